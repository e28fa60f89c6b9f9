"""Linearized attention: a polynomial, without softmax and normalisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxformers.foundations.ranges import Factor
from jaxformers.models.attention import attention
from jaxformers.models.mixers.linear import sums
from jaxformers.models.reductions import wide
from jaxformers.models.variants import MODELS, Variant

MODELS.register("linearized")(Variant("linearized", "attention_only"))


@attention("linearized", use_bias=False)
def linearized(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  mask: jax.Array,
  causal: bool = False,
  scale: Factor = 1.0,
) -> jax.Array:
  """Attention without a softmax: `scale` sum_j (q_i . k_j) v_j.

  A network of L layers in the block `attention_only` is a polynomial of degree
  3^L. It overflows float32 from about L = 4 on, unless its weights or `scale`
  are small.

  Source: Levine et al. 2020, https://arxiv.org/abs/2006.12467, equation 3, with
  `scale` 1 and no biases.

  Shapes: q, k, v [b, h, n, e] -> [b, h, n, e]; mask [b, n], True at tokens.
  """
  # Sum in float32: the terms grow as a polynomial of the input.
  dtype = v.dtype
  q, k, v = (wide(a) for a in (q, k, v))
  # Set padded keys to 0, which gives them the weight 0.
  k = jnp.where(mask[:, None, :, None], k, 0)
  return (scale * sums(q, k, v, causal=causal)).astype(dtype)
