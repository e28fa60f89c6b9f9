"""From encoded tokens to logits."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.models.attention import masked_max, masked_mean
from jaxformers.registry import Registry

POOLS: Registry = Registry("pool")

POOLS.register("max")(masked_max)
POOLS.register("mean")(masked_mean)


@POOLS.register("first")
def first_token(x: jax.Array, mask: jax.Array) -> jax.Array:
  """The first token of x [b, n, d] -> [b, d]; zero where it is masked."""
  return jnp.where(mask[:, 0, None], x[:, 0], 0)


class ClassifierHead(nn.Module):
  """Pools the tokens, then Dense, ReLU, Dense: x [b, n, d] -> f32 [b, c].

  Source: the head of LRA and Skyformer. Differs from theirs: MEAN divides by
  the number of tokens, not by the padded length.

  Attributes:
    num_classes: c.
    pool: "max", "mean" or "first".
    head_dim: width of the hidden layer; 0 for none.
  """

  num_classes: int
  pool: str = "mean"
  head_dim: int = 0

  @nn.compact
  def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
    x = POOLS[self.pool](x, mask).astype(jnp.float32)
    if self.head_dim:
      x = nn.relu(nn.Dense(self.head_dim, name="hidden")(x))
    return nn.Dense(self.num_classes, name="logits")(x)
