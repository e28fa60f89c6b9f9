"""From given orthogonal matrices to the parameters that a map takes there.

In float64 on the host: this is done once, before training.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxformers.errors import UserError
from jaxformers.registry import choose

# How far the eigenvalues of a Cayley map must stay from -1: the parameters grow
# as 4 over this, and float32 loses as many digits.
_NEAREST = 1e-4


def parameters(q: Any, name: str, base: Any = None) -> np.ndarray:
  """The a with `MAPS[name](a, base)` equal to q.

  Args:
    q: [..., d, d], orthogonal to 1e-3.
    name: of the map: "cayley", "expm", "householder" or "matrix".
    base: [..., d, d], orthogonal, or None for the identity.

  Returns:
    float64 [..., d, d], strictly lower triangular but for "matrix".

  Raises:
    UserError: if q is not orthogonal, or beyond what the map can reach from
      the base: determinant -1; an eigenvalue -1 for "cayley"; a reflection
      that would have to be infinite for "householder".
  """
  choose("orthogonal map", name, _INVERSES)
  q = np.asarray(q, np.float64)
  d = q.shape[-1]
  flat = q.reshape((-1, d, d))
  if base is not None:
    base = np.broadcast_to(np.asarray(base, np.float64), q.shape)
    flat = base.reshape((-1, d, d)).swapaxes(1, 2) @ flat
  found = [_one(one, name, i) for i, one in enumerate(flat)]
  return np.stack(found).reshape(q.shape)


def _one(q: np.ndarray, name: str, i: int) -> np.ndarray:
  defect = np.abs(q.T @ q - np.eye(len(q))).max()
  if not defect < 1e-3:
    raise UserError(
      f"Matrix {i} is not orthogonal: max |q.T q - I| is {defect:.2g}. Give "
      "one that is, such as its polar factor (scipy.linalg.polar)."
    )
  left, _, right = np.linalg.svd(q)
  q = left @ right  # The nearest orthogonal matrix.
  if name != "matrix" and np.linalg.det(q) < 0:
    raise UserError(
      f"Matrix {i} has determinant -1 relative to its base; {name!r} gives "
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
  from scipy import linalg  # Takes a quarter of a second; needed here alone.

  triangle, z = linalg.schur(q, output="real")
  # Of a normal matrix: turns of planes on the diagonal, and 1 and -1 alone.
  log = np.zeros_like(q)
  alone, at = [], 0
  while at < len(q):
    if at + 1 < len(q) and abs(triangle[at + 1, at]) > 1e-12:
      sine = (triangle[at + 1, at] - triangle[at, at + 1]) / 2
      cosine = (triangle[at, at] + triangle[at + 1, at + 1]) / 2
      angle = np.arctan2(sine, cosine)
      log[at + 1, at], log[at, at + 1] = angle, -angle
      at += 2
    else:
      if triangle[at, at] < 0:
        alone.append(at)
      at += 1
  # The number of -1 is even: each pair is a plane turned by half a circle.
  for one, other in zip(alone[::2], alone[1::2], strict=True):
    log[other, one], log[one, other] = np.pi, -np.pi
  return np.tril(z @ log @ z.T, -1)


def _householder(q: np.ndarray, i: int) -> np.ndarray:
  d = len(q)
  rest, a = -q, np.zeros_like(q)
  for k in range(d):
    # H_k takes the unit vector k to the first column of what is left.
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
