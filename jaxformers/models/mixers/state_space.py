"""Initial values and discretisation of state-space models x' = A x + B u.

A is diagonal. Tables of initial eigenvalues are NumPy arrays in float64;
functions of trained parameters use JAX. Complex numbers are pairs of real
arrays there, as in `scan`.
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

SMALLEST_STEP = 1e-4  # Lower bound of the steps of `softplus_steps`.


def legs(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns the diagonalised normal part of HiPPO-LegS.

  The matrix of HiPPO-LegS has -sqrt(2n + 1) sqrt(2k + 1) below the diagonal and
  -(n + 1) on the diagonal. Its normal part is its sum with p p^T, where
  p_n = sqrt(n + 1/2).

  Source: Gu et al. 2022, https://arxiv.org/abs/2206.11893, section 3.3;
  Smith et al. 2023, https://arxiv.org/abs/2208.04933, appendix B.1.1.

  Args:
    size: number of states N.

  Returns:
    The eigenvalues, complex128 [N], ascending by their imaginary parts; the
    eigenvectors as columns of a unitary V [N, N]; and V^* b, [N], with
    b_n = sqrt(2n + 1).
  """
  # The matrix of HiPPO-LegS and its normal part.
  n = np.arange(size, dtype=np.float64)
  root = np.sqrt(2 * n + 1)
  matrix = -np.tril(np.outer(root, root), -1) - np.diag(n + 1)
  p = np.sqrt(n + 0.5)
  normal = matrix + np.outer(p, p)
  # The diagonal of the normal part is -1/2, and the rest is skew-symmetric.
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
  """Raises UserError unless each block is made of conjugate pairs of states."""
  if state_size % (2 * blocks):
    raise UserError(
      f"state_size={state_size} does not give pairs of conjugate states in "
      f"{blocks} block(s): choose a multiple of {2 * blocks}."
    )


def log_uniform(low: float, high: float) -> Callable[..., jax.Array]:
  """Returns an initializer of log steps, uniform from log(low) to log(high).

  Raises:
    UserError: unless 0 < low <= high.
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


def softplus_steps(low: float, high: float) -> Callable[..., jax.Array]:
  """Returns an initializer of x with softplus(x) log-uniform in [low, high].

  The steps softplus(x) are at least `SMALLEST_STEP`.

  Source: Gu and Dao 2023, https://arxiv.org/abs/2312.00752, section 3.6, and
  their code.

  Raises:
    UserError: unless 0 < low <= high.
  """
  log = log_uniform(low, high)

  def init(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    step = jnp.maximum(jnp.exp(log(key, shape)), SMALLEST_STEP)
    # Inverse of softplus: log(exp(step) - 1).
    return step + jnp.log(-jnp.expm1(-step))

  return init


def _zoh(eigenvalue: Pair, step: jax.Array) -> tuple[Pair, Pair]:
  """Returns log a = D l and the factor (a - 1) / l of the zero-order hold.

  D is the step and l the eigenvalue.
  """
  log = Pair(eigenvalue.real * step, eigenvalue.imag * step)
  return log, _divide(_minus_one(log), eigenvalue, step)


def _minus_one(log: Pair) -> Pair:
  """Returns exp(log) - 1 without cancellation."""
  size = jnp.expm1(log.real)
  real = size * jnp.cos(log.imag) - 2 * jnp.sin(log.imag / 2) ** 2
  return Pair(real, (size + 1) * jnp.sin(log.imag))


def _divide(x: Pair, y: Pair, limit: jax.Array) -> Pair:
  """Returns x / y, or `limit` where y is 0."""
  # x / y = x conj(y) / |y|^2
  square = y.real**2 + y.imag**2
  # Divide by 1 where y is 0, so that gradients are finite.
  is_zero = square == 0
  square = jnp.where(is_zero, 1, square)
  return Pair(
    jnp.where(is_zero, limit, (x.real * y.real + x.imag * y.imag) / square),
    jnp.where(is_zero, 0, (x.imag * y.real - x.real * y.imag) / square),
  )


def hold(log: Pair, size: jax.Array) -> tuple[Pair, Pair]:
  """Returns a^s and (a^s - 1) / (a - 1), where a = exp(log) and s is `size`.

  For an integer s, s steps h <- a h + v with an equal input v are one step
  h <- a^s h + (1 + a + ... + a^(s-1)) v. These are its factors, for real s >= 0
  too. Under a zero-order hold, a step that is s times as long has the same
  factors.

  Args:
    log: logarithms of the factors, a pair of arrays.
    size: sizes s of the steps; log and size are broadcast.
  """
  held = Pair(log.real * size, log.imag * size)
  gain = _divide(_minus_one(held), _minus_one(log), size)
  return exponential(held), gain


def _bilinear(eigenvalue: Pair, step: jax.Array) -> tuple[Pair, Pair]:
  """Returns log a and the factor D / (1 - D l / 2) of the bilinear method.

  a = (1 + D l / 2) / (1 - D l / 2), D is the step and l the eigenvalue.
  """
  # log a = log |a| + i arg a, from x + i y = D l / 2.
  x, y = eigenvalue.real * step / 2, eigenvalue.imag * step / 2
  above, below = (1 + x) ** 2 + y**2, (1 - x) ** 2 + y**2
  angle = jnp.arctan2(y, 1 + x) + jnp.arctan2(y, 1 - x)
  log = Pair((jnp.log(above) - jnp.log(below)) / 2, angle)
  return log, Pair(step * (1 - x) / below, step * y / below)


METHODS = {"zoh": _zoh, "bilinear": _bilinear}


def discretize(
  eigenvalue: Pair, step: jax.Array, method: str
) -> tuple[Pair, Pair]:
  """Returns log a and `factor` in h_t = a h_(t-1) + factor B u_t.

  Source: Gu et al. 2022, https://arxiv.org/abs/2206.11893, section 3.1.

  Args:
    eigenvalue: eigenvalues of A, a pair of arrays of any shape.
    step: step sizes, an array of the shape of the eigenvalues.
    method: "zoh" for a zero-order hold, or "bilinear".
  """
  return METHODS[choose("discretization", method, METHODS)](eigenvalue, step)


def exponential(log: Pair) -> Pair:
  """Returns exp(log) of complex numbers."""
  size = jnp.exp(log.real)
  return Pair(size * jnp.cos(log.imag), size * jnp.sin(log.imag))
