"""Bounds on the change of a classifier's logits, from bounds of its layers.

There are two modes. Exact bounds, for certificates, use the actual weights in
NumPy's float64. Differentiable bounds, for training, use JAX and assume that
rotations are exactly orthogonal.
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

# Bounds on the change of the pooled vector, from the bounds of the sequence.
POOLED = {
  "mean": lambda change, n: change.mean,
  "root_mean": lambda change, n: n**0.5 * change.mean,
  "max": lambda change, n: change.norm,
  "first": lambda change, n: change.farthest,
}
# Values of `pool_norm` that are affine maps in evaluation.
AFFINE = ("", "running", "batch")

# Forms of the certified loss; see `training.steps.certified_loss`.
MARGIN_LOSSES = ("fixed", "emma", "annealed")

LogitBound = Callable[[Change, Any], Any]


def head_kernels(
  model: Model, params: Mapping[str, Any], *, exact: bool = True
) -> list[Any]:
  """Returns the kernels of the head's linear maps, [inputs, outputs] each.

  `pool_norm="running"` and "batch" are affine maps in evaluation. Their scale
  is multiplied into the first kernel.

  Args:
    model, params: model and its parameters.
    exact: True for arrays of NumPy in float64; False for arrays of JAX.
  """
  config, head = model.config, params["head"]
  # List the linear maps of the head in their order.
  names = [
    "hidden" if layer == 0 else f"hidden_{layer}"
    for layer in range(config.head_layers if config.head_dim else 0)
  ]

  def read(name: str, leaf: str) -> Any:
    array = head[name][leaf]
    return np.asarray(array, np.float64) if exact else array

  # Multiply the first kernel by scale / sqrt(variance + epsilon).
  kernels = [read(name, "kernel") for name in (*names, "logits")]
  if config.pool_norm:
    variance = read("norm", "running_variance") + BatchNorm.epsilon
    if not exact:  # Running averages have no gradient.
      variance = jax.lax.stop_gradient(variance)
    kernels[0] = (read("norm", "scale") / variance**0.5)[:, None] * kernels[0]
  return kernels


# Reason for which certificates refuse other embeddings, for error messages.
NOT_PLAIN = (
  "with adaptive tables, a LayerNorm or a separator in the embedding, there is "
  "no bound on how far a replacement moves tokens: train with the plain "
  "embedding"
)


def has_plain_tokens(config: ModelConfig) -> bool:
  """Returns True if the vector of a token is a row of one embedding table.

  Only then is there a bound on how far a replacement moves a token. Without a
  separator, it moves no other token.

  Args:
    config: config of a model with a vocabulary.
  """
  embedding = config.embedding
  has_norm = embedding.get("cutoffs") or embedding.get("norm_epsilon")
  return not (has_norm or config.separator)


def token_table(model: Model, params: Any) -> jax.Array | None:
  """Returns the token vectors of the vocabulary, [v, c]; None for other inputs.

  c is d, or d / 2 if tokens and positions have separate channels.
  """
  table = params["encoder"]["embedding"].get("tokens", {}).get("embedding")
  scale = model.config.embedding.get("scale", 1.0)
  return None if table is None else table * scale


def find_bound(
  model: Model, variables: Mapping[str, Any], *, exact: bool = True
) -> LogitBound | None:
  """Returns a bound on the change of the input of the head's last linear map.

  The bound does not include `pool_norm`: `head_kernels` multiplies its scale
  into the first kernel.

  Args:
    model: classifier.
    variables: collections of the model, from `make_variables`.
    exact: True for the norms of the actual weights in float64; False for a
      function that JAX can differentiate, which assumes that rotations are
      exactly orthogonal.

  Returns:
    A function (change, n) -> [b], from bounds on the change of the embedded
    sequences and their numbers of tokens n >= 1, [b]. None if the layers, the
    pool or its norm have no bound for all sequences.
  """
  config = model.config
  block = model.stacks()["encoder"]
  layers = layers_of(block)
  is_known = config.pool in POOLED and config.pool_norm in AFFINE
  # A norm of tokens at the end of the encoder has no bound either.
  if layers is None or not is_known or block.final_norm:
    return None
  # Read the weights of all layers and of the head.
  encoder = of_stack(variables, "encoder")
  shared = shared_by_all(layers, encoder, config.d_model)
  all_weights = layers.weights(encoder)
  if exact:
    all_weights = jax.device_get(all_weights)
  kernels = head_kernels(model, variables["params"], exact=exact)
  norm = np.linalg.norm if exact else jnp.linalg.norm
  slope = SLOPES[config.head_activation]
  # Lipschitz constant of the head without its last linear map.
  head = math.prod(slope * norm(kernel, 2) for kernel in kernels[:-1])
  # Collect functions that bound the change of a layer's output by its input's.
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
  """Returns the worst-case logits when any k tokens are replaced, for training.

  Each wrong logit is raised by a bound on the change of its margin. So the
  margin of the result is a lower bound, in evaluation, for the margin of every
  input that differs in at most k tokens. A replacement moves a token with the
  vector e by at most |e| plus the greatest norm of the vocabulary. The bound is
  differentiable.

  Source: Tsuzuku et al. 2018, https://arxiv.org/abs/1802.04034, equation 4.
  Differs from it: uses the bound of this encoder for each input, not one radius
  for all inputs.

  Args:
    model, variables: classifier of ids, and its collections.
    logits: logits of the inputs, [b, c].
    ids: inputs, [b, n], 0 at padding.
    targets: right classes, int32 [b].
    k: number of replaced tokens.
  """
  params = variables["params"]
  table = token_table(model, params)
  bound = find_bound(model, variables, exact=False)
  # `check_bound` refuses other models.
  assert table is not None and bound is not None
  # Bound how far each token can move, [b, n], and take the k farthest.
  # The small constants give vectors of zeros, and sequences without tokens, a
  # finite gradient.
  sizes = jnp.sqrt(jnp.square(table[1:]).sum(-1) + 1e-12)
  mask = ids > 0
  reach = jnp.where(mask, sizes[jnp.maximum(ids - 1, 0)] + sizes.max(), 0)
  far, _ = jax.lax.top_k(reach, min(k, ids.shape[1]))
  count = jnp.maximum(mask.sum(1), 1).astype(jnp.float32)
  total = far.sum(1)
  # Norms of the change of the embedded sequence: Frobenius, sum and mean.
  norm = jnp.sqrt(jnp.square(far).sum(1) + 1e-12)
  moved = bound(Change(norm, total, total / count, far[:, 0]), count)
  # A margin changes by at most |w_target - w_class| times the bound.
  columns = head_kernels(model, params, exact=False)[-1].T
  gaps = jnp.square(columns[targets][:, None] - columns[None]).sum(-1)
  is_own = jnp.arange(logits.shape[1])[None] == targets[:, None]
  apart = jnp.where(is_own, 0, jnp.sqrt(jnp.where(is_own, 1, gaps)))
  return logits + apart * moved[:, None]


def check_bound(model: Any, k: int) -> None:
  """Raises UserError if k > 0 and the model has no differentiable bound."""
  if not k:
    return
  config = model.config
  reason = ""
  # Find the first reason for which there is no bound.
  if config.objective != "classification" or not config.vocab_size:
    reason = "it applies to classifiers of token ids only"
  elif config.num_inputs > 1:
    reason = "it applies to tasks with one input, not to pairs"
  elif not has_plain_tokens(config):
    reason = NOT_PLAIN
  elif config.pool not in POOLED or config.pool_norm not in ("", "running"):
    # In training, BatchNorm differs from the affine map that is bounded.
    reason = (
      f"pool={config.pool!r} with pool_norm={config.pool_norm!r} has no bound "
      f"in training: choose a pool from {', '.join(POOLED)}, and "
      "pool_norm='running' or ''"
    )
  elif config.coupled:
    reason = "coupled layers have no differentiable bound: set coupled=False"
  elif not _has_bound(model):
    reason = (
      f"the layers of {config.name!r} have no bound for all sequences: choose "
      f"{bounded_models()}"
    )
  if reason:
    raise UserError(f"config.margin_tokens={k}: {reason}.")


def _has_bound(model: Model) -> bool:
  """Returns True if a model has a differentiable bound; traces only shapes."""
  bounds = []

  def trace(params: Any) -> None:
    variables = make_variables(model, params)
    bounds.append(find_bound(model, variables, exact=False))

  jax.eval_shape(trace, shapes(model))
  return bounds[0] is not None
