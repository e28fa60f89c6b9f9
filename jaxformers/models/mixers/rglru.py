"""The RG-LRU of Griffin: a real recurrence with token-dependent factors."""

from __future__ import annotations

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.foundations.ranges import OptionalSize, Width
from jaxformers.models.activations import gelu_tanh
from jaxformers.models.cache import count_tokens, recall, remember
from jaxformers.models.kinds import EIGENVALUES
from jaxformers.models.mixer import MIXERS, check_heads
from jaxformers.models.mixers.convolution import (
  front_mask,
  move_back,
  to_front,
)
from jaxformers.models.mixers.recurrence import (
  block_diagonal,
  check_only_causal,
  decay,
  dense,
  short_convolution,
)
from jaxformers.models.reductions import wide
from jaxformers.models.segments import scan_options, starts, tokens
from jaxformers.models.variants import MODELS, Variant
from jaxformers.scan import linear_scan

MODELS.register("rglru")(
  Variant(
    "rglru",
    recurrence="gated",
    count_layers=lambda d, n, layers: layers * (8 * d * d + 18 * d) + 2 * d,
  )
)

CONV_WIDTH = 4  # Tokens that the convolution before the recurrence reads.
POWER = 8.0  # c in log a = -c r softplus(Lambda).
LARGEST_SLOPE = 1_000.0  # Upper bound of the derivative of sqrt(1 - a^2).


@MIXERS.register("rglru")
class RGLRU(nn.Module):
  """Griffin's recurrent block: W (GELU(V x) * RG-LRU(conv(U x))).

  h_t = a_t h_(t-1) + sqrt(1 - a_t^2) (i_t u_t), log a_t = -8 r_t softplus(L),
  with gates r_t and i_t that are sigmoids of block-diagonal maps of u_t. At the
  first token of a sample the factor sqrt(1 - a_t^2) is replaced by 1.

  Source: De et al. 2024, https://arxiv.org/abs/2402.19427, section 2.4. RG-LRU
  was designed for language models; others report an average of 62.5 on Long
  Range Arena.

  Attributes:
    width: number of channels of the recurrence; 0 for d.
    num_heads: number of blocks of the gates' maps; must divide the width.
    signed: True for factors 2 a_t - 1 from -1 to 1; see `decay`. The factor of
      the input stays sqrt(1 - a_t^2).
    causal: True, the only form.
    dtype: compute type; parameters and recurrence are float32.
  """

  kinds: ClassVar[dict[str, str]] = {"Lambda": EIGENVALUES}
  has_step: ClassVar[bool] = True  # Decoding continues from a cache.
  has_segments: ClassVar[bool] = True  # The mask may be numbers.

  width: OptionalSize = 0
  num_heads: Width = 2
  signed: bool = False
  causal: bool = True
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self, x: jax.Array, *, mask: jax.Array, carry: Any, train: bool
  ) -> tuple[jax.Array, Any]:
    del train
    check_only_causal("rglru", causal=self.causal)
    d = x.shape[-1]
    width = self.width or d
    check_heads(self.num_heads, width)
    # Move the tokens before the padding.
    is_first = self._is_first(mask)
    x = to_front(x.astype(self.dtype), mask)
    front = front_mask(mask)
    is_token = tokens(front)
    # Map to the gate and to the inputs of the recurrence.
    gate = gelu_tanh(dense(x, width, "gate", dtype=self.dtype))
    u = dense(x, width, "input", dtype=self.dtype)
    u = short_convolution(self, u, front, CONV_WIDTH)
    # Find the first token of each sample, which may be in an earlier call.
    start = is_token & (jnp.cumsum(is_token, 1) == 1) & is_first[:, None]
    begins = starts(front)
    start = start if begins is None else start | begins
    y = self._recur(u, front, start) * gate
    return move_back(dense(y, d, "output", dtype=self.dtype), mask), carry

  def _is_first(self, mask: jax.Array) -> jax.Array:
    """Returns True for samples without a token in earlier calls, bool [b]."""
    before = recall(self, "count")
    count_tokens(self, mask)
    return jnp.ones(len(mask), bool) if before is None else before == 0

  def _recur(
    self, u: jax.Array, mask: jax.Array, start: jax.Array
  ) -> jax.Array:
    """Returns the states h_t of the recurrence, [b, n, width].

    Args:
      u: inputs, [b, n, width].
      mask: bool [b, n], True at tokens; or numbers of packed rows.
      start: bool [b, n], True at the first token of a sample.
    """
    # Gates r_t and i_t.
    wider = wide(u)
    remain = jax.nn.sigmoid(
      block_diagonal(self, wider, self.num_heads, "remain")
    )
    enter = jax.nn.sigmoid(block_diagonal(self, wider, self.num_heads, "enter"))
    # log a_t = -8 r_t softplus(L)
    free = self.param("Lambda", _init_lambda, u.shape[-1:]).astype(wider.dtype)
    log_a = -POWER * remain * jax.nn.softplus(free)[None, None]
    # sqrt(1 - a_t^2), and 1 at first tokens.
    root = _bounded_root(-jnp.expm1(2 * log_a))
    root = jnp.where(start[..., None], 1, root)
    states, last = linear_scan(
      decay(log_a, signed=self.signed),
      root * enter * wider,
      initial=recall(self, "state"),
      **scan_options(mask),
    )
    remember(self, "state", last)
    return states.astype(u.dtype)


def _init_lambda(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Draws L with exp(-softplus(L)) uniform in the ring from 0.9 to 0.999."""
  square = jax.random.uniform(key, shape, minval=0.9**2, maxval=0.999**2)
  return jnp.log(jnp.expm1(-jnp.log(square) / 2))


@jax.custom_jvp
def _bounded_root(x: jax.Array) -> jax.Array:
  """Returns sqrt(x), x >= 0, whose derivative is at most `LARGEST_SLOPE`."""
  return jnp.sqrt(x)


@_bounded_root.defjvp
def _bounded_root_jvp(
  x: tuple[jax.Array], dx: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
  y = jnp.sqrt(x[0])
  return y, dx[0] / jnp.maximum(2 * y, 1 / LARGEST_SLOPE)
