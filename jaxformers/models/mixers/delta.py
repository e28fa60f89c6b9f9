"""DeltaNet, Gated DeltaNet and DeltaProduct: the delta rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.foundations.ranges import OptionalSize, SmallCount
from jaxformers.models.kinds import EIGENVALUES, STEP
from jaxformers.models.mixer import MIXERS
from jaxformers.models.mixers.matrix_state import MatrixState
from jaxformers.models.mixers.recurrence import short_convolution
from jaxformers.models.reductions import wide
from jaxformers.models.variants import MODELS, Variant

NORM_EPSILON = 1e-6  # Added to the squared norms of queries and keys.


def _count_layers(
  writes: int, expansion: int, *, is_gated: bool
) -> Callable[[int, int, int], int]:
  """Returns the function `count_layers` of a model; see `Variant`."""

  def count(d: int, _: int, layers: int) -> int:
    key = 4 * max(d // 4, 1)
    value = expansion * key
    read = key + writes * (key + value)
    mixer = read * (d + 4) + 4 * writes * d + value // 4 + value * d
    if is_gated:
      mixer += 4 * d + 8 + value * d
    return layers * (mixer + 4 * d * d + 7 * d) + 2 * d

  return count


MODELS.register("deltanet")(
  Variant(
    "delta",
    fixed={"num_householder": 1, "forget": False},
    recurrence="gated",
    count_layers=_count_layers(1, 1, is_gated=False),
  )
)
MODELS.register("gated_deltanet")(
  Variant(
    "delta",
    fixed={"num_householder": 1, "forget": True},
    defaults={"output_gate": True, "expansion": 2},
    source="Yang et al. 2025",
    recurrence="gated",
    count_layers=_count_layers(1, 2, is_gated=True),
  )
)
MODELS.register("deltaproduct")(
  Variant(
    "delta",
    defaults={
      "num_householder": 2,
      "forget": True,
      "signed": True,
      "output_gate": True,
      "expansion": 2,
    },
    source="Siems et al. 2025",
    recurrence="gated",
    count_layers=_count_layers(2, 2, is_gated=True),
  )
)


@MIXERS.register("delta")
class Delta(MatrixState):
  """Linear attention that erases the value of a key before it writes.

  S <- a_t S, then (I - b k k^T) S + b k v^T for each of `num_householder` keys
  of the token, and o_t = S^T q_t / sqrt(K). Queries and keys have norm 1, but
  for a small constant if keys do not reflect, so that the factor of the state
  is a product of reflections, each with one eigenvalue 1 - b. The outputs of a
  head are normalised, gated and mapped back.

  Source: Yang et al. 2024, https://arxiv.org/abs/2406.06484, sections 2 and 3,
  for one key without decay; Yang et al. 2025, https://arxiv.org/abs/2412.06464,
  section 3, with decay; Siems et al. 2025, https://arxiv.org/abs/2502.10297,
  section 3, for several keys; Grazzi et al. 2025,
  https://arxiv.org/abs/2411.12537, for negative eigenvalues. Differs from their
  code: the head width is d / h by default, the convolution starts uniformly, as
  a layer of PyTorch, and the block is `pre_norm`.

  Attributes:
    num_householder: number of keys and values that a token writes.
    signed: True for strengths b from 0 to 2, so that the eigenvalues are from
      -1 to 1; False for strengths from 0 to 1.
    reflect: True to fix the strengths at b = 2 / |k|^2, for both values of
      `signed`. The factors of the state are then orthogonal if `forget` is
      False.
    forget: True for a decay a_t of the state, which depends on the token.
    head_dim: width K of a head; 0 for d / num_heads, rounded down.
    expansion: ratio of the width of values to the width of keys.
    conv_width: number of tokens that the convolution before the recurrence
      reads; 0 for no convolution.
    output_gate: True to multiply the normalised outputs by SiLU(W x).
  """

  kinds: ClassVar[dict[str, str]] = {"A_log": EIGENVALUES, "step_bias": STEP}

  num_householder: SmallCount = 1
  signed: bool = False
  reflect: bool = False
  forget: bool = False
  head_dim: OptionalSize = 0
  expansion: SmallCount = 1
  conv_width: OptionalSize = 4
  output_gate: bool = False

  def respond(
    self, x: jax.Array, mask: jax.Array, carry: Any
  ) -> tuple[jax.Array, Any]:
    """Runs the delta rule; see `MatrixState.respond`."""
    h, writes = self.num_heads, self.num_householder
    size = self.head_dim or max(x.shape[-1] // h, 1)
    # Map to queries, keys and values, and convolve them.
    key, value = h * size, h * size * self.expansion
    read = self.project(x, key + writes * (key + value), "read")
    if self.conv_width:
      read = short_convolution(
        self, read, mask, self.conv_width, use_bias=False
      )
    read = wide(nn.silu(read))
    q = _unit(self.heads(read[..., :key])) * size**-0.5
    k, v = jnp.split(read[..., key:], [writes * key], -1)
    k, v = (a.reshape(*a.shape[:2], writes, h, -1) for a in (k, v))
    k = _direction(k) if self.reflect else _unit(k)
    log_decay = None
    if self.forget:
      _, log_decay = self.decay(self.project(x, h, "decay"), smallest=0.0)
    y = self.scan(
      q,
      k,
      v,
      mask,
      beta=self._strengths(x, k),
      log_decay=log_decay,
    )
    # Normalise each head, and apply the gate.
    y = self.normalize(y)
    if self.output_gate:
      return self.gate(y, x), carry
    return y.reshape(*y.shape[:2], -1), carry

  def _strengths(self, x: jax.Array, k: jax.Array) -> jax.Array:
    """Returns the strengths b of the writes with keys k, [b, n, r, h]."""
    if self.reflect:
      # The norm of a key is 1 up to rounding, or 0.
      square = jnp.square(k).sum(-1)
      return jnp.where(square > 0, 2 / jnp.maximum(square, 0.5), 0)
    shape = k.shape[:-1]
    strengths = self.project(x, shape[2] * shape[3], "strength")
    strengths = jax.nn.sigmoid(wide(strengths)).reshape(shape)
    return 2 * strengths if self.signed else strengths


def _direction(x: jax.Array) -> jax.Array:
  """Returns x divided by its norm over the last axis, or 0 for 0.

  The norm is exact for short vectors, too; see `_unit`.
  """
  largest = jnp.abs(x).max(-1, keepdims=True)
  is_zero = largest == 0
  x = x / jnp.where(is_zero, 1, jax.lax.stop_gradient(largest))
  square = jnp.square(x).sum(-1, keepdims=True)
  return x * jax.lax.rsqrt(jnp.where(is_zero, 1, square))


def _unit(x: jax.Array) -> jax.Array:
  """Returns x divided by its norm over the last axis."""
  square = jnp.square(x).sum(-1, keepdims=True)
  return x * jax.lax.rsqrt(square + NORM_EPSILON)
