"""Gated linear attention, RetNet and HGRN2: states that decay."""

from __future__ import annotations

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.foundations.ranges import Scale, Size
from jaxformers.models.kinds import EIGENVALUES
from jaxformers.models.mixer import MIXERS
from jaxformers.models.mixers.matrix_state import MatrixState
from jaxformers.models.reductions import wide
from jaxformers.models.rotary import number_tokens, rotate
from jaxformers.models.variants import MODELS, Variant

INITIAL_BOUND = -2.0  # Logit of the initial lower bounds of HGRN2.


def _count_gla(d: int, _: int, layers: int) -> int:
  key, value = 4 * max(d // 8, 1), 4 * max(d // 4, 1)
  mixer = 2 * d * key + 3 * d * value + value // 4 + 16 * (d + key) + key
  return layers * (mixer + 4 * d * d + 7 * d) + 2 * d


def _count_retnet(d: int, _: int, layers: int) -> int:
  key = 8 * max(d // 8, 1)
  return layers * (8 * d * key + key // 2 + 4 * d * d + 7 * d) + 2 * d


def _count_hgrn2(d: int, _: int, layers: int) -> int:
  key = 4 * max(d // 4, 1)
  mixer = 4 * d * key + 2 * key
  return layers * (mixer + 4 * d * d + 7 * d) + 2 * d


MODELS.register("gla")(
  Variant("gla", recurrence="gated", count_layers=_count_gla)
)
MODELS.register("retnet")(
  Variant("retnet", recurrence="linear", count_layers=_count_retnet)
)
MODELS.register("hgrn2")(
  Variant("hgrn2", recurrence="gated", count_layers=_count_hgrn2)
)


@MIXERS.register("gla")
class GLA(MatrixState):
  """Gated linear attention: a decay for each channel of a key.

  S_t = diag(a_t) S_(t-1) + k_t v_t^T and o_t = S_t^T q_t / sqrt(K), with
  a_t = sigmoid(W V x_t + c)^(1 / temperature). A key has half as many channels
  as a value. The outputs of a head are normalised, gated and mapped back.

  Source: Yang et al. 2023, https://arxiv.org/abs/2312.06635, section 4, and
  its equation 3.

  Attributes:
    gate_rank: rank of the map W V to the decays.
    temperature: root of the sigmoid; greater numbers forget more slowly.
  """

  gate_rank: Size = 16
  temperature: Scale = 16.0

  def respond(
    self, x: jax.Array, mask: jax.Array, carry: Any
  ) -> tuple[jax.Array, Any]:
    """Runs the recurrence; see `MatrixState.respond`."""
    d, h = x.shape[-1], self.num_heads
    size = max(d // (2 * h), 1)
    q = self.heads(self.project(x, h * size, "query")) * size**-0.5
    k = self.heads(self.project(x, h * size, "key"))
    v = self.heads(self.project(x, h * max(d // h, 1), "value"))
    # log a, [b, n, h, K].
    gates = self.project(x, self.gate_rank, "decay_in")
    gates = self.project(gates, h * size, "decay_out", use_bias=True)
    log_a = nn.log_sigmoid(wide(self.heads(gates))) / self.temperature
    y = self.normalize(self.scan(q, k, v, mask, log_decay=log_a))
    return self.gate(y, x), carry


@MIXERS.register("retnet")
class RetNet(MatrixState):
  """Retention: rotated queries and keys, and one constant decay per head.

  S_t = a S_(t-1) + k_t v_t^T and o_t = S_t^T q_t / sqrt(K), where head i from 0
  has a = 1 - 2^(-5 - i), and queries and keys are rotated by their positions. A
  value has twice as many channels as a key. The outputs of a head are
  normalised, gated and mapped back.

  Source: Sun et al. 2023, https://arxiv.org/abs/2307.08621, equations 5 to 8.
  Differs from it: the root mean square of a head is normalised, as in later
  code, not its mean and variance.
  """

  def respond(
    self, x: jax.Array, mask: jax.Array, carry: Any
  ) -> tuple[jax.Array, Any]:
    """Runs the recurrence; see `MatrixState.respond`."""
    h = self.num_heads
    size = 2 * max(x.shape[-1] // (2 * h), 1)  # Even, to rotate pairs.
    numbers = number_tokens(self, mask)

    def turn(name: str) -> jax.Array:
      heads = self.heads(self.project(x, h * size, name))
      return jnp.swapaxes(rotate(jnp.swapaxes(heads, 1, 2), numbers), 1, 2)

    q, k = turn("query") * size**-0.5, turn("key")
    v = self.heads(self.project(x, 2 * h * size, "value"))
    # log a, [1, n, h].
    log_a = jnp.log1p(-(2.0 ** -(5 + jnp.arange(h, dtype=wide(x).dtype))))
    log_a = jnp.broadcast_to(log_a[None, None], (1, x.shape[1], h))
    y = self.normalize(self.scan(q, k, v, mask, log_decay=log_a))
    return self.gate(y, x), carry


@MIXERS.register("hgrn2")
class HGRN2(MatrixState):
  """HGRN2: a forget gate for each channel of a key, which is 1 minus the gate.

  S_t = diag(f_t) S_(t-1) + (1 - f_t) v_t^T and o_t = S_t^T SiLU(q_t), with
  f_t = l + (1 - l) sigmoid(W x_t). A learned lower bound l of each channel lets
  a layer remember long. The outputs of all heads are normalised together.

  Source: Qin et al. 2024, https://arxiv.org/abs/2404.07904, section 3. Differs
  from it: the bounds of layers are independent and start at 0.12, where those
  of the paper are sums of a softmax over the layers, which grow with depth.
  """

  kinds: ClassVar[dict[str, str]] = {"lower_bound": EIGENVALUES}

  def respond(
    self, x: jax.Array, mask: jax.Array, carry: Any
  ) -> tuple[jax.Array, Any]:
    """Runs the recurrence; see `MatrixState.respond`."""
    width = self.num_heads * max(x.shape[-1] // self.num_heads, 1)
    q = self.heads(nn.silu(self.project(x, width, "query")))
    v = self.heads(self.project(x, width, "value"))
    # k = 1 - f = (1 - l) sigmoid(-W x)
    logit = wide(self.project(x, width, "forget"))
    init = nn.initializers.constant(INITIAL_BOUND)
    free = self.param("lower_bound", init, (width,)).astype(logit.dtype)
    bound = jax.nn.sigmoid(free)[None, None]
    k = self.heads((1 - bound) * jax.nn.sigmoid(-logit))
    log_f = jnp.log(bound + (1 - bound) * jax.nn.sigmoid(logit))
    y = self.scan(q, k, v, mask, log_decay=self.heads(log_f))
    return self.normalize(y.reshape(*y.shape[:2], -1)), carry
