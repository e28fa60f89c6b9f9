"""Generation of tokens with a language model, one after the other."""

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
from jaxformers.models.cache import CACHE, FIXED
from jaxformers.models.config import ModelConfig, field_names
from jaxformers.models.mixer import MIXERS
from jaxformers.models.model import Model
from jaxformers.models.variables import make_variables

# Least temperature that divides log probabilities. Below it the quotients would
# overflow; at it a draw always gives the likeliest token already.
COLDEST = 1e-20


class Choice(NamedTuple):
  """Rule that chooses a token from log probabilities.

  Attributes:
    temperature: divisor of log probabilities, float32. Temperatures below
      `COLDEST`, such as 0, give the likeliest token.
    top_k: number of likeliest tokens from which a token is drawn, int32.
  """

  temperature: jax.Array
  top_k: jax.Array

  def draw(self, log_p: jax.Array, key: jax.Array, most: int) -> jax.Array:
    """Returns one drawn id for each row, int32 [b].

    Args:
      log_p: log probabilities, float32 [b, vocab_size].
      key: random key.
      most: upper limit of `top_k`; 0 to draw from all tokens.
    """
    likeliest = log_p.argmax(-1)
    # Exclude tokens that are less likely than the k-th.
    if most:
      sorted_p = jax.lax.top_k(log_p, most)[0]
      least = jax.lax.dynamic_index_in_dim(sorted_p, self.top_k - 1, 1)
      log_p = jnp.where(log_p >= least, log_p, -jnp.inf)
    # Draw with probabilities proportional to p^(1 / temperature).
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
  """Returns the tokens that a model generates after prompts, int32 [b, steps].

  The model reads the prompt in one call, and every further token in a separate
  call. A recurrent mixer caches its states, whose size does not depend on the
  number of tokens; attention caches its keys and values. The numbers of
  prompts, tokens and steps are padded to powers of two, so that few programs
  are compiled.

  Args:
    model: language model from `models.build`, whose mixer has a cache.
    params: parameters of the model.
    prompt: ids, int [b, n]. Padding (id 0) may be before, between or after the
      tokens of a prompt.
    steps: number of tokens to draw for each prompt.
    key: random key; needed unless `temperature` is 0.
    temperature: divisor of the log probabilities; 0 for the likeliest token.
    top_k: number of likeliest tokens from which a token is drawn; 0 for all.

  Raises:
    UserError: for a model of another objective, a mixer without a cache, more
      tokens than the model can read, an empty prompt, or arguments out of
      range.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from jaxformers.models import build
    >>> sizes = {"vocab_size": 17, "max_len": 8, "objective": "language_model"}
    >>> model = build("s5", d_model=16, num_layers=1, **sizes)
    >>> prompt = jnp.ones((2, 3), jnp.int32)
    >>> params = model.init(jax.random.key(0), prompt, train=False)["params"]
    >>> generate(model, params, prompt, 4, temperature=0.0).shape
    (2, 4)
  """
  prompt = np.asarray(prompt, np.int32)
  _check(model, prompt, steps, key, temperature, top_k)
  choice = Choice(jnp.float32(temperature), jnp.int32(top_k))
  key = jax.random.key(0) if key is None else key
  # Pad all sizes to powers of two, so that few programs are compiled.
  count, width = prompt.shape
  wide = at_least(width, model.config.max_len if is_bounded(model) else 0)
  rows = np.minimum(np.arange(at_least(count)), count - 1)
  padded = np.pad(prompt[rows], ((0, 0), (0, wide - width)))
  most = at_least(int(top_k), model.config.vocab_size) if top_k else 0
  # Draw, and cut off the padding.
  sizes = (most, at_least(int(steps)))
  drawn = _generate(model, sizes, params, padded, key, choice, int(steps))
  return jax.device_put(np.asarray(drawn)[:count, :steps])


def at_least(number: int, limit: int = 0) -> int:
  """Returns the least power of two that is at least `number`, up to a limit.

  Args:
    number: integer of 1 or more.
    limit: greatest result, at least `number`; 0 for no limit.
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
      f"generate needs a language model, but the objective of this model is "
      f"{config.objective}: build it with objective='language_model'."
    )
  model.check_causal()
  # Check the prompt.
  if prompt.ndim != 2 or not (prompt != 0).any(-1).all():
    raise UserError(
      f"prompt has the shape {prompt.shape}: give ids [b, n] with at least one "
      "token other than padding (id 0) in every row."
    )
  size = config.vocab_size
  if (prompt < 0).any() or (prompt >= size).any():
    raise UserError(
      f"prompt has ids from {prompt.min()} to {prompt.max()}, but the ids of "
      f"the model are 0 to {size - 1}: encode the prompt with the model's "
      "vocabulary."
    )
  # Check the other arguments.
  _check_sampling(steps, key, temperature, top_k, size)
  # The last drawn token is not read again.
  total = prompt.shape[1] + steps - 1
  if is_bounded(model) and total > config.max_len:
    raise UserError(
      f"A prompt of {prompt.shape[1]} tokens and {steps} steps are more than "
      f"max_len={config.max_len}: shorten one of the two, or build the model "
      "with a greater max_len."
    )


def _check_sampling(
  steps: int, key: jax.Array | None, temperature: float, top_k: int, size: int
) -> None:
  """Raises UserError for arguments of `generate` out of their ranges.

  Args:
    steps, key, temperature, top_k: arguments of `generate`.
    size: size of the vocabulary.
  """
  # A temperature of NaN is refused: it fails both comparisons.
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


def is_bounded(model: Model) -> bool:
  """Returns True if the model cannot read more than max_len tokens."""
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
  """Returns drawn ids, int32 [b, most_steps], of which `steps` are drawn.

  Args:
    model, params, prompt, key: as for `generate`.
    sizes: `most` of `Choice.draw`; and most_steps, at least `steps`.
    choice: rule that chooses tokens.
    steps: number of tokens to draw; later columns are 0.
  """
  most, most_steps = sizes
  # Compute rotations and derived products once for all steps.
  variables = make_variables(model, params)

  def read(
    ids: jax.Array, cache: dict[str, Any]
  ) -> tuple[jax.Array, dict[str, Any]]:
    """Returns log p of the next token after each token, and the new cache."""
    log_p, changed = model.apply(
      {**variables, **cache}, ids, train=False, mutable=[CACHE, FIXED]
    )
    return log_p, dict(changed)

  # Read the prompt, and draw the first token from log p after its last token.
  # Padding may follow that token.
  log_p, cache = read(prompt, {})
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

  # Draw the other tokens, each from the cache and the token before.
  drawn, _ = jax.lax.fori_loop(1, steps, step, (drawn, cache))
  return drawn.T
