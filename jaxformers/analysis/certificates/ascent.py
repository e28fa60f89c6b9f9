"""Searches for the largest and smallest ratio of distances, by ascent."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxformers.foundations.errors import UserError
from jaxformers.models import Model
from jaxformers.models.blocks.invertible import Interval
from jaxformers.models.capture import capture
from jaxformers.models.variables import make_variables

# Least and greatest distance of a pair, relative to the root mean square norm
# of a token, or of a sequence of as many tokens. Smaller distances would
# measure the rounding of float32.
_NEAR, _FAR = 1e-2, 1e2
Ratio = Callable[[Any], jax.Array]  # From a tree of points to [...].


def ascend(
  ratio: Ratio,
  start: Any,
  *,
  sign: jax.Array | float,
  steps: int,
  rate: float = 0.05,
) -> jax.Array:
  """Returns the extreme of a ratio for every start, by Adam on its logarithm.

  Args:
    ratio: function from a tree of points to ratios [...], one for each start.
    start: tree of points, one for each ratio.
    sign: 1 for the greatest ratio, -1 for the least.
    steps: number of steps of Adam.
    rate: learning rate of Adam.

  Returns:
    The most extreme finite ratio from each start, in the shape of
    `ratio(start)`.
  """
  tx = optax.adam(rate)

  def objective(points: Any) -> tuple[jax.Array, jax.Array]:
    ratios = ratio(points)
    return -sign * jnp.log(ratios).sum(), ratios

  def step(state: Any, _: None) -> tuple[Any, jax.Array]:
    points, moments = state
    (_, ratios), grads = jax.value_and_grad(objective, has_aux=True)(points)
    updates, moments = tx.update(grads, moments)
    return (optax.apply_updates(points, updates), moments), ratios

  start = (start, tx.init(start))
  _, ratios = jax.lax.scan(step, start, None, length=steps)
  # Adam's path is not monotone: take the best finite ratio from each start.
  finite = jnp.where(jnp.isfinite(ratios), sign * ratios, -jnp.inf)
  return sign * finite.max(0)


def _ends(
  points: dict[str, jax.Array], axes: tuple[int, ...], unit: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns both ends of segments given by middle, direction and log length."""
  direction = points["direction"]
  norm = jnp.sqrt(jnp.square(direction).sum(axes, keepdims=True))
  low, high = math.log(_NEAR), math.log(_FAR)
  length = unit * jnp.exp(jnp.clip(points["log_length"], low, high))
  half = length / 2 * direction / norm
  return points["middle"] + half, points["middle"] - half


def _ratios(
  model: Model,
  variables: Any,
  ids: jax.Array,
  x: jax.Array,
  mask: jax.Array,
  unit: jax.Array,
) -> tuple[Ratio, Ratio]:
  """Returns the changes of distances of tokens and of sequences, as functions.

  Args:
    model, variables, ids: model, what it is applied to, and its inputs.
    x, mask: embedded tokens [b, n, d], and where they are [b, n].
    unit: root mean square norm of the tokens.
  """
  n = x.shape[1] // 2 * 2
  both = mask[:, 0:n:2] & mask[:, 1:n:2]
  root = jnp.sqrt(mask.sum(1).astype(x.dtype))[:, None, None]

  def first_and_last(embedded: jax.Array) -> tuple[jax.Array, jax.Array]:
    hidden = capture(model, variables, ids, embedded).hidden
    return hidden[0], hidden[-1]

  def tokens(points: Any) -> jax.Array:
    # Put the ends of each segment side by side; keep an odd last token.
    ends = jnp.stack(_ends(points, (-1,), unit), 2)
    moved = ends.reshape((len(x), n, -1))
    before, after = (
      jnp.linalg.norm(y[:, 0:n:2] - y[:, 1:n:2], axis=-1)
      for y in first_and_last(jnp.concatenate([moved, x[:, n:]], 1))
    )
    # Pairs with padding get the ratio 1, whose logarithm adds nothing.
    return jnp.where(both, after / jnp.where(both, before, 1), 1)

  def sequences(points: Any) -> jax.Array:
    # Padding stays as it is, so that it adds no noise to a pair.
    ends = [
      first_and_last(jnp.where(mask[..., None], end, x))
      for end in _ends(points, (1, 2), unit * root)
    ]
    before, after = (
      jnp.sqrt(jnp.square(jnp.where(mask[..., None], a - b, 0)).sum((1, 2)))
      for a, b in zip(*ends, strict=True)
    )
    return after / before

  return tokens, sequences


def adversarial(
  model: Model,
  params: Any,
  ids: jax.Array,
  *,
  steps: int = 200,
  seed: int = 0,
) -> dict[str, Interval]:
  """Searches for the largest and smallest change of a distance by the encoder.

  Half of the pairs start at a hundredth of the root mean square norm of a token
  (of a sequence), and half at that norm.

  Args:
    model, params: model and parameters from `models.build`, in evaluation.
    ids: samples to start from, [b, n] or [b, 2, n].
    steps: number of Adam steps of each of the four searches.
    seed: seed of the directions.

  Returns:
    Smallest and largest factor. `tokens`: over pairs of neighbouring tokens;
    all pairs are optimised together, and a token may move anywhere in R^d.
    `sequences`: over pairs of whole sequences with the same mask.

  Raises:
    UserError: if no sample has two tokens next to each other.
  """
  variables = make_variables(model, params)
  captured = jax.jit(functools.partial(capture, model))(variables, ids)
  x, mask = captured.hidden[0], captured.mask
  # The pairs are the tokens (0, 1), (2, 3) and so on.
  n = x.shape[1] // 2 * 2
  both = mask[:, 0:n:2] & mask[:, 1:n:2]
  if not both.any():
    raise UserError(
      "No sample has two tokens next to each other, so there are no pairs to "
      "start from: give longer samples."
    )
  # Lengths are relative to the root mean square norm of tokens.
  unit = jnp.sqrt(jnp.square(x).sum(-1).mean(where=mask))
  tokens, sequences = _ratios(model, variables, ids, x, mask, unit)
  key = jax.random.key(seed)

  def points(middle: jax.Array, lengths: tuple[int, ...]) -> Any:
    # Every other pair starts from a short segment.
    near = jnp.arange(math.prod(lengths)).reshape(lengths) % 2 == 0
    return {
      "middle": middle,
      "direction": jax.random.normal(key, middle.shape, middle.dtype),
      "log_length": jnp.where(near, math.log(_NEAR), 0.0).astype(x.dtype),
    }

  # Start around the samples: at the middles of pairs, or at sequences.
  middle = (x[:, 0:n:2] + x[:, 1:n:2]) / 2
  starts = {
    # Leave out pairs with padding, whose ratio is set to 1.
    "tokens": (tokens, points(middle, (*middle.shape[:2], 1)), both),
    "sequences": (sequences, points(x, (len(x), 1, 1)), ...),
  }
  results = {}
  for name, (ratio, start, chosen) in starts.items():
    run = jax.jit(functools.partial(ascend, ratio, steps=steps))
    low, high = (run(start, sign=sign)[chosen] for sign in (-1.0, 1.0))
    results[name] = (float(low.min()), float(high.max()))
  return results
