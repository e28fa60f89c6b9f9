r"""Scores a classifier under every change of its inputs of a size.

python -m jaxformers certified runs/imdb

For k replaced tokens, and for perturbations of the embedded sequence: certified
accuracy, the share of test examples that are classified right and stay so
whatever the change is; and attacked accuracy, what is left after a search for
such changes, which is an upper bound. The first needs layers with a bound for
all sequences, such as those of `isometric`; every encoder has the second.

The certificate: a change moves the pooled vector by at most a bound that goes
through the layers with the weights at hand (`InvertibleLayers.bound`), and the
difference of two logits by the norm of the difference of their weights times
that. A prediction whose margin is greater cannot change. As the radius of
Tsuzuku et al. 2018 (https://arxiv.org/abs/1802.04034), proposition 1, but for
the mean over tokens, of which k of n change by any token of the vocabulary.
Jia et al. 2019 (https://arxiv.org/abs/1909.00986) certify substitutions from
lists of similar words, at any number of places.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxformers.analysis.certificates import certified
from jaxformers.commands import states
from jaxformers.foundations import cli, requirements


@cli.command(
  cli.WORKDIR,
  *states.STATE,
  states.SPLIT,
  cli.option("tokens", "0,1,2,4,8", "numbers of replaced tokens"),
  cli.option("radii", "0.001,0.01,0.1", "norms of perturbations, as shares"),
  cli.option("samples", 200, "number of test examples to attack"),
  cli.option("examples", 0, "number to certify (default: all)"),
  cli.option("steps", 20, "steps of gradient ascent"),
  cli.option("seed", 0, "seed of the choice of examples"),
)
def main(workdir: str, tokens: str, radii: str, **options: Any) -> None:
  """Prints the table of a run; writes `certified.json` and pictures into it.

  Tables of other states are printed, and not written.
  """
  state = states.take_state(options)
  if not states.describe(state):
    requirements.require("plots", f"The picture in {workdir}")
  run = states.load(workdir, **state)
  content = certified.measure_certified(
    run,
    counts=cli.numbers("tokens", tokens),
    radii=cli.numbers("radii", radii, float),
    **options,
  )
  print(f"{run.model.config.name} at step {run.step} on {run.task.name}")
  print("\n".join(certified.lines(content)))
  if label := states.describe(state):
    print(f"Not written to {workdir}: {label}.")
    return
  path = Path(workdir) / "certified.json"
  path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
  certified.figure(content).write(Path(workdir))
  print(f"Written to {path}, with pictures beside it.")


if __name__ == "__main__":
  main()
