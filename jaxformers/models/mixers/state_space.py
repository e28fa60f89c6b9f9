"""Linear state-space models x' = A x + B u with a diagonal A: starts and steps.

Tables of eigenvalues are NumPy's in float64; what a step computes is JAX's.
Complex numbers are pairs of real arrays, as in `scan`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import choose
from jaxformers.scan import Pair


def legs(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns the diagonal form of HiPPO-LegS: its normal part, diagonalised.

  The matrix has -sqrt(2n + 1) sqrt(2k + 1) below the diagonal and -(n + 1) on
  it; with p p^T added, p_n = sqrt(n + 1/2), it is normal.

  Source: Gu et al. 2022, https://arxiv.org/abs/2206.11893, section 3.3;
  Smith et al. 2023, https://arxiv.org/abs/2208.04933, appendix B.1.1.

  Args:
    size: number of states N.

  Returns:
    The eigenvalues, complex128 [N], ascending by their imaginary parts; the
    eigenvectors as columns of a unitary V [N, N]; and V^* b, [N], with
    b_n = sqrt(2n + 1).
  """
  n = np.arange(size, dtype=np.float64)
  root = np.sqrt(2 * n + 1)
  matrix = -np.tril(np.outer(root, root), -1) - np.diag(n + 1)
  p = np.sqrt(n + 0.5)
  normal = matrix + np.outer(p, p)
  # All of the diagonal is -1/2, and the rest is skew.
  imag, vectors = np.linalg.eigh(-1j * (normal + np.eye(size) / 2))
  return -0.5 + 1j * imag, vectors, vectors.conj().T @ root


def s4d_lin(size: int) -> np.ndarray:
  """Returns -1/2 + i pi n for half of the states, complex128 [N / 2].

  Source: Gu et al. 2022, https://arxiv.org/abs/2206.11893, equation 9.
  """
  return -0.5 + 1j * np.pi * np.arange(size // 2)


def s4d_inv(size: int) -> np.ndarray:
  """Returns -1/2 + i N/pi (N/(2n + 1) - 1), complex128 [N / 2].

  Source: Gu et al. 2022, https://arxiv.org/abs/2206.11893, equation 8.
  """
  n = np.arange(size // 2)
  return -0.5 + 1j * size / np.pi * (size / (2 * n + 1) - 1)


def check_pairs(state_size: int, blocks: int = 1) -> None:
  """Raises UserError for states that are not pairs of conjugates by block."""
  if state_size % (2 * blocks):
    raise UserError(
      f"state_size={state_size} is not pairs of conjugate states in each of "
      f"{blocks} block(s): choose a multiple of {2 * blocks}."
    )


def log_uniform(low: float, high: float) -> Callable[..., jax.Array]:
  """Returns an initializer of logarithms of steps between low and high.

  Raises:
    UserError: for low above high.
  """
  if not 0 < low <= high:
    raise UserError(
      f"step_min={low} and step_max={high}: give 0 < step_min <= step_max."
    )

  def init(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.uniform(
      key, shape, minval=math.log(low), maxval=math.log(high)
    )

  return init


def _zoh(eigenvalue: Pair, step: jax.Array) -> tuple[Pair, Pair]:
  """Zero-order hold: log a = D l, and (a - 1) / l times B."""
  log = Pair(eigenvalue.real * step, eigenvalue.imag * step)
  # a - 1 without cancellation.
  size = jnp.expm1(log.real)
  real = size * jnp.cos(log.imag) - 2 * jnp.sin(log.imag / 2) ** 2
  imag = (size + 1) * jnp.sin(log.imag)
  square = eigenvalue.real**2 + eigenvalue.imag**2
  # The limit at 0 is the step; divide by 1 there, for the gradient's sake.
  is_zero = square == 0
  square = jnp.where(is_zero, 1, square)
  l_real, l_imag = eigenvalue
  quotient = Pair(
    jnp.where(is_zero, step, (real * l_real + imag * l_imag) / square),
    jnp.where(is_zero, 0, (imag * l_real - real * l_imag) / square),
  )
  return log, quotient


def _bilinear(eigenvalue: Pair, step: jax.Array) -> tuple[Pair, Pair]:
  """log of a = (1 + D l / 2) / (1 - D l / 2), and D / (1 - D l / 2)."""
  x, y = eigenvalue.real * step / 2, eigenvalue.imag * step / 2
  above, below = (1 + x) ** 2 + y**2, (1 - x) ** 2 + y**2
  angle = jnp.arctan2(y, 1 + x) + jnp.arctan2(y, 1 - x)
  log = Pair((jnp.log(above) - jnp.log(below)) / 2, angle)
  return log, Pair(step * (1 - x) / below, step * y / below)


METHODS = {"zoh": _zoh, "bilinear": _bilinear}


def discretize(
  eigenvalue: Pair, step: jax.Array, method: str
) -> tuple[Pair, Pair]:
  """Returns log a and the factor of B of h_t = a h_(t-1) + factor B u_t.

  Source: Gu et al. 2022, https://arxiv.org/abs/2206.11893, section 3.1.

  Args:
    eigenvalue: a pair of any shape, eigenvalues of A.
    step: step size, of the same shape.
    method: "zoh", zero-order hold, or "bilinear".
  """
  return METHODS[choose("discretization", method, METHODS)](eigenvalue, step)


def exponential(log: Pair) -> Pair:
  """Returns exp of a pair."""
  size = jnp.exp(log.real)
  return Pair(size * jnp.cos(log.imag), size * jnp.sin(log.imag))
