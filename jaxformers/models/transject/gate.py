"""The gate: how much of each expert a sample takes."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxformers.models.reductions import masked_max
from jaxformers.models.transject.sigma import HIGHEST

GATINGS = ("paper", "certified")
# Outputs of all experts: e times [b, n, d], or one [e, b, n, d] where experts
# lie on several devices.
Outputs = list[jax.Array] | jax.Array


def _stacked(
  function: Callable[[jax.Array], jax.Array], f: Outputs
) -> jax.Array:
  """Applies a function to every expert's output -> experts on axis 1."""
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
  """Returns the experts' weights, convex in each sample -> float32 [b, e].

  softmax over e of w . max over the tokens of (x + a f_e). The paper leaves
  the gate open; this is its authors', with padding left out and without the
  bias, which a softmax does not see.

  Args:
    x: [b, n, d].
    f: `expert_outputs`, e times [b, n, d].
    a: scalar, the residual scale.
    w: float32 [d].
    mask: [b, n], True at tokens.
  """
  # Pool x + a f_e of every expert over the tokens: [b, e, d].
  a = a.astype(x.dtype)
  pooled = _stacked(lambda output: masked_max(x + a * output, mask), f)
  pooled = pooled.astype(jnp.float32)
  return jax.nn.softmax(jnp.matmul(pooled, w, precision=HIGHEST), axis=-1)


def certified_gate(x: jax.Array, w: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns experts' weights that keep sequences apart -> float32 [b, e].

  softmax over e of w_e . h, with h the mean token divided by the root mean
  square norm of the tokens: |h| <= 1, and h moves by at most
  2 |X - Y| / (|X| + |Y|) (Frobenius norms). What an expert puts out grows as
  the norm of its input at most, so the two meet in a constant: see
  `certified_constant`. The proof is in docs/theory.md.

  Args:
    x: [b, n, d], the layer's input.
    w: float32 [e, d].
    mask: [b, n], True at tokens.
  """
  # Padding adds nothing to the sums over tokens.
  x = jnp.where(mask[..., None], x.astype(jnp.float32), 0)
  count = jnp.maximum(mask.sum(1), 1).astype(jnp.float32)
  # Divide the mean token by the root mean square norm: [b, d].
  square = jnp.square(x).sum((1, 2)) / count
  h = x.sum(1) / (count * jnp.sqrt(square + 1e-12))[:, None]
  return jax.nn.softmax(jnp.matmul(h, w.T, precision=HIGHEST), axis=-1)


def certified_constant(w: jax.Array) -> jax.Array:
  """Returns a Lipschitz constant of a mixture under `certified_gate`.

  1 + sqrt(e) |w - mean_e w| / 2 with the Frobenius norm (a softmax does not see
  the mean): for any two sequences under one mask and one Sigma,
  sum_e lambda_e ELU(x U_e Sigma V_e) differs by at most this times what they
  differ by. The layer divides by it.

  Args:
    w: float32 [e, d].
  """
  # A softmax does not change when all its logits move alike.
  w = w - w.mean(0, keepdims=True)
  return 1 + jnp.sqrt(len(w) * (jnp.square(w).sum() + 1e-12)) / 2
