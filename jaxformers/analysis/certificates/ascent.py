"""Gradient searches for the largest and the smallest ratio of distances."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import choose
from jaxformers.models import Model
from jaxformers.models.blocks.fixed_point import LENGTHS, Length
from jaxformers.models.blocks.invertible import Interval
from jaxformers.models.capture import capture
from jaxformers.models.mixers.nonexpansive import into_ball
from jaxformers.models.variables import make_variables

# Smallest and largest distance of a pair, relative to the root mean square norm
# of a token (of a sequence, for pairs of sequences). Smaller distances would
# measure the rounding of float32.
_NEAR, _FAR = 1e-2, 1e2
Ratio = Callable[[Any], jax.Array]  # Function of a tree of points to [...].


def ascend(
  ratio: Ratio,
  start: Any,
  *,
  sign: jax.Array | float,
  steps: int,
  rate: float = 0.05,
) -> jax.Array:
  """Returns the extreme ratio reached from every start.

  Adam maximises `sign * log(ratio)`.

  Args:
    ratio: function from a tree of points to ratios [...], one for each start.
    start: tree of starting points, one for each ratio.
    sign: 1 to search for the largest ratio, -1 for the smallest.
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
  points: dict[str, jax.Array],
  axes: tuple[int, ...],
  unit: jax.Array,
  ball: float | None,
) -> tuple[jax.Array, jax.Array]:
  """Returns both ends of segments.

  Args:
    points: `middle`, `direction` and `log_length` of each segment.
    axes: axes over which a segment's length is taken.
    unit: unit of the length.
    ball: greatest norm of a token, for which ends are projected; or None.
  """
  direction = points["direction"]
  norm = jnp.sqrt(jnp.square(direction).sum(axes, keepdims=True))
  # Clip the length to the range of allowed distances.
  low, high = math.log(_NEAR), math.log(_FAR)
  length = unit * jnp.exp(jnp.clip(points["log_length"], low, high))
  half = length / 2 * direction / norm
  ends = points["middle"] + half, points["middle"] - half
  if ball is None:
    return ends
  first, second = (ball * into_ball(x, jnp.float32(ball)) for x in ends)
  return first, second


def _ratios(
  model: Model,
  variables: Any,
  ids: jax.Array,
  x: jax.Array,
  mask: jax.Array,
  unit: jax.Array,
  ball: float | None,
) -> dict[str, Ratio]:
  """Returns functions for the ratios of the distances of `adversarial`.

  They map a tree of points to the distance after the encoder over the distance
  before it.

  Args:
    model, variables, ids: model, its variables, and its inputs.
    x: embedded tokens, [b, n, d].
    mask: [b, n], True at tokens.
    unit: root mean square norm of the tokens.
    ball: greatest norm of a token, or None.
  """
  # A pair of tokens counts if neither of them is padding.
  n = x.shape[1] // 2 * 2
  both = mask[:, 0:n:2] & mask[:, 1:n:2]
  root = jnp.sqrt(mask.sum(1).astype(x.dtype))[:, None, None]

  def first_and_last(embedded: jax.Array) -> tuple[jax.Array, jax.Array]:
    hidden = capture(model, variables, ids, embedded).hidden
    return hidden[0], hidden[-1]

  def tokens(points: Any) -> jax.Array:
    # Put the ends of each segment at neighbouring positions, [b, n, d]. Keep
    # the last token if their number is odd.
    ends = jnp.stack(_ends(points, (-1,), unit, ball), 2)
    moved = ends.reshape((len(x), n, -1))
    before, after = (
      jnp.linalg.norm(y[:, 0:n:2] - y[:, 1:n:2], axis=-1)
      for y in first_and_last(jnp.concatenate([moved, x[:, n:]], 1))
    )
    # Set the ratio of pairs with padding to 1: its logarithm is 0.
    return jnp.where(both, after / jnp.where(both, before, 1), 1)

  def sequences(length: Length, points: Any) -> jax.Array:
    # Move only the tokens: both sequences of a pair keep the same padding.
    ends = [
      first_and_last(jnp.where(mask[..., None], end, x))
      for end in _ends(points, (1, 2), unit * root, ball)
    ]
    before, after = (
      length(jnp.where(mask[..., None], a - b, 0))
      for a, b in zip(*ends, strict=True)
    )
    return after / before

  ratios: dict[str, Ratio] = {"tokens": tokens}
  for kind, length in LENGTHS.items():
    ratios[kind] = functools.partial(sequences, length)
  return ratios


def adversarial(
  model: Model,
  params: Any,
  ids: jax.Array,
  *,
  kinds: Sequence[str] = ("tokens", "sequences"),
  ball: float | None = None,
  steps: int = 200,
  seed: int = 0,
) -> dict[str, Interval]:
  """Returns the extreme factors by which the encoder changes a distance.

  The factors are found by a search. Half of the pairs start at a distance of a
  hundredth of the root mean square norm of a token (of a sequence), and half at
  that norm.

  Args:
    model, params: model and parameters from `models.build`, in evaluation.
    ids: samples to start from, [b, n] or [b, 2, n].
    kinds: kinds of pairs; see below.
    ball: greatest norm of a token before the encoder; None for no limit.
    steps: number of Adam steps of each of the two searches of a kind.
    seed: seed of the directions.

  Returns:
    (smallest factor, largest factor) for each kind of pairs. `tokens`: pairs of
    neighbouring tokens; all pairs are optimised together, and a token may move
    anywhere in the ball. `sequences`: pairs of whole sequences with the same
    mask, in the Frobenius norm. `farthest`: the same pairs, whose distance is
    the greatest distance of two tokens at one place.

  Raises:
    UserError: if no sample has two tokens next to each other.
  """
  # Embed the samples.
  variables = make_variables(model, params)
  captured = jax.jit(functools.partial(capture, model))(variables, ids)
  x, mask = captured.hidden[0], captured.mask
  # Pair the tokens (0, 1), (2, 3) and so on.
  n = x.shape[1] // 2 * 2
  both = mask[:, 0:n:2] & mask[:, 1:n:2]
  if not both.any():
    raise UserError(
      "No sample has two tokens next to each other, so there are no pairs to "
      "start from. Give longer samples."
    )
  # Measure lengths in units of the root mean square norm of a token.
  unit = jnp.sqrt(jnp.square(x).sum(-1).mean(where=mask))
  ratios = _ratios(model, variables, ids, x, mask, unit, ball)
  key = jax.random.key(seed)

  def points(middle: jax.Array, lengths: tuple[int, ...]) -> Any:
    # Start every other pair from a short segment.
    near = jnp.arange(math.prod(lengths)).reshape(lengths) % 2 == 0
    return {
      "middle": middle,
      "direction": jax.random.normal(key, middle.shape, middle.dtype),
      "log_length": jnp.where(near, math.log(_NEAR), 0.0).astype(x.dtype),
    }

  # Centre the starts at the middles of token pairs, and at the sequences.
  middle = (x[:, 0:n:2] + x[:, 1:n:2]) / 2
  # `both` leaves out pairs with padding, whose ratio is set to 1.
  starts = {"tokens": (points(middle, (*middle.shape[:2], 1)), both)}
  starts |= dict.fromkeys(LENGTHS, (points(x, (len(x), 1, 1)), ...))
  # Search for the smallest and the largest ratio of each kind.
  results = {}
  for kind in kinds:
    start, chosen = starts[choose("kind of pairs", kind, starts)]
    run = jax.jit(functools.partial(ascend, ratios[kind], steps=steps))
    low, high = (run(start, sign=sign)[chosen] for sign in (-1.0, 1.0))
    results[kind] = (float(low.min()), float(high.max()))
  return results
