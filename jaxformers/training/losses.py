"""Losses of examples, as sums: nothing is divided before the end."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax


def sown_losses(collection: Any, count: int) -> jax.Array:
  """The sum of all losses that a model has sown -> float32 [count].

  Args:
    collection: the Linen collection `losses`; every leaf is [count], one value
      an example, or for pairs [2 count], whose mean counts. May be empty.
    count: b.
  """
  total = jnp.zeros(count, jnp.float32)
  for leaf in jax.tree.leaves(collection):
    total = total + leaf.reshape(count, -1).mean(1)
  return total


def classification(
  logits: jax.Array, batch: dict[str, jax.Array], extra: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Softmax cross-entropy and what else was sown, summed over real examples.

  Args:
    logits: float32 [b, c].
    batch: `targets` int32 [b] and `weights` float32 [b], 0 for padding.
    extra: float32 [b], added to the loss that is minimised.

  Returns:
    The sum to minimise, and the sums `objective` (the same), `loss`
    (cross-entropy alone), `correct` and `count`, all float32 scalars.
  """
  weights, targets = batch["weights"], batch["targets"]
  loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
  hit = (logits.argmax(-1) == targets).astype(jnp.float32)
  # A weight of zero must silence even a non-finite value.
  real = weights > 0
  loss = jnp.where(real, weights * loss, 0).sum()
  extra = jnp.where(real, weights * extra, 0).sum()
  objective = loss + extra
  return objective, {
    "objective": objective,
    "loss": loss,
    "correct": (weights * hit).sum(),
    "count": weights.sum(),
  }
