"""S4D: a diagonal state-space model for every channel, as a convolution."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.models.attention import MIXERS, wide
from jaxformers.models.cache import (
  check_causal,
  is_decoding,
  recall,
  remember,
)
from jaxformers.models.kinds import EIGENVALUES, INPUT, OUTPUT, STEP
from jaxformers.models.mixers.convolution import (
  convolve,
  move_back,
  sum_powers,
  to_front,
)
from jaxformers.models.mixers.recurrence import Recurrence
from jaxformers.models.mixers.state_space import (
  check_pairs,
  discretize,
  exponential,
  legs,
  log_uniform,
  s4d_inv,
  s4d_lin,
)
from jaxformers.models.variants import MODELS, Variant
from jaxformers.registry import choose
from jaxformers.scan import Pair, linear_scan, times

MODELS.register("s4d")(Variant("s4d", "one_branch"))

STARTS = ("legs", "lin", "inv")
LARGEST_INPUT = 2.0  # Of the imaginary part of B at the start "legs".


@MIXERS.register("s4d")
class S4D(Recurrence):
  """S4D: a diagonal state-space model of N states for each channel.

  y = k * x + D x with k_l = 2 Re sum_j C_j b_j a_j^l, by FFT; in both
  directions the present token is in the forward kernel alone. Parameters have
  the names and shapes of the authors' code, `SSMKernelDiag` with the real part
  "exp"; but for B, which is a parameter for the start "legs" alone, and a
  constant 1 for the others.

  Source: Gu et al. 2022, https://arxiv.org/abs/2206.11893, sections 3 and 4.

  Attributes:
    state_size: number N of states, of which half are kept.
    start: "legs", "lin" or "inv", the eigenvalues at the start.
    discretization: "zoh" or "bilinear".
    step_min, step_max: steps of channels start log-uniformly between these.
    num_ssm: sets of A and B, shared by the channels in turn; 0 for one each.
    causal, glu, dropout_rate, dtype: see `recurrence.Recurrence`.
  """

  activation: ClassVar[str] = "gelu"
  kinds: ClassVar[dict[str, str]] = {
    "log_A_real": EIGENVALUES,
    "A_imag": EIGENVALUES,
    "B": INPUT,
    "C": OUTPUT,
    "log_dt": STEP,
  }

  state_size: int = 64
  start: str = "legs"
  discretization: str = "zoh"
  step_min: float = 1e-3
  step_max: float = 0.1
  num_ssm: int = 0

  def respond(self, x: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the outputs of the convolution, [b, n, d], before the gate."""
    check_causal(self, causal=self.causal)
    log, inputs, outputs = self._systems(x.shape[-1])
    skip = self.param("D", nn.initializers.normal(1.0), x.shape[-1:])
    if is_decoding(self):
      y = self._continue(log, times(inputs, _part(outputs, 0)), x, mask)
    else:
      y = self._convolve(log, inputs, outputs, x, mask)
    return y.astype(x.dtype) + skip.astype(x.dtype)[None, None] * x

  def _systems(self, d: int) -> tuple[Pair, Pair, Pair]:
    """Returns log a and b, pairs of [d, N / 2], and C by direction."""
    check_pairs(self.state_size)
    kept = self.state_size // 2
    sets = self.num_ssm or d
    eigenvalues, b = _start(self.start, self.state_size)

    def repeated(part: np.ndarray) -> Any:
      return lambda _: jnp.tile(jnp.asarray(part, jnp.float32), (sets, 1))

    real = self.param("log_A_real", repeated(np.log(-eigenvalues.real)))
    imag = self.param("A_imag", repeated(eigenvalues.imag))
    parts = [-jnp.exp(real), imag]
    if b is not None:
      b = self.param(
        "B",
        lambda _: jnp.stack([repeated(b.real)(_), repeated(b.imag)(_)], -1),
      )
      parts += [b[..., 0], b[..., 1]]
    # The channels take the sets in turn.
    parts = [jnp.tile(part, (-(-d // sets), 1))[:d] for part in parts]
    steps = log_uniform(self.step_min, self.step_max)
    step = jnp.exp(self.param("log_dt", steps, (d,)))
    log, factor = discretize(
      Pair(*parts[:2]),
      jnp.broadcast_to(step[:, None], (d, kept)),
      self.discretization,
    )
    if b is not None:
      factor = times(factor, Pair(*parts[2:]))
    directions = 1 if self.causal else 2
    init = nn.initializers.normal(math.sqrt(0.5))
    c = self.param("C", init, (directions, d, kept, 2))
    return log, factor, Pair(2 * c[..., 0], 2 * c[..., 1])

  def _convolve(
    self, log: Pair, b: Pair, c: Pair, x: jax.Array, mask: jax.Array
  ) -> jax.Array:
    n = x.shape[1]
    kernels = [
      sum_powers(log, times(b, _part(c, i)), n) for i in range(c.real.shape[0])
    ]
    if not self.causal:
      # The backward kernel begins with the next token.
      kernels[1] = jnp.pad(kernels[1], ((0, 0), (1, 0)))[:, :n]
    x, moved = to_front(wide(x), mask)
    return move_back(convolve(x, *kernels), moved)

  def _continue(
    self, log: Pair, weight: Pair, x: jax.Array, mask: jax.Array
  ) -> jax.Array:
    """Returns the sums of the recurrence that goes on from the cache."""
    x = wide(x)[..., None]
    drive = Pair(x * weight.real, x * weight.imag)
    states, last = linear_scan(
      exponential(log), drive, mask=mask, initial=recall(self, "state")
    )
    remember(self, "state", last)
    return states.real.sum(-1)


def _part(x: Pair, index: int) -> Pair:
  return Pair(x.real[index], x.imag[index])


def _start(name: str, size: int) -> tuple[np.ndarray, np.ndarray | None]:
  """Returns kept eigenvalues [N / 2], and B [N / 2] or None for 1."""
  if choose("start", name, STARTS) == "lin":
    return s4d_lin(size), None
  if name == "inv":
    return s4d_inv(size), None
  eigenvalues, _, b = legs(size)
  # The second half has positive imaginary parts.
  eigenvalues, b = eigenvalues[size // 2 :], b[size // 2 :]
  imag = np.clip(b.imag, -LARGEST_INPUT, LARGEST_INPUT)
  return eigenvalues, b.real + 1j * imag
