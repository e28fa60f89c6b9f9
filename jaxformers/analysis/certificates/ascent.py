"""The extremes of what an encoder does to distances, by gradient ascent."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxformers.analysis.tokens.capture import capture
from jaxformers.errors import UserError
from jaxformers.models import Classifier
from jaxformers.models.variables import make_variables

Interval = tuple[float, float]
# Distances within which the ascent looks for pairs, relative to the tokens'
# root mean square norm: below, float32 would count its own rounding.
_NEAR, _FAR = 1e-2, 1e2


def ascend(
  ratio: Callable[[Any], jax.Array],
  start: Any,
  *,
  sign: jax.Array | float,
  steps: int,
  rate: float = 0.05,
) -> jax.Array:
  """The extreme of a ratio for every start, by Adam on its logarithm.

  Args:
    ratio: of a tree of points -> [...], one of each start.
    start: the points.
    sign: 1 for the greatest, -1 for the least.
    steps: of Adam.
    rate: its learning rate.

  Returns:
    The most extreme finite ratio on each way, of the shape of `ratio(start)`.
  """
  tx = optax.adam(rate)

  def objective(points: Any) -> tuple[jax.Array, jax.Array]:
    found = ratio(points)
    return -sign * jnp.log(found).sum(), found

  def step(state: Any, _: None) -> tuple[Any, None]:
    points, moments, best = state
    (_, found), grads = jax.value_and_grad(objective, has_aux=True)(points)
    better = jnp.isfinite(found) & (sign * found > sign * best)
    best = jnp.where(better, found, best)
    updates, moments = tx.update(grads, moments)
    return (optax.apply_updates(points, updates), moments, best), None

  shape = jax.eval_shape(ratio, start)
  best = jnp.full(shape.shape, -sign * jnp.inf, shape.dtype)
  state = (start, tx.init(start), best)
  return jax.lax.scan(step, state, None, length=steps)[0][2]


def _ends(
  points: dict[str, jax.Array], axes: tuple[int, ...], unit: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """The two ends of segments by middle, direction and log-length."""
  direction = points["direction"]
  direction = direction / jnp.sqrt(
    jnp.square(direction).sum(axes, keepdims=True)
  )
  low, high = math.log(_NEAR), math.log(_FAR)
  length = unit * jnp.exp(jnp.clip(points["log_length"], low, high))
  half = length / 2 * direction
  return points["middle"] + half, points["middle"] - half


def adversarial(
  model: Classifier,
  params: Any,
  ids: jax.Array,
  *,
  steps: int = 200,
  seed: int = 0,
) -> dict[str, Interval]:
  """The extreme factors from embedding to last layer that ascent finds.

  `tokens`: of pairs of one sample, all pairs of neighbours moved together,
  wherever in R^d; `sequences`: of pairs of whole sequences under one mask. Half
  of the ways start from segments a hundredth as long as tokens, and half from
  ones as long as they are.

  Args:
    model, params: any of `models.build`, in evaluation.
    ids: [b, n] or [b, 2, n], where it starts.
    steps: of each of the four ascents.
    seed: of the directions.
  """
  own = make_variables(model, params)
  found = jax.jit(functools.partial(capture, model))(own, ids)
  x, mask = found.hidden[0], found.mask
  n = x.shape[1] // 2 * 2
  if n < 2:
    raise UserError(f"Sequences of {x.shape[1]} token have no pairs.")
  both = mask[:, 0:n:2] & mask[:, 1:n:2]
  if not both.any():
    raise UserError(
      "No sample has two tokens beside each other: there are no pairs to start "
      "from. Give longer samples."
    )
  root = jnp.sqrt(mask.sum(1).astype(x.dtype))[:, None, None]
  unit = jnp.sqrt(jnp.square(x).sum(-1).mean(where=mask))
  key = jax.random.key(seed)

  def last(embedded: jax.Array) -> tuple[jax.Array, jax.Array]:
    hidden = capture(model, own, ids, embedded).hidden
    return hidden[0], hidden[-1]

  def tokens(points: Any) -> jax.Array:
    one, other = _ends(points, (-1,), unit)
    moved = jnp.stack([one, other], 2).reshape((len(x), n, -1))
    before, after = last(jnp.concatenate([moved, x[:, n:]], 1))
    ratio = [
      jnp.linalg.norm(y[:, 0:n:2] - y[:, 1:n:2], axis=-1)
      for y in (after, before)
    ]
    return jnp.where(both, ratio[0] / jnp.where(both, ratio[1], 1), 1)

  def sequences(points: Any) -> jax.Array:
    # One pair's noise must not be another's: padding keeps what it was.
    one, other = _ends(points, (1, 2), unit * root)
    ends = [last(jnp.where(mask[..., None], end, x)) for end in (one, other)]
    ratio = [
      jnp.sqrt(jnp.square(jnp.where(mask[..., None], a - b, 0)).sum((1, 2)))
      for a, b in zip(*ends, strict=True)
    ]
    return ratio[1] / ratio[0]

  def points(middle: jax.Array, lengths: tuple[int, ...]) -> Any:
    near = jnp.arange(math.prod(lengths)).reshape(lengths) % 2 == 0
    return {
      "middle": middle,
      "direction": jax.random.normal(key, middle.shape, middle.dtype),
      "log_length": jnp.where(near, math.log(_NEAR), 0.0).astype(x.dtype),
    }

  middle = (x[:, 0:n:2] + x[:, 1:n:2]) / 2
  starts = {
    "tokens": (tokens, points(middle, (*middle.shape[:2], 1))),
    "sequences": (sequences, points(x, (len(x), 1, 1))),
  }
  results = {}
  for name, (ratio, start) in starts.items():
    run = jax.jit(functools.partial(ascend, ratio, steps=steps))
    low, high = (np.asarray(run(start, sign=s)) for s in (-1.0, 1.0))
    if name == "tokens":
      low, high = low[np.asarray(both)], high[np.asarray(both)]
    results[name] = (float(low.min()), float(high.max()))
  return results
