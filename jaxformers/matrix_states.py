"""Linear recurrences whose state is a matrix, such as the delta rule.

`matrix_scan` is independent of the models of this package. DeltaNet, Mamba-2,
gated linear attention and their relatives are options of it. Its backward pass
stores one state per chunk of tokens.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformers.foundations import platforms
from jaxformers.foundations.registry import check_keywords

# Writes per chunk: with one decay for all channels of a key, and with a decay
# for each ("fine"). Measured on a CPU; for a TPU, the compiler's estimate.
CHUNK, CHUNK_TPU = 32, 64
FINE_CHUNK, FINE_CHUNK_CPU = 16, 8
FINE_SIZE_TPU = 1_024  # Writes times channels, for 16 to 64 writes.
MOST_PAIRS_TPU = 2**22  # Factors of the pairs of a chunk, for its fast memory.
FEW_CHANNELS = 16  # With a decay for each, chunks are slower on a CPU.
BLOCK = 16  # Rows of the blocks of a triangular system.
HIGHEST = jax.lax.Precision.HIGHEST  # Float32 on TPUs, too.

_einsum = functools.partial(jnp.einsum, precision=HIGHEST)


class _Chunk(NamedTuple):
  """Arrays of the c writes of a chunk, r of them for each token.

  Attributes:
    q: queries of the tokens, [b, h or 1, c / r, K].
    k: keys of the writes, [b, h or 1, c, K].
    v: values of the writes, [b, h, c, V].
    log_decay: log of the factors before each write, [b, h, c, K or 1]; 0 but
      for the first write of a token. None for no decay.
    beta: strengths of the writes, [b, h, c, 1]; None for no erasing.
    resets: True where the state is set to 0 before a write, bool [b, 1, c];
      None for no resets.
  """

  q: jax.Array
  k: jax.Array
  v: jax.Array
  log_decay: jax.Array | None
  beta: jax.Array | None
  resets: jax.Array | None


@check_keywords
def matrix_scan(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  beta: jax.Array | None = None,
  log_decay: jax.Array | None = None,
  mask: jax.Array | None = None,
  resets: jax.Array | None = None,
  initial: jax.Array | None = None,
  reverse: bool = False,
  form: str = "auto",
  chunk: int = 0,
) -> tuple[jax.Array, jax.Array]:
  """Returns o_t = S_t^T q_t for all tokens t, and the last state S.

  A token multiplies row i of the state S [K, V] by its factor a_i, and then
  writes r times, each time with its own key k, value v and beta:

      S <- diag(a) S
      S <- (I - beta k k^T) S + beta k v^T

  The factor I - beta k k^T is a generalised Householder reflection: with a key
  of norm 1 its eigenvalues are 1 and 1 - beta, so that it erases for beta = 1
  and reflects for beta = 2. Without `beta` nothing is erased: S <- S + k v^T.
  The query reads the state after all writes of its token. A masked token
  writes nothing and reads 0. States are computed in float32 at least. Inputs of
  tokens that are not masked must be finite, also where a reset follows.

  Keys should have norm 1 if `beta` is given; the state may grow without bound
  otherwise.

  Source: Yang et al. 2024, https://arxiv.org/abs/2406.06484, section 3, in
  chunks; Siems et al. 2025, https://arxiv.org/abs/2502.10297, several writes;
  Yang et al. 2023, https://arxiv.org/abs/2312.06635, a decay for each channel.

  Args:
    q: queries, [b, n, h, K]; or [b, n, 1, K], shared by all heads.
    k: keys, [b, n, h, K], or [b, n, r, h, K] for r writes per token; or one
      head of them, shared by all heads.
    v: values, [b, n, h, V] or [b, n, r, h, V].
    beta: strengths of the writes, [b, n, h] or [b, n, r, h]; None for a sum
      without erasing.
    log_decay: log a, at most 0: [b or 1, n, h] for one factor per head, or
      [b or 1, n, h, K] for one per channel of the key; None for a = 1.
    mask: bool [b, n], False at tokens to skip; None for all True.
    resets: bool [b, n], True at tokens before which the state is set to 0,
      masked or not; None for none. With several examples in a row these are
      their first tokens, or their last ones with `reverse`.
    initial: state before the first token, [b, h, K, V]; None for 0.
    reverse: True to begin with the last token.
    form: "chunked" computes the tokens of a chunk at once by products and one
      triangular solve, and "loop" one token after another. Both give the same
      result up to rounding. "auto" is "loop" on a CPU with a decay for each
      of at most `FEW_CHANNELS` channels, and "chunked" otherwise.
    chunk: number of writes per chunk; 0 for a number that suits the backend.
      The last chunk may be shorter.

  Returns:
    The outputs [b, n, h, V] in the dtype of `v`, and the state after the last
    token (the first one with `reverse`), [b, h, K, V], in float32 at least.

  Raises:
    ValueError: if the form is unknown, or if shapes do not fit.

  Example:
    A key that is written twice holds the second value:

    >>> import jax.numpy as jnp
    >>> ones = jnp.ones((1, 2, 1, 1))
    >>> values = jnp.array([3.0, 5.0]).reshape(1, 2, 1, 1)
    >>> outputs, last = matrix_scan(ones, ones, values, beta=ones[..., 0])
    >>> outputs.ravel().tolist(), last.ravel().tolist()
    ([3.0, 5.0], [5.0])
  """
  mask, resets = _map(jnp.asarray, (mask, resets))
  # Give keys, values and beta an axis of writes.
  if k.ndim == q.ndim == v.ndim == 4:
    k, v = k[:, :, None], v[:, :, None]
    if beta is not None and beta.ndim == 3:
      beta = beta[:, :, None]
  _check(
    form,
    chunk,
    q=q,
    k=k,
    v=v,
    beta=beta,
    log_decay=log_decay,
    mask=mask,
    resets=resets,
    initial=initial,
  )
  (b, n, _, size), (writes, h) = q.shape, v.shape[2:4]
  is_fine = log_decay is not None and log_decay.ndim == q.ndim
  chunk = chunk or _default_chunk(b * h, size, is_fine)
  if form == "auto":
    is_small = is_fine and size <= FEW_CHANNELS
    is_cpu = platforms.backend() == "cpu"
    form = "loop" if is_small and is_cpu else "chunked"
  if log_decay is not None and not is_fine:
    log_decay = log_decay[..., None]
  # Compute in float32 at least.
  dtype = v.dtype
  wide = jnp.promote_types(dtype, jnp.float32)
  arrays = _map(lambda x: x.astype(wide), (q, k, v, beta, log_decay))
  q, k, v, beta, log_decay = arrays
  if log_decay is not None:
    log_decay = jnp.broadcast_to(log_decay, (b, *log_decay.shape[1:]))
  if initial is None:
    initial = jnp.zeros((b, h, size, v.shape[-1]), wide)
  # A masked token does not decay, erase or write, even where it is not finite.
  if mask is not None:
    q, k, v, beta, log_decay = _map(
      lambda x: jnp.where(_beside(mask, x), x, 0), (q, k, v, beta, log_decay)
    )
  # Run a reversed recurrence forwards on flipped tokens.
  tokens = (q, k, v, beta, log_decay, resets)
  if reverse:
    tokens = _map(lambda x: jnp.flip(x, 1), tokens)
  # Scan over the chunks; the backward pass recomputes their states.
  length = max(chunk // writes, 1)
  chunks = _cut(min(length, n), *tokens)
  # JAX keeps the trace of a function, which may be for another device: give it
  # a new one.
  step = jax.checkpoint(functools.partial(FORMS[form]))
  last, outputs = jax.lax.scan(step, initial.astype(wide), chunks)
  # Join the chunks, [chunks, b, h, length, V] -> [b, n, h, V].
  outputs = jnp.moveaxis(outputs, (0, 3), (1, 2))
  outputs = outputs.reshape(b, -1, h, v.shape[-1])[:, :n]
  if reverse:
    outputs = jnp.flip(outputs, 1)
  return outputs.astype(dtype), last


def _default_chunk(rows: int, size: int, is_fine: bool) -> int:
  """Returns the number of writes per chunk.

  Args:
    rows: number of states, over all heads and devices.
    size: number of channels of a key.
    is_fine: True for a decay for each channel of a key.
  """
  backend = platforms.backend()
  if backend == "tpu" and is_fine:
    # The factors between all pairs of writes of a chunk, on a device.
    pairs = platforms.rows_of_device(rows) * size
    chunk = min(max(FINE_SIZE_TPU // size, 16), 64)
    while chunk > 16 and pairs * chunk**2 > MOST_PAIRS_TPU:
      chunk = max(chunk // 2, 16)
    return chunk
  if backend == "tpu":
    return CHUNK_TPU
  if is_fine:
    return FINE_CHUNK_CPU if backend == "cpu" else FINE_CHUNK
  return CHUNK


def _map(function: Any, arrays: Any) -> Any:
  """Applies `function` to all arrays that are not None."""
  return jax.tree.map(function, arrays)


def _beside(mask: jax.Array, x: jax.Array) -> jax.Array:
  """Appends axes of size one to the mask until it has the rank of x."""
  return mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim))


def _check(form: str, chunk: int, **arrays: jax.Array | None) -> None:
  """Raises ValueError for a wrong form, chunk or shape.

  Args:
    form: name of the form.
    chunk: number of writes per chunk.
    **arrays: arguments of `matrix_scan`; k, v and beta with an axis of writes.
  """
  if form not in ("auto", *FORMS):
    raise ValueError(f"Unknown form {form!r}: choose auto, {', '.join(FORMS)}.")
  if chunk < 0:
    raise ValueError(f"chunk={chunk} is negative: give a number of writes.")
  actual = {name: x.shape for name, x in arrays.items() if x is not None}
  q, k, v = (actual[name] for name in "qkv")
  if len(q) != 4 or len(k) != 5 or len(v) != 5 or q[1] < 1:
    raise ValueError(
      f"q has the shape {q}, k {k} and v {v}: give q as [b, n, h, K] with "
      "n > 0, and k and v as [b, n, h, K] or [b, n, r, h, K]."
    )
  # Shapes that each array may have; q and k may have one head for all.
  (b, n, _, size), writes, h = q, k[2], max(q[2], k[3], v[3])
  allowed: dict[str, list[tuple[int, ...]]] = {
    "q": [(b, n, heads, size) for heads in (h, 1)],
    "k": [(b, n, writes, heads, size) for heads in (h, 1)],
    "v": [(b, n, writes, h, *v[4:])],
    "beta": [(b, n, writes, h)],
    "log_decay": [
      (rows, n, h, *channels) for rows in (b, 1) for channels in ((), (size,))
    ],
    "mask": [(b, n)],
    "resets": [(b, n)],
    "initial": [(b, h, size, *v[4:])],
  }
  for name, shapes in allowed.items():
    if name in actual and actual[name] not in shapes:
      listed = " or ".join(map(str, dict.fromkeys(shapes)))
      raise ValueError(
        f"{name} has the shape {actual[name]}, with q {q}, k {k} and v "
        f"{v}: give {listed}."
      )


def _cut(
  length: int,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  beta: jax.Array | None,
  log_decay: jax.Array | None,
  resets: jax.Array | None,
) -> _Chunk:
  """Cuts n tokens into chunks of `length`, with the chunks as first axis.

  The tokens that pad the last chunk change nothing.
  """
  writes = k.shape[2]

  def cut(x: jax.Array) -> jax.Array:
    # [b, n, r, h, e] -> [chunks, b, h, length r, e].
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % length), *[(0, 0)] * 3))
    x = x.reshape(x.shape[0], -1, length, *x.shape[2:])
    x = jnp.moveaxis(x, (1, 4), (0, 2))
    return x.reshape(*x.shape[:3], -1, x.shape[-1])

  def at_first_write(x: jax.Array) -> jax.Array:
    # A token decays and is reset before its first write only.
    return jnp.pad(
      x[:, :, None], ((0, 0), (0, 0), (0, writes - 1), (0, 0), (0, 0))
    )

  return _Chunk(
    q=cut(q[:, :, None]),
    k=cut(k),
    v=cut(v),
    log_decay=None if log_decay is None else cut(at_first_write(log_decay)),
    beta=None if beta is None else cut(beta[..., None]),
    resets=(
      None
      if resets is None
      else cut(at_first_write(resets[..., None, None]))[..., 0]
    ),
  )


def _run_loop(state: jax.Array, chunk: _Chunk) -> tuple[jax.Array, jax.Array]:
  """Runs one write after another; see `_run_chunk`."""
  writes = chunk.k.shape[2] // chunk.q.shape[2]

  def write(state: jax.Array, part: _Chunk) -> tuple[jax.Array, jax.Array]:
    k, v = part.k, part.v
    if part.resets is not None:
      state = jnp.where(part.resets[..., None, None], 0, state)
    if part.log_decay is not None:
      state = jnp.exp(part.log_decay)[..., None] * state
    # (I - beta k k^T) S + beta k v^T = S + k (beta (v - S^T k))^T
    if part.beta is not None:
      v = part.beta * (v - _einsum("bhk,bhkv->bhv", k, state))
    state = state + k[..., None] * v[:, :, None]
    return state, _einsum("bhk,bhkv->bhv", part.q, state)

  # Repeat queries for all writes, and keep the outputs after the last ones.
  chunk = chunk._replace(q=jnp.repeat(chunk.q, writes, 2))
  steps = _map(lambda x: jnp.moveaxis(x, 2, 0), chunk)
  state, outputs = jax.lax.scan(write, state, steps)
  return state, jnp.moveaxis(outputs[writes - 1 :: writes], 0, 2)


def _run_chunk(state: jax.Array, chunk: _Chunk) -> tuple[jax.Array, jax.Array]:
  """Runs all writes of a chunk at once.

  Write i adds k_i u_i^T to the state, where the u solve a triangular system:

      u_i + beta_i sum_{j<i} (k_i . D_ij k_j) u_j = beta_i (v_i - S^T D_i k_i)

  S is the state before the chunk, D_i the product of the factors up to write i
  and D_ij of those after write j. The system is solved by forward substitution:
  powers of its matrix, a usual alternative, lose all digits for equal keys.

  Args:
    state: state before the chunk, [b, h, K, V].
    chunk: arrays of the chunk.

  Returns:
    The state after the chunk, and the outputs, [b, h, tokens, V].
  """
  q, k, v = chunk.q, chunk.k, chunk.v
  writes = k.shape[2] // q.shape[2]
  # Weigh pairs of a write i and an earlier write j by D_ij.
  into, pairs, out = _decays(chunk)
  keys = _products(k, k, pairs)
  queries = _products(q, k, pairs[:, :, writes - 1 :: writes])
  # Keys and queries meet the state before the chunk through D_i.
  if chunk.beta is not None:
    # Solve for u.
    v = chunk.beta * (v - _read(k, into, state))
    inverse = _invert(jnp.tril(chunk.beta * keys, -1))
    v = _einsum("bhij,bhjv->bhiv", inverse, v)
  outputs = _read(q, into[:, :, writes - 1 :: writes], state)
  outputs = outputs + _einsum("bhtc,bhcv->bhtv", queries, v)
  # The state decays by all factors, and gains what each write leaves.
  state = jnp.swapaxes(into[:, :, -1:], -1, -2) * state
  if out.shape[-1] == 1:
    v = out * v
  else:
    k = k * out
  return state + _einsum("bhck,bhcv->bhkv", k, v), outputs


def _read(x: jax.Array, into: jax.Array, state: jax.Array) -> jax.Array:
  """Returns (D_i x_i)^T S for the factors D_i of `into`, [b, h, i, V]."""
  if into.shape[-1] == 1:
    return into * _einsum("bhik,bhkv->bhiv", x, state)
  return _einsum("bhik,bhkv->bhiv", x * into, state)


def _decays(chunk: _Chunk) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the factors between the writes of a chunk.

  Returns:
    D_i, the factor from the state before the chunk to write i, [b, h, c, K or
    1]; D_ij, the factor from write j to write i >= j, and 0 for i < j, [b, h,
    c, c, K or 1]; and the factor from write i to the end, shaped as the first.
    Leading axes may be 1.
  """
  count = chunk.k.shape[2]
  is_earlier = jnp.tril(jnp.ones((count, count), bool))[None, None]
  ones = jnp.ones((1, 1, count, 1), chunk.k.dtype)
  # A write is connected with writes that no reset separates from it.
  is_first = is_last = None
  if chunk.resets is not None:
    number = jnp.cumsum(chunk.resets, -1, dtype=jnp.int32)
    is_earlier &= number[..., None] == number[..., None, :]
    is_first = (number == 0)[..., None]
    is_last = (number == number[..., -1:])[..., None]
  # Without decay the factors are 1 or 0.
  if chunk.log_decay is None:
    into = ones if is_first is None else is_first.astype(ones.dtype)
    out = ones if is_last is None else is_last.astype(ones.dtype)
    return into, is_earlier[..., None].astype(ones.dtype), out
  # Sum the logs between j and i; differences of sums from the start would lose
  # digits. A product does it, because XLA's sums along an axis of a large array
  # are slow. Hide i < j before the exponential, or gradients would be NaN.
  logs = chunk.log_decay
  m, i, j = jnp.ogrid[:count, :count, :count]
  is_between = ((j < m) & (m <= i)).astype(logs.dtype)
  between = jnp.tensordot(
    jnp.swapaxes(logs, 2, 3), is_between, 1, precision=HIGHEST
  )
  between = jnp.moveaxis(between, 2, -1)
  pairs = jnp.exp(jnp.where(is_earlier[..., None], between, -jnp.inf))
  into, out = jnp.exp(jnp.cumsum(logs, 2)), jnp.exp(between[:, :, -1])
  if is_first is not None and is_last is not None:
    into, out = jnp.where(is_first, into, 0), jnp.where(is_last, out, 0)
  return into, pairs, out


def _products(x: jax.Array, k: jax.Array, pairs: jax.Array) -> jax.Array:
  """Returns x_i . D_ij k_j, [b, h, i, j], for D_ij of `pairs`."""
  if pairs.shape[-1] == 1:
    return _einsum("bhik,bhjk->bhij", x, k) * pairs[..., 0]
  return (x[:, :, :, None] * k[:, :, None] * pairs).sum(-1)


@jax.custom_jvp
def _invert(matrix: jax.Array) -> jax.Array:
  """Returns (I + A)^-1 of a strictly lower triangular A, [b, h, c, c]."""
  if platforms.on_tpu():
    return _invert_by_products(matrix)
  return _invert_by_substitution(matrix)


def _invert_by_products(matrix: jax.Array) -> jax.Array:
  """Returns (I + A)^-1, as `_invert`, by products of whole matrices.

  If T is the inverse of the diagonal blocks of w rows, and B the part of A that
  joins pairs of them, T - T B T is the inverse of the blocks of 2 w rows. TPUs
  would write a triangular solve with the batch along their 128 lanes.
  """
  count = matrix.shape[-1]
  i, j = jnp.ogrid[:count, :count]
  inverse = jnp.zeros_like(matrix) + jnp.eye(count)
  width = 1
  while width < count:
    joins = (i // (2 * width) == j // (2 * width)) & (i // width != j // width)
    below = jnp.where(joins[None, None], matrix, 0)
    if width > 1:
      below = _product(inverse, _product(below, inverse))
    inverse = inverse - below
    width *= 2
  return inverse


def _invert_by_substitution(matrix: jax.Array) -> jax.Array:
  """Returns (I + A)^-1, as `_invert`, by forward substitution in blocks.

  The diagonal blocks of `BLOCK` rows are inverted by forward substitution.
  Pairs of blocks are then joined, [[P, 0], [-Q A P, Q]], until one is left.
  """
  # Pad with rows of the identity.
  count, size = matrix.shape[-1], BLOCK
  while size < count:
    size *= 2
  rest = (0, size - count)
  matrix = jnp.pad(matrix, ((0, 0), (0, 0), rest, rest))
  # Invert the diagonal blocks.
  blocks = _blocks(matrix, 0, BLOCK, BLOCK)
  eye = (
    jnp.zeros_like(blocks)
    + jnp.eye(BLOCK, dtype=matrix.dtype)[None, None, None]
  )
  blocks = jax.lax.linalg.triangular_solve(
    blocks, eye, left_side=True, lower=True, unit_diagonal=True
  )
  # Join pairs of blocks.
  while (width := blocks.shape[-1]) < size:
    below = _blocks(matrix, width, width, 2 * width)
    first, second = blocks[:, :, ::2], blocks[:, :, 1::2]
    corner = -_product(second, _product(below, first))
    upper = jnp.concatenate([first, jnp.zeros_like(first)], -1)
    lower = jnp.concatenate([corner, second], -1)
    blocks = jnp.concatenate([upper, lower], -2)
  return blocks[:, :, 0, :count, :count]


def _blocks(
  matrix: jax.Array, below: int, width: int, stride: int
) -> jax.Array:
  """Returns blocks of a matrix [b, h, c, c], [b, h, c / stride, width, width].

  Args:
    matrix: the matrix.
    below: number of rows from the diagonal down to the first row of a block.
    width: number of rows of a block.
    stride: number of columns from a block to the next one.
  """
  starts = range(0, matrix.shape[-1], stride)
  rows = (slice(i + below, i + below + width) for i in starts)
  columns = (slice(i, i + width) for i in starts)
  pairs = zip(rows, columns, strict=True)
  return jnp.stack([matrix[:, :, r, c] for r, c in pairs], 2)


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
  return jnp.matmul(x, y, precision=HIGHEST)


@_invert.defjvp
def _invert_jvp(
  matrix: tuple[jax.Array], tangent: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
  # The differential of the inverse T is -T dA T.
  inverse = _invert(*matrix)
  return inverse, -_product(_product(inverse, *tangent), inverse)


FORMS = {"chunked": _run_chunk, "loop": _run_loop}
