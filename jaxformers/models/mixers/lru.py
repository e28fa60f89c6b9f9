"""The Linear Recurrent Unit: a diagonal recurrence, eigenvalues on a ring."""

from __future__ import annotations

import math
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Scale, Share, Size
from jaxformers.models.kinds import EIGENVALUES, INPUT, OUTPUT
from jaxformers.models.mixer import MIXERS
from jaxformers.models.mixers.recurrence import Recurrence, System
from jaxformers.models.variants import MODELS, Variant
from jaxformers.scan import Pair

MODELS.register("lru")(
  Variant(
    "lru",
    "one_branch",
    recurrence="linear",
    count_layers=lambda d, n, layers: layers * (2 * d * d + 389 * d + 192),
  )
)


@MIXERS.register("lru")
class LRU(Recurrence):
  """The Linear Recurrent Unit: h_t = lambda h_(t-1) + e^g B x_t, gated.

  The gate is applied to y_t = Re(C h_t) + D x_t. The eigenvalues
  lambda = exp(-e^nu + i e^theta) satisfy |lambda| < 1. They start uniformly on
  the ring from r_min to r_max; g starts at log sqrt(1 - |lambda|^2). Parameters
  have the names and shapes of minimal-LRU, the code of N. Zucchet, which reads
  in one direction. With two directions, C has columns for both here.

  Source: Orvieto et al. 2023, https://arxiv.org/abs/2303.06349, section 3 and
  appendix A.

  Attributes:
    state_size: number N of complex states per direction.
    r_min, r_max: radii of the ring, 0 <= r_min < r_max <= 1.
    max_phase: greatest initial angle of an eigenvalue.
    causal, glu, dropout_rate, dtype: see `recurrence.Recurrence`.
  """

  has_segments: ClassVar[bool] = True  # The mask may be numbers.
  has_step_sizes: ClassVar[bool] = True
  kinds: ClassVar[dict[str, str]] = {
    "nu_log": EIGENVALUES,
    "theta_log": EIGENVALUES,
    "gamma_log": INPUT,
    "B_re": INPUT,
    "B_im": INPUT,
    "C_re": OUTPUT,
    "C_im": OUTPUT,
  }

  state_size: Size = 64
  r_min: Share = 0.0
  r_max: Share = 0.99
  max_phase: Scale = 2 * math.pi

  def system(self, d: int) -> System:
    """Creates the parameters and returns the system of d channels."""
    # lambda from nu and theta.
    n = self.state_size
    columns = n if self.causal else 2 * n
    nu = self.param("nu_log", self._init_nu, (n,))
    theta = self.param("theta_log", self._init_theta, (n,))

    def init_gamma(_: jax.Array) -> jax.Array:
      # log sqrt(1 - |lambda|^2), without cancellation near 1.
      return jnp.log(-jnp.expm1(-2 * jnp.exp(nu))) / 2

    gamma = self.param("gamma_log", init_gamma)
    # B [n, d] and C [d, n], or [d, 2 n] for both directions.
    normal = nn.initializers.normal
    b_real, b_imag = (
      self.param(name, normal((2 * d) ** -0.5), (n, d))
      for name in ("B_re", "B_im")
    )
    c_real, c_imag = (
      self.param(name, normal(n**-0.5), (d, columns))
      for name in ("C_re", "C_im")
    )
    # Scale the input by e^g.
    scale = jnp.exp(gamma)[None]
    return System(
      Pair(-jnp.exp(nu), jnp.exp(theta)),
      Pair(b_real.T * scale, b_imag.T * scale),
      Pair(c_real.T, c_imag.T),
      self.param("D", normal(1.0), (d,)),
    )

  def _init_nu(self, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    if not 0 <= self.r_min < self.r_max <= 1:
      raise UserError(
        f"r_min={self.r_min} and r_max={self.r_max} are not radii of a ring: "
        "give 0 <= r_min < r_max <= 1."
      )
    # Draw |lambda|^2 uniformly in area; exclude 0 and 1, where nu is infinite.
    low, high = self.r_min**2, self.r_max**2
    square = jax.random.uniform(key, shape, minval=low, maxval=high)
    square = jnp.clip(square, jnp.finfo(square.dtype).tiny, 1 - 1e-7)
    return jnp.log(-jnp.log(square) / 2)

  def _init_theta(self, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    # Draw angles above 0, whose logarithm would be infinite.
    tiny = jnp.finfo(jnp.float32).tiny
    share = jax.random.uniform(key, shape, minval=tiny)
    return jnp.log(self.max_phase * share)
