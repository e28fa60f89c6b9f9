"""Mamba's selective state-space model."""

from __future__ import annotations

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.foundations import platforms
from jaxformers.foundations.ranges import OptionalSize, Scale, Size, SmallCount
from jaxformers.models import step_sizes
from jaxformers.models.cache import recall, remember
from jaxformers.models.kinds import EIGENVALUES
from jaxformers.models.mixer import MIXERS
from jaxformers.models.mixers.blocked import split
from jaxformers.models.mixers.convolution import (
  front_mask,
  move_back,
  to_front,
)
from jaxformers.models.mixers.recurrence import (
  check_only_causal,
  decay,
  dense,
  short_convolution,
)
from jaxformers.models.mixers.state_space import softplus_steps
from jaxformers.models.parallel import product
from jaxformers.models.reductions import wide
from jaxformers.models.segments import scan_options
from jaxformers.models.variants import MODELS, Variant
from jaxformers.scan import linear_scan

MODELS.register("mamba")(
  Variant(
    "mamba",
    "one_branch",
    recurrence="gated",
    count_layers=lambda d, n, layers: (
      layers * d * (6 * d + 112 - 4 * (-d // 16))
    ),
  )
)

CONV_WIDTH = 4  # Tokens that the convolution before the recurrence reads.
PART = 128  # Tokens whose states are in memory at a time.


@MIXERS.register("mamba")
class Mamba(nn.Module):
  """Mamba: a state-space model per channel; its step, B and C depend on tokens.

  h_t = exp(D_t A) h_(t-1) + D_t B_t u_t, y_t = (C_t h_t + D u_t) SiLU(z_t), for
  u = SiLU(conv(U x)) and D_t = softplus(W V u_t + b). The states of only `PART`
  tokens are in memory at a time; the backward pass recomputes them.

  Source: Gu and Dao 2023, https://arxiv.org/abs/2312.00752, algorithm 2 and
  section 3.4. Mamba was designed for language models. It is here as a
  reference; others report an average of 66.6 on Long Range Arena.

  Attributes:
    state_size: number N of states per channel.
    expansion: ratio of the channels of the recurrence to d.
    step_rank: rank of the map to steps; 0 for d / 16, rounded up.
    step_min, step_max: range of the initial steps, drawn log-uniformly; smaller
      ones than 1e-4 become 1e-4.
    signed: True for factors 2 exp(D_t A) - 1 from -1 to 1; see `decay`.
    causal: True, the only form.
    dtype: compute type; parameters and recurrence are float32.
  """

  kinds: ClassVar[dict[str, str]] = {"A_log": EIGENVALUES}
  has_step: ClassVar[bool] = True  # Decoding continues from a cache.
  has_segments: ClassVar[bool] = True  # The mask may be numbers.
  has_step_sizes: ClassVar[bool] = True  # They multiply D_t.

  state_size: Size = 16
  expansion: SmallCount = 2
  step_rank: OptionalSize = 0
  step_min: Scale = 1e-3
  step_max: Scale = 0.1
  signed: bool = False
  causal: bool = True
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self, x: jax.Array, *, mask: jax.Array, carry: Any, train: bool
  ) -> tuple[jax.Array, Any]:
    del train
    check_only_causal("mamba", causal=self.causal)
    d = x.shape[-1]
    inner = self.expansion * d
    # Move the tokens before the padding.
    x = to_front(x.astype(self.dtype), mask)
    places, mask = mask, front_mask(mask)
    # Map to the inputs u of the recurrence and the gate z.
    both = dense(x, 2 * inner, "input", use_bias=False, dtype=self.dtype)
    u, z = both[..., :inner], both[..., inner:]
    # Convolve, run the recurrence, apply the gate, and map back to d channels.
    u = nn.silu(short_convolution(self, u, mask, CONV_WIDTH))
    sizes = step_sizes.find(self)
    if sizes is not None:
      sizes = to_front(sizes[..., None], places)
    y = self._select(u, mask, d, sizes) * nn.silu(z)
    y = dense(y, d, "output", use_bias=False, dtype=self.dtype)
    return move_back(y, places), carry

  def _select(
    self, u: jax.Array, mask: jax.Array, d: int, sizes: jax.Array | None
  ) -> jax.Array:
    """Returns the outputs of the recurrence, [b, n, inner].

    Args:
      u: inputs, [b, n, inner].
      mask: mask of the tokens, which are at the front; or numbers.
      d: number of channels of the mixer.
      sizes: factors of the steps D_t, [b, n, 1]; None for 1.
    """
    # Map each token to the low-rank step, B_t and C_t.
    n, inner = u.shape[1:]
    size, rank = self.state_size, self.step_rank or -(-d // 16)
    gates = dense(u, rank + 2 * size, "gates", use_bias=False, dtype=self.dtype)

    def init(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
      limit = rank**-0.5
      return jax.random.uniform(key, shape, minval=-limit, maxval=limit)

    # D_t = softplus(W V u_t + b), [b, n, inner].
    kernel = self.param("step", init, (rank, inner))
    init_bias = softplus_steps(self.step_min, self.step_max)
    bias = self.param("step_bias", init_bias, (inner,))
    step = wide(product(gates[..., :rank], kernel.astype(u.dtype)))
    step = jax.nn.softplus(step + bias.astype(step.dtype)[None, None])
    step = step if sizes is None else step * sizes

    def init_a(_: jax.Array) -> jax.Array:
      return jnp.tile(jnp.log(jnp.arange(1.0, size + 1)), (inner, 1))

    # A is real and negative, [inner, size].
    a = -jnp.exp(self.param("A_log", init_a)).astype(step.dtype)
    state = recall(self, "state")
    if state is None:
      state = jnp.zeros((u.shape[0], inner, size), step.dtype)
    b, c = gates[..., rank : rank + size], gates[..., rank + size :]
    arrays = (wide(u), step, wide(b), wide(c), scan_options(mask))
    # On a TPU the channels come last, which fill its vectors: with the 16
    # numbers of a channel there, the states would be copied to the scan.
    is_last = platforms.on_tpu()
    a = a.T if is_last else a
    state = state.swapaxes(1, 2) if is_last else state

    # Run the recurrence over one part of the tokens.
    @jax.checkpoint
    def run_part(state: jax.Array, part: Any) -> tuple[jax.Array, jax.Array]:
      u, step, b, c, flags = part
      # Add the axes of the numbers and of the channels, [b, n, inner, size].
      channels, numbers = (2, 3) if is_last else (3, 2)
      states, last = linear_scan(
        decay(
          jnp.expand_dims(step, channels) * a[None, None], signed=self.signed
        ),
        jnp.expand_dims(step * u, channels) * jnp.expand_dims(b, numbers),
        initial=state,
        **flags,
      )
      order = "bnsd" if is_last else "bnds"
      return last, jnp.einsum(f"{order},bns->bnd", states, c)

    # Scan over the parts; the tokens that pad the last part are masked.
    length = min(PART, n)
    parts = jax.tree.map(
      lambda a: jnp.moveaxis(split(a, length, 1), 1, 0), arrays
    )
    state, y = jax.lax.scan(run_part, state, parts)
    remember(self, "state", state.swapaxes(1, 2) if is_last else state)
    # Join the parts, and add D u_t.
    y = jnp.moveaxis(y, 0, 1).reshape(u.shape[0], -1, inner)[:, :n]
    skip = self.param("D", nn.initializers.ones, (inner,)).astype(y.dtype)
    return (y + skip[None, None] * wide(u)).astype(u.dtype)
