r"""Tokens from the hidden states of trained language models.

python -m benchmarks.inversion PATH/texts runs/inversion \
    --out results/inversion.jsonl --picture docs/figures/inversion.png

Language models of two layers with d = 64 and 2,000 byte pairs are trained on a
folder of text, each for a number of steps. Then prompts of 20 tokens of the
test split are recovered from the states of the last layer. "brute force" runs
the whole prefix again for each candidate, for one prompt; published code does
so, but stops at the first candidate within a distance. Models that --out
already has are skipped.

The second table has the share of recovered tokens when noise is added to the
states: its norm is a multiple of half of the typical distance of the states of
two candidates. "radius" is the noise up to which a theorem guarantees recovery,
in the same unit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxformers as jf
from benchmarks.data import Row
from benchmarks.programs import RECORDS, append, read, record
from jaxformers import inference
from jaxformers.analysis.plotting import plots
from jaxformers.analysis.plotting.figures import Figure, Texts
from jaxformers.analysis.tokens import collisions
from jaxformers.foundations import cli
from jaxformers.models import sipit
from jaxformers.models.capture import capture
from jaxformers.models.variables import make_variables
from jaxformers.training import provenance

MODELS = "transformer,neutreno,mamba,lru,allpass,retnet,deltanet"
LEVELS = (0.03, 0.1, 0.3, 1.0, 2.0, 3.0, 5.0, 10.0)
LENGTH, COMPARED = 20, 32
CONFIG = "lm/text:size=tiny,model={}"


def train(name: str, folder: str, workdir: Path, steps: int) -> Any:
  """Returns a trained language model."""
  return jf.train(
    CONFIG.format(name),
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
  run = inference.load_run(workdir / name)
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
  row: Row = {
    "tokens": LENGTH,
    "perplexity": round(trained.results["perplexity"], 1),
    "training, s": round(trained.results["train_seconds"]),
    "recovered, %": share(recovered.ids, ids),
    "least margin": f"{recovered.margins.min():.1e}",
    "s a prompt": round(seconds, 2),
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
    "tokens": LENGTH,
    "radius": None if radius is None else f"{radius / unit:.1g}",
  }
  for level in LEVELS:
    noise = rng.normal(size=states.shape)
    noise *= level * unit / np.linalg.norm(noise, axis=-1, keepdims=True)
    recovered = sipit.recover(model, params, states + noise)
    row[f"noise {level:g}"] = share(recovered.ids, ids)
  yield "noise", row


def share(recovered: np.ndarray, ids: np.ndarray) -> float:
  """Returns the share of tokens that are right, in percent."""
  return round(100 * float((recovered == ids).mean()), 1)


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


def figure(records: Sequence[dict[str, Any]]) -> Figure:
  """Returns the figure of the records of the table `noise`."""
  rows: list[tuple[Any, ...]] = []
  caption = "Share of recovered tokens by the norm of the noise."
  for each in records:
    for column, value in each["values"].items():
      if column.startswith("noise"):
        level = float(column.split()[1])
        rows.append((each["model"], 0, "share", level, value))
    if radius := each["values"]["radius"]:
      # A theorem says 100 % up to the radius.
      certified = f"{each['model']}, certified"
      rows += [
        (certified, 0, "share", float(radius) * part, 100.0)
        for part in (0.25, 1)
      ]
  texts = Texts("inversion", "Tokens from noisy states", caption)
  x = "norm of the noise, in half distances of candidates"
  return plots.curves(texts, rows, x, {"share": "recovered, %"}, log="x")


@cli.command(
  cli.argument("folder", help="folder of text, such as WikiText-2"),
  cli.argument("workdir", type=Path, help="folder of the runs"),
  cli.argument("--models", default=MODELS, help="names: a,b"),
  cli.argument("--steps", default=1_200, help="steps of training"),
  cli.argument("--prompts", default=100, help="number of prompts"),
  cli.argument("--picture", type=Path, help="PNG file for a figure of noise"),
  RECORDS,
)
def main(
  folder: str,
  workdir: Path,
  models: str,
  steps: int,
  prompts: int,
  picture: Path | None,
  out: Path,
) -> None:
  """Appends the records of both tables to a file, and draws the noise."""
  facts = provenance.hardware()
  done = {each["model"] for each in read(out)}
  for name in cli.names(models):
    if name in done:
      continue
    began = time.time()
    measured = list(measure(name, folder, workdir, steps, prompts))
    records = [
      record(
        table,
        name,
        row,
        config=CONFIG.format(name),
        protocol=f"states of the last of two layers, {LENGTH} tokens a prompt",
        hardware=f"{facts['cores']} cores of an {facts['processor']}, jax "
        f"{jax.__version__}",
        began=began,
        seeds=(0,),
      )
      for table, row in measured
    ]
    append(out, records)
    jax.clear_caches()
  if picture:
    noise = [each for each in read(out) if each["table"] == "noise"]
    picture.write_bytes(figure(noise).picture("png"))


if __name__ == "__main__":
  main()
