r"""Invertible layers: time of one layer, and memory by depth.

python -m benchmarks.injective --out injective.json

The first table compares a layer of `isometric` (form "pointwise") and a layer
of `allpass` with a layer of TransJect with four experts. It has the times of
the forward pass, and of the gradient by tokens and weights, as medians of
rounds in which all layers take turns. "padded" and `allpass` have samples of
two lengths. Orthogonal matrices are computed before the measurement. The second
table has the memory of the gradient of a model in the memory mode "reversible",
by depth. It is twice the difference between XLA's scratch memory for a batch
and for half a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import ours
from benchmarks.data import OUT, Rows, report
from benchmarks.timing import Call, interleaved, median, ready
from jaxformers import models
from jaxformers.foundations import cli
from jaxformers.models.blocks import invertible
from jaxformers.models.variables import make_variables, of_stack

TOKENS = 16_384
SIZES = ((1_024, 64), (4_096, 64), (1_024, 512), (4_096, 512))
DEPTHS = (2, 6, 24, 96)
BATCH, LENGTH, WIDTH = 16, 512, 64
RIVAL = "TransJect"


def layer_calls(name: str, n: int, d: int, *, padded: bool) -> dict[str, Call]:
  """Returns the calls "forward" and "gradient" of one layer of a model.

  Args:
    name: name of the model.
    n: number of tokens.
    d: width.
    padded: True to give the first sample half of the tokens.
  """
  # Build the model, and take the weights of its first layer.
  model = ours.build(name, n, d_model=d, num_layers=2)
  params = ours.draw_params(model, model.example())
  layers = invertible.require_layers(model.stacks()["encoder"])
  encoder = of_stack(make_variables(model, params), "encoder")
  weights = layers.weights(encoder)[0]
  # Draw the tokens [b, n, d] and their mask [b, n].
  x = jax.random.normal(jax.random.key(0), (max(1, TOKENS // n), n, d))
  lengths = jnp.full((len(x), 1), n).at[0].add(-n // 2 if padded else 0)
  mask = jnp.arange(n)[None] < lengths
  shared = layers.shared(encoder, x, mask).value

  def loss(weights: Any, x: jax.Array, mask: jax.Array) -> jax.Array:
    y, _ = layers.forward(weights, x, shared, mask)
    return jnp.square(y).sum()

  def forward(weights: Any, x: jax.Array, mask: jax.Array) -> jax.Array:
    return layers.forward(weights, x, shared, mask)[0]

  return {
    "forward": ready(jax.jit(forward), weights, x, mask),
    "gradient": ready(jax.jit(jax.grad(loss, (0, 1))), weights, x, mask),
  }


def measure_layers(
  rounds: int, sizes: tuple[tuple[int, int], ...] = SIZES
) -> Rows:
  """Yields the time of each layer, and its ratio to TransJect's time."""
  for n, d in sizes:
    # Build the layers, and time them in turns.
    layers = {
      RIVAL: layer_calls("transject", n, d, padded=False),
      "isometric": layer_calls("isometric", n, d, padded=False),
      "isometric, padded": layer_calls("isometric", n, d, padded=True),
      "allpass": layer_calls("allpass", n, d, padded=True),
    }
    times = {
      what: interleaved({k: calls[what] for k, calls in layers.items()}, rounds)
      for what in ("forward", "gradient")
    }
    for name in layers:
      row = {"layer": name, "n": n, "d": d}
      for what, seconds in times.items():
        spent, rival = median(seconds, name), median(seconds, RIVAL)
        row |= {f"{what} ms": 1e3 * spent, f"{what} / {RIVAL}": spent / rival}
      yield row


def scratch(model: models.Model, batch: int) -> int:
  """Returns the bytes of scratch memory of the gradient of a model."""

  def loss(params: Any, ids: jax.Array) -> jax.Array:
    variables = make_variables(model, params)
    return jnp.square(model.apply(variables, ids, train=False)).mean()

  ids = jax.ShapeDtypeStruct((batch, LENGTH), jnp.int32)
  lowered = jax.jit(jax.grad(loss)).lower(models.shapes(model), ids)
  return lowered.compile().memory_analysis().temp_size_in_bytes


def measure_memory(depths: tuple[int, ...] = DEPTHS) -> Rows:
  """Yields the activation memory of reversible training, by depth."""
  for name in ("isometric", "transformer", "s5"):
    for depth in depths:
      model = ours.build(
        name,
        LENGTH,
        d_model=WIDTH,
        num_layers=depth,
        memory="reversible",
        coupled=name != "isometric",
      )
      # Twice the difference between half a batch and a batch.
      few, many = (scratch(model, batch) for batch in (BATCH // 2, BATCH))
      title = name if name == "isometric" else f"coupled {name}"
      yield {"model": title, "L": depth, "MB": 2 * (many - few) / 1e6}


@cli.command(
  cli.argument(
    "--rounds", default=7, help="number of timed rounds; 0: no time table"
  ),
  cli.argument("--depths", default=",".join(map(str, DEPTHS)), help="a,b"),
  OUT,
)
def main(rounds: int, depths: str, out: str) -> None:
  """Prints the tables, and writes them as JSON if --out is set."""

  def tables() -> Iterator[tuple[str, Rows]]:
    if rounds:
      yield "layers", measure_layers(rounds)
    chosen = tuple(cli.numbers("depths", depths))
    if chosen:
      yield "memory in reverse", measure_memory(chosen)

  report(tables(), out)


if __name__ == "__main__":
  main()
