"""How injective a causal model is: distances of the states of last tokens.

Two prompts collide in a layer if the states of their last tokens are equal. The
measures are the nearest pairs of many prompts, the nearest of all continuations
of the nearest prompts by one token, and the distance of long sequences that
differ by one repeated token.

Source: Nikolaou et al. 2025, https://arxiv.org/abs/2510.15511, section 4, for
the first two; Barbero et al. 2024, https://arxiv.org/abs/2406.04267, section 4,
for the last one (representational collapse).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.models import Model, in_float32
from jaxformers.models.capture import batches, capture
from jaxformers.models.decode import is_bounded
from jaxformers.models.model import EncoderModel, from_config
from jaxformers.models.sipit import read_token, start_cache
from jaxformers.models.variables import make_variables

COLLISION = 1e-6  # Distances below it count as collisions, as in the source.
BLOCK = 512  # Rows of a block of pairwise distances.
BATCH = 32  # Prompts of a batch.
DTYPES = ("float32", "bfloat16")


class Nearest(NamedTuple):
  """Nearest pairs of states.

  Attributes:
    distances: Euclidean distances, ascending, float64 [k].
    pairs: numbers of the two states of each pair, int64 [k, 2].
  """

  distances: np.ndarray
  pairs: np.ndarray


def last_states(model: Model, params: Any, ids: np.ndarray) -> np.ndarray:
  """Returns the states of the last tokens, float32 [layers + 1, b, d].

  Args:
    model: causal model; it computes in float32.
    params: parameters of the model.
    ids: prompts, int32 [b, n], 0 at padding.
  """
  model = in_float32(model)
  model.check_causal()
  variables = make_variables(model, params)
  parts = []
  for batch in batches(ids, BATCH, "states"):
    captured = capture(model, variables, jnp.asarray(batch))
    last = np.asarray(captured.mask).sum(1) - 1
    rows = np.arange(len(batch))
    parts.append(np.stack([np.asarray(x)[rows, last] for x in captured.hidden]))
  return np.concatenate(parts, 1)


def nearest(states: np.ndarray, count: int) -> Nearest:
  """Returns the `count` nearest pairs of different rows of states [b, d]."""
  x = np.asarray(states, np.float64)
  squares = np.square(x).sum(1)
  found = Nearest(np.zeros(0), np.zeros((0, 2), np.int64))
  for start in range(0, len(x), BLOCK):
    rows = np.arange(start, min(start + BLOCK, len(x)))
    # |a - b|^2 = |a|^2 - 2 a . b + |b|^2 chooses the pairs of a block.
    square = squares[rows, None] - 2 * x[rows] @ x.T + squares[None]
    square[np.arange(len(x))[None] <= rows[:, None]] = np.inf
    flat = square.ravel()
    kept = np.argpartition(flat, min(count, flat.size - 1))[:count]
    kept = kept[np.isfinite(flat[kept])]
    first, second = np.divmod(kept, len(x))
    pairs = np.stack([rows[first], second], 1)
    # Differences have no cancellation.
    exact = np.linalg.norm(x[pairs[:, 0]] - x[pairs[:, 1]], axis=1)
    distances = np.concatenate([found.distances, exact])
    order = np.argsort(distances, kind="stable")[:count]
    found = Nearest(
      distances[order], np.concatenate([found.pairs, pairs])[order]
    )
  return found


def continuations(model: Model, params: Any, ids: np.ndarray) -> np.ndarray:
  """Returns the states of every next token of each prompt, in all layers.

  Args:
    model: causal model, whose mixer has a cache.
    params: parameters of the model.
    ids: prompts, int32 [b, n], 0 at padding.

  Returns:
    float32 [layers + 1, b, vocab_size - 1, d], for the tokens from 1 on.
  """
  encoder = EncoderModel(in_float32(model).config)
  found = _continue(encoder, make_variables(model, params), jnp.asarray(ids))
  return np.asarray(found)


@functools.partial(jax.jit, static_argnums=0)
def _continue(model: EncoderModel, variables: Any, ids: jax.Array) -> jax.Array:
  cache = start_cache(model, variables, len(ids))

  def step(cache: Any, token: jax.Array) -> tuple[Any, None]:
    return read_token(model, variables, cache, token)[1], None

  cache, _ = jax.lax.scan(step, cache, ids.T)

  def states(token: jax.Array) -> jax.Array:
    hidden, _ = read_token(model, variables, cache, jnp.full(len(ids), token))
    return jnp.stack(hidden)

  every = jnp.arange(1, model.config.vocab_size, dtype=jnp.int32)
  # One token after another: the caches of all would take much memory.
  return jnp.moveaxis(jax.lax.map(states, every), 0, 2)


def collapse(
  model: Model, params: Any, tokens: tuple[int, int], lengths: Sequence[int]
) -> dict[str, list[float]]:
  """Returns relative distances of the last states of (a^n, b), (a^(n+1), b).

  Args:
    model: causal model.
    params: parameters of the model.
    tokens: ids a and b.
    lengths: numbers n.

  Returns:
    |x - y| / |x| in the last layer for each n, by dtype.
  """
  curves: dict[str, list[float]] = {}
  for dtype in DTYPES:
    same = from_config(dataclasses.replace(model.config, dtype=dtype))
    variables = make_variables(same, params)
    distances = []
    for n in lengths:
      pair = np.zeros((2, n + 2), np.int32)
      for row, repeats in zip(pair, (n, n + 1), strict=True):
        row[:repeats], row[repeats] = tokens
      captured = capture(same, variables, jnp.asarray(pair))
      hidden = np.asarray(captured.hidden[-1], np.float64)
      x, y = hidden[0, n], hidden[1, n + 1]
      distances.append(float(np.linalg.norm(x - y) / np.linalg.norm(x)))
    curves[dtype] = distances
  return curves


def collapse_lengths(model: Model, most: int) -> list[int]:
  """Returns powers of two up to `most`, or to what the model reads."""
  if is_bounded(model):
    most = min(most, model.config.max_len - 2)
  return [1 << k for k in range(max(most, 1).bit_length()) if 1 << k <= most]
