"""The collection `cache`: what causal models remember of tokens so far.

A causal model that is applied with `mutable=["cache"]` goes on where the cache
ends, and returns the cache after its tokens: `decode.generate` calls it token
by token. Without it a model reads and writes nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.foundations.errors import UserError

CACHE = "cache"


def is_decoding(module: nn.Module) -> bool:
  """Returns True if a module is applied with a cache that it can change."""
  return module.is_mutable_collection(CACHE) and not module.is_initializing()


def recall(module: nn.Module, name: str) -> Any:
  """Returns what was remembered under a name; None outside decoding, too."""
  return module.get_variable(CACHE, name) if is_decoding(module) else None


def remember(module: nn.Module, name: str, value: Any) -> None:
  """Remembers a value under a name, where the module is decoding."""
  if is_decoding(module):
    module.put_variable(CACHE, name, value)


def check_causal(module: nn.Module, *, causal: bool) -> None:
  """Raises UserError for decoding by a mixer that reads later tokens."""
  if is_decoding(module) and not causal:
    raise UserError(
      "A cache is for models that read earlier tokens alone: build the model "
      "with mixer.causal=True."
    )


class Extended(NamedTuple):
  """Arrays of all tokens so far, and which of them new tokens see.

  Attributes:
    arrays: the arrays by name, [b, max_len, ...].
    seen: [b, n, max_len], True where a new token sees a token: itself and those
      before it.
    places: numbers of the new tokens in their samples, int32 [b, n].
  """

  arrays: dict[str, jax.Array]
  seen: jax.Array
  places: jax.Array


def count_tokens(
  module: nn.Module, mask: jax.Array, name: str = "count"
) -> jax.Array:
  """Returns the number of each token in its sample, int32 [b, n], from 0.

  Masked tokens are not counted; what they get has no meaning. Where the module
  is decoding, counting goes on after the tokens that it has counted.

  Args:
    module: the module that keeps the count.
    mask: [b, n], True at tokens.
    name: name of the count.
  """
  before = recall(module, name)
  if before is None:
    before = jnp.zeros(mask.shape[:1], jnp.int32)
  counts = jnp.cumsum(mask, 1, dtype=jnp.int32) + before[:, None]
  remember(module, name, counts[:, -1])
  return jnp.maximum(counts - 1, 0)


def extend(
  module: nn.Module, mask: jax.Array, max_len: int, **arrays: jax.Array
) -> Extended:
  """Returns arrays of all tokens so far; the module remembers them.

  Tokens beyond `max_len` are not remembered.

  Args:
    module: the module that is decoding.
    mask: [b, n], True at new tokens.
    max_len: greatest number of tokens.
    **arrays: arrays of the new tokens, [b, n, ...].
  """
  places = count_tokens(module, mask)
  # Padding has no place.
  targets = jnp.where(mask, places, max_len)
  rows = jnp.arange(mask.shape[0])[:, None]
  known = {}
  for name, array in arrays.items():
    buffer = recall(module, name)
    if buffer is None:
      shape = (array.shape[0], max_len, *array.shape[2:])
      buffer = jnp.zeros(shape, array.dtype)
    known[name] = buffer.at[rows, targets].set(array, mode="drop")
    remember(module, name, known[name])
  seen = jnp.arange(max_len)[None, None] <= places[..., None]
  return Extended(known, seen, places)
