"""The mLSTM of xLSTM: a matrix memory with exponential input gates."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Deviation, Size, SmallCount
from jaxformers.matrix_states import matrix_scan
from jaxformers.models.cache import recall, remember
from jaxformers.models.mixer import MIXERS, check_heads
from jaxformers.models.mixers.matrix_state import EPSILON, MatrixState
from jaxformers.models.mixers.recurrence import (
  block_diagonal,
  short_convolution,
)
from jaxformers.models.parallel import product
from jaxformers.models.reductions import wide
from jaxformers.models.segments import scan_options, tokens
from jaxformers.models.variants import MODELS, Variant

CONV_WIDTH = 4  # Tokens that the convolution before the recurrence reads.
SMALLEST_DIVISOR = 1e-6  # Added to the divisor of the outputs.


def _count_layers(d: int, _: int, layers: int) -> int:
  inner = 2 * d
  mixer = 3 * d * inner + 5 * inner + 12 * inner + 8 * (3 * inner + 1)
  return layers * (mixer + 2 * inner + 2 * d)


MODELS.register("mlstm")(
  Variant("mlstm", "one_branch", recurrence="gated", count_layers=_count_layers)
)


@MIXERS.register("mlstm")
class MLSTM(MatrixState):
  """mLSTM: S_t = f_t S_(t-1) + i_t k_t v_t^T, read relative to a normaliser.

  n_t = f_t n_(t-1) + i_t k_t and o_t = S_t^T q_t / max(|n_t . q_t|, 1), with a
  sigmoid as forget gate f and an exponential as input gate i. Both gates are
  divided by exp(m_t), where m_t is their running maximum, so that nothing
  overflows. Queries and keys read a convolution of the tokens.

  Source: Beck et al. 2024, https://arxiv.org/abs/2405.04517, equations 19 to 27
  and figure 11; stabilised by their equation 15.

  Attributes:
    expansion: ratio of the channels of the recurrence to d.
    block_size: width of the blocks of the maps to queries, keys and values.
  """

  init_std: Deviation = 0.0
  expansion: SmallCount = 2
  block_size: Size = 4

  def respond(
    self, x: jax.Array, mask: jax.Array, carry: Any
  ) -> tuple[jax.Array, Any]:
    """Runs the recurrence; see `MatrixState.respond`."""
    inner = self.expansion * x.shape[-1]
    check_heads(self.num_heads, inner)
    if inner % self.block_size:
      raise UserError(
        f"block_size={self.block_size} does not divide the {inner} channels of "
        "mlstm (expansion times d_model): choose a divisor."
      )
    # Map to the gate z and to u, and convolve u.
    z = self.project(x, inner, "gate")
    u = self.project(x, inner, "read")
    c = nn.silu(short_convolution(self, u, mask, CONV_WIDTH))
    # Maps within blocks of channels.
    blocks = inner // self.block_size
    q, k, v = (
      block_diagonal(self, wide(a), blocks, name, use_bias=False)
      for a, name in ((c, "query"), (c, "key"), (u, "value"))
    )
    y = self._read(q, k, v, mask)
    # Normalise each head, and apply the skip connection and the gate.
    norm = nn.LayerNorm(
      epsilon=EPSILON, use_bias=False, use_scale=False, name="norm"
    )
    scale = self.param("scale", nn.initializers.ones, (inner,)).astype(y.dtype)
    skip = self.param("skip", nn.initializers.ones, (inner,)).astype(y.dtype)
    y = norm(y).reshape(*y.shape[:2], inner) * scale[None, None]
    return (y + skip[None, None] * wide(c)) * nn.silu(wide(z)), carry

  def _read(
    self, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array
  ) -> jax.Array:
    """Returns the normalised outputs of the recurrence, [b, n, h, V]."""
    # Logs of both gates, [b, n, h].
    h, joined = self.num_heads, jnp.concatenate([q, k, v], -1)
    kernel = self.param(
      "gates", nn.initializers.zeros, (joined.shape[-1], 2 * h)
    )
    bias = self.param("gates_bias", _init_gates, (2 * h,)).astype(q.dtype)
    gates = product(joined, kernel.astype(q.dtype)) + bias[None, None]
    is_token = tokens(mask)
    log_i = jnp.where(is_token[..., None], gates[..., :h], -jnp.inf)
    log_f = jnp.where(is_token[..., None], nn.log_sigmoid(gates[..., h:]), 0)
    q, k, v = (self.heads(a) for a in (q, k, v))
    q = q * q.shape[-1] ** -0.5
    # The normaliser is one more channel of the values.
    v = jnp.concatenate([v, jnp.ones_like(v[..., :1])], -1)
    top = recall(self, "top")
    if top is None:
      top = jnp.zeros_like(log_i[:, 0])

    def run(*, reverse: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
      flags = scan_options(mask, reverse=reverse)
      tops, before = _stabilise(
        log_f, log_i, top, flags["resets"], reverse=reverse
      )
      y, last = matrix_scan(
        q,
        k * jnp.exp(log_i - tops)[..., None],
        v,
        log_decay=log_f + before - tops,
        initial=recall(self, "state"),
        reverse=reverse,
        **flags,
      )
      divisor = jnp.maximum(jnp.abs(y[..., -1:]), jnp.exp(-tops)[..., None])
      return y[..., :-1] / (divisor + SMALLEST_DIVISOR), last, tops[:, -1]

    y, last, last_top = run(reverse=False)
    remember(self, "state", last)
    remember(self, "top", last_top)
    return y if self.causal else y + run(reverse=True)[0]


def _stabilise(
  log_f: jax.Array,
  log_i: jax.Array,
  top: jax.Array,
  resets: jax.Array | None,
  *,
  reverse: bool,
) -> tuple[jax.Array, jax.Array]:
  """Returns m_t = max(log f_t + m_(t-1), log i_t), and m_(t-1), [b, n, h].

  The outputs do not depend on m, which therefore needs no gradient.

  Args:
    log_f, log_i: logs of the gates, [b, n, h].
    top: m before the first token, [b, h].
    resets: bool [b, n], True where m_(t-1) is 0; None for nowhere.
    reverse: True to begin with the last token.
  """

  def join(first: Any, second: Any) -> Any:
    # Maps m -> max(a + m, b), one after another.
    (a, b), (c, d) = first, second
    return a + c, jnp.maximum(c + b, d)

  pair = jax.lax.stop_gradient((log_f, log_i))
  if resets is not None:
    # From m = 0: the map is constant.
    is_first = resets[..., None]
    pair = (
      jnp.where(is_first, -jnp.inf, pair[0]),
      jnp.where(is_first, jnp.maximum(*pair), pair[1]),
    )
  total, most = jax.lax.associative_scan(join, pair, reverse=reverse, axis=1)
  top = jax.lax.stop_gradient(top)[:, None]
  tops = jnp.maximum(total + top, most)
  if reverse:
    before = jnp.concatenate([tops[:, 1:], top], 1)
  else:
    before = jnp.concatenate([top, tops[:, :-1]], 1)
  if resets is not None:
    before = jnp.where(resets[..., None], 0, before)
  return tops, before


def _init_gates(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Draws biases near 0 of input gates, and from 3 to 6 of forget gates."""
  h = shape[0] // 2
  enter = 0.1 * jax.random.normal(key, (h,))
  return jnp.concatenate([enter, jnp.linspace(3.0, 6.0, h)])
