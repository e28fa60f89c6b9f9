"""Skyformer: kernelized attention through sampled landmarks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Interval, Length, Size, Weight
from jaxformers.models.attention import attention
from jaxformers.models.mixers.kernelized import gaussian
from jaxformers.models.mixers.landmarks import (
  iterative_inverse,
  ranks,
  tokens_first,
)
from jaxformers.models.reductions import wide
from jaxformers.models.variants import MODELS, Variant

MODELS.register("skyformer")(Variant("skyformer"))


@attention("skyformer", redraw=True)
def skyformer(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  mask: jax.Array,
  draw: Callable[..., jax.Array],
  max_len: Length,
  num_landmarks: Size = 128,
  gamma: Weight = 0.1,
  inverse_steps: Annotated[int, Interval("[1, 100]")] = 6,
  inverse_init: str = "sample",
) -> jax.Array:
  """Nystrom approximation of `kernelized` on the stacked matrix [q; k].

  Computes kappa([q; k], s) (kappa(s, s) + gamma)^-1 kappa(s, [q; k]) with
  landmarks s, drawn from the tokens with replacement: half are queries and half
  are keys. The iterative inverse is applied to D^-1/2 (.) D^-1/2, where D are
  the row sums.

  Source: Chen et al. 2021, https://arxiv.org/abs/2111.00035, equations 5 to 8
  and lemma 3. Equals `kernelized` when all tokens are landmarks. Differs from
  their code: the scale is e^-1/4, not 32^-1/4 for any e; padding is never a
  landmark, even between tokens; evaluation always draws the same landmarks; the
  inverse starts from the norms of each matrix, not from the greatest norm of
  the batch (`inverse_init="batch"` does, which makes a sample depend on the
  rest of its batch). No causal form: landmarks see all tokens.

  Shapes: q, k, v [b, h, n, e] -> [b, h, n, e]; mask [b, n], True at tokens.
  `draw` returns "landmarks", [num_landmarks] in [0, 1): the landmarks as
  fractions of the number of tokens.
  """
  _check_options(num_landmarks, gamma, max_len)
  # Draw the positions of the landmarks.
  shape = (num_landmarks,)
  place = draw("landmarks", lambda key: jax.random.uniform(key, shape))
  rank = ranks(place[None], mask.sum(1, keepdims=True))
  index = jnp.take_along_axis(tokens_first(mask), rank, 1)[:, None, :, None]
  scale = q.shape[-1] ** -0.25
  q, k = (wide(a) * scale for a in (q, k))
  # Take half of the landmarks from the queries, and half from the keys.
  half = num_landmarks // 2
  halves = [
    jnp.take_along_axis(a, i, 2)
    for a, i in ((q, index[:, :, :half]), (k, index[:, :, half:]))
  ]
  s = jnp.concatenate(halves, 2)
  # Invert the kernel of the landmarks, scaled to row sums near 1.
  eye = jnp.eye(num_landmarks, dtype=s.dtype)[None, None]
  square = gaussian(s, s) + gamma * eye
  # D^-1/2, where D are the row sums, [b, h, m].
  d = jax.lax.rsqrt(square.sum(-1))
  inverse = iterative_inverse(
    d[..., None] * square * d[..., None, :], inverse_steps, inverse_init
  )
  # Sum the values into the landmarks, and from these into the queries.
  weights = jnp.where(mask[:, None, :, None], gaussian(k, s), 0)
  y = jnp.einsum("bhnm,bhne->bhme", weights, wide(v))
  y = d[..., None] * (inverse @ (d[..., None] * y))
  return (gaussian(q, s) @ y).astype(v.dtype)


def _check_options(num_landmarks: int, gamma: float, max_len: int) -> None:
  """Raises UserError for an invalid number of landmarks or a negative gamma."""
  if not 2 <= num_landmarks <= 2 * max_len or num_landmarks % 2:
    raise UserError(
      f"num_landmarks={num_landmarks}: half are queries and half keys; give "
      f"an even number of 2 to {2 * max_len}, twice max_len."
    )
  if gamma < 0:
    raise UserError(f"gamma={gamma} is negative: give 0 or a small number.")
