"""Several residual streams around a branch: hyper-connections.

A token has s streams X [s, d]. A branch f reads a weighted sum of them and is
added to each, while a matrix H mixes the streams:

    X' = H X + post^T f(pre X).

The matrix H is doubly stochastic or orthogonal, by the option `mixing`.
Products of doubly stochastic matrices approach the matrix of all 1/s, so that
deep streams become equal; products of orthogonal matrices keep all streams. See
docs/theory.md, section 19.

Source: Zhu et al. 2024, https://arxiv.org/abs/2409.19606; Xie et al. 2025,
https://arxiv.org/abs/2512.24880 (mHC).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformers import orthogonal
from jaxformers.foundations.registry import choose
from jaxformers.models.mixers.scores import HIGHEST
from jaxformers.models.reductions import wide

# Start of logits that keep the streams apart, as in mHC-lite's code
# (https://arxiv.org/abs/2601.05732).
APART = -8.0


def sinkhorn(logits: jax.Array, rounds: int = 20) -> jax.Array:
  """Returns exp(logits) after rounds of normalising rows, then columns.

  Columns have the sum 1. Rows have it only in the limit: after 20 rounds with
  logits of deviation 8, they differ from 1 by up to 0.2.

  Args:
    logits: [..., s, s].
    rounds: number of rounds.
  """

  def normalise(x: jax.Array, _: None) -> tuple[jax.Array, None]:
    for axis in (-1, -2):
      x = x - jax.nn.logsumexp(x, axis, keepdims=True)
    return x, None

  return jnp.exp(jax.lax.scan(normalise, logits, None, length=rounds)[0])


def permutations(logits: jax.Array) -> jax.Array:
  """Returns the mean of all permutation matrices under a softmax.

  Every doubly stochastic matrix is such a mean (Birkhoff).

  Args:
    logits: [..., s!], in the order of `itertools.permutations`.
  """
  weights = jax.nn.softmax(logits, -1)
  size = next(s for s in range(10) if math.factorial(s) == logits.shape[-1])
  # The identity is the first permutation.
  rows = np.array(list(itertools.permutations(range(size))))
  matrices = jnp.asarray(np.eye(size)[rows], weights.dtype)
  return jnp.einsum("...r,rij->...ij", weights, matrices, precision=HIGHEST)


def _rotation(logits: jax.Array) -> jax.Array:
  """Returns rotations [..., s, s] from s (s - 1) / 2 angles."""
  size = (1 + math.isqrt(1 + 8 * logits.shape[-1])) // 2
  rows, columns = np.tril_indices(size, -1)
  shape = (*logits.shape[:-1], size, size)
  return orthogonal.cayley(
    jnp.zeros(shape, logits.dtype).at[..., rows, columns].set(logits)
  )


def orthostochastic(logits: jax.Array) -> jax.Array:
  """Returns the squares of the entries of a rotation, doubly stochastic.

  Source: https://arxiv.org/abs/2604.02309, with blocks of size 1.

  Args:
    logits: angles, [..., s (s - 1) / 2].
  """
  return jnp.square(_rotation(logits))


def mean_orthogonal(logits: jax.Array) -> jax.Array:
  """Returns an orthogonal matrix that keeps the mean of the streams.

  The matrix is 11^T / s + B Q B^T with a rotation Q of s - 1 dimensions, and
  columns B that are orthonormal and orthogonal to the vector 1.

  Args:
    logits: angles of Q, [..., (s - 1) (s - 2) / 2].
  """
  q = _rotation(logits)
  s = q.shape[-1] + 1
  # Take the basis from a QR factorisation that begins with the vector 1.
  start = np.concatenate([np.ones((s, 1)), np.eye(s)[:, :-1]], 1)
  basis = jnp.asarray(np.linalg.qr(start)[0][:, 1:], q.dtype)
  inside = jnp.einsum("ia,...ab,jb->...ij", basis, q, basis, precision=HIGHEST)
  return inside + 1 / s


class Mixing(NamedTuple):
  """Family of matrices that mix streams.

  Attributes:
    shape: shape of the logits for s streams.
    start: logits at initialization for s streams and a random key.
    matrix: map from logits to matrices [..., s, s].
    least, most: smallest and greatest number of streams.
  """

  shape: Callable[[int], tuple[int, ...]]
  start: Callable[[int, jax.Array], jax.Array]
  matrix: Callable[[jax.Array], jax.Array]
  least: int = 2
  most: int = 16


def _angles(of: Callable[[int], int]) -> tuple[Callable, Callable]:
  """Returns shape and start of the angles of a rotation of `of(s)` axes."""

  def shape(s: int) -> tuple[int, ...]:
    return (of(s) * (of(s) - 1) // 2,)

  # At angle 0 the squares of a rotation have no slope.
  return shape, lambda s, key: 0.1 * jax.random.normal(key, shape(s))


MIXINGS = {
  "sinkhorn": Mixing(
    lambda s: (s, s),
    lambda s, _: APART * (1 - jnp.eye(s)),
    sinkhorn,
  ),
  "permutations": Mixing(
    lambda s: (math.factorial(s),),
    lambda s, _: jnp.full(math.factorial(s), APART).at[0].set(0),
    permutations,
    most=5,
  ),
  "orthostochastic": Mixing(*_angles(lambda s: s), orthostochastic),
  "orthogonal": Mixing(*_angles(lambda s: s), _rotation),
  "mean_orthogonal": Mixing(
    *_angles(lambda s: s - 1), mean_orthogonal, least=3
  ),
}


def expand(x: jax.Array, streams: int) -> jax.Array:
  """Returns copies of tokens [b, n, d] as streams [b, n, s, d].

  One stream has no axis.
  """
  if streams == 1:
    return x
  return jnp.broadcast_to(x[:, :, None], (*x.shape[:2], streams, x.shape[-1]))


def reduce(x: jax.Array, streams: int) -> jax.Array:
  """Returns the mean of streams [b, n, s, d], which inverts `expand`.

  Differs from the source, which sums the streams: a norm after it cancels the
  factor.
  """
  return x if streams == 1 else x.mean(2)


class Connection(nn.Module):
  """Weights of the streams around a branch: X [b, n, s, d] -> pre, post, H.

  With u = vec(X) / rms(vec(X)), the weights are

      pre = sigmoid(a1 u W1 + b1), post = 2 sigmoid(a2 u W2 + b2),
      H = P(a3 u W3 + b3),

  where P is the map of `mixing`. At first W is 0, so no weight depends on the
  token, a is 0.01, and b is 1 for one stream, the number of the layer modulo s,
  and -1 for the others, which the branch reads and writes less. The matrices H
  are float32, and are sown as `mixing` into `intermediates`.

  Source: equations 5 to 8 of Xie et al. 2025; start as in mHC-lite's code.

  Attributes:
    mixing: family of H, in `MIXINGS`.
    layer: number of the layer, from 0.
    is_dynamic: False for weights that are the same at all tokens.
  """

  mixing: str
  layer: int
  is_dynamic: bool = True

  @nn.compact
  def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns pre and post, [b or 1, n or 1, s], and H, [..., s, s]."""
    s, d = x.shape[2:]
    family = MIXINGS[choose("mixing", self.mixing, MIXINGS)]

    def one_stream(_: jax.Array) -> jax.Array:
      return 2.0 * jax.nn.one_hot(self.layer % s, s) - 1

    pre, post = (
      self.param(f"{name}_bias", one_stream)[None, None]
      for name in ("pre", "post")
    )
    logits = self.param("mixing_bias", lambda key: family.start(s, key))
    logits = logits[None, None]
    if self.is_dynamic:
      # Without a kernel's name, weight decay and Muon leave W out.
      shape = family.shape(s)
      sizes = np.cumsum([s, s])
      width = 2 * s + math.prod(shape)
      zeros = nn.initializers.zeros
      w = self.param("stream_gate", zeros, (s * d, width))
      a = self.param("scale", nn.initializers.constant(0.01), (3,))
      u = wide(x).reshape(*x.shape[:2], s * d)
      rms = jax.lax.rsqrt(jnp.square(u).mean(-1, keepdims=True) + 1e-6)
      y = jnp.matmul(u * rms, w, precision=HIGHEST)
      to_pre, to_post, rest = jnp.split(y, sizes, -1)
      pre, post = pre + a[0] * to_pre, post + a[1] * to_post
      logits = logits + a[2] * rest.reshape(*rest.shape[:2], *shape)
    matrix = family.matrix(logits)
    self.sow("intermediates", "mixing", matrix)
    return jax.nn.sigmoid(pre), 2 * jax.nn.sigmoid(post), matrix


def weigh(weights: jax.Array, x: jax.Array) -> jax.Array:
  """Returns the sum of streams [b, n, s, d] by weights [..., s], [b, n, d]."""
  # With few streams, a sum of products needs no small matrices.
  parts = (weights[..., i, None] * x[:, :, i] for i in range(x.shape[2]))
  return functools.reduce(jnp.add, parts)


def mix(matrix: jax.Array, x: jax.Array) -> jax.Array:
  """Returns H X for streams X [b, n, s, d] and matrices H [..., s, s]."""
  return jnp.stack([weigh(matrix[..., i, :], x) for i in range(x.shape[2])], 2)
