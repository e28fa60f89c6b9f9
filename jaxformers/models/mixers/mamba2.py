"""Mamba-2: a selective state-space model with one decay per head."""

from __future__ import annotations

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.foundations.ranges import (
  Deviation,
  OptionalSize,
  Size,
  SmallCount,
)
from jaxformers.models.kinds import EIGENVALUES, STEP
from jaxformers.models.mixer import MIXERS, check_heads
from jaxformers.models.mixers.matrix_state import MatrixState
from jaxformers.models.mixers.recurrence import short_convolution
from jaxformers.models.reductions import wide
from jaxformers.models.variants import MODELS, Variant

CONV_WIDTH = 4  # Tokens that the convolution before the recurrence reads.
LARGEST_HEAD = 64  # Greatest width of a head by default.


def _count_layers(d: int, _: int, layers: int) -> int:
  inner, size = 2 * d, 128
  heads = inner // find_width(inner)
  mixer = d * (3 * inner + 2 * size + heads) + 5 * (inner + 2 * size)
  return layers * (mixer + 3 * heads + inner + 2 * d)


def find_width(inner: int) -> int:
  """Returns the greatest divisor of `inner` up to `LARGEST_HEAD`."""
  return max(e for e in range(1, LARGEST_HEAD + 1) if inner % e == 0)


MODELS.register("mamba2")(
  Variant(
    "mamba2", "one_branch", recurrence="gated", count_layers=_count_layers
  )
)


@MIXERS.register("mamba2")
class Mamba2(MatrixState):
  """Mamba-2: a state-space model with one decay per head, x [b, n, d].

  S_t = exp(-D_t A) S_(t-1) + B_t (D_t u_t)^T and y_t = S_t^T C_t + D u_t, where
  u, B and C are the convolved and activated maps of the tokens, and the steps
  D_t = softplus(W x_t + b) have one value per head. All heads share B and C.
  The outputs are multiplied by SiLU(z_t), normalised and mapped back.

  Source: Dao and Gu 2024, https://arxiv.org/abs/2405.21060, sections 6 and 7.1.

  Attributes:
    num_heads: number of heads; 0 for heads of `LARGEST_HEAD` channels or the
      next smaller divisor of the channels.
    state_size: number of rows of the state of a head.
    expansion: ratio of the channels of the recurrence to d.
  """

  kinds: ClassVar[dict[str, str]] = {"A_log": EIGENVALUES, "step_bias": STEP}

  num_heads: OptionalSize = 0
  init_std: Deviation = 0.0
  state_size: Size = 128
  expansion: SmallCount = 2

  def respond(
    self, x: jax.Array, mask: jax.Array, carry: Any
  ) -> tuple[jax.Array, Any]:
    """Runs the recurrence; see `MatrixState.respond`."""
    inner, size = self.expansion * x.shape[-1], self.state_size
    h = self.num_heads or inner // find_width(inner)
    check_heads(h, inner)
    # Map to the gate z, to u, B and C, and to the steps.
    z = self.project(x, inner, "gate")
    u = self.project(x, inner + 2 * size, "read")
    u = short_convolution(self, u, mask, CONV_WIDTH)
    u = wide(nn.silu(u))
    u, b, c = jnp.split(u, [inner, inner + size], -1)
    u = u.reshape(*u.shape[:2], h, -1)
    step, log_a = self.decay(self.project(x, h, "step"), smallest=1.0)
    # All heads read and write by the same C and B.
    c, b = c[:, :, None], b[:, :, None]
    y = self.scan(c, b, step[..., None] * u, mask, log_decay=log_a)
    skip = self.param("D", nn.initializers.ones, (h,)).astype(y.dtype)
    y = (y + skip[None, None, :, None] * u).reshape(*y.shape[:2], inner)
    return self.normalize(y * nn.silu(wide(z))), carry
