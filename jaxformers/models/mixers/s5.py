"""S5: one diagonal state-space model for all channels."""

from __future__ import annotations

import functools
import math
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.foundations.ranges import Scale, Size
from jaxformers.foundations.registry import choose
from jaxformers.models.kinds import EIGENVALUES, INPUT, OUTPUT, STEP
from jaxformers.models.mixer import MIXERS
from jaxformers.models.mixers.recurrence import LECUN, Recurrence, System
from jaxformers.models.mixers.scores import HIGHEST
from jaxformers.models.mixers.state_space import (
  check_pairs,
  discretize,
  legs,
  log_uniform,
)
from jaxformers.models.variants import MODELS, Variant
from jaxformers.scan import Pair, times

MODELS.register("s5")(
  Variant(
    "s5",
    "one_branch",
    recurrence="linear",
    count_layers=lambda d, n, layers: layers * (d * d + 196 * d + 96),
  )
)

OUTPUTS = ("lecun", "rows", "complex")
LARGEST_REAL = -1e-4  # Greatest real part with `clip_eigenvalues`.


@MIXERS.register("s5")
class S5(Recurrence):
  """S5: a state-space model for all channels, x' = Lambda x + B u, gated.

  The gate is applied to y = 2 Re(C x) + D u. Lambda starts as the eigenvalues
  of the normal part of HiPPO-LegS, in J blocks. One state of each conjugate
  pair is kept. Parameters have the names and shapes of the authors' code, and
  both directions include the present token, as in the authors' code.

  Source: Smith et al. 2023, https://arxiv.org/abs/2208.04933, section 3 and
  appendix B.

  Attributes:
    state_size: number P of states, half of which are kept.
    blocks: number J of copies of the initial eigenvalues; state_size must be a
      multiple of 2 J.
    c_init: initializer of C: "lecun" is LeCun's normal initializer, times the
      eigenvectors; "rows" has the fan-in of a single row of C
      ("trunc_standard_normal" in the authors' code); "complex" is normal with
      variance 1/2 for the real and for the imaginary parts.
    discretization: discretisation of time, "zoh" or "bilinear".
    step_min, step_max: range of the initial steps, drawn log-uniformly.
    share_step: True for one step for all states ("dt_global").
    clip_eigenvalues: True to clip real parts to at most -1e-4. If False, real
      parts may become positive in training, as in the authors' code.
    causal, glu, dropout_rate, dtype: see `recurrence.Recurrence`.
  """

  has_segments: ClassVar[bool] = True  # The mask may be numbers.
  has_step_sizes: ClassVar[bool] = True
  kinds: ClassVar[dict[str, str]] = {
    "Lambda_re": EIGENVALUES,
    "Lambda_im": EIGENVALUES,
    "log_step": STEP,
    "B": INPUT,
    "C": OUTPUT,
    "C1": OUTPUT,
    "C2": OUTPUT,
  }

  state_size: Size = 64
  blocks: Size = 1
  c_init: str = "lecun"
  discretization: str = "zoh"
  step_min: Scale = 1e-3
  step_max: Scale = 0.1
  share_step: bool = False
  clip_eigenvalues: bool = False
  glu: str = "half1"

  def system(self, d: int) -> System:
    """Creates the parameters and returns the system of d channels."""
    check_pairs(self.state_size, self.blocks)
    # Eigenvalues Lambda.
    eigenvalues, vectors = _start(self.state_size, self.blocks)
    kept = len(eigenvalues)
    real, imag = (
      self.param(name, lambda _, part=part: jnp.asarray(part, jnp.float32))
      for name, part in (
        ("Lambda_re", eigenvalues.real),
        ("Lambda_im", eigenvalues.imag),
      )
    )
    if self.clip_eigenvalues:
      real = jnp.minimum(real, LARGEST_REAL)
    # Step sizes, one per state or one for all.
    steps = log_uniform(self.step_min, self.step_max)
    count = 1 if self.share_step else kept
    step = jnp.exp(self.param("log_step", steps, (count, 1)))[:, 0]

    # B starts as V^* times LeCun's normal numbers, [P / 2, d, 2].
    def init_input(key: jax.Array) -> jax.Array:
      b = LECUN(key, (self.state_size, d))
      return _times(vectors.conj().T, Pair(b, jnp.zeros_like(b)))

    b = self.param("B", init_input)
    # Discretise, and double C, which adds the conjugate states that are not
    # kept.
    log, factor = discretize(
      Pair(real, imag), jnp.broadcast_to(step, (kept,)), self.discretization
    )
    factor = Pair(*(part[:, None] for part in factor))
    drive = times(factor, Pair(b[..., 0], b[..., 1]))
    c = 2 * self._outputs(d, vectors)
    return System(
      log,
      Pair(drive.real.T, drive.imag.T),
      Pair(c[..., 0].T, c[..., 1].T),
      self.param("D", nn.initializers.normal(1.0), (d,)),
    )

  def _outputs(self, d: int, vectors: np.ndarray) -> jax.Array:
    """Creates C, with the columns of all directions, [d, columns, 2]."""
    size, kept = vectors.shape
    directions = 1 if self.causal else 2
    if choose("c_init", self.c_init, OUTPUTS) == "complex":
      normal = nn.initializers.normal(math.sqrt(0.5))
      return self.param("C", normal, (d, directions * kept, 2))
    # LeCun's initializer counts the channels d as inputs; "rows" undoes this.
    scale = math.sqrt(d) if self.c_init == "rows" else 1.0

    def init(key: jax.Array) -> jax.Array:
      c = scale * LECUN(key, (d, size, 2))
      pair = Pair(c[..., 0].T, c[..., 1].T)
      return jnp.swapaxes(_times(vectors.T, pair), 0, 1)

    names = ["C"] if self.causal else ["C1", "C2"]
    return jnp.concatenate([self.param(name, init) for name in names], 1)


@functools.cache
def _start(size: int, blocks: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the kept eigenvalues [P / 2] and their eigenvectors [P, P / 2].

  Eigenvalues with negative imaginary parts are kept, as in the authors' code.
  """
  # Repeat the first half of the eigenvalues of one block for all blocks.
  eigenvalues, vectors, _ = legs(size // blocks)
  half = size // blocks // 2
  block = np.eye(blocks)
  return np.tile(eigenvalues[:half], blocks), np.kron(block, vectors[:, :half])


def _times(matrix: np.ndarray, x: Pair) -> jax.Array:
  """Returns matrix x for a complex matrix [m, k] and x [k, d].

  The last axis of the result [m, d, 2] holds real and imaginary parts.
  """
  real, imag = (
    jnp.asarray(part, x.real.dtype) for part in (matrix.real, matrix.imag)
  )
  # (R + i I) (x + i y) = (R x - I y) + i (R y + I x)
  precise = functools.partial(jnp.matmul, precision=HIGHEST)
  return jnp.stack(
    [
      precise(real, x.real) - precise(imag, x.imag),
      precise(real, x.imag) + precise(imag, x.real),
    ],
    -1,
  )
