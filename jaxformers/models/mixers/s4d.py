"""S4D: a diagonal state-space model for every channel, as a convolution."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Length, OptionalSize, Scale, Size
from jaxformers.foundations.registry import choose
from jaxformers.models import step_sizes
from jaxformers.models.activations import elu
from jaxformers.models.cache import (
  FIXED,
  check_causal,
  is_decoding,
  recall,
  remember,
)
from jaxformers.models.kinds import EIGENVALUES, INPUT, OUTPUT, STEP
from jaxformers.models.mixer import MIXERS
from jaxformers.models.mixers.convolution import (
  convolve,
  move_back,
  on_ring,
  sum_powers,
  to_front,
  transform_real,
)
from jaxformers.models.mixers.recurrence import Recurrence, stretch
from jaxformers.models.mixers.state_space import (
  check_pairs,
  discretize,
  legs,
  log_uniform,
  s4d_inv,
  s4d_lin,
)
from jaxformers.models.parallel import product
from jaxformers.models.reductions import largest, wide
from jaxformers.models.segments import scan_options
from jaxformers.models.variables import find_rotations, rotation
from jaxformers.models.variants import ALWAYS, MODELS, Variant
from jaxformers.scan import Pair, linear_scan, times

MODELS.register("s4d")(
  Variant(
    "s4d",
    "one_branch",
    recurrence="linear",
    count_layers=lambda d, n, layers: layers * (2 * d * d + 262 * d),
  )
)
MODELS.register("certified_s4d")(
  Variant(
    "s4d",
    "contractive",
    {"certified": True, "glu": "full", "dropout_rate": 0.0},
    bounded=ALWAYS,
  )
)

STARTS = ("legs", "lin", "inv")
LARGEST_INPUT = 2.0  # Greatest |Im B| with start="legs".


@MIXERS.register("s4d")
class S4D(Recurrence):
  """S4D: a diagonal state-space model of N states for each channel.

  y = k * x + D x with k_l = 2 Re sum_j C_j b_j a_j^l, by FFT. With both
  directions, only the forward kernel reads the present token. Parameters have
  the names and shapes of `SSMKernelDiag` in the authors' code. The real part of
  A is -exp(log_A_real), as with its option "exp". B differs: it is a parameter
  only with start="legs", and the constant 1 otherwise.

  Source: Gu et al. 2022, https://arxiv.org/abs/2206.11893, sections 3 and 4.

  Attributes:
    state_size: number N of states, half of which are kept.
    start: initial eigenvalues, "legs", "lin" or "inv".
    discretization: discretisation of time, "zoh" or "bilinear".
    step_min, step_max: range of the initial steps of channels, drawn
      log-uniformly.
    num_ssm: number of sets of A and B, assigned to the channels in turn; 0 for
      one set per channel.
    certified: True for a mixer that is nonexpansive (1-Lipschitz) on sequences
      of at most max_len tokens. The kernel of a channel, D included, is divided
      by its gain if the gain is above 1, and ELU(y Q + c) with a rotation Q
      replaces the gate. See `gain`.
    max_len: greatest number of tokens; used by `certified`.
    orthogonal_map: name of the map to the rotation, in `orthogonal.MAPS`; used
      by `certified`.
    causal, glu, dropout_rate, dtype: see `recurrence.Recurrence`.
  """

  activation: ClassVar[str] = "gelu"
  has_resets: ClassVar[bool] = True  # The recurrence of the cache has resets.
  has_step_sizes: ClassVar[bool] = True  # By a recurrence, too.
  distance: ClassVar[str] = "sequences"  # Distance to which `gain` applies.
  kinds: ClassVar[dict[str, str]] = {
    "log_A_real": EIGENVALUES,
    "A_imag": EIGENVALUES,
    "B": INPUT,
    "C": OUTPUT,
    "log_dt": STEP,
  }

  state_size: Size = 64
  start: str = "legs"
  discretization: str = "zoh"
  step_min: Scale = 1e-3
  step_max: Scale = 0.1
  num_ssm: OptionalSize = 0
  certified: bool = False
  max_len: Length = 1_024
  orthogonal_map: str = "cayley"

  def finish(self, y: jax.Array, *, train: bool) -> jax.Array:
    """Applies the gate, or with `certified` ELU(y Q + c), [b, n, d]."""
    if not self.certified:
      return super().finish(y, train=train)
    if self.glu != "full" or self.dropout_rate:
      raise UserError(
        f"certified=True with glu={self.glu!r} and dropout_rate="
        f"{self.dropout_rate}: certified=True replaces the gate by a rotation, "
        "and has no dropout. Remove both options."
      )
    d = y.shape[-1]
    q = rotation(self, "mixing", (1, d, d), self.orthogonal_map)[0]
    bias = self.param("bias", nn.initializers.zeros, (d,)).astype(y.dtype)
    return elu(product(y, q.astype(y.dtype)) + bias[None, None])

  @property
  def has_limit(self) -> bool:
    """True if the mixer reads at most max_len tokens."""
    return self.certified

  @property
  def is_bounded(self) -> bool:
    """True if `gain` returns a Lipschitz constant of the mixer."""
    return self.certified

  @nn.nowrap
  def gain(self, collections: Mapping[str, Any]) -> float:
    """Returns a Lipschitz constant for sequences with equal masks, in float64.

    This is the greatest modulus of the transfer function on a ring of 2 max_len
    tokens, times the norm of the rotation. The convolution of at most max_len
    tokens is a part of the circular convolution on this ring.

    Args:
      collections: `params` of the mixer, and `rotations` if they are computed.

    Raises:
      UserError: if `certified` is False, since a gate has no bound.
    """
    if not self.certified:
      raise UserError(
        "S4D's gate has no Lipschitz constant: set mixer.certified=True."
      )
    d = collections["params"]["D"].shape[0]
    # Run the mixer on one token, which stores the circular kernel.
    _, sown = self.apply(
      collections,
      jnp.zeros((1, 1, d)),
      mask=jnp.ones((1, 1), bool),
      carry=None,
      train=False,
      mutable=["kernels"],
    )
    kernel = np.asarray(sown["kernels"]["ring"][0], np.float64)
    # Multiply the gain of the kernel by the norm of the rotation.
    (matrix,) = find_rotations(collections, self.orthogonal_map).values()
    norm = np.linalg.norm(np.asarray(matrix[0], np.float64), 2)
    return float(np.abs(np.fft.rfft(kernel)).max() * norm)

  def respond(self, x: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the outputs of the convolution, [b, n, d], before the gate."""
    check_causal(self, causal=self.causal)
    if self.certified and x.shape[1] > self.max_len:
      raise UserError(
        f"{x.shape[1]} tokens, but certified=True bounds S4D for "
        f"max_len={self.max_len}: build the model with a greater max_len."
      )
    has_sizes = step_sizes.find(self) is not None
    if self.certified and has_sizes:
      raise UserError(
        "certified=True bounds S4D for equal steps: leave out step_sizes."
      )
    # y = k * x + D x
    log, inputs, outputs = self._systems(x.shape[-1])
    skip = self.param("D", nn.initializers.normal(1.0), x.shape[-1:])
    if is_decoding(self) or has_sizes:
      y = self._recur(log, inputs, outputs, x, mask)
    else:
      y = self._convolve(log, inputs, outputs, x, mask)
    y = y.astype(x.dtype) + skip.astype(x.dtype)[None, None] * x
    if not self.certified:
      return y
    # Divide by the gain.
    share = self._share(log, inputs, outputs, skip)
    return share.astype(x.dtype)[None, None] * y

  def _share(self, log: Pair, b: Pair, c: Pair, skip: jax.Array) -> jax.Array:
    """Returns min(1, 1 / gain) of each channel, [d].

    The gain is computed for max_len tokens, so it does not depend on padding.
    """
    if self.has_variable(FIXED, "share"):
      return self.get_variable(FIXED, "share")
    # The gain is the greatest modulus of the transfer function on a ring.
    kernels = self._kernels(log, b, c, self.max_len)
    ring = on_ring(*kernels, size=2 * self.max_len)
    ring = ring.at[:, 0].add(skip)
    share = 1 / jnp.maximum(largest(jnp.abs(transform_real(ring))), 1)
    self.sow("kernels", "ring", share[:, None] * ring)
    if self.is_mutable_collection(FIXED) and not self.is_initializing():
      self.put_variable(FIXED, "share", share)
    return share

  def _systems(self, d: int) -> tuple[Pair, Pair, Pair]:
    """Creates the parameters and returns the system of each channel.

    Returns:
      log a and b, pairs of [d, N / 2]; and 2 C, a pair of
      [directions, d, N / 2].
    """
    check_pairs(self.state_size)
    # Create `sets` copies of A and B.
    kept = self.state_size // 2
    sets = self.num_ssm or d
    eigenvalues, start = _start(self.start, self.state_size)

    def repeated(part: np.ndarray) -> Any:
      return lambda _: jnp.tile(jnp.asarray(part, jnp.float32), (sets, 1))

    real = self.param("log_A_real", repeated(np.log(-eigenvalues.real)))
    imag = self.param("A_imag", repeated(eigenvalues.imag))
    parts = [-jnp.exp(real), imag]
    if start is not None:
      initial = (repeated(start.real), repeated(start.imag))
      b = self.param(
        "B", lambda _: jnp.stack([part(_) for part in initial], -1)
      )
      parts += [b[..., 0], b[..., 1]]
    # Assign the sets to the channels in turn.
    parts = [jnp.tile(part, (-(-d // sets), 1))[:d] for part in parts]
    # Discretise with one step per channel.
    steps = log_uniform(self.step_min, self.step_max)
    step = jnp.exp(self.param("log_dt", steps, (d,)))
    log, factor = discretize(
      Pair(*parts[:2]),
      jnp.broadcast_to(step[:, None], (d, kept)),
      self.discretization,
    )
    if start is not None:
      factor = times(factor, Pair(*parts[2:]))
    # Double C, which adds the conjugate states that are not kept.
    directions = 1 if self.causal else 2
    init = nn.initializers.normal(math.sqrt(0.5))
    c = self.param("C", init, (directions, d, kept, 2))
    return log, factor, Pair(2 * c[..., 0], 2 * c[..., 1])

  def _convolve(
    self, log: Pair, b: Pair, c: Pair, x: jax.Array, mask: jax.Array
  ) -> jax.Array:
    kernels = self._kernels(log, b, c, x.shape[1])
    # Move the tokens before the padding, convolve them, and move them back.
    y = convolve(to_front(wide(x), mask), *kernels)
    return move_back(y, mask)

  def _kernels(self, log: Pair, b: Pair, c: Pair, n: int) -> list[jax.Array]:
    """Returns the kernel of each direction for n tokens, [d, n]."""
    kernels = [
      sum_powers(log, times(b, _part(c, i)), n) for i in range(c.real.shape[0])
    ]
    if not self.causal:
      # Shift the backward kernel by one, so that it begins at the next token.
      kernels[1] = jnp.pad(kernels[1], ((0, 0), (1, 0)))[:, :n]
    return kernels

  def _recur(
    self, log: Pair, b: Pair, c: Pair, x: jax.Array, mask: jax.Array
  ) -> jax.Array:
    """Returns Re sum_j C_j h_tj, with states h that continue from the cache."""
    # One state per channel and eigenvalue, [b, n, d, N / 2].
    x = wide(x)[..., None]

    def driven(i: int) -> tuple[Pair, Pair]:
      weight = times(b, _part(c, i))
      return stretch(self, log, Pair(x * weight.real, x * weight.imag))

    a, drive = driven(0)
    states, last = linear_scan(
      a, drive, initial=recall(self, "state"), **scan_options(mask)
    )
    remember(self, "state", last)
    y = states.real.sum(-1)
    if self.causal:
      return y
    # The backward direction reads only later tokens.
    a, drive = driven(1)
    states, _ = linear_scan(
      a, drive, reverse=True, **scan_options(mask, reverse=True)
    )
    later = states.real.sum(-1)[:, 1:]
    return y + jnp.pad(later, ((0, 0), (0, 1), (0, 0)))


def _part(x: Pair, index: int) -> Pair:
  return Pair(x.real[index], x.imag[index])


def _start(name: str, size: int) -> tuple[np.ndarray, np.ndarray | None]:
  """Returns the kept eigenvalues [N / 2], and B [N / 2], or None if B = 1."""
  if choose("start", name, STARTS) == "lin":
    return s4d_lin(size), None
  if name == "inv":
    return s4d_inv(size), None
  eigenvalues, _, b = legs(size)
  # Keep the second half, whose imaginary parts are positive.
  eigenvalues, b = eigenvalues[size // 2 :], b[size // 2 :]
  imag = np.clip(b.imag, -LARGEST_INPUT, LARGEST_INPUT)
  return eigenvalues, b.real + 1j * imag
