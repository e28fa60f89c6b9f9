"""Base class of mixers whose state is a matrix for each head."""

from __future__ import annotations

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.foundations.ranges import Deviation, Width
from jaxformers.matrix_states import matrix_scan
from jaxformers.models.cache import check_causal, recall, remember
from jaxformers.models.mixers.convolution import (
  front_mask,
  move_back,
  to_front,
)
from jaxformers.models.mixers.recurrence import dense
from jaxformers.models.mixers.state_space import softplus_steps
from jaxformers.models.reductions import wide
from jaxformers.models.segments import scan_options

EPSILON = 1e-5  # Added to the mean square of the outputs of a head.
STEPS = (1e-3, 0.1)  # Range of the initial steps of a decay.
LARGEST_FACTOR = 16.0  # Upper bound of the initial factors A of a decay.


class MatrixState(nn.Module):
  """Base class of mixers around `matrix_scan`: x [b, n, d] -> [b, n, d].

  A subclass overrides `respond`. All subclasses have the fields below.

  Attributes:
    num_heads: number of heads.
    init_std: initial standard deviation of the maps; 0 for LeCun's initializer.
    causal: True to read only the present and earlier tokens; False to add the
      outputs of the reversed recurrence, with the same queries, keys and
      values.
    dtype: compute type; parameters and states are float32.
  """

  has_step: ClassVar[bool] = True  # Decoding continues from a cache.
  has_segments: ClassVar[bool] = True  # The mask may be numbers.

  num_heads: Width = 4
  init_std: Deviation = 0.02
  causal: bool = False
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self, x: jax.Array, *, mask: jax.Array, carry: Any, train: bool
  ) -> tuple[jax.Array, Any]:
    del train
    check_causal(self, causal=self.causal)
    # Move the tokens before the padding.
    front = to_front(x.astype(self.dtype), mask)
    y, carry = self.respond(front, front_mask(mask), carry)
    y = self.project(y.astype(self.dtype), x.shape[-1], "output")
    return move_back(y, mask), carry

  def respond(
    self, x: jax.Array, mask: jax.Array, carry: Any
  ) -> tuple[jax.Array, Any]:
    """Returns the outputs before the last map, [b, n, width], and the carry.

    Args:
      x: tokens [b, n, d], before the padding, which is 0.
      mask: bool [b, n], True at tokens; or numbers of packed rows.
      carry: carry of the previous layer.
    """
    raise NotImplementedError

  def project(
    self, x: jax.Array, width: int, name: str, *, use_bias: bool = False
  ) -> jax.Array:
    """Maps x [b, n, d] linearly to [b, n, width]."""
    return dense(
      x,
      width,
      name,
      init_std=self.init_std,
      use_bias=use_bias,
      dtype=self.dtype,
    )

  def heads(self, x: jax.Array) -> jax.Array:
    """Splits channels [b, n, width] into heads, [b, n, h, width / h]."""
    return x.reshape(*x.shape[:2], self.num_heads, -1)

  def decay(
    self, x: jax.Array, *, smallest: float
  ) -> tuple[jax.Array, jax.Array]:
    """Returns steps D = softplus(x + bias) and log a = -D A, float32 [b, n, h].

    Args:
      x: one channel for each head, [b, n, h].
      smallest: lower bound of the initial factors A, which are uniform up to
        `LARGEST_FACTOR`.
    """

    def init(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
      factor = jax.random.uniform(
        key, shape, minval=smallest, maxval=LARGEST_FACTOR
      )
      return jnp.log(jnp.maximum(factor, jnp.finfo(factor.dtype).tiny))

    x, shape = wide(x), x.shape[-1:]
    bias = self.param("step_bias", softplus_steps(*STEPS), shape)
    step = jax.nn.softplus(x + bias.astype(x.dtype)[None, None])
    factor = jnp.exp(self.param("A_log", init, shape)).astype(x.dtype)
    return step, -step * factor[None, None]

  def scan(
    self,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    **options: Any,
  ) -> jax.Array:
    """Returns the outputs of `matrix_scan`, [b, n, h, V], as float32.

    A causal mixer continues from the state in its cache. Otherwise the outputs
    of both directions are added.

    Args:
      q, k, v: queries, keys and values; see `matrix_scan`.
      mask: mask or numbers of the tokens, at the front, [b, n].
      **options: other options of `matrix_scan`.
    """
    v, initial = wide(v), recall(self, "state")
    y, last = matrix_scan(
      q, k, v, initial=initial, **scan_options(mask), **options
    )
    remember(self, "state", last)
    if not self.causal:
      options |= scan_options(mask, reverse=True)
      y = y + matrix_scan(q, k, v, reverse=True, **options)[0]
    return y

  def normalize(self, y: jax.Array) -> jax.Array:
    """Divides y by the root mean square of its last axis, and scales it."""
    return nn.RMSNorm(epsilon=EPSILON, name="norm")(y)

  def gate(self, y: jax.Array, x: jax.Array) -> jax.Array:
    """Multiplies y [b, n, ...] by SiLU(W x), and joins its heads."""
    y = y.reshape(*y.shape[:2], -1)
    return y * wide(nn.silu(self.project(x, y.shape[-1], "gate")))
