r"""Cost of depth for TransJect, and the effect of depth on tokens.

python -m benchmarks.depth --out depth.json

The first table has the time and the activation memory of the gradient for each
memory mode (stored, recomputed, reversible), at L = 2 to 96 (stored: up to L =
24). Activation memory is twice the difference between XLA's scratch memory for
a batch and for half a batch. The second table has activation factors and
entropy before and after 300 steps of training on ListOps, with expressions of
51 to 249 tokens. It also has the mean loss over the first tenth and over the
last tenth of the steps.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import differential_entropy

from benchmarks import ours, training
from benchmarks.data import OUT, Row, Rows, report
from benchmarks.memory import ACTIVATIONS, transject_options
from benchmarks.timing import interleaved, median, ready, timed
from jaxformers import models, orthogonal
from jaxformers.analysis.certificates import lipschitz
from jaxformers.foundations import cli
from jaxformers.models.capture import capture
from jaxformers.models.variables import make_variables
from jaxformers.training.run import open_run
from jaxformers.training.trainer import Trainer

DEPTHS = (2, 6, 24, 96)
BATCH, LENGTH, WIDTH = 16, 512, 64
# Largest depth in the mode "stored": deeper models compile for minutes.
LONGEST_UNROLLED = 24


def make_gradient(kind: str, depth: int) -> tuple[Any, Any]:
  """Returns the gradient of a loss of TransJect, and random parameters.

  Args:
    kind: memory mode.
    depth: number of layers.
  """
  options = transject_options(kind, "float32", depth)
  model = ours.build("transject", LENGTH, d_model=WIDTH, **options)

  def loss(params: Any, ids: jax.Array) -> jax.Array:
    rotations = orthogonal.rotations(params, model.orthogonal_map)
    variables = {"params": params, "rotations": rotations}
    logits, _ = model.apply(variables, ids, train=True, mutable=["losses"])
    return jnp.square(logits).mean()

  rng = np.random.default_rng(0)

  def draw(path: Any, leaf: Any) -> jax.Array:
    # Draw parameters far from the initial ones: an untrained layer is the
    # identity, whose inverse takes only one step.
    if path[-1].key == "alpha":
      return jnp.ones(leaf.shape)
    values = rng.normal(size=leaf.shape) / max(*leaf.shape[-1:], 1) ** 0.5
    return jnp.asarray(values, jnp.float32)

  params = jax.tree_util.tree_map_with_path(draw, models.shapes(model))
  return jax.jit(jax.grad(loss)), params


def compile_batch(gradient: Any, params: Any, batch: int) -> Any:
  """Compiles a gradient for batches of `batch` rows."""
  ids = jax.ShapeDtypeStruct((batch, LENGTH), jnp.int32)
  return gradient.lower(params, ids).compile()


def measure_memory(rounds: int) -> Rows:
  """Measures the time and memory of a gradient, by depth and memory mode."""
  rows, calls = {}, {}
  ids = jnp.asarray(ours.random_ids(BATCH, LENGTH))
  for depth in DEPTHS:
    for kind in ACTIVATIONS:
      if kind == "stored" and depth > LONGEST_UNROLLED:
        continue
      # Compile for half a batch and for a batch. Their scratch memory differs
      # by the activations of half a batch.
      gradient, params = make_gradient(kind, depth)
      half = compile_batch(gradient, params, BATCH // 2)
      program, seconds = timed(compile_batch, gradient, params, BATCH)
      programs = (half, program)
      few, many = (p.memory_analysis().temp_size_in_bytes for p in programs)
      rows[f"{kind} {depth}"] = {
        "L": depth,
        "memory": kind,
        "MB": 2 * (many - few) / 1e6,
        "MB of scratch": many / 1e6,
        "compile s": seconds,
      }
      calls[f"{kind} {depth}"] = ready(program, params, ids)
  # Time all programs in turns.
  times = interleaved(calls, rounds)
  return [row | {"ms": 1e3 * median(times, name)} for name, row in rows.items()]


def measure_tokens(run: Trainer, params: Any, ids: np.ndarray) -> Row:
  """Measures activation factors of the last layer, and entropies of tokens.

  "entropy in" is the entropy of embedded tokens, and "entropy out" is the
  entropy of the outputs of the last layer. Each token is divided by the
  standard deviation of its units. The entropy is Vasicek's estimate over the
  units of a token, in nats, averaged over tokens. A Gaussian has the entropy
  1.42.

  Args:
    run: trainer of the run.
    params: parameters to measure.
    ids: samples [b, n].
  """
  factors = lipschitz.measure_factors(run.model, params, [ids])["factors"]
  variables = make_variables(run.model, params)
  captured = capture(run.model, variables, jnp.asarray(ids))
  mask = np.asarray(captured.mask)

  def entropy(x: jax.Array) -> float:
    tokens = np.asarray(x)[mask].astype(np.float64)
    tokens = tokens / tokens.std(1, keepdims=True)
    estimate = differential_entropy(tokens, axis=1, method="vasicek")
    # Leave out tokens with many equal units, whose estimate is -inf.
    return float(estimate[np.isfinite(estimate)].mean())

  last = factors[-1]
  return {
    "factor": last["mean"],
    "least": last["min"],
    "greatest": last["max"],
    "entropy in": entropy(captured.hidden[0]),
    "entropy out": entropy(captured.hidden[-1]),
  }


def train_depth(depth: int, steps: int, folder: Path) -> Rows:
  """Trains at one depth; yields a row before and a row after training."""
  config = training.make_config(
    "transject", steps, folder, num_layers=depth, memory="reversible"
  )
  with tempfile.TemporaryDirectory() as workdir:
    run = Trainer(open_run(config, Path(workdir)))
    # Measure the same eight expressions before and after training.
    ids = run.task.splits["test"].batch(np.arange(8), 250)["inputs"]
    before = measure_tokens(run, run.state.params, ids)
    losses, _ = training.train_to_end(run)
    after = measure_tokens(run, run.state.params, ids)
  first, last = training.average_tenths(losses)
  yield {"L": depth, "step": 0, "loss": first, **before}
  yield {"L": depth, "step": steps, "loss": last, **after}


@cli.command(
  cli.argument(
    "--rounds", default=7, help="number of timed rounds; 0: no memory table"
  ),
  cli.argument("--steps", default=300, help="training steps; 0: no training"),
  OUT,
  cli.argument("--data_dir", default="", help="folder of the expressions"),
)
def main(rounds: int, steps: int, out: str, data_dir: str) -> None:
  """Prints the tables, and writes them as JSON if --out is set."""

  def tables() -> Iterator[tuple[str, Rows]]:
    if rounds:
      yield "memory", measure_memory(rounds)
    if steps:
      with tempfile.TemporaryDirectory() as folder:
        data = Path(data_dir or folder)
        rows = [row for d in DEPTHS for row in train_depth(d, steps, data)]
      yield "training", rows

  report(tables(), out)


if __name__ == "__main__":
  main()
