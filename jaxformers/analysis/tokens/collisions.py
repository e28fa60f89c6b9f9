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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.foundations.errors import UserError
from jaxformers.models import Model, in_float32, sipit
from jaxformers.models.capture import batches, capture
from jaxformers.models.decode import is_bounded
from jaxformers.models.model import EncoderModel, from_config
from jaxformers.models.variables import make_variables

COLLISION = 1e-6  # Distances below it count as collisions, as in the source.
BATCH = 32  # Prompts of a batch.
DTYPES = ("float32", "bfloat16")


def last_states(model: Model, params: Any, ids: np.ndarray) -> np.ndarray:
  """Returns the states of the last tokens, float32 [layers + 1, b, d].

  Args:
    model: causal model; it computes in float32.
    params: parameters of the model.
    ids: prompts, int32 [b, n], 0 at padding.
  """
  model = in_float32(model)
  sipit.check_model(model)
  variables = make_variables(model, params)
  parts = []
  for batch in batches(ids, BATCH, "states"):
    captured = capture(model, variables, jnp.asarray(batch))
    mask = np.asarray(captured.mask)
    last = mask.shape[1] - 1 - mask[:, ::-1].argmax(1)
    rows = np.arange(len(batch))
    parts.append(np.stack([np.asarray(x)[rows, last] for x in captured.hidden]))
  return np.concatenate(parts, 1)


def continuations(
  model: Model, params: Any, ids: np.ndarray, layer: int
) -> np.ndarray:
  """Returns the states of every next token of each prompt in a layer.

  Args:
    model: causal model, whose mixer has a cache.
    params: parameters of the model.
    ids: prompts, int32 [b, n], 0 at padding.
    layer: number of the layer, from 0.

  Returns:
    float32 [b, vocab_size - 1, d], for the tokens from 1 on.

  Raises:
    UserError: for prompts that are too long to be continued, and for a model
      that `sipit.recover` refuses.
  """
  sipit.check_model(model)
  longest = model.config.max_len
  if is_bounded(model) and ids.shape[1] >= longest:
    raise UserError(
      f"Prompts of {ids.shape[1]} tokens have no continuation, because the "
      f"model reads at most max_len={longest}: give shorter prompts."
    )
  encoder = EncoderModel(in_float32(model).config)
  variables = make_variables(model, params)
  return np.asarray(_continue(encoder, layer, variables, jnp.asarray(ids)))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _continue(
  model: EncoderModel, layer: int, variables: Any, ids: jax.Array
) -> jax.Array:
  cache = sipit.start_cache(model, variables, len(ids))

  def step(cache: Any, token: jax.Array) -> tuple[Any, None]:
    return sipit.read_token(model, variables, cache, token)[1], None

  cache, _ = jax.lax.scan(step, cache, ids.T)

  def states(token: jax.Array) -> jax.Array:
    tokens = jnp.full(len(ids), token)
    return sipit.read_token(model, variables, cache, tokens)[0][layer]

  tokens = jnp.arange(1, model.config.vocab_size, dtype=jnp.int32)
  # One token after another: the caches of all would take much memory.
  return jnp.swapaxes(jax.lax.map(states, tokens), 0, 1)


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
