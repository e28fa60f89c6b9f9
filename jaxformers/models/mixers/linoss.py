"""LinOSS and D-LinOSS: state spaces that are harmonic oscillators."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Scale, Share, Size, refuse_unused
from jaxformers.foundations.registry import choose
from jaxformers.models.kinds import EIGENVALUES, INPUT, OUTPUT, STEP
from jaxformers.models.mixer import MIXERS
from jaxformers.models.mixers.recurrence import Recurrence, System
from jaxformers.models.variants import MODELS, Variant
from jaxformers.scan import Pair

MODELS.register("linoss")(
  Variant(
    "linoss",
    "one_branch",
    {"damped": False, "r_min": 0.9, "r_max": 1.0},
    recurrence="linear",
    count_layers=lambda d, n, layers: layers * (2 * d * d + 389 * d + 128),
  )
)
MODELS.register("damped_linoss")(
  Variant(
    "linoss",
    "one_branch",
    {"damped": True},
    {"start": "ring"},
    source="Boyer et al. 2025",
    recurrence="linear",
    count_layers=lambda d, n, layers: layers * (2 * d * d + 389 * d + 192),
  )
)

SCHEMES = ("imex", "implicit")
STARTS = ("uniform", "ring")
# Smallest distance of the angle of an eigenvalue from 0 and from pi: the
# rounding errors of states are divided by the sine of the angle.
SMALLEST_ANGLE = 1e-3


@MIXERS.register("linoss")
class LinOSS(Recurrence):
  """LinOSS: P forced harmonic oscillators x'' = -A x - G x' + B u, gated.

  The gate is applied to y = Re(C x) + D u; B and C are complex. With the scheme
  "imex" and without damping (G = 0), the state keeps its norm if there is no
  input; with damping (G > 0) or with the scheme "implicit", every step shrinks
  it. See `rates`, and docs/theory.md.

  A step of an oscillator multiplies its velocity and its position by a matrix
  whose eigenvalues are lambda = r e^(+-i th). The mixer computes the recurrence
  h_n = lambda h_(n-1) + v_n of the input v = B u, whose real and imaginary
  parts have separate states, and x_n = D^2 r^2 Im(lambda h_n) / Im(lambda) with
  the step D.

  Differs from the authors' code, where without damping A of 4 / D^2 and more
  makes the states of "imex" grow, and A = 0 makes them grow linearly: here A is
  clipped so that th is from 0.001 to pi - 0.001, as D-LinOSS does for 0 and pi.
  With two
  directions, C has columns for both.

  Source: Rusch and Rus 2025, https://arxiv.org/abs/2410.03943, section 2; with
  damping, Boyer et al. 2025, https://arxiv.org/abs/2505.12171.

  Attributes:
    state_size: number P of oscillators.
    scheme: discretisation of time, "imex" (symplectic) or "implicit".
    damped: True for a trained damping G >= 0 of each oscillator; only with
      "imex".
    start: initial values. "uniform": A is uniform in [0, 1], as published for
      LinOSS. "ring": the eigenvalues are uniform in a ring, as published for
      D-LinOSS, or on the circle without damping; only with "imex".
    r_min, r_max: radii of the ring, 0 < r_min < r_max <= 1; used by "ring" with
      damping.
    max_phase: greatest initial angle of an eigenvalue; used by "ring".
    causal, glu, dropout_rate, dtype: see `recurrence.Recurrence`.
  """

  has_segments: ClassVar[bool] = True  # The mask may be numbers.
  has_step_sizes: ClassVar[bool] = True
  kinds: ClassVar[dict[str, str]] = {
    "A_diag": EIGENVALUES,
    "G_diag": EIGENVALUES,
    "steps": STEP,
    "B": INPUT,
    "C": OUTPUT,
  }

  state_size: Size = 64
  scheme: str = "imex"
  damped: bool = False
  start: str = "uniform"
  r_min: Share = 0.9
  r_max: Share = 1.0
  max_phase: Scale = math.pi

  def system(self, d: int) -> System:
    """Creates the parameters and returns the system of d channels."""
    self._check()
    p = self.state_size
    columns = p if self.causal else 2 * p
    # Step sizes D, damping G and squared frequencies A.
    is_ring = self.start == "ring"
    normal = nn.initializers.normal
    init_steps = normal(0.5) if is_ring else nn.initializers.uniform(1.0)
    steps = self.param("steps", init_steps, (p,))
    damping: jax.Array | float = 0.0
    if self.damped:
      damping = self.param("G_diag", self._draw_damping, steps)
    init_a = self._draw_frequencies if is_ring else _uniform_like
    a = self.param("A_diag", init_a, steps, damping)
    step = jax.nn.sigmoid(steps)
    log_r, angle = self._modes(a, step, damping)
    # B [P, d] and C [d, P], or [d, 2 P] for both directions.
    b, c = (
      self.param(name, _symmetric(fan), shape)
      for name, fan, shape in (("B", d, (p, d, 2)), ("C", p, (d, columns, 2)))
    )
    # Read the positions of both parts of the input from the states h:
    # Im(lambda h) / Im(lambda) = Re(h) + cot(th) Im(h).
    size = (step * jnp.exp(log_r)) ** 2
    cotangent = jnp.cos(angle) / jnp.sin(angle)
    rows, slopes = [], []
    for i in range(columns // p):
      part = c[:, i * p : (i + 1) * p] * size[None, :, None]
      rows += [part[..., 0], -part[..., 1]]
      slopes += 2 * [cotangent]
    real = jnp.concatenate(rows, 1).T
    return System(
      Pair(jnp.tile(log_r, 2), jnp.tile(angle, 2)),
      Pair(jnp.concatenate([b[..., 0], b[..., 1]]).T),
      Pair(real, -jnp.concatenate(slopes)[:, None] * real),
      self.param("D", normal(1.0), (d,)),
    )

  @nn.nowrap
  def rates(self, collections: Mapping[str, Any]) -> np.ndarray:
    """Returns the moduli r of the eigenvalues, float64 [P].

    Without input, n steps multiply the norm of the state of each oscillator by
    r^n, for any parameters; with step sizes, n is their sum. This is the norm
    of the states h of the cache. For "imex" without damping, its square times
    D^2 is z^2 - D A z x + A x^2, in velocity z and position x.

    Args:
      collections: `params` of the mixer.
    """
    params = {
      name: np.asarray(value, np.float64)
      for name, value in collections["params"].items()
      if name in ("A_diag", "G_diag", "steps")
    }
    step = 1 / (1 + np.exp(-params["steps"]))
    if self.scheme == "implicit":
      least = (math.tan(SMALLEST_ANGLE) / step) ** 2
      return (1 + step**2 * np.maximum(params["A_diag"], least)) ** -0.5
    return (1 + step * np.maximum(params.get("G_diag", 0), 0)) ** -0.5

  def _check(self) -> None:
    """Raises UserError for options that do not suit each other."""
    choose("scheme", self.scheme, SCHEMES)
    choose("start", self.start, STARTS)
    is_ring = self.start == "ring"
    if self.scheme == "implicit" and (self.damped or is_ring):
      raise UserError(
        f"scheme='implicit' with damped={self.damped} and start="
        f"{self.start!r}: damping and the ring are defined for scheme='imex'. "
        "Set it, or leave both out."
      )
    if self.damped and not is_ring:
      raise UserError(
        "damped=True with start='uniform' has no initial damping: set "
        "start='ring'."
      )
    if not self.damped:
      reason = "there is no damping: choose damped_linoss, or remove it."
      refuse_unused(self, ("r_min", "r_max"), reason)
    if not is_ring:
      reason = "start='uniform' draws no angles: choose 'ring', or remove it."
      refuse_unused(self, ("max_phase",), reason)
    if self.damped and not 0 < self.r_min < self.r_max <= 1:
      raise UserError(
        f"r_min={self.r_min} and r_max={self.r_max} are not radii of a ring: "
        "give 0 < r_min < r_max <= 1."
      )

  def _draw_damping(self, key: jax.Array, steps: jax.Array) -> jax.Array:
    """Draws G, so that |lambda|^2 = 1 / (1 + D G) is uniform in the ring."""
    low, high = self.r_min**2, self.r_max**2
    square = jax.random.uniform(key, steps.shape, minval=low, maxval=high)
    return (1 / square - 1) / jax.nn.sigmoid(steps)

  def _draw_frequencies(
    self, key: jax.Array, steps: jax.Array, damping: jax.Array | float
  ) -> jax.Array:
    """Draws A = |1 - lambda|^2 / (r D)^2, for uniform angles of lambda."""
    step = jax.nn.sigmoid(steps)
    angle = self.max_phase * jax.random.uniform(key, step.shape)
    square = 1 / (1 + step * damping)
    # |1 - lambda|^2 = (1 - r)^2 + 4 r sin^2(th / 2)
    r = jnp.sqrt(square)
    distance = (1 - r) ** 2 + 4 * r * jnp.sin(angle / 2) ** 2
    return distance / (square * step**2)

  def _modes(
    self, a: jax.Array, step: jax.Array, damping: jax.Array | float
  ) -> tuple[jax.Array, jax.Array]:
    """Returns log r and th of the eigenvalues r e^(+-i th), [P] each."""
    if self.scheme == "implicit":
      # D sqrt(A) is the tangent of th, and r its cosine.
      square = jnp.maximum(step**2 * a, math.tan(SMALLEST_ANGLE) ** 2)
      return -jnp.log1p(square) / 2, jnp.arctan(jnp.sqrt(square))
    # With S = 1 + D G, r = S^(-1/2) and
    # D^2 A = (S^(1/2) - 1)^2 + 4 S^(1/2) sin^2(th / 2).
    stiffness = step * jax.nn.relu(damping)
    root = jnp.sqrt(1 + stiffness)
    # S^(1/2) - 1, without cancellation.
    excess = stiffness / (root + 1)
    sine = (step**2 * a - excess**2) / (4 * root)
    smallest = math.sin(SMALLEST_ANGLE / 2) ** 2
    sine = jnp.clip(sine, smallest, 1 - smallest)
    return -jnp.log1p(stiffness) / 2, 2 * jnp.arcsin(jnp.sqrt(sine))


def _uniform_like(
  key: jax.Array, steps: jax.Array, damping: jax.Array | float
) -> jax.Array:
  """Draws numbers from [0, 1), in the shape of `steps`."""
  del damping
  return jax.random.uniform(key, steps.shape)


def _symmetric(fan: int) -> nn.initializers.Initializer:
  """Returns an initializer of numbers from [-1, 1) / sqrt(fan)."""

  def init(key: jax.Array, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
    limit = fan**-0.5
    return jax.random.uniform(key, shape, dtype, minval=-limit, maxval=limit)

  return init
