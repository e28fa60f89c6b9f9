r"""Tokens from the hidden states of trained language models.

python -m benchmarks.inversion PATH/texts runs/inversion --out inversion.json

Language models of two layers with d = 64 and 2,000 byte pairs are trained on a
folder of text, each for a number of steps. Then prompts of 20 tokens of the
test split are recovered from the states of the last layer. "brute force" runs
the whole prefix again for each candidate, for one prompt; published code does
so, but stops at the first candidate within a distance.

The second table has the share of recovered tokens when noise is added to the
states: its norm is a multiple of half of the typical distance of the states of
two candidates. "radius" is the noise up to which a theorem guarantees recovery,
in the same unit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxformers as jf
from benchmarks.data import OUT, Row, Rows, report
from jaxformers.analysis.tokens import collisions
from jaxformers.foundations import cli
from jaxformers.models import sipit
from jaxformers.models.capture import capture
from jaxformers.models.variables import make_variables

MODELS = "transformer,neutreno,mamba,lru,allpass,retnet,deltanet"
LEVELS = (0.03, 0.1, 0.3, 1.0, 2.0, 3.0, 5.0, 10.0)
LENGTH, COMPARED = 20, 32


def train(name: str, folder: str, workdir: Path, steps: int) -> Any:
  """Returns a trained language model."""
  return jf.train(
    f"lm/text:size=tiny,model={name}",
    workdir / name,
    options={
      "task.archive": folder,
      "model.num_layers": 2,
      "total_steps": steps,
      "schedule.warmup_steps": steps // 10,
      "eval_steps": steps,
      "checkpoint_steps": steps,
    },
  )


def measure(
  name: str, folder: str, workdir: Path, steps: int, prompts: int
) -> Iterator[tuple[str, Row]]:
  """Yields the rows of both tables."""
  trained = train(name, folder, workdir, steps)
  model, params = trained.model, trained.params
  run = jf.inference.load_run(workdir / name)
  ids = run.sample(prompts, LENGTH)
  variables = make_variables(model, params)
  states = np.asarray(capture(model, variables, jnp.asarray(ids)).hidden[-1])
  # Compile for one prompt and for a batch, then measure.
  sipit.recover(model, params, states[:1])
  sipit.recover(model, params, states[:COMPARED])
  began = time.perf_counter()
  recovered = sipit.recover(model, params, states)
  seconds = (time.perf_counter() - began) / len(ids)
  single = time.perf_counter()
  sipit.recover(model, params, states[:1])
  single = time.perf_counter() - single
  brute = brute_force(model, variables, ids[0], states[0])
  row = {
    "model": f"`{name}`",
    "perplexity": round(trained.results["perplexity"], 1),
    "training, s": round(trained.results["train_seconds"]),
    "recovered": f"{(recovered.ids == ids).mean():.2%}",
    "least margin": f"{recovered.margins.min():.3g}",
    "s a prompt": round(seconds, 3),
    "one prompt, s": round(single, 2),
    "brute force, s": round(brute, 2),
    "speed-up": round(brute / single, 1),
  }
  yield "inversion", row
  # Noise in units of half of the typical distance of two candidates.
  layer = model.config.num_layers
  prefixes = ids[:COMPARED, :-1]
  candidates = collisions.continuations(model, params, prefixes, layer)
  rng = np.random.default_rng(0)
  order = rng.permutation(candidates.shape[1])
  apart = np.linalg.norm(
    candidates[:, order[1:]] - candidates[:, order[:-1]], axis=2
  )
  unit = float(np.median(apart)) / 2
  radius = sipit.noise_radius(model, params)
  ids, states = ids[:COMPARED], states[:COMPARED]
  row = {
    "model": f"`{name}`",
    "radius": None if radius is None else f"{radius / unit:.2g}",
  }
  for level in LEVELS:
    noise = rng.normal(size=states.shape)
    noise *= level * unit / np.linalg.norm(noise, axis=-1, keepdims=True)
    recovered = sipit.recover(model, params, states + noise)
    row[f"noise {level:g}"] = f"{(recovered.ids == ids).mean():.1%}"
  yield "noise", row


def brute_force(
  model: Any, variables: Any, ids: np.ndarray, states: np.ndarray
) -> float:
  """Returns the seconds of a search that runs every prefix again."""
  count = model.config.vocab_size - 1
  candidates = np.repeat(ids[None], count, 0).astype(np.int32)

  def position(t: int) -> None:
    rows = np.where(np.arange(len(ids)) < t, candidates, 0)
    rows[:, t] = np.arange(1, count + 1)
    hidden = last(jnp.asarray(rows[:, : t + 1]))
    distance = np.linalg.norm(np.asarray(hidden) - states[t], axis=1)
    assert 1 + distance.argmin() == ids[t]

  @jax.jit
  def last(rows: jax.Array) -> jax.Array:
    return capture(model, variables, rows).hidden[-1][:, -1]

  for t in range(len(ids)):
    position(t)  # Compile.
  began = time.perf_counter()
  for t in range(len(ids)):
    position(t)
  return time.perf_counter() - began


def tables(
  names: list[str], folder: str, workdir: Path, steps: int, prompts: int
) -> list[tuple[str, Rows]]:
  """Returns both tables."""
  rows: dict[str, list[Row]] = {"inversion": [], "noise": []}
  for name in names:
    for table, row in measure(name, folder, workdir, steps, prompts):
      rows[table].append(row)
    jax.clear_caches()
  return [(table, iter(listed)) for table, listed in rows.items()]


@cli.command(
  cli.argument("folder", help="folder of text, such as WikiText-2"),
  cli.argument("workdir", type=Path, help="folder of the runs"),
  cli.argument("--models", default=MODELS, help="names: a,b"),
  cli.argument("--steps", default=1_000, help="steps of training"),
  cli.argument("--prompts", default=100, help="number of prompts"),
  OUT,
)
def main(
  folder: str, workdir: Path, models: str, steps: int, prompts: int, out: str
) -> None:
  """Prints both tables, and writes them as JSON if --out is set."""
  report(tables(cli.names(models), folder, workdir, steps, prompts), out)


if __name__ == "__main__":
  main()
