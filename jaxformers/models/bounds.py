"""How far the logits of a classifier can move, through layers that bound it.

Exactly, for certificates: in NumPy's float64, from the weights at hand. Or for
gradients: in JAX, with rotations taken for orthogonal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.foundations.errors import UserError
from jaxformers.models.activations import SLOPES
from jaxformers.models.blocks.invertible import (
  Change,
  layers_of,
  shared_by_all,
)
from jaxformers.models.config import ModelConfig
from jaxformers.models.model import Model, shapes
from jaxformers.models.norm import BatchNorm
from jaxformers.models.variables import make_variables, of_stack
from jaxformers.models.variants import bounded_models

# How far a pool moves at the most, from the bounds of the sequence.
POOLED = {
  "mean": lambda change, n: change.mean,
  "root_mean": lambda change, n: n**0.5 * change.mean,
  "max": lambda change, n: change.norm,
  "first": lambda change, n: change.norm,
}
# Norms of the pooled vector that are affine maps in evaluation.
AFFINE = ("", "running", "batch")

LogitBound = Callable[[Change, Any], Any]


def head_kernels(
  model: Model, params: Mapping[str, Any], *, exact: bool = True
) -> list[Any]:
  """Returns the kernels of the head's linear maps, [inputs, outputs].

  The scale of `pool_norm="running"` or "batch", an affine map in evaluation, is
  part of the first.

  Args:
    model, params: model and its parameters.
    exact: True for NumPy's float64; False for arrays of JAX.
  """
  config, head = model.config, params["head"]
  names = [
    "hidden" if layer == 0 else f"hidden_{layer}"
    for layer in range(config.head_layers if config.head_dim else 0)
  ]

  def read(name: str, leaf: str) -> Any:
    array = head[name][leaf]
    return np.asarray(array, np.float64) if exact else array

  kernels = [read(name, "kernel") for name in (*names, "logits")]
  if config.pool_norm:
    variance = read("norm", "running_variance") + BatchNorm.epsilon
    if not exact:  # Averages are made of batches, and have no gradient.
      variance = jax.lax.stop_gradient(variance)
    kernels[0] = (read("norm", "scale") / variance**0.5)[:, None] * kernels[0]
  return kernels


# Why other embeddings are refused.
NOT_PLAIN = (
  "tokens of adaptive tables, or under a LayerNorm, have no bound of how far a "
  "replacement moves them: train with the plain embedding"
)


def has_plain_tokens(config: ModelConfig) -> bool:
  """Returns True if a token is a row of one table, so that its reach is known.

  Args:
    config: of a model with a vocabulary.
  """
  embedding = config.embedding
  return not (embedding.get("cutoffs") or embedding.get("norm_epsilon"))


def token_table(model: Model, params: Any) -> jax.Array | None:
  """Returns the vectors of the vocabulary, [v, c]; None for other inputs.

  c is d, or the channels of tokens where positions have their own.
  """
  table = params["encoder"]["embedding"].get("tokens", {}).get("embedding")
  scale = model.config.embedding.get("scale", 1.0)
  return None if table is None else table * scale


def find_bound(
  model: Model, variables: Mapping[str, Any], *, exact: bool = True
) -> LogitBound | None:
  """Returns how far the input of the last linear map moves at the most.

  Before `pool_norm`, which `head_kernels` has in the first kernel. None where
  the layers, the pool or its norm have no bound for all sequences.

  Args:
    model: classifier.
    variables: its collections, from `make_variables`.
    exact: True for float64 and the norms of the weights at hand; False for a
      function that JAX differentiates, with rotations taken for orthogonal.

  Returns:
    A function from bounds of the embedded sequences, and the number of tokens
    of each, at least 1, to [b].
  """
  config = model.config
  block = model.stacks()["encoder"]
  layers = layers_of(block)
  is_known = config.pool in POOLED and config.pool_norm in AFFINE
  # A norm of tokens at the end of the encoder has no bound either.
  if layers is None or not is_known or block.final_norm:
    return None
  encoder = of_stack(variables, "encoder")
  shared = shared_by_all(layers, encoder, config.d_model)
  all_weights = layers.weights(encoder)
  if exact:
    all_weights = jax.device_get(all_weights)
  kernels = head_kernels(model, variables["params"], exact=exact)
  norm = np.linalg.norm if exact else jnp.linalg.norm
  slope = SLOPES[config.head_activation]
  head = math.prod(slope * norm(kernel, 2) for kernel in kernels[:-1])
  moves = []
  for weights in all_weights:
    move = layers.bound(weights, shared, exact=exact)
    if move is None:
      return None
    moves.append(move)

  def bound(change: Change, n: Any) -> Any:
    for move in moves:
      change = move(change, n)
    return head * POOLED[config.pool](change, n)

  return bound


def nearest_wrong(
  model: Model,
  variables: Mapping[str, Any],
  logits: jax.Array,
  ids: jax.Array,
  targets: jax.Array,
  k: int,
) -> jax.Array:
  """Returns logits, the wrong ones raised by what k replaced tokens can do.

  Whatever tokens stand in any k places, or in all if there are fewer, the logit
  of the target less a wrong one is in evaluation at least that of the result. A
  token of the vector e can be moved by at most |e| plus the greatest norm of
  the vocabulary. For training: gradients go through the bound, too.

  Source: Tsuzuku et al. 2018, https://arxiv.org/abs/1802.04034, equation 4, for
  the bound of this encoder in place of one radius for all inputs.

  Args:
    model, variables: classifier of ids, and its collections.
    logits: [b, c].
    ids: [b, n], 0 at padding.
    targets: int32 [b].
    k: number of tokens.
  """
  params = variables["params"]
  table = token_table(model, params)
  bound = find_bound(model, variables, exact=False)
  # `check_margin` refuses other models.
  assert table is not None and bound is not None
  sizes = jnp.linalg.norm(table[1:], axis=-1)
  mask = ids > 0
  reach = jnp.where(mask, sizes[jnp.maximum(ids - 1, 0)] + sizes.max(), 0)
  far, _ = jax.lax.top_k(reach, min(k, ids.shape[1]))
  count = jnp.maximum(mask.sum(1), 1).astype(jnp.float32)
  total = far.sum(1)
  # A sequence without tokens does not move; nor is there a gradient at 0.
  norm = jnp.sqrt(jnp.square(far).sum(1) + 1e-12)
  moved = bound(Change(norm, total, total / count), count)
  columns = head_kernels(model, params, exact=False)[-1].T
  gaps = jnp.square(columns[targets][:, None] - columns[None]).sum(-1)
  is_own = jnp.arange(logits.shape[1])[None] == targets[:, None]
  apart = jnp.where(is_own, 0, jnp.sqrt(jnp.where(is_own, 1, gaps)))
  return logits + apart * moved[:, None]


def check_bound(model: Any, k: int) -> None:
  """Raises UserError for k replaced tokens of a model without a bound."""
  if not k:
    return
  config = model.config
  reason = ""
  if config.objective != "classification" or not config.vocab_size:
    reason = "it is for classifiers of tokens"
  elif config.num_inputs > 1:
    reason = "it is for one input, not for pairs"
  elif not has_plain_tokens(config):
    reason = NOT_PLAIN
  elif config.pool not in POOLED or config.pool_norm not in ("", "running"):
    # A BatchNorm has another map in training than the bound has.
    reason = (
      f"pool={config.pool!r} with pool_norm={config.pool_norm!r} has no bound "
      f"in training: choose a pool of {', '.join(POOLED)}, and "
      "pool_norm='running' or ''"
    )
  elif config.coupled:
    reason = "coupled layers have no bound for gradients: set coupled=False"
  elif not _has_bound(model):
    reason = (
      f"the layers of {config.name!r} have no bound for all sequences: choose "
      f"{bounded_models()}"
    )
  if reason:
    raise UserError(f"config.margin_tokens={k}: {reason}.")


def _has_bound(model: Model) -> bool:
  """Returns True if the layers of a model have a bound, from shapes alone."""
  found = []

  def trace(params: Any) -> None:
    variables = make_variables(model, params)
    found.append(find_bound(model, variables, exact=False))

  jax.eval_shape(trace, shapes(model))
  return found[0] is not None
