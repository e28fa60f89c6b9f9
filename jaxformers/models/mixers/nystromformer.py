"""Nystromformer: softmax attention through landmarks, which are token means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Interval, Length, Size
from jaxformers.models.attention import attention
from jaxformers.models.dropout import Dropout
from jaxformers.models.mixers.blocked import sum_values
from jaxformers.models.mixers.landmarks import iterative_inverse, segments
from jaxformers.models.mixers.scores import dot, hide, weigh
from jaxformers.models.reductions import wide
from jaxformers.models.variants import MODELS, Variant

MODELS.register("nystromformer")(Variant("nystromformer"))


@attention("nystromformer")
def nystromformer(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  mask: jax.Array,
  param: Callable[..., Any],
  max_len: Length,
  num_landmarks: Size = 128,
  inverse_steps: Annotated[int, Interval("[1, 100]")] = 6,
  inverse_init: str = "sample",
  conv_size: Annotated[int, Interval("[0, 1000]")] = 0,
) -> jax.Array:
  """Nystrom approximation of softmax attention, with means as landmarks.

  Computes softmax(q k'.T) pinv(softmax(q' k'.T)) softmax(q' k.T) v, where
  products are scaled by e^-1/2, and q' and k' are means of q and k over equal
  runs of the tokens, without padding. `conv_size` adds a depthwise convolution
  of v over the positions, with one kernel per head.

  Source: Xiong et al. 2021, https://arxiv.org/abs/2102.03902, equations 10 to
  14. Equals softmax attention with a landmark for every token and many steps.
  Differs from their code and Skyformer's, which count padding in the means and
  start the inverse from the greatest norm in the batch (as
  `inverse_init="batch"` does here, which makes a sample depend on the rest of
  its batch). Differs from their code with a landmark for every token, where
  their result is exactly softmax attention; here `inverse_steps` approximate
  the inverse. No causal form: a landmark is a mean over past and future.

  Shapes: q, k, v [b, h, n, e] -> [b, h, n, e]; mask [b, n], True at tokens.
  """
  if not 1 <= num_landmarks <= max_len:
    raise UserError(
      f"num_landmarks={num_landmarks} is not in 1 to max_len={max_len}: give "
      "a number in that range."
    )
  if conv_size < 0 or (conv_size and conv_size % 2 == 0):
    raise UserError(
      f"conv_size={conv_size}: give an odd number, or 0 for none."
    )
  scale = q.shape[-1] ** -0.25
  q, k = (wide(a) * scale for a in (q, k))
  # Average runs of tokens to get the landmarks, [b, h, m, e].
  means = segments(mask, min(num_landmarks, mask.shape[1]), q.dtype)
  q_means, k_means = (jnp.einsum("bmn,bhne->bhme", means, a) for a in (q, k))
  is_run = (means.sum(-1) > 0)[:, None]  # [b, 1, m], False at empty runs.
  # Invert the kernel between the landmarks.
  square = weigh(dot(q_means, k_means), is_run[:, :, None])
  square = jnp.where(is_run[..., None], square, 0)
  inverse = iterative_inverse(square, inverse_steps, inverse_init)
  # Sum the values into the landmarks, and from these into the queries.
  y = _attend(dot(q_means, k), mask[:, None, None], wide(v))
  y = _attend(dot(q, k_means), is_run[:, :, None], inverse @ y)
  y = y.astype(v.dtype)
  if not conv_size:
    return y
  # Add the convolution of the values.
  init = nn.initializers.lecun_normal()
  kernel = param("conv", init, (conv_size, q.shape[1])).astype(v.dtype)
  return y + _convolve(jnp.where(mask[:, None, :, None], v, 0), kernel)


def _attend(scores: jax.Array, seen: jax.Array, v: jax.Array) -> jax.Array:
  """Returns the mean of the values under the softmax of the visible scores."""
  return sum_values([hide(scores, seen)], [v], Dropout())


def _convolve(v: jax.Array, kernel: jax.Array) -> jax.Array:
  """Convolves v [b, h, n, e] over its positions with kernel [size, h]."""
  size, n = len(kernel), v.shape[2]
  padded = jnp.pad(v, ((0, 0), (0, 0), (size // 2, size // 2), (0, 0)))
  return jnp.asarray(
    sum(
      padded[:, :, i : i + n] * kernel[i][None, :, None, None]
      for i in range(size)
    )
  )
