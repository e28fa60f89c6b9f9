"""The collection `cache`: states of causal models after the tokens so far.

A causal model that is applied with `mutable=["cache"]` continues from the cache
and returns the cache after its tokens. `decode.generate` applies a model in
this way, token by token. Without `mutable=["cache"]` a model neither reads nor
writes a cache.

The cache is the state of `Model.apply` with `return_state`, which may also be
carried from one training step to the next. What depends only on parameters is
not a part of it: a loop with fixed parameters keeps such values in a second
collection, `FIXED`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.foundations.errors import UserError
from jaxformers.models.segments import starts, tokens

CACHE = "cache"
FIXED = "fixed"  # Collection of values that depend only on parameters.


def is_decoding(module: nn.Module) -> bool:
  """Returns True if a module is applied with a mutable cache."""
  return module.is_mutable_collection(CACHE) and not module.is_initializing()


def recall(module: nn.Module, name: str) -> Any:
  """Returns the cached value of `name`.

  Returns None if there is no such value or if the model is not decoding.
  """
  return module.get_variable(CACHE, name) if is_decoding(module) else None


def remember(module: nn.Module, name: str, value: Any) -> None:
  """Stores a value in the cache as `name`, if the module is decoding."""
  if is_decoding(module):
    module.put_variable(CACHE, name, value)


def check_causal(module: nn.Module, *, causal: bool) -> None:
  """Raises UserError for decoding by a mixer that reads later tokens."""
  if is_decoding(module) and not causal:
    raise UserError(
      "Only causal models, which read earlier tokens only, have a cache: build "
      "the model with mixer.causal=True."
    )


class Extended(NamedTuple):
  """Arrays of all tokens so far, and which tokens each new token sees.

  Attributes:
    arrays: arrays by name, [b, ..., max_len, ...].
    seen: bool [b, n, max_len], True where a new token sees a token. A token
      sees itself and earlier tokens.
    places: positions of the new tokens in their samples, int32 [b, n].
  """

  arrays: dict[str, jax.Array]
  seen: jax.Array
  places: jax.Array


def count_tokens(
  module: nn.Module, mask: jax.Array, name: str = "count"
) -> jax.Array:
  """Returns the position of each token in its sample, int32 [b, n], from 0.

  In packed rows it is the position in the example.

  Padding is not counted; positions at padding have no meaning. If the module is
  decoding, counting continues after the tokens in the cache.

  Args:
    module: module that stores the count in its cache.
    mask: [b, n], True at tokens; or numbers of packed rows.
    name: name of the count in the cache.
  """
  # Number of tokens in the cache, [b].
  before = recall(module, name)
  if before is None:
    before = jnp.zeros(mask.shape[:1], jnp.int32)
  is_token = tokens(mask).astype(jnp.int32)
  counts = jnp.cumsum(is_token, 1)
  begins = starts(mask)
  if begins is None:
    counts = counts + before[:, None]
  else:
    # Count from the start of each example; example 1 continues the cache.
    earlier = jnp.where(begins, counts - is_token, -before[:, None])
    counts = counts - jax.lax.cummax(earlier, axis=1)
  remember(module, name, counts[:, -1])
  return jnp.maximum(counts - 1, 0)


def extend(
  module: nn.Module,
  mask: jax.Array,
  max_len: int,
  axis: int = 1,
  **arrays: jax.Array,
) -> Extended:
  """Appends arrays of new tokens to the cache, and returns the arrays.

  Tokens beyond `max_len` are not stored.

  Args:
    module: module that is decoding.
    mask: [b, n], True at new tokens.
    max_len: greatest number of tokens.
    axis: axis of the tokens in the arrays.
    **arrays: arrays of the new tokens, [b, ..., n, ...].
  """
  places = count_tokens(module, mask)
  # Write tokens at their positions; send padding out of range to drop it.
  targets = jnp.where(mask, places, max_len)
  rows = jnp.arange(mask.shape[0])[:, None]
  extended = {}
  for name, array in arrays.items():
    buffer = recall(module, name)
    if buffer is None:
      shape = (*array.shape[:axis], max_len, *array.shape[axis + 1 :])
      buffer = jnp.zeros(shape, array.dtype)
    place = (rows, *[slice(None)] * (axis - 1), targets)
    array = jnp.moveaxis(array, axis, 1)
    extended[name] = buffer.at[place].set(array, mode="drop")
    remember(module, name, extended[name])
  # A token sees positions up to its own.
  seen = jnp.arange(max_len)[None, None] <= places[..., None]
  return Extended(extended, seen, places)
