"""Exact attention whose memory grows as n: one block of queries at a time.

A block has the weights of all its keys, so there is no running maximum. On one
CPU, samples and heads take turns, because a product of two matrices is faster
there than one with batch axes; elsewhere they are batch axes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformers.models.attention import Dropout
from jaxformers.models.mixers.blocked import merge, split
from jaxformers.models.mixers.scores import dot, earlier, hide, seen_keys
from jaxformers.models.parallel import on_one_cpu

BLOCK = 256  # Queries whose weights are in memory at a time.

Weigh = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class Block(NamedTuple):
  """A block of queries.

  Attributes:
    number: number of the block, int32; blocks of all samples and heads differ.
    start: index of the first query, int32.
    count: number of keys that the block may see, from the first.
  """

  number: jax.Array
  start: jax.Array
  count: int

  def seen(self, mask: jax.Array, *, causal: bool) -> jax.Array:
    """Returns the visible keys, [..., BLOCK or 1, count]; mask [..., n]."""
    seen = mask[..., None, : self.count]
    if not causal:
      return seen
    past = earlier(BLOCK, self.count, self.start)
    return seen & jnp.expand_dims(past, range(mask.ndim - 1))


def _split(x: jax.Array) -> jax.Array:
  """Cuts tokens [..., n, e] into blocks [blocks, ..., BLOCK, e], padded."""
  return jnp.moveaxis(split(x, BLOCK, axis=x.ndim - 2), -3, 0)


def _merge(x: jax.Array, n: int) -> jax.Array:
  """Undoes `_split`: blocks [blocks, ..., BLOCK, e] to tokens [..., n, e]."""
  return merge(jnp.moveaxis(x, 0, -3), n)


def _scan_blocks(
  step: Callable[..., Any],
  carry: Any,
  tokens: tuple[jax.Array, ...],
  turn: jax.Array | int,
  *,
  causal: bool,
) -> tuple[Any, Any]:
  """Scans over blocks of queries, as `jax.lax.scan`.

  Args:
    step: function of a carry, a `Block` and the tokens of the block; returns
      the next carry and an output.
    carry: first carry.
    tokens: arrays of all queries, [..., n, e] each.
    turn: number of this scan among those of other samples and heads.
    causal: True if queries of the first quarter need the first quarter of the
      keys alone, and so on.

  Returns:
    The last carry, and the outputs of all blocks, stacked.
  """
  n = tokens[0].shape[-2]
  blocks = -(-n // BLOCK)
  arrays = tuple(_split(x) for x in tokens)
  quarters = sorted({blocks * i // 4 for i in range(5)})
  outputs = []
  for first, last in itertools.pairwise(quarters if causal else (0, blocks)):
    count = min(last * BLOCK, n)

    def body(carry: Any, args: Any, count: int = count) -> tuple[Any, Any]:
      i, *block = args
      return step(carry, Block(turn * blocks + i, i * BLOCK, count), *block)

    numbers = jnp.arange(first, last)
    part = (numbers, *(a[first:last] for a in arrays))
    carry, output = jax.lax.scan(body, carry, part)
    outputs.append(output)
  return carry, jax.tree.map(lambda *x: jnp.concatenate(x), *outputs)


def _in_turn(
  attend: Callable[..., jax.Array],
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  mask: jax.Array,
) -> jax.Array:
  """Calls `attend(turn, q, k, v, mask)` for every sample and head, or for all.

  Args:
    attend: function of arrays [..., n, e] and a mask [..., n].
    q, k, v: [b, h, n, e].
    mask: [b, n].
  """
  b, h, n, _ = q.shape
  mask = jnp.broadcast_to(mask[:, None], (b, h, n))
  if not on_one_cpu():
    return attend(0, q, k, v, mask)
  flat = [a.reshape(b * h, *a.shape[2:]) for a in (q, k, v, mask)]
  turns = (jnp.arange(b * h), *flat)
  return jax.lax.map(lambda turn: attend(*turn), turns).reshape(v.shape)


def attend(
  weigh_keys: Weigh,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  mask: jax.Array,
  dropout: Dropout,
  causal: bool,
) -> jax.Array:
  """Returns weights v; the backward pass computes the weights again.

  Source: Rabe and Staats 2021, https://arxiv.org/abs/2112.05682, by blocks of
  queries alone.

  Args:
    weigh_keys: function of queries [..., s, e], keys [..., m, e] and visible
      keys [..., s or 1, m]; returns float32 weights [..., s, m].
    q, k, v: [b, h, n, e].
    mask: [b, n], True at tokens.
    dropout: dropout of the weights.
    causal: True if token i sees tokens up to i alone.

  Returns:
    [b, h, n, e] in the type of v.
  """
  n = q.shape[2]
  if n <= BLOCK:
    weights = dropout(weigh_keys(q, k, seen_keys(mask, causal)))
    return jnp.einsum("bhnm,bhme->bhne", weights.astype(v.dtype), v)

  def attend_in_turn(
    turn: Any, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array
  ) -> jax.Array:
    @functools.partial(jax.checkpoint, static_argnums=2)
    def sums(
      number: jax.Array, start: jax.Array, count: int, q: jax.Array
    ) -> jax.Array:
      seen = Block(number, start, count).seen(mask, causal=causal)
      weights = dropout(weigh_keys(q, k[..., :count, :], seen), part=number)
      return _sum_values(weights.astype(v.dtype), v[..., :count, :])

    def step(_: None, block: Block, q: jax.Array) -> tuple[None, jax.Array]:
      return None, sums(*block, q)

    _, y = _scan_blocks(step, None, (q,), turn, causal=causal)
    return _merge(y, n)

  return _in_turn(attend_in_turn, q, k, v, mask)


def _sum_values(weights: jax.Array, v: jax.Array) -> jax.Array:
  """Returns weights [..., s, m] times v [..., m, e] -> [..., s, e]."""
  # Values come first: so no gradient needs a transposed copy of the weights.
  return jnp.swapaxes(jnp.einsum("...me,...sm->...es", v, weights), -1, -2)


def softmax_attend(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  mask: jax.Array,
  dropout: Dropout,
  *,
  causal: bool,
) -> jax.Array:
  """Returns softmax(q k.T / sqrt(e)) v over the visible keys.

  As `attend` with softmax weights, but the forward pass keeps the maximum and
  the sum of every row, so that the backward pass computes neither again.

  Source: Dao et al. 2022, https://arxiv.org/abs/2205.14135, algorithms 2 and 4
  of appendix B, by blocks of queries alone.

  Args:
    q, k, v: [b, h, n, e].
    mask: [b, n], True at tokens.
    dropout: dropout of the weights.
    causal: True if token i sees tokens up to i alone.

  Returns:
    [b, h, n, e] in the type of v. A query that sees nothing gets uniform
    weights.
  """
  if q.shape[2] <= BLOCK:  # One block: there is nothing to compute again.

    def weigh_keys(q: jax.Array, k: jax.Array, seen: jax.Array) -> jax.Array:
      return jax.nn.softmax(_scores(q, k, seen), axis=-1)

    return attend(
      weigh_keys, q, k, v, mask=mask, dropout=dropout, causal=causal
    )

  def attend_in_turn(turn: Any, *arrays: jax.Array) -> jax.Array:
    return _softmax(causal, turn, dropout, *arrays)

  return _in_turn(attend_in_turn, q, k, v, mask)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _softmax(causal: bool, *args: Any) -> jax.Array:
  """Returns the sums of v for all queries, [..., n, e] in the type of v."""
  return _softmax_forward(causal, *args)[0]


def _scores(q: jax.Array, k: jax.Array, seen: jax.Array) -> jax.Array:
  """Returns q k.T / sqrt(e), and the lowest number at invisible keys."""
  return hide(dot(q, k) / q.shape[-1] ** 0.5, seen)


def _softmax_forward(
  causal: bool,
  turn: jax.Array | int,
  dropout: Dropout,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  mask: jax.Array,
) -> tuple[jax.Array, Any]:
  def step(_: None, block: Block, q: jax.Array) -> tuple[None, Any]:
    keys, values = k[..., : block.count, :], v[..., : block.count, :]
    scores = _scores(q, keys, block.seen(mask, causal=causal))
    # Exponentiate below the maximum; divide the sums instead of the weights.
    top = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - top)
    inverse = 1 / weights.sum(-1, keepdims=True)
    weights = dropout(weights, part=block.number).astype(v.dtype)
    y = _sum_values(weights, values) * inverse
    return None, (y.astype(v.dtype), top, inverse)

  _, outputs = _scan_blocks(step, None, (q,), turn, causal=causal)
  outputs = tuple(_merge(a, q.shape[-2]) for a in outputs)
  return outputs[0], (turn, dropout, q, k, v, mask, *outputs)


def _softmax_backward(causal: bool, kept: Any, g: jax.Array) -> tuple[Any, ...]:
  turn, dropout, q, k, v, mask, y, top, inverse = kept
  n, scale = q.shape[-2], q.shape[-1] ** -0.5
  # The mean of the weights' gradients, under the weights.
  mean = (g.astype(top.dtype) * y).sum(-1, keepdims=True)

  def step(
    carry: tuple[jax.Array, jax.Array],
    block: Block,
    *rows: jax.Array,
  ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    (dk, dv), (q, g, mean, top, inverse) = carry, rows
    keys, values = k[..., : block.count, :], v[..., : block.count, :]
    # Compute the weights again.
    scores = _scores(q, keys, block.seen(mask, causal=causal))
    weights = jnp.exp(scores - top) * inverse
    dropped = dropout(weights, part=block.number).astype(v.dtype)
    # Pass the gradient back through values, dropout and softmax.
    slopes = dropout(dot(g, values), part=block.number)
    slopes = (weights * (slopes - mean) * scale).astype(q.dtype)
    # Queries come first: so the weights need no transposed copy.
    later = [(0, 0)] * (dk.ndim - 1) + [(0, n - block.count)]
    dk = dk + jnp.pad(_across(q, slopes), later)
    dv = dv + jnp.pad(_across(g, dropped), later)
    return (dk, dv), jnp.matmul(slopes, keys)

  start = tuple(
    jnp.zeros((*a.shape[:-2], a.shape[-1], n), top.dtype) for a in (k, v)
  )
  # All rows of padded queries are 0: they have no weights, and add nothing.
  rows = (q, g, mean, top, inverse)
  (dk, dv), dq = _scan_blocks(step, start, rows, turn, causal=causal)
  dk, dv = (jnp.swapaxes(a, -1, -2) for a in (dk, dv))
  return (
    None,
    None,
    _merge(dq, n),
    dk.astype(k.dtype),
    dv.astype(v.dtype),
    None,
  )


def _across(a: jax.Array, weights: jax.Array) -> jax.Array:
  """Returns a.T [..., e, s] times weights [..., s, m] -> [..., e, m]."""
  return jnp.einsum(
    "...se,...sm->...em",
    a,
    weights,
    preferred_element_type=jnp.promote_types(a.dtype, jnp.float32),
  )


_softmax.defvjp(_softmax_forward, _softmax_backward)
