"""Inverses of the maps: from orthogonal matrices to parameters.

The inverses are computed in float64 on the host, once before training.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import choose

# Least distance of an eigenvalue from -1 that the Cayley map accepts. The
# parameters grow as 4 / distance, and float32 loses precision by this factor.
_NEAREST = 1e-4


def parameters(q: Any, name: str, base: Any = None) -> np.ndarray:
  """Returns the parameters a for which `MAPS[name](a, base)` equals q.

  Args:
    q: matrices [..., d, d], orthogonal to 1e-3.
    name: name of the map: "bro", "cayley", "expm", "householder" or "matrix".
    base: orthogonal matrices [..., d, d], or None for the identity.

  Returns:
    The parameters, float64 [..., d, d], strictly lower triangular except for
    the map "matrix".

  Raises:
    UserError: if q is not orthogonal, or if the map cannot reach q from the
      base. No map but "matrix" reaches a determinant of -1 relative to the
      base; "cayley" does not reach an eigenvalue of -1; "householder" does not
      reach matrices that need an infinite vector; "bro" reaches only the Cayley
      maps of one block.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxformers.orthogonal.maps import cayley
    >>> quarter = np.array([[0.0, -1.0], [1.0, 0.0]])
    >>> parameters(quarter, "cayley").tolist()
    [[0.0, 0.0], [2.0, 0.0]]
  """
  choose("orthogonal map", name, _INVERSES)
  # Divide by the base from the left: base.T q.
  q = np.asarray(q, np.float64)
  d = q.shape[-1]
  flat = q.reshape((-1, d, d))
  if base is not None:
    base = np.broadcast_to(np.asarray(base, np.float64), q.shape)
    flat = base.reshape((-1, d, d)).swapaxes(1, 2) @ flat
  a = [_invert(matrix, name, i) for i, matrix in enumerate(flat)]
  return np.stack(a).reshape(q.shape)


def _invert(q: np.ndarray, name: str, i: int) -> np.ndarray:
  """Returns the parameters of matrix i, q [d, d], relative to its base."""
  # Check that q is orthogonal, and replace it by the nearest orthogonal matrix.
  defect = np.abs(q.T @ q - np.eye(len(q))).max()
  if not defect < 1e-3:
    raise UserError(
      f"Matrix {i} is not orthogonal: max |q.T q - I| is {defect:.2g}. Give an "
      "orthogonal matrix, such as its polar factor (scipy.linalg.polar)."
    )
  left, _, right = np.linalg.svd(q)
  q = left @ right
  if name != "matrix" and np.linalg.det(q) < 0:
    raise UserError(
      f"Matrix {i} has determinant -1 relative to its base, but {name!r} gives "
      "rotations only. Give a base of determinant -1, such as the matrix."
    )
  return _INVERSES[name](q, i)


def _cayley(q: np.ndarray, i: int) -> np.ndarray:
  # The least singular value of q + I is the least distance of an eigenvalue
  # from -1.
  eye = np.eye(len(q))
  distance = np.linalg.svd(q + eye, compute_uv=False).min()
  if distance < _NEAREST:
    raise UserError(
      f"Matrix {i} has an eigenvalue within {distance:.1g} of -1, which "
      "'cayley' cannot reach. Give a base close to the matrix, such as the "
      "matrix itself, or use 'expm'."
    )
  # s = 2 (q + I)^-1 (q - I)
  return np.tril(2 * np.linalg.solve(q + eye, q - eye), -1)


def _bro(q: np.ndarray, i: int) -> np.ndarray:
  a, r = _cayley(q, i) / 2, len(q) // 2
  block = np.zeros_like(a)
  block[r:, :r] = a[r:, :r]
  rest = np.abs(a - block).max(initial=0)
  if rest > _NEAREST:
    raise UserError(
      f"Matrix {i} is no product of two block reflections: outside the block "
      f"of 'bro' it needs parameters of up to {rest:.1g}. Give a base close to "
      "the matrix, such as the matrix itself, or use 'expm'."
    )
  return block


def _expm(q: np.ndarray, _: int) -> np.ndarray:
  from scipy import linalg  # The import takes a quarter of a second.

  triangle, z = linalg.schur(q, output="real")
  # The diagonal of the Schur form of a rotation consists of plane rotations,
  # [2, 2], and of 1 and -1. Take the angle of each plane.
  log = np.zeros_like(q)
  negative, i = [], 0
  while i < len(q):
    if i + 1 < len(q) and abs(triangle[i + 1, i]) > 1e-12:
      sine = (triangle[i + 1, i] - triangle[i, i + 1]) / 2
      cosine = (triangle[i, i] + triangle[i + 1, i + 1]) / 2
      angle = np.arctan2(sine, cosine)
      log[i + 1, i], log[i, i + 1] = angle, -angle
      i += 2
    else:
      if triangle[i, i] < 0:
        negative.append(i)
      i += 1
  # The number of -1 is even. Each pair is a plane rotated by pi.
  for i, j in zip(negative[::2], negative[1::2], strict=True):
    log[j, i], log[i, j] = np.pi, -np.pi
  return np.tril(z @ log @ z.T, -1)


def _householder(q: np.ndarray, i: int) -> np.ndarray:
  d = len(q)
  rest, a = -q, np.zeros_like(q)
  for k in range(d):
    # H_k maps the unit vector k to column k of the remaining matrix.
    v = -rest[:, k].copy()
    v[:k] = 0
    v[k] += 1
    if abs(v[k]) < _NEAREST:
      raise UserError(
        f"Matrix {i} needs an infinite vector in reflection {k} of "
        "'householder'. Give a base close to the matrix, such as the matrix "
        "itself, or use 'expm'."
      )
    # Scale v to v[k] = 1, store v, and apply the reflection to the rest.
    v /= v[k]
    a[:, k] = v
    rest = rest - np.outer(v, 2 / (v @ v) * (v @ rest))
  return np.tril(a, -1)


_INVERSES = {
  "bro": _bro,
  "cayley": _cayley,
  "expm": _expm,
  "householder": _householder,
  "matrix": lambda q, i: q,
}
