"""Mega: a moving average of the tokens, then gated attention of one head."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.foundations import platforms
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Fraction, Length, OptionalSize, Size
from jaxformers.foundations.registry import choose
from jaxformers.models.cache import (
  check_causal,
  extend,
  is_decoding,
  recall,
  remember,
)
from jaxformers.models.dropout import Dropout, make_dropout
from jaxformers.models.kinds import EIGENVALUES
from jaxformers.models.mixer import MIXERS
from jaxformers.models.mixers.blocked import split
from jaxformers.models.mixers.convolution import (
  convolve,
  move_back,
  sum_powers,
  to_front,
)
from jaxformers.models.mixers.recurrence import dense
from jaxformers.models.mixers.scores import dot, hide
from jaxformers.models.reductions import wide
from jaxformers.models.rotary import ROTARY_BASE
from jaxformers.models.variants import MODELS, Variant
from jaxformers.scan import Pair, linear_scan

MODELS.register("mega")(
  Variant(
    "mega",
    "gated",
    recurrence="gated",
    count_layers=lambda d, n, layers: (
      layers * (12 * d * d + 207 * d + 2 * n + 319)
    ),
  )
)

BLOCK = 256  # Queries whose weights are in memory at a time.
START = 0.02  # Initial standard deviation of kernels and biases.
BIASES = ("simple", "rotary")
# Mean and deviation of the Laplace function, which approximates squared ReLU.
MEAN, DEVIATION = math.sqrt(0.5), math.sqrt(0.25 / math.pi)


class Head(NamedTuple):
  """Queries, keys, values and mask of one head.

  Attributes:
    q, k: queries and keys, [b, n, z].
    v: values, [b, n, v].
    mask: bool [b, n], True at tokens.
  """

  q: jax.Array
  k: jax.Array
  v: jax.Array
  mask: jax.Array


def softmax_weights(scores: jax.Array, seen: jax.Array) -> jax.Array:
  """Returns the softmax of the scores over the visible keys."""
  return jax.nn.softmax(hide(scores, seen), -1)


def laplace_weights(scores: jax.Array, seen: jax.Array) -> jax.Array:
  """Returns (1 + erf((s - m) / (sqrt 2 d))) / 2, and 0 at masked keys.

  Source: Ma et al. 2023, https://arxiv.org/abs/2209.10655, equation 17. Differs
  from the authors' code, where m and d have six digits (0.707107 and 0.282095);
  here they are exact, which changes weights by 1e-6.
  """
  standard = (scores - MEAN) / (math.sqrt(2) * DEVIATION)
  return jnp.where(seen, (1 + jax.lax.erf(standard)) / 2, 0)


WEIGHTS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
  "softmax": softmax_weights,
  "laplace": laplace_weights,
}


@MIXERS.register("mega")
class Mega(nn.Module):
  """Mega: u (h - x), with h from gated attention over a damped moving average.

  X' = SiLU(EMA(x)); Z = SiLU(X' Wz); queries and keys are Z, scaled and shifted
  by channels; V = SiLU(x Wv); O = weights V; with gates r and u from X',
  h = SiLU(X' Wh + (r * O) Uh + b). The block adds the result to x. The moving
  average has `state_size` real states per channel. With both directions, the
  present token counts twice, as in the authors' code. Time grows as n^2 (as n
  with `attention_chunk`), and memory as n.

  Source: Ma et al. 2023, https://arxiv.org/abs/2209.10655, section 3.

  Attributes:
    state_size: number of states of the moving average per channel.
    query_dim: width z of queries and keys.
    value_dim: width v of values; 0 for 2 d.
    weights: "softmax", or "laplace", which first divides the scores by the
      number of visible keys.
    bias: "simple" for a learned bias per distance, or "rotary".
    attention_chunk: size of the chunks within which tokens attend
      (Mega-chunk); 0 for attention to all tokens.
    truncation: number of lags of the moving average's kernel; 0 for all.
    causal: True to read only the present and earlier tokens; False to read in
      both directions.
    dropout_rate: dropout of X' and h.
    value_dropout_rate: dropout of V.
    weight_dropout_rate: dropout of the attention weights.
    max_len: greatest number of tokens, for biases and cache.
    dtype: compute type; parameters and moving average are float32.
  """

  kinds: ClassVar[dict[str, str]] = {
    "delta": EIGENVALUES,
    "alpha": EIGENVALUES,
  }
  has_step: ClassVar[bool] = True  # Decoding continues from a cache.

  state_size: Size = 16
  query_dim: Size = 64
  value_dim: OptionalSize = 0
  weights: str = "softmax"
  bias: str = "simple"
  attention_chunk: OptionalSize = 0
  truncation: OptionalSize = 0
  causal: bool = False
  dropout_rate: Fraction = 0.0
  value_dropout_rate: Fraction = 0.0
  weight_dropout_rate: Fraction = 0.0
  max_len: Length = 0
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    *,
    mask: jax.Array,
    carry: Any,
    train: bool,
    residual: jax.Array | None = None,
  ) -> tuple[jax.Array, Any]:
    self._check(x.shape[1])
    d, z = x.shape[-1], self.query_dim
    v = self.value_dim or 2 * d
    residual = x if residual is None else residual
    x = x.astype(self.dtype)
    # Values V come from x; everything else comes from the moving average X'.
    values = nn.silu(self._dense(x, v, "v_proj"))
    values = make_dropout(self, self.value_dropout_rate, train=train)(values)
    # X' = SiLU(EMA(x))
    averaged = nn.silu(self._average(x, mask))
    averaged = make_dropout(self, self.dropout_rate, train=train)(averaged)
    # Map X' to the update gate, Z, the reset gate and the candidate.
    base = self._dense(averaged, d + z + v + d, "mx_proj")
    update, shared, reset, candidate = jnp.split(
      base, (d, d + z, d + z + v), axis=-1
    )
    q, k = self._queries_and_keys(nn.silu(shared))
    # Attend: O = weights V.
    head = Head(q, k, values, mask)
    dropout = make_dropout(self, self.weight_dropout_rate, train=train)
    attended = self._attend(head, dropout)
    # h = SiLU(X' Wh + (r * O) Uh + b); return u (h - x).
    h = self._dense(nn.silu(reset) * attended, d, "h_proj")
    h = make_dropout(self, self.dropout_rate, train=train)(
      nn.silu(candidate + h)
    )
    change = h.astype(residual.dtype) - residual
    return jax.nn.sigmoid(update).astype(residual.dtype) * change, carry

  def _queries_and_keys(self, shared: jax.Array) -> list[jax.Array]:
    """Returns queries and keys: channels of Z [b, n, z], scaled and shifted."""
    shape = (2, self.query_dim)
    gamma = self.param("gamma", nn.initializers.normal(START), shape)
    beta = self.param("beta", nn.initializers.zeros, shape)
    gamma, beta = (a.astype(shared.dtype)[:, None, None] for a in (gamma, beta))
    return [shared * gamma[i] + beta[i] for i in range(2)]

  def _dense(self, x: jax.Array, width: int, name: str) -> jax.Array:
    return dense(x, width, name, init_std=START, dtype=self.dtype)

  def _check(self, n: int) -> None:
    check_causal(self, causal=self.causal)
    if self.max_len and n > self.max_len:
      raise UserError(
        f"A sequence of {n} tokens is longer than max_len={self.max_len}: "
        "raise max_len or cut the sequence."
      )
    choose("weights", self.weights, WEIGHTS)
    if choose("bias", self.bias, BIASES) == "rotary" and self.query_dim % 2:
      raise UserError(
        f'query_dim={self.query_dim} is odd, but bias="rotary" turns pairs of '
        "channels: choose an even query_dim."
      )

  def _average(self, x: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns EMA(x) + omega x, [b, n, d] in the dtype of x."""
    # Create the parameters, with a row for each channel and direction.
    d, size = x.shape[-1], self.state_size
    rows = d if self.causal else 2 * d
    normal = nn.initializers.normal

    # beta starts with alternating signs.
    def init_beta(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
      signs = jnp.where(jnp.arange(size) % 2, -1.0, 1.0)[None]
      return signs + START * jax.random.normal(key, shape)

    delta = self.param("delta", normal(0.2), (rows, size))
    alpha = self.param("alpha", normal(0.2), (rows, size))
    beta = self.param("ema_beta", init_beta, (rows, size))
    eta = self.param("eta", normal(1.0), (rows, size))
    omega = self.param("omega", normal(1.0), (d,))
    # log q = log(1 - sigmoid(delta) sigmoid(alpha)).
    p = jax.nn.sigmoid(delta)
    # The product may round to 1, whose logarithm would be infinite.
    log_q = jnp.log1p(-jnp.minimum(p * jax.nn.sigmoid(alpha), 1 - 2**-24))
    weight = p * beta * eta * size**-0.5
    skip = omega.astype(x.dtype)[None, None] * x
    # Decode by the recurrence, whose state is in the cache.
    if is_decoding(self):
      if 0 < self.truncation < self.max_len:
        raise UserError(
          f"truncation={self.truncation} cuts the moving average, but decoding "
          "from a cached state cannot. Remove the option."
        )
      drive = wide(x)[..., None] * (p * beta)[None, None]
      states, last = linear_scan(
        jnp.exp(log_q), drive, mask=mask, initial=recall(self, "average")
      )
      remember(self, "average", last)
      y = jnp.einsum("bndh,dh->bnd", states, eta * size**-0.5)
      return y.astype(x.dtype) + skip
    # Otherwise convolve with k_l = sum_j weight_j q_j^l, cut at `truncation`.
    n = x.shape[1]
    zero = jnp.zeros_like(log_q)
    kernel = sum_powers(Pair(log_q, zero), Pair(weight, zero), n)
    if 0 < self.truncation < n:
      kernel = kernel.at[:, self.truncation :].set(0)
    kernels = [kernel[i : i + d] for i in range(0, rows, d)]
    y = convolve(to_front(wide(x), mask), *kernels)
    return move_back(y, mask).astype(x.dtype) + skip

  def _attend(self, head: Head, dropout: Dropout) -> jax.Array:
    """Returns the sums of values [b, n, v] under the weights of one head."""
    biases = self._biases()
    if is_decoding(self):
      return self._attend_to_cache(head, biases, dropout)
    # Without chunks, attend to the whole sequence.
    n, chunk = head.mask.shape[1], self.attention_chunk
    if not chunk or chunk >= n:
      return self._by_blocks(head, biases, dropout)
    # Attend within chunks, as if they were separate samples.
    parts = Head(
      *(
        (cut := split(array, chunk, 1)).reshape(-1, chunk, *cut.shape[3:])
        for array in head
      )
    )
    y = self._by_blocks(parts, biases, dropout)
    return y.reshape(len(head.mask), -1, y.shape[-1])[:, :n]

  def _by_blocks(
    self, head: Head, biases: jax.Array, dropout: Dropout
  ) -> jax.Array:
    """Attends with one block of queries at a time."""
    n = head.mask.shape[1]
    size = min(BLOCK, n)
    keys = jnp.arange(n)
    # Padding queries of the last block may be farther from a key than the
    # biases reach: pad the biases with zeros.
    padded = jnp.pad(biases, (size, 0))[None]
    # Give the samples of each device a copy. Otherwise the devices would send a
    # gradient in every block.
    parts = math.gcd(platforms.row_parts(), len(head.q))
    padded = jnp.repeat(padded, parts, 0)

    @jax.checkpoint
    def attend(args: Any) -> jax.Array:
      i, q = args
      queries = i * size + jnp.arange(size)
      seen = head.mask[:, None]
      if self.causal:
        seen = seen & (keys[None] <= queries[:, None])[None]
      # Cut out the biases of the block. The first one is for key 0 and the last
      # query of the block.
      first = len(biases) // 2 + 1 - i * size
      near = jax.lax.dynamic_slice_in_dim(padded, first, size + n - 1, 1)
      offsets = jax.vmap(lambda values: _toeplitz(values, size, n))(near)
      if parts > 1:
        offsets = jnp.repeat(offsets, len(head.q) // parts, 0)
      return self._weigh(head._replace(q=q), seen, offsets, dropout.fold(i))

    # Loop over the blocks, [blocks, b, size, z].
    blocks = jnp.moveaxis(split(head.q, size, 1), 1, 0)
    y = jax.lax.map(attend, (jnp.arange(len(blocks)), blocks))
    return jnp.moveaxis(y, 0, 1).reshape(len(head.q), -1, y.shape[-1])[:, :n]

  def _attend_to_cache(
    self, head: Head, biases: jax.Array, dropout: Dropout
  ) -> jax.Array:
    """Attends to all tokens so far, including the tokens of the cache."""
    longest = self._longest()
    cached = extend(self, head.mask, longest, k=head.k, v=head.v)
    keys, seen = jnp.arange(longest), cached.seen
    # Mask keys of other chunks.
    if self.attention_chunk:
      query_chunks, key_chunks = (
        a // self.attention_chunk for a in (cached.places, keys)
      )
      seen = seen & (query_chunks[..., None] == key_chunks[None, None])
    # Look up the bias of each pair by its distance.
    distances = keys[None, None] - cached.places[..., None]
    offsets = biases[jnp.clip(distances + len(biases) // 2, 0, len(biases) - 1)]
    head = head._replace(k=cached.arrays["k"], v=cached.arrays["v"])
    return self._weigh(head, seen, offsets, dropout)

  def _weigh(
    self, head: Head, seen: jax.Array, offsets: jax.Array, dropout: Dropout
  ) -> jax.Array:
    """Returns the weighted sums of the values, [b, s, v].

    Args:
      head: queries [b, s, z], and keys and values of m tokens; the mask is not
        used.
      seen: True where a query sees a key, [b, 1 or s, m].
      offsets: biases that are added to the scores, [1 or b, s, m].
      dropout: dropout of the weights.
    """
    # Scale by 1 / sqrt(z) for the softmax, else by 1 / number of visible keys.
    scores = dot(head.q, head.k)
    if self.weights == "softmax":
      scores = scores * self.query_dim**-0.5
    else:
      count = jnp.maximum(seen.sum(-1, keepdims=True), 1)
      scores = scores / count.astype(scores.dtype)
    weights = WEIGHTS[self.weights](scores + offsets.astype(scores.dtype), seen)
    return jnp.matmul(dropout(weights).astype(head.v.dtype), head.v)

  def _longest(self) -> int:
    """Returns max_len; raises UserError if it is 0."""
    if not self.max_len:
      raise UserError("The mixer mega needs max_len: give a number of tokens.")
    return self.max_len

  def _biases(self) -> jax.Array:
    """Returns the biases of distances 1 - m to m - 1, float32 [2 m - 1]."""
    normal = nn.initializers.normal(START)
    longest = min(self.attention_chunk or self._longest(), self._longest())
    if self.bias == "simple":
      return self.param("distance", normal, (2 * longest - 1,))
    # The product of two rotated vectors depends only on the distance of
    # their positions: it is
    # sum_r cos(distance rate_r) aligned_r - sin(distance rate_r) crossed_r.
    half = self.query_dim // 2
    a, b = (
      self.param(name, normal, (2, half))
      for name in ("rotary_query", "rotary_key")
    )
    aligned, crossed = (a * b).sum(0), a[0] * b[1] - a[1] * b[0]
    rates = ROTARY_BASE ** (-jnp.arange(half, dtype=a.dtype) / half)
    distances = jnp.arange(1 - longest, longest, dtype=a.dtype)
    angles = distances[:, None] * rates[None]
    return jnp.cos(angles) @ aligned - jnp.sin(angles) @ crossed


def _toeplitz(values: jax.Array, rows: int, columns: int) -> jax.Array:
  """Returns the Toeplitz matrix with values[j - i + rows - 1] at (i, j).

  The matrix is built by reshaping, whose gradient is a sum. The gradient of a
  gather would be slow.

  Args:
    values: entries of the diagonals, [rows + columns - 1].
    rows, columns: shape of the matrix.
  """
  size = len(values)
  # Repeat the values and one zero, and reshape to rows of `size` entries, which
  # shifts each row by one.
  ring = jnp.tile(jnp.pad(values, (0, 1)), rows)[: rows * size]
  return ring.reshape(rows, size)[:, rows - 1 :][:, :columns]
