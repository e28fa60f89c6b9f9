r"""Bounds and measures the Lipschitz constants of a trained encoder.

jaxformers lipschitz runs/listops

For TransJect, a theorem bounds the ratio |f(x) - f(y)| / |x - y| of any two
tokens of one sample; the bound is evaluated on the trained weights. A bound for
any two sequences is also printed if the encoder has one (docs/theory.md). For
every encoder, the command measures activation factors on data (TransJect,
equation 9), and searches for the largest and the smallest ratio by gradient
ascent.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxformers.analysis.certificates import lipschitz
from jaxformers.commands import states
from jaxformers.foundations import cli
from jaxformers.foundations.errors import UserError


@cli.command(
  cli.WORKDIR,
  *states.STATE,
  states.SPLIT,
  cli.option("samples", 32, "number of samples"),
  cli.option("length", 128, "largest number of tokens per sample"),
  cli.option("steps", 200, "Adam steps of each search"),
  cli.option("seed", 0, "seed of the samples and the searches"),
)
def main(
  workdir: str, split: str, samples: int, length: int, **search: Any
) -> None:
  """Prints the table of a run, and writes `lipschitz.json` to its workdir.

  Results for other weights are only printed.
  """
  if search["steps"] < 1:
    raise UserError(f"--steps={search['steps']}: give at least 1.")
  # Load the model, and draw the samples.
  state = states.take_state(search)
  run = states.load(workdir, **state)
  ids = run.sample(samples, length, split, seed=search["seed"])
  # Record the settings, then the measurements.
  content = {"step": run.step, "workdir": workdir, "samples": samples}
  content["split"] = split
  content |= {key: value for key, value in state.items() if value}
  content |= {"length": length, **search}
  content |= lipschitz.measure_encoder(run.model, run.params, ids, **search)
  print(f"{run.model.config.name} at step {run.step} on {run.task.name}")
  print(lipschitz.factor_table(content))
  # Write the file if the weights are the run's.
  if label := states.describe(state):
    print(f"Not written to {workdir}: {label}.")
    return
  path = Path(workdir) / "lipschitz.json"
  path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
  print(f"Written to {path}.")


if __name__ == "__main__":
  main()
