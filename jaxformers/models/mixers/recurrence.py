"""Linear system, gate and base class that recurrent mixers share."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.foundations import platforms
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Fraction
from jaxformers.foundations.registry import choose
from jaxformers.models import step_sizes
from jaxformers.models.activations import ACTIVATIONS
from jaxformers.models.cache import check_causal, recall, remember
from jaxformers.models.dropout import drop_channels
from jaxformers.models.mixer import MIXERS, kernel_init, names_with_step
from jaxformers.models.mixers.state_space import exponential, hold
from jaxformers.models.parallel import dot_general, product
from jaxformers.models.segments import (
  is_packed,
  last_number,
  scan_options,
  tokens,
)
from jaxformers.scan import Pair, linear_scan, times

LECUN = nn.initializers.lecun_normal()


class System(NamedTuple):
  """Parameters of h_t = a h_(t-1) + B x_t, y_t = Re(C h_t) + D x_t.

  Attributes:
    log_a: logarithms of the factors of the N complex states, a pair of float32
      [N].
    b: matrix B from input to state, a pair of [d, N], without imaginary part if
      it is real.
    c: matrix C from state to output, a pair of [N, d], or of [2 N, d] for two
      directions.
    skip: factors D of the input, [d].
  """

  log_a: Pair
  b: Pair
  c: Pair
  skip: jax.Array


def run(
  module: nn.Module,
  system: System,
  x: jax.Array,
  mask: jax.Array,
  *,
  causal: bool,
) -> jax.Array:
  """Returns the outputs of a system, [b, n, d] in the dtype of x.

  Masked positions are skipped: they do not change the state. The states of both
  directions include the present token. A token of step size s acts as s equal
  tokens, see `state_space.hold`.

  Args:
    module: the mixer, whose cache holds the state between two calls.
    system: parameters of the system.
    x: tokens, [b, n, d].
    mask: bool [b, n], True at tokens; or numbers of packed rows.
    causal: True for one direction; False for both, with 2 N rows of C.
  """
  check_causal(module, causal=causal)
  # Compute the real and the imaginary parts of B x.
  size = system.log_a.real.shape[0]
  driven = products(x, [part for part in system.b if part is not None])
  drive = Pair(driven[0], driven[1] if driven[1:] else jnp.zeros_like(*driven))
  a, drive = stretch(module, system.log_a, drive)
  # Run the recurrence forwards, and also backwards if not causal.
  initial = recall(module, "state")
  states, last = linear_scan(a, drive, initial=initial, **scan_options(mask))
  remember(module, "state", last)
  parts = [*states]
  if not causal:
    states, _ = linear_scan(
      a, drive, reverse=True, **scan_options(mask, reverse=True)
    )
    parts += states
  # Re(C h) = Re(C) Re(h) - Im(C) Im(h).
  real, imag = system.c
  rows = [real[:size], -imag[:size]]
  if not causal:
    rows += [real[size:], -imag[size:]]
  y = sum_products(parts, rows)
  return y + system.skip.astype(x.dtype)[None, None] * x


def products(x: jax.Array, matrices: Sequence[jax.Array]) -> list[jax.Array]:
  """Returns the products of tokens [b, n, d] and matrices [d, N] each.

  They are computed as one product, except for narrow layers on TPUs, where
  results would be copied to be cut apart.
  """
  if _are_apart(matrices):
    return [product(x, matrix.astype(x.dtype)) for matrix in matrices]
  joined = product(x, jnp.concatenate(matrices, 1).astype(x.dtype))
  return jnp.split(joined, len(matrices), -1)


def sum_products(
  parts: Sequence[jax.Array], matrices: Sequence[jax.Array]
) -> jax.Array:
  """Returns the sum of the products of parts [b, n, N] and matrices [N, d].

  They are computed as one product, or one by one where `products` does so.
  """
  dtype = parts[0].dtype
  if not _are_apart(matrices):
    joined = jnp.concatenate(matrices).astype(dtype)
    return product(jnp.concatenate(parts, -1), joined)
  terms = [
    dot_general(
      part,
      matrix.astype(dtype),
      (((2,), (0,)), ((), ())),
      preferred_element_type=jnp.promote_types(dtype, jnp.float32),
    )
    for part, matrix in zip(parts, matrices, strict=True)
  ]
  return functools.reduce(jnp.add, terms).astype(dtype)


def _are_apart(matrices: Sequence[jax.Array]) -> bool:
  """Returns True on a TPU if matrices have at most 128 rows and columns.

  Tokens with more channels would be read again for every matrix.
  """
  return platforms.on_tpu() and max(matrices[0].shape) <= 128


def stretch(module: nn.Module, log_a: Pair, drive: Pair) -> tuple[Pair, Pair]:
  """Returns factors and inputs of a recurrence with the mixer's step sizes.

  Args:
    module: the mixer, see `step_sizes.find`.
    log_a: logarithms of the factors of a step, a pair of [...].
    drive: inputs of a step, a pair of [b, n, ...].

  Returns:
    The factors, [...] without step sizes and [b, n, ...] with them; and the
    inputs [b, n, ...] in their dtype.
  """
  sizes = step_sizes.find(module)
  if sizes is None:
    return exponential(log_a), drive
  dtype = drive.real.dtype
  axes = (1,) * log_a.real.ndim
  a, gain = hold(
    Pair(*(part[None, None] for part in log_a)),
    sizes.reshape(*sizes.shape, *axes),
  )
  scaled = times(gain, drive)
  return a, Pair(scaled.real.astype(dtype), scaled.imag.astype(dtype))


GLUS = ("full", "half1", "half2", "none")


class GatedOutput(nn.Module):
  """Activation and gated linear unit after a recurrence, [b, n, d].

  Let g = dropout(activation(y)). The form "full" computes
  (W1 g + b1) sigmoid(W2 g + b2), "half1" computes g sigmoid(W g + b), "half2"
  computes y sigmoid(W g + b), and "none" returns g. Dropout drops a channel at
  all tokens or at none.

  Source: Smith et al. 2023, https://arxiv.org/abs/2208.04933, appendix G.1;
  "full" is Dauphin et al. 2017, https://arxiv.org/abs/1612.08083, equation 1.

  Attributes:
    form: form of the gate, in `GLUS`.
    activation: name of the activation, in `ACTIVATIONS`.
    dropout_rate: share of the channels of g that are dropped in training.
    dtype: compute type; parameters are float32.
  """

  form: str = "full"
  activation: str = "gelu_tanh"
  dropout_rate: float = 0.0
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, y: jax.Array, *, train: bool) -> jax.Array:
    form = choose("glu", self.form, GLUS)
    activation = ACTIVATIONS[self.activation]
    g = drop_channels(self, activation(y), self.dropout_rate, train=train)
    if form == "none":
      return g
    # Multiply by the sigmoid of a linear map of g.
    d = y.shape[-1]
    gate = jax.nn.sigmoid(dense(g, d, "gate", dtype=self.dtype))
    if form == "full":
      return dense(g, d, "value", dtype=self.dtype) * gate
    return (g if form == "half1" else y) * gate


class Recurrence(nn.Module):
  """Base class of mixers: a linear recurrence and its gate, [b, n, d].

  A subclass overrides `system`, or `respond` if its channels do not share their
  states. All subclasses have the fields below.

  Attributes:
    causal: True to read only the present and earlier tokens; False to read in
      both directions.
    glu: form of the gate, see `GatedOutput`.
    dropout_rate: dropout of whole channels inside the gate.
    dtype: compute type; parameters and recurrence are float32.
  """

  activation: ClassVar[str] = "gelu_tanh"
  has_step: ClassVar[bool] = True  # Decoding continues from a cache.

  causal: bool = False
  glu: str = "full"
  dropout_rate: Fraction = 0.0
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self, x: jax.Array, *, mask: jax.Array, carry: Any, train: bool
  ) -> tuple[jax.Array, Any]:
    y = self.respond(x.astype(self.dtype), mask)
    return self.finish(y, train=train), carry

  def finish(self, y: jax.Array, *, train: bool) -> jax.Array:
    """Applies the gate to the outputs y of the recurrence, [b, n, d]."""
    gate = GatedOutput(
      self.glu, self.activation, self.dropout_rate, self.dtype, name="gate"
    )
    return gate(y, train=train)

  def respond(self, x: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the outputs of the recurrence, [b, n, d], before the gate."""
    return run(self, self.system(x.shape[-1]), x, mask, causal=self.causal)

  def system(self, d: int) -> System:
    """Creates the parameters and returns the system of d channels."""
    raise NotImplementedError


def dense(
  x: jax.Array,
  width: int,
  name: str,
  *,
  init_std: float = 0.0,
  use_bias: bool = True,
  dtype: Any = jnp.float32,
) -> jax.Array:
  """Maps x [b, n, d] linearly to [b, n, width], within the call of a module.

  Args:
    x: tokens.
    width: number of channels of the result.
    name: name of the parameters.
    init_std: initial standard deviation of the kernel; 0 for LeCun's
      initializer.
    use_bias: True to add a bias.
    dtype: compute type.
  """
  return nn.Dense(
    width,
    use_bias=use_bias,
    kernel_init=kernel_init(init_std) if init_std else LECUN,
    dtype=dtype,
    dot_general=dot_general,
    name=name,
  )(x)


def short_convolution(
  module: nn.Module,
  x: jax.Array,
  mask: jax.Array,
  width: int,
  *,
  use_bias: bool = True,
) -> jax.Array:
  """Returns a causal depthwise convolution of x, [b, n, d].

  Tokens of other examples of a packed row are not read.

  Args:
    module: the mixer, which owns `conv` and `conv_bias`; its cache holds the
      last width - 1 tokens.
    x: tokens, [b, n, d]; padding is at the end.
    mask: bool [b, n], True at tokens; or numbers of packed rows.
    width: number of tokens that the convolution reads.
    use_bias: True to add a bias.
  """
  n, d = x.shape[1:]
  # Uniform within 1 / sqrt(width): a channel reads only itself.
  init = nn.initializers.variance_scaling(
    1 / 3, "fan_in", "uniform", in_axis=0, out_axis=(), batch_axis=1
  )
  kernel = module.param("conv", init, (width, d)).astype(x.dtype)
  # Prepend the last width - 1 tokens of the cache, or zeros.
  past = recall(module, "past")
  if past is None:
    past = jnp.zeros((x.shape[0], width - 1, d), x.dtype)
  full = jnp.concatenate([past, x], 1)
  # Store the last width - 1 tokens of each sample.
  lengths = tokens(mask).sum(1, dtype=jnp.int32)
  last = lengths[:, None] + jnp.arange(width - 1)[None]
  kept = jnp.take_along_axis(full, last[..., None], 1)
  numbers = None
  if is_packed(mask):
    # Tokens of the cache belong to example 1; keep tokens of the last one.
    numbers = jnp.pad(mask, ((0, 0), (width - 1, 0)), constant_values=1)
    of_last = (
      jnp.take_along_axis(numbers, last, 1) == last_number(mask)[:, None]
    )
    kept = jnp.where(of_last[..., None], kept, 0)
  remember(module, "past", kept)

  def shifted(k: int) -> jax.Array:
    part = full[:, k : k + n]
    if numbers is None:
      return part
    is_mine = numbers[:, k : k + n] == mask
    return jnp.where(is_mine[..., None], part, 0)

  # Sum the shifted tokens times the kernel.
  taps = [kernel[k][None, None] * shifted(k) for k in range(width)]
  if not use_bias:
    return sum(taps[1:], taps[0])
  bias = module.param("conv_bias", nn.initializers.zeros, (d,)).astype(x.dtype)
  return sum(taps, bias[None, None])


def block_diagonal(
  module: nn.Module,
  x: jax.Array,
  blocks: int,
  name: str,
  *,
  use_bias: bool = True,
) -> jax.Array:
  """Maps the channels of each block linearly, [b, n, d].

  Args:
    module: the mixer, which owns the kernel `name` and the bias `name`_bias.
    x: tokens, [b, n, d]; `blocks` must divide d.
    blocks: number of blocks.
    name: name of the kernel.
    use_bias: True to add a bias.
  """
  # One kernel and bias per block, [h, e, e] and [h, e].
  h, e = blocks, x.shape[-1] // blocks
  init = nn.initializers.variance_scaling(
    1.0, "fan_in", "normal", in_axis=1, out_axis=2, batch_axis=0
  )
  kernel = module.param(name, init, (h, e, e)).astype(x.dtype)
  y = jnp.einsum("bnhe,hef->bnhf", x.reshape(*x.shape[:2], h, e), kernel)
  if use_bias:
    bias = module.param(f"{name}_bias", nn.initializers.zeros, (h, e))
    y = y + bias.astype(x.dtype)[None, None]
  return y.reshape(x.shape)


def check_only_causal(name: str, *, causal: bool) -> None:
  """Raises UserError if a mixer that is always causal has causal=False."""
  if not causal:
    recurrent = names_with_step()
    both = [n for n in recurrent if getattr(MIXERS[n], "causal", None) is False]
    raise UserError(
      f"The mixer {name!r} reads only earlier tokens: leave out causal=False, "
      f"or choose a mixer of both directions: {', '.join(both)}."
    )


def decay(log_a: jax.Array, *, signed: bool) -> jax.Array:
  """Returns the factors a of a real recurrence, or 2 a - 1 if `signed`.

  A factor in [0, 1] only forgets; a factor of -1 changes the sign of the state,
  which counts modulo 2.

  Source: Grazzi et al. 2025, https://arxiv.org/abs/2411.12537, section 4; their
  code leaves the input of the recurrence unchanged.

  Args:
    log_a: log a, at most 0.
    signed: True for factors from -1 to 1.
  """
  a = jnp.exp(log_a)
  return 2 * a - 1 if signed else a
