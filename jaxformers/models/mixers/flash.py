"""Attention with exponential weights, one block of queries at a time.

The result is exact, and memory grows as n. A block of queries sees all its keys
at once, so no running maximum is needed. On one CPU a loop runs over samples
and heads, because a product of two matrices is faster there than a product with
batch axes. On other devices samples and heads are batch axes.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp

from jaxformers.foundations import platforms
from jaxformers.models.dropout import Dropout
from jaxformers.models.mixers.blocked import merge, split
from jaxformers.models.mixers.scores import (
  dot,
  earlier,
  exp_below_one,
  hide,
  seen_keys,
)
from jaxformers.models.parallel import on_gpus, on_one_cpu, row_sums
from jaxformers.models.reductions import wide
from jaxformers.models.segments import is_packed, tokens

BLOCK = 256  # Queries whose weights are in memory at a time.
# The same for a TPU with many rows, whose vector memory shall hold the weights:
# least number of queries, and greatest number of weights of a device.
LEAST_BLOCK, MOST_WEIGHTS = 64, 2**23
LANES = 128  # Numbers that a TPU's vector unit takes along the last axis.
CUDNN: Final = "cudnn"  # Implementation of JAX's attention on GPUs.
HIDDEN = -1e4  # Added to scores of padding with cuDNN; its exponential is 0.


class Form(NamedTuple):
  """Options of the map from queries and keys to exponential weights.

  Attributes:
    causal: True if token i sees only tokens up to i.
    normalize: True for the softmax: weights are divided by their sum over the
      visible keys. False for exp(min(score, 0)).
    scale: factor of q k.T in the scores.
    precision: precision of q k.T; None for the default.
    block: number of queries whose weights are in memory at a time.
    split: True if every device has some of the queries, keys and values.
  """

  causal: bool = False
  normalize: bool = True
  scale: float = 1.0
  precision: Any = None
  block: int = BLOCK
  split: bool = False

  def gather(
    self, k: jax.Array, v: jax.Array, mask: jax.Array
  ) -> tuple[jax.Array, ...]:
    """Returns keys, values and mask of the tokens of all devices."""
    if not self.split:
      return k, v, mask
    return tuple(
      jax.lax.all_gather(x, platforms.SEQUENCE, axis=mask.ndim - 1, tiled=True)
      for x in (k, v, mask)
    )

  def scatter(self, x: jax.Array, axis: int) -> jax.Array:
    """Sums x over the devices; returns this device's part along an axis."""
    if not self.split:
      return x
    return jax.lax.psum_scatter(
      x, platforms.SEQUENCE, scatter_dimension=axis % x.ndim, tiled=True
    )

  def scores(self, q: jax.Array, k: jax.Array, seen: jax.Array) -> jax.Array:
    """Returns float32 scores [..., s, m], the lowest number if masked."""
    return hide(dot(q, k, self.precision) * self.scale, seen)

  def top(self, scores: jax.Array, sink: jax.Array | None) -> jax.Array:
    """Returns the number to subtract from the scores of a query, [..., s, 1].

    This is the maximum score for the softmax, and 0 without normalisation.

    Args:
      scores: scores of the keys, [..., s, m].
      sink: score of the sink, [..., 1, 1]; None without a sink.
    """
    if not self.normalize:
      return jnp.zeros_like(scores[..., :1])
    top = scores.max(-1, keepdims=True)
    return jax.lax.stop_gradient(
      top if sink is None else jnp.maximum(top, sink)
    )

  def total(
    self, weights: jax.Array, top: jax.Array, sink: jax.Array | None
  ) -> jax.Array:
    """Returns the divisor of the weighted sum of the values, [..., s, 1].

    This is the sum of the weights, and of the weight of the sink, for the
    softmax, and 1 otherwise.

    Args:
      weights: weights of the keys, [..., s, m].
      top: result of `top`.
      sink: argument of `top`.
    """
    if not self.normalize:
      return jnp.ones_like(weights[..., :1])
    total = row_sums(weights)
    return total if sink is None else total + jnp.exp(sink - top)


class Block(NamedTuple):
  """A block of queries.

  Attributes:
    number: number of the block, int32, unique over all samples and heads.
    start: index of the first query of the block, int32.
    num_keys: the block may see the first `num_keys` keys.
  """

  number: jax.Array
  start: jax.Array
  num_keys: int

  def seen(
    self, mask: jax.Array, numbers: jax.Array | None, form: Form
  ) -> jax.Array:
    """Returns the visible keys, [..., form.block or 1, num_keys].

    Args:
      mask: mask of the keys or numbers of packed rows, [..., n].
      numbers: numbers of the queries of the block, [..., form.block, 1], for
        packed rows.
      form: options of the weights.
    """
    seen = tokens(mask)[..., None, : self.num_keys]
    if numbers is not None:
      seen = seen & (jnp.abs(mask)[..., None, : self.num_keys] == numbers)
    if not form.causal:
      return seen
    past = earlier(form.block, self.num_keys, self.start)
    return seen & jnp.expand_dims(past, range(mask.ndim - 1))


def _split(x: jax.Array, block: int) -> jax.Array:
  """Cuts tokens [..., n, e] into blocks [blocks, ..., block, e], padded."""
  return jnp.moveaxis(split(x, block, axis=x.ndim - 2), -3, 0)


def _merge(x: jax.Array, n: int) -> jax.Array:
  """Inverts `_split`: blocks [blocks, ..., block, e] to tokens [..., n, e]."""
  return merge(jnp.moveaxis(x, 0, -3), n)


def _scan_blocks(
  step: Callable[..., Any],
  carry: Any,
  tokens: tuple[Any, ...],
  keys: jax.Array,
  turn: jax.Array | int,
  form: Form,
) -> tuple[Any, Any]:
  """Scans over blocks of queries with `jax.lax.scan`.

  Args:
    step: function of a carry, a `Block` and the tokens of the block; returns
      the next carry and an output.
    carry: first carry.
    tokens: arrays of all queries of the device, each [..., n, e], or None.
    keys: all keys, [..., m, e].
    turn: index of the sample and head of this scan, or of the device if they
      are batch axes and the mesh splits tokens; 0 otherwise.
    form: options of the weights. If it is causal and queries are not split,
      each quarter of them is scanned separately, with only the keys up to its
      end.

  Returns:
    The last carry, and the outputs of all blocks, stacked.
  """
  # Cut the queries into blocks, and the blocks into quarters if causal.
  n, m = tokens[0].shape[-2], keys.shape[-2]
  first_query = turn * n if form.split else 0
  blocks = -(-n // form.block)
  arrays = jax.tree.map(lambda x: _split(x, form.block), tokens)
  quarters = sorted({blocks * i // 4 for i in range(5)})
  outputs = []
  in_quarters = form.causal and not form.split
  for first, last in itertools.pairwise(
    quarters if in_quarters else (0, blocks)
  ):
    # Keys after the end of the quarter are not read.
    count = min(last * form.block, n) if in_quarters else m

    def body(carry: Any, args: Any, count: int = count) -> tuple[Any, Any]:
      i, *block = args
      start = first_query + i * form.block
      part = Block(turn * blocks + i, start, count)
      return step(carry, part, *block)

    numbers = jnp.arange(first, last)
    rows = slice(first, last)
    part = (numbers, *jax.tree.map(operator.itemgetter(rows), arrays))
    carry, output = jax.lax.scan(body, carry, part)
    outputs.append(output)
  return carry, jax.tree.map(lambda *x: jnp.concatenate(x), *outputs)


def _in_turn(
  attend: Callable[..., jax.Array], dropout: Dropout, arrays: Any
) -> jax.Array:
  """Calls `attend` once per sample and head on one CPU.

  On other devices `attend` is called once, for all samples and heads.

  Args:
    attend: function of a turn, dropout, arrays [..., n, e], a mask [..., n],
      and a sink [..., 1, 1] or None.
    dropout: dropout of the weights.
    arrays: queries, keys and values, [b, h, n, e]; mask, bool [b, n], True at
      tokens; scores of the sinks, [b, h, 1, 1], or None.
  """
  q, k, v, mask, sink = arrays
  b, h, n, _ = q.shape
  arrays = (q, k, v, jnp.broadcast_to(mask[:, None], (b, h, n)), sink)
  if not on_one_cpu():
    return attend(0, dropout, *arrays)
  # Loop over samples and heads, [b h, n, e].
  flat = jax.tree.map(lambda a: a.reshape(b * h, *a.shape[2:]), arrays)
  turns = (jnp.arange(b * h), *flat)
  return jax.lax.map(
    lambda turn: attend(turn[0], dropout, *turn[1:]), turns
  ).reshape(v.shape)


def attend(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  mask: jax.Array,
  dropout: Dropout,
  form: Form,
  sink: jax.Array | None = None,
) -> jax.Array:
  """Returns the sums of the values under exponential weights.

  The sums are divided by the sums of the weights if `form` normalises. The
  forward pass stores the maximum and the sum of every row of weights, and the
  backward pass recomputes the weights from these.

  If the mesh splits more than 256 tokens, each device has its own queries and
  gathers keys and values, in the backward pass again, and sends back their
  gradients. Which weights are dropped depends on the mesh.

  Source: Dao et al. 2022, https://arxiv.org/abs/2205.14135, algorithms 2 and 4
  of appendix B, with blocks of queries only.

  Args:
    q, k, v: queries, keys and values, [b, h, n, e].
    mask: bool [b, n], True at tokens; or numbers of packed rows, in which a
      query sees the keys of the same example.
    dropout: dropout of the weights.
    form: options of the weights.
    sink: score of a key with the value 0 in each head, [h]; None without it.
      Weights that are not normalised ignore it.

  Returns:
    The outputs [b, h, n, e] in the dtype of v. The weights of a query that sees
    no key are uniform if they are normalised without a sink, and 0 otherwise.
  """
  # cuDNN has no sink.
  if sink is None and _cudnn_takes(q, k, v, mask, dropout, form):
    return platforms.by_device(
      lambda rows, _: _by_cudnn(form, *rows), (q, k, v, mask)
    )
  # With a single block, JAX's gradient needs no more memory.
  n = q.shape[2]
  if n > BLOCK and n % LANES and _pads_keys():
    # Padding is masked. The compiler's time for 2,000 keys is 1.8 times its
    # time for 2,048.
    rest = (0, -n % LANES)
    q, k, v = (jnp.pad(x, ((0, 0), (0, 0), rest, (0, 0))) for x in (q, k, v))
    mask = jnp.pad(mask, ((0, 0), rest))
    return attend(q, k, v, mask, dropout, form, sink)[:, :, :n]
  if sink is not None:
    shape = (*q.shape[:2], 1, 1)
    sink = jnp.broadcast_to(wide(sink)[None, :, None, None], shape)
  if n <= BLOCK:
    scores = form.scores(q, k, seen_keys(mask, form.causal))
    top = form.top(scores, sink)
    weights = exp_below_one(scores - top)
    y = jnp.matmul(dropout(weights).astype(v.dtype), v)
    return (y / form.total(weights, top, sink)).astype(v.dtype)

  form = form._replace(block=BLOCK, split=platforms.splits_tokens(len(q), n))
  if not (form.split or platforms.on_tpu()):
    turn = functools.partial(_attend, form)
    return _in_turn(turn, dropout, (q, k, v, mask, sink))
  # Dropout has a key for each row, so that devices and groups of rows differ.
  row = jnp.broadcast_to(jnp.arange(len(q))[:, None, None], (len(q), 1, n))
  shared = (dropout, None if sink is None else sink[:1])
  return platforms.by_device(
    functools.partial(_attend_local, form, n),
    (q, k, v, jnp.broadcast_to(mask[:, None], q.shape[:3]), row),
    shared,
    token_axis=2 if form.split else 0,
  )


def _attend_local(form: Form, n: int, local: Any, shared: Any) -> jax.Array:
  """Returns `_attend` for the queries of one device, some rows at a time.

  Args:
    form: options of the weights.
    n: number of keys of all devices.
    local: queries, keys, values, mask, and the numbers of the rows, each
      [b, h or 1, n of the device, ...].
    shared: dropout, and the scores of the sinks [1, h, 1, 1] or None.
  """
  dropout, sink = shared
  device = jax.lax.axis_index(platforms.SEQUENCE) if form.split else 0
  b, h = local[0].shape[:2]
  count, block = _fitting(b, platforms.heads_of_device(h) * n)
  # Few queries are not padded to a whole block.
  block = min(block, -(-local[0].shape[2] // 8) * 8)

  def run(part: Any) -> jax.Array:
    *arrays, row = part
    first = sink
    if first is not None:
      first = jnp.broadcast_to(first, (len(row), *first.shape[1:]))
    drop = dropout.for_rows(row[:, 0, 0])
    return _attend(form._replace(block=block), device, drop, *arrays, first)

  if count == b:
    return run(local)
  parts = jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]), local)
  return jax.lax.map(run, parts).reshape(local[2].shape)


def _fitting(b: int, keys: int) -> tuple[int, int]:
  """Returns how many rows, and queries of each, are computed at a time.

  On a TPU their weights fit its vector memory, but at least one row with
  `LEAST_BLOCK` queries is computed.

  Args:
    b: number of rows of the device.
    keys: number of weights of a query in all heads of the device.
  """
  if not platforms.on_tpu():
    return b, BLOCK

  def fitting(rows: int) -> int:
    queries = max(1, MOST_WEIGHTS // (rows * keys))
    return min(1 << (queries.bit_length() - 1), BLOCK)

  if fitting(b) >= LEAST_BLOCK:
    return b, fitting(b)
  counts = [c for c in range(1, b + 1) if b % c == 0 and fitting(c) == BLOCK]
  count = max(counts, default=1)
  return count, max(fitting(count), LEAST_BLOCK)


def _pads_keys() -> bool:
  """Returns True on TPUs, if the mesh does not split tokens."""
  return platforms.on_tpu() and platforms.keeps_tokens()


def _cudnn_takes(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  mask: jax.Array,
  dropout: Dropout,
  form: Form,
) -> bool:
  """Returns True if cuDNN supports these heads and is faster."""
  e = q.shape[-1]
  return (
    on_gpus(8.0)
    and form.normalize
    and form.precision is None
    and not is_packed(mask)
    and dropout.key is None
    and q.dtype == k.dtype == v.dtype == jnp.bfloat16
    and v.shape[-1] == e
    and e <= 120
    and e % 8 == 0
  )


def _by_cudnn(
  form: Form, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array
) -> jax.Array:
  """Computes `attend` by cuDNN; memory grows as n.

  cuDNN would read a mask as an array n x n. Here the mask is an added channel
  of the keys, which lowers the scores of padding. Eight channels are added,
  since cuDNN needs a multiple of 8. A query that sees no token weighs all keys
  by their scores.
  """
  # Add the channels and move the heads, [b, n, h, e + 8].
  padding = [(0, 0)] * 3 + [(0, 8)]
  q, k, v = (jnp.swapaxes(jnp.pad(a, padding), 1, 2) for a in (q, k, v))
  # Write 1 to the queries' channel, and the mask to the keys' channel.
  e = v.shape[-1] - 8
  q = q.at[..., e].set(1)
  lowered = jnp.where(mask, 0, HIDDEN / form.scale).astype(k.dtype)
  k = k.at[..., e].set(lowered[..., None])
  y = jax.nn.dot_product_attention(
    q, k, v, scale=form.scale, is_causal=form.causal, implementation=CUDNN
  )
  return jnp.swapaxes(y[..., :e], 1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(form: Form, *args: Any) -> jax.Array:
  """Returns the weighted sums of v, [..., n, e] in the dtype of v."""
  return _forward(form, *args)[0]


def _forward(
  form: Form,
  turn: jax.Array | int,
  dropout: Dropout,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  mask: jax.Array,
  sink: jax.Array | None,
) -> tuple[jax.Array, Any]:
  all_k, all_v, all_mask = form.gather(k, v, mask)

  def step(
    _: None, block: Block, q: jax.Array, numbers: jax.Array | None
  ) -> tuple[None, Any]:
    keys = all_k[..., : block.num_keys, :]
    values = all_v[..., : block.num_keys, :]
    seen = block.seen(all_mask, numbers, form)
    scores = form.scores(q, keys, seen)
    # Subtract the maximum; divide the sums instead of the weights.
    top = form.top(scores, sink)
    weights = exp_below_one(scores - top)
    inverse = 1 / form.total(weights, top, sink)
    weights = dropout.fold(block.number)(weights).astype(v.dtype)
    y = _sum_values(weights, values) * inverse
    return None, (y.astype(v.dtype), top, inverse)

  rows = (q, _numbers(mask))
  _, outputs = _scan_blocks(step, None, rows, all_k, turn, form)
  outputs = tuple(_merge(a, q.shape[-2]) for a in outputs)
  return outputs[0], (turn, dropout, q, k, v, mask, sink, *outputs)


def _numbers(mask: jax.Array) -> jax.Array | None:
  """Returns the numbers of packed rows, [..., n, 1]; None for a mask."""
  return jnp.abs(mask)[..., None] if is_packed(mask) else None


def _sum_values(weights: jax.Array, v: jax.Array) -> jax.Array:
  """Returns weights [..., s, m] times v [..., m, e], float32 [..., s, e]."""
  # With the values first, no gradient needs a transposed copy of the weights.
  y = jnp.einsum(
    "...me,...sm->...es",
    v,
    weights,
    preferred_element_type=jnp.promote_types(v.dtype, jnp.float32),
  )
  return jnp.swapaxes(y, -1, -2)


def _backward(form: Form, kept: Any, g: jax.Array) -> tuple[Any, ...]:
  turn, dropout, q, k, v, mask, sink, y, top, inverse = kept
  all_k, all_v, all_mask = form.gather(k, v, mask)
  n, m = q.shape[-2], all_k.shape[-2]
  # The softmax's gradient is w_ij (dw_ij - sum_k w_ik dw_ik); the sum is g . y.
  mean = (g.astype(top.dtype) * y).sum(-1, keepdims=True)
  mean = mean if form.normalize else jnp.zeros_like(mean)

  def step(
    carry: tuple[jax.Array, jax.Array],
    block: Block,
    *rows: Any,
  ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    (dk, dv), (q, g, mean, top, inverse, numbers) = carry, rows
    keys = all_k[..., : block.num_keys, :]
    values = all_v[..., : block.num_keys, :]
    # Recompute the weights.
    seen = block.seen(all_mask, numbers, form)
    scores = form.scores(q, keys, seen)
    weights = exp_below_one(scores - top) * inverse
    drop = dropout.fold(block.number)
    dropped = drop(weights).astype(v.dtype)
    # Pass the gradient back through values, dropout and exponential.
    slopes = drop(dot(g, values))
    slopes = (weights * (slopes - mean) * form.scale).astype(q.dtype)
    # Add to the gradients of keys and values. With the queries first, the
    # weights need no transposed copy.
    later = [(0, 0)] * (dk.ndim - 1) + [(0, m - block.num_keys)]
    dk = dk + jnp.pad(_across(q, slopes), later)
    dv = dv + jnp.pad(_across(g, dropped), later)
    return (dk, dv), jnp.matmul(slopes, keys)

  # Scan over the blocks; gradients of keys and values are the carry, [e, m].
  start = tuple(
    jnp.zeros((*a.shape[:-2], a.shape[-1], m), top.dtype) for a in (k, v)
  )
  # Padded queries add nothing, since their rows and their gradients g are 0.
  rows = (q, g, mean, top, inverse, _numbers(mask))
  (dk, dv), dq = _scan_blocks(step, start, rows, all_k, turn, form)
  dk, dv = (jnp.swapaxes(form.scatter(a, -1), -1, -2) for a in (dk, dv))
  return (
    None,
    None,
    _merge(dq, n),
    dk.astype(k.dtype),
    dv.astype(v.dtype),
    None,
    _sink_slope(sink, top, inverse, mean),
  )


def _sink_slope(sink: jax.Array | None, *rows: jax.Array) -> jax.Array | None:
  """Returns the gradient of the score of the sink, [..., 1, 1].

  Args:
    sink: scores, [..., 1, 1]; None without a sink.
    *rows: maximum, inverse of the sum and mean slope of each row, [..., n, 1].
  """
  if sink is None:
    return None
  # The value of the sink is 0, so its slope is its weight times minus the mean.
  top, inverse, mean = rows
  slopes = -jnp.exp(sink - top) * inverse * mean
  return slopes.sum(-2, keepdims=True).astype(sink.dtype)


def _across(a: jax.Array, weights: jax.Array) -> jax.Array:
  """Returns the product of a.T [..., e, s] and weights [..., s, m]."""
  return jnp.einsum(
    "...se,...sm->...em",
    a,
    weights,
    preferred_element_type=jnp.promote_types(a.dtype, jnp.float32),
  )


_attend.defvjp(_forward, _backward)
