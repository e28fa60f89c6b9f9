r"""Cost and accuracy of orthogonal maps, ours and PyTorch's.

python -m benchmarks.orthogonal --out orthogonal.json

The maps are applied to 21 matrices, as many as TransJect has at L = 2 and
E = 4. A step is the map and its gradient. PyTorch's maps are modules of
`torch.nn.utils.parametrizations.orthogonal`, one for each matrix, as users
write them. All maps take turns in every round, and the tables show medians
without compilation. The defect of a matrix is max |Q.T Q - I|. The benchmark
needs the extra `bench`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.data import OUT, Row, Rows, report
from benchmarks.timing import Calls, interleaved, median, ready, threads, timed
from jaxformers import orthogonal
from jaxformers.foundations import cli, requirements

COUNT = 21  # Number of matrices.
ROUNDS = 7
# Names of PyTorch's maps, by our names.
TORCH_MAPS = {
  "expm": "matrix_exp",
  "cayley": "cayley",
  "householder": "householder",
}


def make_calls(name: str, a: np.ndarray, w: np.ndarray) -> Calls:
  """Returns calls of a map without and with its gradient.

  Args:
    name: key of `orthogonal.MAPS`.
    a: [k, d, d], free matrices.
    w: [k, d, d], weights of the loss sum(map(a) * w).
  """
  mapping = orthogonal.MAPS[name]
  # The map "matrix" expects orthogonal matrices.
  if name == "matrix":
    a = np.asarray(orthogonal.cayley(jnp.asarray(a)))
  free, weights = jnp.asarray(a), jnp.asarray(w)
  both = jax.jit(jax.value_and_grad(lambda a, w: (mapping(a) * w).sum()))
  return {
    "forward": ready(jax.jit(mapping), free),
    "step": ready(both, free, weights),
  }


def make_pytorch_calls(name: str, a: np.ndarray, w: np.ndarray) -> Calls:
  """Returns the calls of `make_calls` in PyTorch, with a module per matrix."""
  import torch
  from torch.nn.utils import parametrizations

  torch.set_num_threads(threads())
  layers, d = [], a.shape[-1]
  for free in a:
    # Make a module for each matrix, as users write it.
    layer = torch.nn.Linear(d, d, bias=False)
    parametrizations.orthogonal(
      layer, orthogonal_map=TORCH_MAPS[name], use_trivialization=False
    )
    with torch.no_grad():
      if name == "householder":
        # PyTorch multiplies by the diagonal: set it to 1.
        free = np.tril(free, -1) + np.eye(d, dtype=free.dtype)
      layer.parametrizations.weight.original.copy_(torch.from_numpy(free))
    layers.append(layer)
  weights = torch.from_numpy(w)

  def forward() -> Any:
    with torch.no_grad():
      # Reading a weight computes its map.
      return np.stack([layer.weight.numpy() for layer in layers])

  def step() -> None:
    pairs = zip(layers, weights, strict=True)
    sum((layer.weight * weight).sum() for layer, weight in pairs).backward()
    # Remove the gradients, or the next call would add to them.
    for layer in layers:
      layer.parametrizations.weight.original.grad = None

  return {"forward": forward, "step": step}


def draw_matrices(d: int) -> tuple[np.ndarray, np.ndarray]:
  """Draws free matrices of the models' initial scale, and loss weights."""
  rng = np.random.default_rng(0)
  a = rng.normal(size=(COUNT, d, d), scale=1.5 / d**0.5).astype(np.float32)
  return a, rng.normal(size=a.shape).astype(np.float32)


def measure_maps(d: int, rounds: int) -> Rows:
  """Yields the time and the defect of each map at one size."""
  # Build the calls of our maps and of PyTorch's.
  a, w = draw_matrices(d)
  runs = {f"ours: {k}": make_calls(k, a, w) for k in orthogonal.MAPS}
  runs |= {f"PyTorch: {k}": make_pytorch_calls(k, a, w) for k in TORCH_MAPS}
  # Time all maps in turns.
  calls = {
    f"{name} {part}": parts[part]
    for name, parts in runs.items()
    for part in parts
  }
  seconds = interleaved(calls, rounds)
  # Compute the defect in double precision.
  for name, parts in runs.items():
    q = np.asarray(parts["forward"]()).astype(np.float64)
    defect = np.abs(q.swapaxes(1, 2) @ q - np.eye(d)).max()
    yield {
      "map": name,
      "d": d,
      "forward ms": 1e3 * median(seconds, f"{name} forward"),
      "with gradient ms": 1e3 * median(seconds, f"{name} step"),
      "defect": float(defect),
    }


def measure_norms(d: int) -> Rows:
  """Yields the defect in float32 for parameters of growing norm."""
  # Free matrices [1, d, d] with a spectral norm of about 1.
  unit = jax.random.normal(jax.random.key(0), (1, d, d)) / d**0.5 / 2
  for name in ("bro", "cayley", "expm", "householder"):
    row: Row = {"map": name, "d": d}
    for norm in (0.1, 2, 10, 50):
      q = jax.jit(orthogonal.MAPS[name])(norm * unit)
      row[f"|s| = {norm}"] = float(orthogonal.orthogonality_defect(q)[0])
    yield row


def measure_drift(name: str, steps: int, d: int) -> Row:
  """Measures the defect of a map after many steps of Adam."""
  from jaxformers.config import Choice
  from jaxformers.training import optim

  # Start at the initial matrices of models.
  a = orthogonal.initializer(jax.random.key(0), (COUNT, d, d))
  start = orthogonal.cayley(a) if name == "matrix" else a
  params = {orthogonal.parameter_name("u", name): start}
  rate = Choice(name="constant", options={"learning_rate": 1e-3})
  tx, _ = optim.build_optimizer(Choice(name="adam"), rate, steps)

  def loss(params: Any, k: Any) -> jax.Array:
    (q,) = orthogonal.rotations(params, name).values()
    # The seed k gives another random gradient in each step.
    return (q * jax.random.normal(jax.random.key(k), q.shape)).mean()

  @jax.jit
  def step(params: Any, state: Any, k: Any) -> Any:
    updates, state = tx.update(jax.grad(loss)(params, k), state, params)
    return jax.tree.map(jnp.add, params, updates), state

  def train(params: Any, state: Any) -> Any:
    for k in range(steps):
      params, state = step(params, state, k)
      # Wait now and then: a long queue of steps would fill the memory.
      if k % 32 == 0:
        jax.block_until_ready(params)
    return params

  params, seconds = timed(train, params, tx.init(params))
  # Measure the defect after the last step.
  (q,) = orthogonal.rotations(params, name).values()
  defect = float(orthogonal.orthogonality_defect(q).max())
  row = {"map": name, "d": d, "steps": steps, "seconds": seconds}
  return row | {"defect": defect}


@cli.command(
  cli.argument("--sizes", default="128,512", help="sides of the matrices"),
  cli.argument("--rounds", default=ROUNDS, help="number of timed rounds"),
  cli.argument(
    "--steps", default=10_000, help="steps of Adam for the drift; 0: no drift"
  ),
  OUT,
)
def main(sizes: str, rounds: int, steps: int, out: str) -> None:
  """Prints the tables, and writes them as JSON if --out is set."""
  requirements.require("bench", "The comparison with PyTorch")
  sides = cli.numbers("sizes", sizes)
  drifting = orthogonal.MAPS if steps else ()
  results = {
    "cost": [row for d in sides for row in measure_maps(d, rounds)],
    "norms": [row for d in sides for row in measure_norms(d)],
    "many": [measure_drift(name, steps, min(sides)) for name in drifting],
  }
  report(results.items(), out)


if __name__ == "__main__":
  main()
