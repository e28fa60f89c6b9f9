"""The gate: the weight of each expert for a sample."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxformers.models.reductions import masked_max_of_sum
from jaxformers.models.transject.sigma import HIGHEST

GATINGS = ("paper", "certified")
# Outputs of all experts: a list of e arrays [b, n, d], or one array
# [e, b, n, d] if the experts are spread over several devices.
Outputs = list[jax.Array] | jax.Array


def _stacked(
  function: Callable[[jax.Array], jax.Array], f: Outputs
) -> jax.Array:
  """Applies a function to every expert's output; axis 1 is the expert."""
  if isinstance(f, list):
    return jnp.stack([function(output) for output in f], 1)
  return jax.vmap(function, out_axes=1)(f)


def gate(
  x: jax.Array,
  f: Outputs,
  a: jax.Array,
  w: jax.Array,
  mask: jax.Array,
) -> jax.Array:
  """Returns the convex weights of the experts for each sample, float32 [b, e].

  lambda_e = softmax_e(w . max over tokens of (x + a f_e)). The paper does not
  specify the gate. This gate is from the authors' code, with padding masked and
  without the bias, which cancels in the softmax.

  Args:
    x: input of the layer, [b, n, d].
    f: outputs of the experts, from `expert_outputs`.
    a: residual scale, a scalar.
    w: weights of the gate, float32 [d].
    mask: bool [b, n], True at tokens.
  """
  # Pool x + a f_e of every expert over the tokens: [b, e, d].
  a = a.astype(x.dtype)
  pooled = _stacked(lambda output: masked_max_of_sum(x, a, output, mask), f)
  pooled = pooled.astype(jnp.float32)
  return jax.nn.softmax(jnp.matmul(pooled, w, precision=HIGHEST), axis=-1)


def certified_gate(x: jax.Array, w: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns weights of the experts with a Lipschitz bound, float32 [b, e].

  lambda_e = softmax_e(w_e . h), where h is the mean token divided by the root
  mean square norm of the tokens. |h| <= 1, and h changes by at most
  2 |X - Y| / (|X| + |Y|) in Frobenius norms. The output of an expert is at most
  as large as its input, so the product with the change of the weights is
  bounded by a constant times |X - Y|: see `certified_constant`. The proof is in
  docs/theory.md.

  Args:
    x: input of the layer, [b, n, d].
    w: weights of the gate, float32 [e, d].
    mask: bool [b, n], True at tokens.
  """
  # Set padding to 0, so that it adds nothing to the sums over tokens.
  x = jnp.where(mask[..., None], x.astype(jnp.float32), 0)
  count = jnp.maximum(mask.sum(1), 1).astype(jnp.float32)
  # Divide the mean token by the root mean square norm: [b, d].
  square = jnp.square(x).sum((1, 2)) / count
  h = x.sum(1) / (count * jnp.sqrt(square + 1e-12))[:, None]
  return jax.nn.softmax(jnp.matmul(h, w.T, precision=HIGHEST), axis=-1)


def certified_constant(w: jax.Array) -> jax.Array:
  """Returns a Lipschitz constant of a mixture under `certified_gate`.

  The constant is 1 + sqrt(e) |w - mean_e w| / 2, in the Frobenius norm. It
  holds for sum_e lambda_e ELU(x U_e Sigma V_e) and any two sequences with equal
  masks and equal Sigma. The layer divides by the constant.

  Args:
    w: weights of the gate, float32 [e, d].
  """
  # Subtract the mean over the experts, which cancels in the softmax.
  w = w - w.mean(0, keepdims=True)
  return 1 + jnp.sqrt(len(w) * (jnp.square(w).sum() + 1e-12)) / 2
