"""Linear system, gate and module that recurrent mixers share."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Fraction
from jaxformers.foundations.registry import choose
from jaxformers.models.activations import ACTIVATIONS
from jaxformers.models.cache import check_causal, recall, remember
from jaxformers.models.dropout import drop_channels
from jaxformers.models.mixer import MIXERS, kernel_init, names_with_step
from jaxformers.models.parallel import dot_general, product
from jaxformers.scan import Pair, linear_scan

LECUN = nn.initializers.lecun_normal()


class System(NamedTuple):
  """h_t = a h_(t-1) + B x_t, y_t = Re(C h_t) + D x_t, with N complex states.

  Attributes:
    a: factors, a pair of float32 [N].
    b: matrix from input to state, a pair of [d, N].
    c: matrix from state to output, a pair of [N, d]; of two systems that read
      in both directions [2 N, d].
    skip: D, [d].
  """

  a: Pair
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
  """Returns the outputs of a system, [b, n, d] in the type of x.

  Masked tokens are no steps: the state of a token is that of the tokens before
  it alone. Both directions have the state of the present token.

  Args:
    module: the mixer, whose cache holds the state between two calls.
    system: the system.
    x: [b, n, d].
    mask: [b, n], True at tokens.
    causal: True for one direction; else C has rows for both.
  """
  check_causal(module, causal=causal)
  # Real and imaginary parts are one product.
  size = system.a.real.shape[0]
  driven = product(x, jnp.concatenate(system.b, 1).astype(x.dtype))
  drive = Pair(driven[..., :size], driven[..., size:])
  initial = recall(module, "state")
  states, last = linear_scan(system.a, drive, mask=mask, initial=initial)
  remember(module, "state", last)
  parts = [*states]
  if not causal:
    states, _ = linear_scan(system.a, drive, mask=mask, reverse=True)
    parts += states
  # Re(C h) is the real parts' product less that of the imaginary ones.
  real, imag = system.c
  rows = [real[:size], -imag[:size]]
  if not causal:
    rows += [real[size:], -imag[size:]]
  y = product(jnp.concatenate(parts, -1), jnp.concatenate(rows).astype(x.dtype))
  return y + system.skip.astype(x.dtype)[None, None] * x


GLUS = ("full", "half1", "half2", "none")


class GatedOutput(nn.Module):
  """Activation and gated linear unit after a recurrence, [b, n, d].

  With g = dropout(gelu(y)): "full" is (W1 g + b1) sigmoid(W2 g + b2), "half1"
  is g sigmoid(W g + b), "half2" is y sigmoid(W g + b), and "none" is g. A
  channel is dropped at all tokens or none.

  Source: Smith et al. 2023, https://arxiv.org/abs/2208.04933, appendix G.1;
  "full" is Dauphin et al. 2017, https://arxiv.org/abs/1612.08083, equation 1.

  Attributes:
    form: in `GLUS`.
    activation: in `ACTIVATIONS`.
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
    d = y.shape[-1]
    gate = jax.nn.sigmoid(dense(g, d, "gate", dtype=self.dtype))
    if form == "full":
      return dense(g, d, "value", dtype=self.dtype) * gate
    return (g if form == "half1" else y) * gate


class Recurrence(nn.Module):
  """A linear recurrence and its gate, [b, n, d], the frame of three mixers.

  A mixer gives `system`, or `respond` where its states are not shared by all
  channels. The attributes are fields of every such mixer.

  Attributes:
    causal: True to read earlier tokens alone; False for both directions.
    glu: form of the gate, see `GatedOutput`.
    dropout_rate: dropout inside the gate, of whole channels.
    dtype: compute type; parameters and recurrence are float32.
  """

  activation: ClassVar[str] = "gelu_tanh"
  has_step: ClassVar[bool] = True  # It goes on from a cache.

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
    """Returns the mixer's output from that of the recurrence, [b, n, d]."""
    gate = GatedOutput(
      self.glu, self.activation, self.dropout_rate, self.dtype, name="gate"
    )
    return gate(y, train=train)

  def respond(self, x: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the outputs of the recurrence, [b, n, d], before the gate."""
    return run(self, self.system(x.shape[-1]), x, mask, causal=self.causal)

  def system(self, d: int) -> System:
    """Returns the system of d channels, whose parameters it makes."""
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
  """Returns a linear map of x [b, n, d] to [b, n, width], inside a module.

  Args:
    x: tokens.
    width: number of channels of the result.
    name: name of the parameters.
    init_std: standard deviation of the kernel at the start; 0 for LeCun's.
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
  module: nn.Module, x: jax.Array, lengths: jax.Array, width: int
) -> jax.Array:
  """Returns a causal convolution of every channel alone, with a bias.

  Args:
    module: the mixer, which owns `conv` and `conv_bias`; its cache holds the
      last width - 1 tokens.
    x: [b, n, d], tokens before padding.
    lengths: number of tokens, int32 [b].
    width: number of tokens that are read.
  """
  n, d = x.shape[1:]
  init = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform", 0, ())
  kernel = module.param("conv", init, (width, d)).astype(x.dtype)
  bias = module.param("conv_bias", nn.initializers.zeros, (d,)).astype(x.dtype)
  past = recall(module, "past")
  if past is None:
    past = jnp.zeros((x.shape[0], width - 1, d), x.dtype)
  full = jnp.concatenate([past, x], 1)
  last = lengths[:, None] + jnp.arange(width - 1)[None]
  remember(module, "past", jnp.take_along_axis(full, last[..., None], 1))
  taps = [kernel[k][None, None] * full[:, k : k + n] for k in range(width)]
  return sum(taps, bias[None, None])


def check_only_causal(name: str, *, causal: bool) -> None:
  """Raises UserError for causal=False of a mixer that has one direction."""
  if not causal:
    recurrent = names_with_step()
    both = [n for n in recurrent if getattr(MIXERS[n], "causal", None) is False]
    raise UserError(
      f"The mixer {name!r} reads earlier tokens alone: leave out causal=False, "
      f"or choose one of both directions: {', '.join(both)}."
    )
