"""Classifier heads: pools, interactions of pairs, and layers to the logits."""

from __future__ import annotations

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import Registry, choose
from jaxformers.models.activations import ACTIVATIONS
from jaxformers.models.cache import is_decoding, recall, remember
from jaxformers.models.dropout import make_dropout
from jaxformers.models.mixer import kernel_init
from jaxformers.models.norm import NORMS, normalize
from jaxformers.models.reductions import masked_max, masked_mean
from jaxformers.models.segments import Packed, unpack

POOLS: Registry = Registry("pool")
INTERACTIONS: Registry = Registry("interaction")
LECUN = nn.initializers.lecun_normal()  # Default initializer of nn.Dense.

# Signature of a pool: (x [b, n, d], mask [b, n], padded_len) -> [b, d].
Pool = Callable[[jax.Array, jax.Array, int], jax.Array]


@POOLS.register("max")
def max_pool(x: jax.Array, mask: jax.Array, padded_len: int) -> jax.Array:
  """Returns the maximum over the tokens of x [b, n, d] -> [b, d]."""
  del padded_len
  return masked_max(x, mask)


@POOLS.register("mean")
def mean_pool(x: jax.Array, mask: jax.Array, padded_len: int) -> jax.Array:
  """Returns the mean over the tokens of x [b, n, d] -> [b, d]."""
  del padded_len
  return masked_mean(x, mask)


@POOLS.register("padded_mean")
def padded_mean(x: jax.Array, mask: jax.Array, padded_len: int) -> jax.Array:
  """Returns the sum over the tokens divided by the padded length -> [b, d].

  This is "MEAN" of Skyformer's code, which gives short sequences small vectors.
  Use it only to reproduce published numbers. The divisor is `padded_len`, not
  the length of the current batch.
  """
  # Multiply the mean over tokens by the share of tokens.
  share = mask.sum(1).astype(jnp.float32) / padded_len
  return masked_mean(x, mask) * share[:, None]


@POOLS.register("root_mean")
def root_mean(x: jax.Array, mask: jax.Array, padded_len: int) -> jax.Array:
  """Returns the sum over the n tokens of x divided by sqrt(n) -> [b, d].

  This pool does not increase the distance of two sequences. For n independent
  tokens the size of the result does not shrink with n, unlike the mean.
  """
  del padded_len
  count = mask.sum(1).astype(jnp.float32)
  return masked_mean(x, mask) * jnp.sqrt(count)[:, None]


@POOLS.register("all_mean")
def all_mean(x: jax.Array, mask: jax.Array, padded_len: int) -> jax.Array:
  """Returns the mean over all positions of x [b, n, d] -> [b, d].

  This is "MEAN" of LRA's code, which masks black pixels as padding but counts
  them in the mean. Use it only to reproduce published numbers on images, which
  all have the same length.
  """
  del mask, padded_len
  return x.astype(jnp.float32).mean(1)


@POOLS.register("first")
@POOLS.register("cls")
def first_token(x: jax.Array, mask: jax.Array, padded_len: int) -> jax.Array:
  """Returns the first token of x [b, n, d] -> [b, d]; zero if it is masked.

  With "cls", the first token is a class token that the encoder prepends.
  """
  del padded_len
  return jnp.where(mask[:, 0, None], x[:, 0], 0)


@POOLS.register("distilled")
def first_two_tokens(
  x: jax.Array, mask: jax.Array, padded_len: int
) -> jax.Array:
  """Returns the first two tokens of x [b, n, d], concatenated -> [b, 2 d].

  Masked tokens are zero. The two tokens are the class token and the
  distillation token that the encoder prepends. DeiT averages a linear head of
  each token; this average is one linear head of both tokens.

  Source: `forward` of DistilledVisionTransformer in DeiT's models.py; Touvron
  et al. 2021, section 4.
  """
  del padded_len
  return jnp.where(mask[:, :2, None], x[:, :2], 0).reshape(len(x), -1)


# Factors of the mean over the tokens, from their number and `padded_len`.
_FACTORS: dict[str, Callable[[jax.Array, int], jax.Array]] = {
  "mean": lambda count, _: jnp.ones_like(count),
  "padded_mean": lambda count, padded_len: count / padded_len,
  "root_mean": lambda count, _: jnp.sqrt(count),
}


def _scale(
  total: jax.Array, count: jax.Array, name: str, padded_len: int
) -> jax.Array:
  """Returns a pool in `_FACTORS` from the sum of the tokens, [b, d].

  Args:
    total: sum of the tokens, [b, d].
    count: number of the tokens, float32 [b, 1].
    name: name of the pool.
    padded_len: divisor of "padded_mean".
  """
  return total / jnp.maximum(count, 1) * _FACTORS[name](count, padded_len)


def pool_so_far(
  module: nn.Module, x: jax.Array, mask: jax.Array, name: str, padded_len: int
) -> jax.Array:
  """Returns a pool of x [b, n, d] -> [b, d], after the tokens in the cache.

  Args:
    module: module that stores the pool of earlier tokens in its cache.
    x: tokens.
    mask: bool [b, n], True at tokens.
    name: name of the pool.
    padded_len: divisor of "padded_mean".

  Raises:
    UserError: when continuing from a cache with a pool that cannot.
  """
  if not is_decoding(module):
    return POOLS[name](x, mask, padded_len)
  choose("pool of a model with a state", name, (*_FACTORS, "max", "first"))
  count = mask.sum(1, dtype=jnp.float32)[:, None]
  # Means are kept as sums.
  is_mean = name in _FACTORS
  value = masked_mean(x, mask) * count if is_mean else POOLS[name](x, mask, 0)
  before = recall(module, "pooled")
  if before is not None:
    earlier, earlier_count = before
    if is_mean:
      value = earlier + value
    else:
      # Without tokens in one of the parts, the other one counts.
      both = jnp.maximum(earlier, value)
      later = jnp.where(earlier_count > 0, both, value)
      # The first token may be padding, which a later part does not change.
      is_kept = (count == 0) | (name == "first")
      value = jnp.where(is_kept, earlier, later)
    count = earlier_count + count
  remember(module, "pooled", (value, count))
  return _scale(value, count, name, padded_len) if is_mean else value


def pool_examples(
  packed: Packed, x: jax.Array, mask: jax.Array, name: str, padded_len: int
) -> tuple[jax.Array, jax.Array]:
  """Returns a pool of each example of packed rows.

  Args:
    packed: examples of the rows.
    x: tokens of the rows, [b, n, d].
    mask: bool [b, n], True at tokens.
    name: name of the pool.
    padded_len: divisor of "padded_mean".

  Returns:
    The results, [b most, d], and True for examples with tokens, [b most, 1].
  """
  if name not in _FACTORS:
    x, mask = (unpack(packed, a) for a in (x, mask))
    return POOLS[name](x, mask, padded_len), mask.any(1, keepdims=True)
  # Sum the tokens of each example by one product, [b, most, n] x [b, n, d].
  examples = jnp.arange(1, packed.most + 1, dtype=jnp.int32)[None, :, None]
  is_mine = ((packed.numbers * mask)[:, None] == examples).astype(jnp.float32)
  x = jnp.where(mask[..., None], x.astype(jnp.float32), 0)
  total = jnp.matmul(is_mine, x, precision=jax.lax.Precision.HIGHEST)
  total = total.reshape(-1, x.shape[-1])
  count = is_mine.sum(-1).reshape(-1, 1)
  return _scale(total, count, name, padded_len), count > 0


@INTERACTIONS.register("concat")
def concat(a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns [a, b] for a and b [b, d] -> [b, 2 d], as LRA's dual encoder."""
  return jnp.concatenate([a, b], -1)


@INTERACTIONS.register("nli")
def nli(a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns [a, b, a b, a - b] -> [b, 4 d], as Skyformer and S4."""
  return jnp.concatenate([a, b, a * b, a - b], -1)


@INTERACTIONS.register("symmetric")
def symmetric(a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns [|a - b|, a b] -> [b, 2 d], for symmetric relations.

  Source: the features of Conneau et al. 2017
  (https://arxiv.org/abs/1705.02364) that do not change when a and b are
  exchanged.
  """
  return jnp.concatenate([jnp.abs(a - b), a * b], -1)


class ClassifierHead(nn.Module):
  """Pools the tokens and maps the result to logits, float32 [b, c].

  Source: the heads of LRA, Skyformer and S4. Differs from these heads: "mean"
  divides by the number of tokens, not by the padded length.

  Attributes:
    num_classes: number of classes c.
    pool: "max", "mean", "first", "cls", "distilled", "padded_mean",
      "root_mean" or "all_mean".
    pool_norm: norm of the pooled vector, in `NORMS`; "" for none. The means of
      two long sequences differ little, so "running" and "batch" divide each
      channel by its standard deviation over samples. In evaluation these two
      norms are fixed affine maps.
    head_dim: width of the first hidden layer; 0 for none.
    head_layers: number of hidden layers, each half as wide as the one before.
    activation: activation of the hidden layers: "relu", "gelu" (by tanh) or
      "tanh".
    interaction: combination of the two pooled vectors of a pair, in
      `INTERACTIONS`; "" for one input.
    padded_len: divisor of "padded_mean".
    init_std: standard deviation of the normal kernels at initialization; 0 for
      LeCun's, 1 / sqrt(inputs). DeiT uses 0.02. (timm's `trunc_normal_` cuts at
      2, a hundred standard deviations away, so it is not truncated here.)
    dropout_rate: dropout rate of the input of the last layer, as in BERT
      (`create_model` of its run_classifier.py).
  """

  num_classes: int
  pool: str = "mean"
  pool_norm: str = ""
  head_dim: int = 0
  head_layers: int = 1
  activation: str = "relu"
  interaction: str = ""
  padded_len: int = 0
  init_std: float = 0.0
  dropout_rate: float = 0.0

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    mask: jax.Array,
    *,
    train: bool,
    packed: Packed | None = None,
  ) -> jax.Array:
    """Returns the logits of x [b, n, d].

    The two sequences of a pair are adjacent samples: x is then [2 b, n, d].
    With packed rows, the result has the logits of b `packed.most` examples.
    """
    # Pool in float32 for every compute type.
    if packed is None:
      x = pool_so_far(self, x, mask, self.pool, self.padded_len)
      has_tokens = mask.any(1, keepdims=True)
    else:
      pool = (self.pool, self.padded_len)
      x, has_tokens = pool_examples(packed, x, mask, *pool)
    x = x.astype(jnp.float32)
    if self.pool_norm:
      norm = NORMS[self.pool_norm](name="norm")
      # Exclude samples without tokens from the mean over samples.
      x = normalize(norm, x[:, None], mask=has_tokens, train=train)[:, 0]
    if self.interaction:
      # Combine the two pooled vectors of each pair.
      pairs = x.reshape(-1, 2, x.shape[-1])
      x = INTERACTIONS[self.interaction](pairs[:, 0], pairs[:, 1])
    # Apply the hidden layers, each half as wide as the one before.
    init = kernel_init(self.init_std) if self.init_std else LECUN
    dense = functools.partial(nn.Dense, kernel_init=init)
    for layer in range(self.head_layers if self.head_dim else 0):
      name = "hidden" if layer == 0 else f"hidden_{layer}"
      x = dense(max(self.head_dim >> layer, 1), name=name)(x)
      # In heads, "gelu" means the tanh approximation.
      function = "gelu_tanh" if self.activation == "gelu" else self.activation
      x = ACTIVATIONS[function](x)
    # Drop out the input of the last layer, and compute the logits.
    x = make_dropout(self, self.dropout_rate, train=train)(x)
    return dense(self.num_classes, name="logits")(x)


def check(
  pool: str,
  activation: str,
  interaction: str,
  num_inputs: int,
  hidden: tuple[int, int],
) -> None:
  """Raises UserError for options of a head that cannot be combined.

  Args:
    pool, activation, interaction: attributes of `ClassifierHead`.
    num_inputs: number of inputs of an example of the task.
    hidden: (head_dim, head_layers).
  """
  width, layers = hidden
  # More than one hidden layer needs a width.
  if layers < 1 or (layers > 1 and not width):
    raise UserError(
      f"head_layers={layers} with head_dim={width}: give head_layers of 1 or "
      "more and a head_dim above 0, or head_dim=0 and head_layers=1 for no "
      "hidden layer."
    )
  choose("pool", pool, POOLS)
  choose("activation", activation, ACTIVATIONS)
  # Pairs need an interaction, and single inputs have none.
  if num_inputs == 2:
    choose("interaction of a pair", interaction, INTERACTIONS)
  elif interaction:
    raise UserError(
      f"interaction={interaction!r} applies to pairs, but this task has "
      f"{num_inputs} input: leave it empty."
    )
