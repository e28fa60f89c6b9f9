"""Text from a language model, token by token."""

from __future__ import annotations

import functools
import math
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import check_keywords
from jaxformers.models.cache import CACHE
from jaxformers.models.config import ModelConfig, field_names
from jaxformers.models.mixer import MIXERS
from jaxformers.models.model import Model
from jaxformers.models.variables import make_variables

# Below it log probabilities over the temperature would overflow, and draws are
# the likeliest token long before.
COLDEST = 1e-20


class Choice(NamedTuple):
  """How a token is chosen by its log probability.

  Attributes:
    temperature: divisor of log probabilities, float32; 0, and anything below
      `COLDEST`, for the likeliest token.
    top_k: number of likeliest tokens that are drawn from, int32.
  """

  temperature: jax.Array
  top_k: jax.Array

  def draw(self, log_p: jax.Array, key: jax.Array, most: int) -> jax.Array:
    """Returns one id for each row of log_p [b, vocab_size], int32 [b].

    Args:
      log_p: log probabilities, float32.
      key: random key.
      most: upper limit of `top_k`; 0 to draw from all tokens.
    """
    likeliest = log_p.argmax(-1)
    if most:
      sorted_p = jax.lax.top_k(log_p, most)[0]
      least = jax.lax.dynamic_index_in_dim(sorted_p, self.top_k - 1, 1)
      log_p = jnp.where(log_p >= least, log_p, -jnp.inf)
    warm = jnp.maximum(self.temperature, COLDEST)
    drawn = jax.random.categorical(key, log_p / warm)
    is_cold = self.temperature < COLDEST
    return jnp.where(is_cold, likeliest, drawn).astype(jnp.int32)


@check_keywords
def generate(
  model: Model,
  params: Any,
  prompt: Any,
  steps: int,
  *,
  key: jax.Array | None = None,
  temperature: float = 1.0,
  top_k: int = 0,
) -> jax.Array:
  """Returns the tokens that follow prompts, int32 [b, steps].

  The prompt is read at once, and every further token alone: a recurrent mixer
  remembers its states, whose size does not depend on the number of tokens, and
  attention its keys and values. Programs are compiled for numbers of prompts,
  tokens and steps that are powers of two, and serve all smaller ones.

  Args:
    model: a language model from `models.build`, whose mixer has a cache.
    params: its parameters.
    prompt: ids, int [b, n]; 0 is padding, which may stand anywhere: before or
      after the tokens of a prompt, or between them.
    steps: number of tokens to draw for each prompt.
    key: random key; needed unless `temperature` is 0.
    temperature: what log probabilities are divided by before a draw; 0 takes
      the likeliest token.
    top_k: number of likeliest tokens that are drawn from; 0 for all.

  Raises:
    UserError: for a model of another objective, a mixer without a cache, more
      tokens than the model can have, an empty prompt, or arguments out of
      range.
  """
  prompt = np.asarray(prompt, np.int32)
  _check(model, prompt, steps, key, temperature, top_k)
  choice = Choice(jnp.float32(temperature), jnp.int32(top_k))
  key = jax.random.key(0) if key is None else key
  # Pad to sizes of which there are few.
  count, width = prompt.shape
  wide = at_least(width, model.config.max_len if _is_bounded(model) else 0)
  rows = np.minimum(np.arange(at_least(count)), count - 1)
  padded = np.pad(prompt[rows], ((0, 0), (0, wide - width)))
  most = at_least(int(top_k), model.config.vocab_size) if top_k else 0
  sizes = (most, at_least(int(steps)))
  drawn = _generate(model, sizes, params, padded, key, choice, int(steps))
  return jax.device_put(np.asarray(drawn)[:count, :steps])


def at_least(number: int, limit: int = 0) -> int:
  """Returns the least power of two from a number on, or a limit below it.

  Args:
    number: 1 or more.
    limit: greatest result, at least `number`; 0 for none.
  """
  power = 1 << (number - 1).bit_length()
  return min(power, limit) if limit else power


def _check(
  model: Model,
  prompt: np.ndarray,
  steps: int,
  key: jax.Array | None,
  temperature: float,
  top_k: int,
) -> None:
  config = model.config
  if config.objective != "language_model":
    raise UserError(
      f"generate needs a language model, and this one is for "
      f"{config.objective}: build it with objective='language_model'."
    )
  if prompt.ndim != 2 or not (prompt != 0).any(-1).all():
    raise UserError(
      f"prompt has the shape {prompt.shape}: give ids [b, n] with at least one "
      "token, not 0, in every row."
    )
  size = config.vocab_size
  if (prompt < 0).any() or (prompt >= size).any():
    raise UserError(
      f"prompt has ids from {prompt.min()} to {prompt.max()}, and the model "
      f"knows 0 to {size - 1}: encode it with its vocabulary."
    )
  _check_sampling(steps, key, temperature, top_k, size)
  total = prompt.shape[1] + steps - 1
  if _is_bounded(model) and total > config.max_len:
    raise UserError(
      f"A prompt of {prompt.shape[1]} tokens and {steps} steps are more than "
      f"max_len={config.max_len}: shorten one of the two, or build the model "
      "with a greater max_len."
    )


def _check_sampling(
  steps: int, key: jax.Array | None, temperature: float, top_k: int, size: int
) -> None:
  """Raises UserError for arguments of `generate` that draw no tokens.

  Args:
    steps, key, temperature, top_k: arguments of `generate`.
    size: size of the vocabulary.
  """
  # NaN fails both comparisons of the temperature.
  is_warm = (
    isinstance(temperature, numbers.Real) and 0 <= temperature < math.inf
  )
  is_count = all(isinstance(k, numbers.Integral) for k in (steps, top_k))
  if not is_warm or not is_count or steps < 1 or not 0 <= top_k < size:
    raise UserError(
      f"steps={steps}, temperature={temperature}, top_k={top_k}: give an "
      "integer of 1 or more for steps, a finite temperature of 0 or more, and "
      f"an integer top_k from 0 to {size - 1}."
    )
  if temperature and key is None:
    raise UserError(
      "temperature above 0 draws tokens: give key=jax.random.key(0), or "
      "temperature=0 for the likeliest tokens."
    )


def _is_bounded(model: Model) -> bool:
  """Returns True if a model cannot read more than max_len tokens."""
  config = model.config
  return config.positions != "none" or _has_limit(config)


def _has_limit(config: ModelConfig) -> bool:
  """Returns True if the mixer cannot read more than max_len tokens."""
  make = MIXERS[config.variant.mixer]
  if "max_len" not in field_names(make):
    return False
  mixer = make(**config.mixer_options(), **config.variant.fixed)
  return getattr(mixer, "has_limit", True)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _generate(
  model: Model,
  sizes: tuple[int, int],
  params: Any,
  prompt: jax.Array,
  key: jax.Array,
  choice: Choice,
  steps: jax.Array,
) -> jax.Array:
  """Returns drawn ids, int32 [b, most_steps], the first `steps` of each row.

  Args:
    model, params, prompt, key: as for `generate`.
    sizes: `most` of `Choice.draw`; and most_steps, at least `steps`.
    choice: how tokens are chosen.
    steps: number of tokens to draw.
  """
  most, most_steps = sizes
  variables = make_variables(model, params)

  def read(
    ids: jax.Array, cache: dict[str, Any]
  ) -> tuple[jax.Array, dict[str, Any]]:
    """Returns log p of what follows each token, and the cache after them."""
    log_p, changed = model.apply(
      {**variables, **cache}, ids, train=False, mutable=[CACHE]
    )
    return log_p, dict(changed)

  log_p, cache = read(prompt, {})
  # Read the last token of each row, which padding may follow.
  last = prompt.shape[1] - 1 - jnp.argmax(prompt[:, ::-1] > 0, axis=1)
  log_p = jnp.take_along_axis(log_p, last[:, None, None], 1)[:, 0]
  keys = jax.random.split(key, most_steps)
  drawn = jnp.zeros((most_steps, len(prompt)), jnp.int32)
  drawn = drawn.at[0].set(choice.draw(log_p, keys[0], most))

  def step(
    i: jax.Array, carry: tuple[jax.Array, dict[str, Any]]
  ) -> tuple[jax.Array, dict[str, Any]]:
    drawn, cache = carry
    log_p, cache = read(drawn[i - 1][:, None], cache)
    token = choice.draw(log_p[:, 0], keys[i], most)
    return drawn.at[i].set(token), cache

  drawn, _ = jax.lax.fori_loop(1, steps, step, (drawn, cache))
  return drawn.T
