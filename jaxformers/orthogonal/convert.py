"""Inverses of the maps: from orthogonal matrices to parameters.

Computed in float64 on the host, once before training.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import choose

# Least distance of an eigenvalue from -1 under the Cayley map. The parameters
# grow as 4 over this distance, and float32 loses as many digits.
_NEAREST = 1e-4


def parameters(q: Any, name: str, base: Any = None) -> np.ndarray:
  """Returns the parameters a for which `MAPS[name](a, base)` equals q.

  Args:
    q: [..., d, d], orthogonal to 1e-3.
    name: name of the map: "cayley", "expm", "householder" or "matrix".
    base: [..., d, d], orthogonal, or None for the identity.

  Returns:
    float64 [..., d, d], strictly lower triangular but for "matrix".

  Raises:
    UserError: if q is not orthogonal, or if the map cannot reach it from the
      base: determinant -1; an eigenvalue -1 for "cayley"; an infinite
      reflection for "householder".
  """
  choose("orthogonal map", name, _INVERSES)
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
  defect = np.abs(q.T @ q - np.eye(len(q))).max()
  if not defect < 1e-3:
    raise UserError(
      f"Matrix {i} is not orthogonal: max |q.T q - I| is {defect:.2g}. Give an "
      "orthogonal matrix, such as its polar factor (scipy.linalg.polar)."
    )
  left, _, right = np.linalg.svd(q)
  q = left @ right  # Nearest orthogonal matrix.
  if name != "matrix" and np.linalg.det(q) < 0:
    raise UserError(
      f"Matrix {i} has determinant -1 relative to its base, but {name!r} gives "
      "rotations only. Give a base of determinant -1, such as the matrix."
    )
  return _INVERSES[name](q, i)


def _cayley(q: np.ndarray, i: int) -> np.ndarray:
  eye = np.eye(len(q))
  distance = np.linalg.svd(q + eye, compute_uv=False).min()
  if distance < _NEAREST:
    raise UserError(
      f"Matrix {i} has an eigenvalue within {distance:.1g} of -1, which "
      "'cayley' cannot reach. Give a base near to the matrix, such as the "
      "matrix itself, or take 'expm'."
    )
  return np.tril(2 * np.linalg.solve(q + eye, q - eye), -1)


def _expm(q: np.ndarray, _: int) -> np.ndarray:
  from scipy import linalg  # The import takes a quarter of a second.

  triangle, z = linalg.schur(q, output="real")
  # The Schur form of a rotation has rotations of planes, 1 and -1 on its
  # diagonal. Take the angle of each plane.
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
  # The number of -1 is even: each pair is a plane rotated by half a circle.
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
        f"Matrix {i} needs an infinite reflection {k} under 'householder'. "
        "Give a base near to the matrix, such as the matrix itself, or take "
        "'expm'."
      )
    v /= v[k]
    a[:, k] = v
    rest = rest - np.outer(v, 2 / (v @ v) * (v @ rest))
  return np.tril(a, -1)


_INVERSES = {
  "cayley": _cayley,
  "expm": _expm,
  "householder": _householder,
  "matrix": lambda q, i: q,
}
