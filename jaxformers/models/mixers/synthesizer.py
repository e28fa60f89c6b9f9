"""Synthesizer: attention logits without products of queries and keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Interval, Length
from jaxformers.foundations.registry import choose
from jaxformers.models.attention import attention
from jaxformers.models.dropout import Dropout
from jaxformers.models.mixers.blocked import sum_values
from jaxformers.models.mixers.scores import dot, earlier, hide, seen_keys
from jaxformers.models.parallel import each_sample
from jaxformers.models.reductions import wide
from jaxformers.models.variants import MODELS, Variant

MODELS.register("synthesizer")(Variant("synthesizer"))

KINDS = (
  "random",
  "fixed_random",
  "factorized_random",
  "dense",
  "factorized_dense",
  "dot",
)
# Arrays [b, ...], and a function of one sample's arrays to logits [h, n, n].
Logits = tuple[tuple[jax.Array, ...], Callable[..., jax.Array]]


@attention("synthesizer", growth="n^2")
def synthesizer(
  v: jax.Array,
  *,
  mask: jax.Array,
  dropout: Dropout,
  param: Callable[..., Any],
  draw: Callable[..., jax.Array],
  project: Callable[[str], jax.Array],
  max_len: Length,
  kind: str = "random",
  factor: Annotated[int, Interval("(0, 1000]")] = 8,
  causal: bool = False,
) -> jax.Array:
  """Softmax attention softmax(S) v with synthetic logits S [n, n] of each head.

  `kind` names the source of S; several kinds joined by "+" give a mixture with
  learned convex weights:

    random: a parameter. fixed_random: drawn, and not trained.
    factorized_random: R_1 R_2.T with R [max_len, factor].
    dense: W_2 relu(W_1 x_i), a row of max_len logits from each token.
    factorized_dense: A_i[j mod a] B_i[j // a] from two such maps to about
      sqrt(max_len) logits each.
    dot: q k.T / sqrt(e), as in the Transformer.

  All kinds except "dot" have parameters for max_len positions. Time and memory
  grow as n^2.

  Source: Tay et al. 2021, https://arxiv.org/abs/2005.00743, section 3. Equals
  softmax attention with kind "dot". Differs from LRA's code: no reshape mixes
  heads and positions, padding is masked, and a mixture has weights, where LRA's
  code takes a sum.

  Shapes: v [b, h, n, e] -> [b, h, n, e]; mask [b, n], True at tokens.
  """
  # Check the kinds: each may occur once, since it names its parameters.
  kinds = [choose("kind of synthesizer", k, KINDS) for k in kind.split("+")]
  # The registered range of the name `factor`, Informer's, admits real numbers.
  if len(set(kinds)) < len(kinds) or factor < 1 or not isinstance(factor, int):
    raise UserError(
      f"kind={kind!r}, factor={factor}: name each kind at most once, and give "
      "an integer factor of at least 1."
    )
  h, n, e = v.shape[1:]
  normal = nn.initializers.normal

  def map_tokens(name: str, size: int) -> Logits:
    """Maps each token to `size` logits by two layers, [h, n, size]."""
    hidden = wide(jax.nn.relu(project(f"{name}_hidden")))
    w = param(f"{name}_kernel", normal(e**-0.5), (h, e, size))
    bias = param(f"{name}_bias", nn.initializers.zeros, (h, size))

    def apply(hidden: jax.Array) -> jax.Array:
      return jnp.einsum("hne,hem->hnm", hidden, w) + bias[:, None]

    return (hidden,), apply

  def make_logits(kind: str) -> Logits:
    """Returns arrays, and a function of one sample's arrays to [h, n, n]."""
    square = (h, max_len, max_len)
    # Cut the parameters for max_len positions to the current n.
    if kind == "random":
      learned = param(kind, normal(1.0), square)
      return (), lambda: learned[:, :n, :n]
    if kind == "fixed_random":
      drawn = draw(kind, lambda key: jax.random.normal(key, square))
      return (), lambda: drawn[:, :n, :n]
    # R_1 R_2.T
    if kind == "factorized_random":
      init, shape = normal(factor**-0.25), (h, max_len, factor)
      r = [param(f"{kind}_{i}", init, shape)[:, :n] for i in (1, 2)]
      return (), lambda: dot(*r)
    if kind == "dense":
      arrays, apply = map_tokens(kind, max_len)
      return arrays, lambda x: apply(x)[..., :n]
    if kind == "factorized_dense":
      # Give position j the product of entry j mod a and entry j // a.
      a = math.isqrt(max_len - 1) + 1
      j, b = jnp.arange(n), -(-max_len // a)
      first, apply_first = map_tokens(f"{kind}_1", a)
      second, apply_second = map_tokens(f"{kind}_2", b)

      def multiply(x: jax.Array, y: jax.Array) -> jax.Array:
        return apply_first(x)[..., j % a] * apply_second(y)[..., j // a]

      return (*first, *second), multiply
    # kind == "dot": q k.T / sqrt(e)
    q, k = project("query"), project("key")
    return (q, k), lambda q, k: dot(q, k) / q.shape[-1] ** 0.5

  # Add the logits of all kinds, with learned convex weights.
  arrays, functions = zip(*(make_logits(kind) for kind in kinds), strict=True)
  shares = jnp.ones(1)
  if len(kinds) > 1:
    mixture = param("mixture", nn.initializers.zeros, (len(kinds),))
    shares = jax.nn.softmax(mixture)

  def add_logits(arrays: Any) -> jax.Array:
    return sum(
      share * function(*inputs)
      for share, function, inputs in zip(shares, functions, arrays, strict=True)
    )

  @jax.checkpoint
  def attend_sample(
    number: jax.Array, arrays: Any, v: jax.Array, mask: jax.Array
  ) -> jax.Array:
    scores = hide(add_logits(arrays), seen_keys(mask[None], causal)[0])
    return sum_values([scores], [v], dropout.fold(number))

  def attend_in_turn() -> jax.Array:
    # On a CPU, loop over samples, so that memory holds one sample's scores.
    return each_sample(attend_sample, jnp.arange(v.shape[0]), arrays, v, mask)

  if any(arrays) or dropout.key is not None:
    return attend_in_turn()
  # Logits without arrays per sample are equal for all samples. Compute the
  # exponentials once, and mask the values instead of the logits.
  sums, total = _sum_shared(add_logits(arrays), v, mask, causal=causal)
  # The sums underflow if the logits of padding are far above the logits of all
  # tokens. In this case, compute each sample separately. The bound is not lower
  # because the gradient divides by its square.
  is_exact = total > 1e-15
  y = (sums / jnp.where(is_exact, total, 1)).astype(v.dtype)
  return jax.lax.cond(is_exact.all(), lambda: y, attend_in_turn)


def _sum_shared(
  logits: jax.Array, v: jax.Array, mask: jax.Array, *, causal: bool
) -> tuple[jax.Array, jax.Array]:
  """Returns the sums of the values under exp(logits), and of the weights.

  Args:
    logits: logits that all samples share, [h, n, n].
    v: values, [b, h, n, e].
    mask: bool [b, n], True at tokens.
    causal: True if token i sees only tokens up to i.

  Returns:
    The sums of the values [b, h, n, e], and of the weights [b, h, n, 1], in
    float32.
  """
  b, h, n, e = v.shape
  # Mask later tokens, and find the maximum of each row.
  if causal:
    logits = hide(logits, earlier(n)[None])
  top = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
  # Put the values of all samples, and ones for the sums of the weights, into
  # columns; set padding to 0; then multiply all columns by the weights at once.
  ones = jnp.ones((b, h, n, 1), top.dtype)
  columns = jnp.concatenate([wide(v), ones], -1)
  columns = jnp.where(mask[:, None, :, None], columns, 0)
  columns = jnp.moveaxis(columns, 0, 2).reshape(h, n, b * (e + 1))
  sums = jnp.matmul(jnp.exp(logits - top), columns)
  sums = jnp.moveaxis(sums.reshape(h, n, b, e + 1), 2, 0)
  return sums[..., :-1], sums[..., -1:]
