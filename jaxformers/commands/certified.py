r"""Certifies and attacks the predictions of a classifier.

jaxformers certified runs/imdb

Two scores are computed for k replaced tokens, and for perturbations of the
embedded sequence. Certified accuracy is the share of test examples that are
classified correctly and provably stay so under every change of this size.
Attacked accuracy is the accuracy after a search for harmful changes, and an
upper bound of certified accuracy. Certified accuracy needs layers with a bound
for all sequences, as `isometric` has; attacked accuracy works for every
encoder.

The certificate: a change of the input moves the pooled vector by at most a
bound, which is propagated through the layers with their current weights
(`InvertibleLayers.bound`). The difference of two logits then moves by at most
this bound times the norm of the difference of their weight vectors. If the
margin of a prediction is greater, the prediction cannot change. This is the
radius of Tsuzuku et al. 2018 (https://arxiv.org/abs/1802.04034), proposition 1,
adapted to mean pooling when k of n tokens may be replaced by any token of the
vocabulary. Jia et al. 2019 (https://arxiv.org/abs/1909.00986) instead certify
substitutions from lists of similar words, at any number of positions.

jaxformers certified runs/votes --edits=1,2,4

certifies insertions, deletions and replacements, by a vote over random
deletions or exactly (`analysis.evaluation.edits`), and writes `edits.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxformers.analysis.certificates import certified
from jaxformers.analysis.evaluation import edits as measure
from jaxformers.commands import states
from jaxformers.foundations import cli, requirements
from jaxformers.foundations.errors import UserError

# Options without --edits and with it, and their defaults.
REPLACED = {"tokens": "0,1,2,4,8", "radii": "0.001,0.01,0.1", "steps": 20}
EDITED = {"deletion": 0.0, "draws": ",".join(map(str, measure.DRAWS))}


def _check_use(has_edits: bool, values: Mapping[str, Any]) -> None:
  """Raises UserError for options without effect.

  Args:
    has_edits: True with --edits.
    values: values of `REPLACED` and `EDITED`.
  """
  unused = [
    f"--{name}={values[name]}"
    for name, default in (REPLACED if has_edits else EDITED).items()
    if values[name] != default
  ]
  if unused:
    raise UserError(
      f"{', '.join(unused)}: no effect {'with' if has_edits else 'without'} "
      "--edits, so remove it."
    )


@cli.command(
  cli.WORKDIR,
  *states.STATE,
  states.SPLIT,
  cli.option("tokens", REPLACED["tokens"], "numbers of replaced tokens"),
  cli.option(
    "radii",
    REPLACED["radii"],
    "norms of perturbations, as shares of the norm of the sequence",
  ),
  cli.option("samples", measure.SAMPLES, "number of test examples to attack"),
  cli.option(
    "examples",
    0,
    "number of test examples to certify (default: all; of votes: --samples)",
  ),
  cli.option(
    "steps", REPLACED["steps"], "steps of gradient ascent of each attack"
  ),
  cli.option("seed", 0, "seed of the choice of examples"),
  cli.option(
    "edits",
    "",
    "numbers of edits, such as 1,2,4,8: certify insertions, deletions and "
    "replacements instead of --tokens and --radii",
  ),
  cli.option(
    "deletion",
    EDITED["deletion"],
    "for --edits: probability of deletion in votes (default: the run's)",
  ),
  cli.option(
    "draws",
    EDITED["draws"],
    "for --edits: draws to predict a class, and to bound its share",
  ),
)
def main(
  workdir: str,
  tokens: str,
  radii: str,
  edits: str,
  deletion: float,
  draws: str,
  **options: Any,
) -> None:
  """Prints the scores of a run, and writes `certified.json` and pictures.

  The files go to the workdir; scores of edits go to `edits.json`. Scores of
  other weights are only printed.
  """
  state = states.take_state(options)
  label = states.describe(state)
  values = {"tokens": tokens, "radii": radii, "steps": options["steps"]}
  _check_use(bool(edits), {**values, "deletion": deletion, "draws": draws})
  pair = tuple(cli.numbers("draws", draws))
  if len(pair) != 2 or min(pair) < 1:
    raise UserError(f"--draws={draws}: give two numbers, such as 1000,4000.")
  # Check for the plotting library before the measurement.
  if not (edits or label):
    requirements.require("plots", f"The picture in {workdir}")
  # Certify and attack the predictions.
  run = states.load(workdir, **state)
  if edits:
    del options["steps"]
    options |= {"deletion": deletion, "draws": pair}
    content = measure.measure_edits(
      run, counts=cli.numbers("edits", edits), **options
    )
    lines = measure.lines(content)
  else:
    content = certified.measure_certified(
      run,
      counts=cli.numbers("tokens", tokens),
      radii=cli.numbers("radii", radii, float),
      **options,
    )
    lines = certified.lines(content)
  # Print the table, and write it if the weights are the run's.
  print(f"{run.model.config.name} at step {run.step} on {run.task.name}")
  print("\n".join(lines))
  if label:
    print(f"Not written to {workdir}: {label}.")
    return
  path = Path(workdir) / ("edits.json" if edits else "certified.json")
  path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
  if not edits:
    certified.figure(content).write(Path(workdir))
  pictures = "" if edits else ", with pictures in the same folder"
  print(f"Written to {path}{pictures}.")


if __name__ == "__main__":
  main()
