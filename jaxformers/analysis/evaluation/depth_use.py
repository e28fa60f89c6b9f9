"""How a trained model uses its depth: what each layer adds, and who needs it.

Source: Csordas et al. 2025, https://arxiv.org/abs/2505.13898, sections 3.1 to
3.3, averaged over tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.models import Model
from jaxformers.training.losses import LOSSES

MEASURES = {
  "contribution": "norm of the layer's change / norm of its input",
  "cosine": "cosine of the layer's change and its input",
  "later": "greatest relative change of a later layer if it is skipped",
  "loss": "increase of the loss if it is skipped",
  "divergence": "KL from the outputs to those after the layer, nats",
  "overlap": "share of likeliest classes that agree after the layer",
}
# Objectives whose outputs are logits or log probabilities of classes.
WITH_CLASSES = ("classification", "token_classification", "language_model")
MOST_CLASSES = 5  # Likeliest classes that `overlap` compares.
# Names of the measures that are means over tokens, and over labelled outputs.
_MEANS = {
  "tokens": ("contribution", "cosine", "later"),
  "outputs": ("divergence", "overlap"),
}


class Pass(NamedTuple):
  """Results of a forward pass.

  Attributes:
    hidden: embedded tokens and the output of every layer, [b, n, d] each.
    sums: sums of the objective over the batch.
    log_p: log probabilities, [b, c] or [b, n, c]; None without classes.
  """

  hidden: tuple[jax.Array, ...]
  sums: dict[str, jax.Array]
  log_p: jax.Array | None


def _skipping(skipped: jax.Array) -> Callable[..., Any]:
  """Returns an interceptor of Flax that replaces layers by the identity.

  A skipped layer still computes the carry of the next one.

  Args:
    skipped: bool [l], True for layers to replace.
  """

  def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    result = call(*args, **kwargs)
    path = context.module.path
    # A segmenter's decoder has layers, too.
    is_in_encoder = len(path) == 2 and path[0] == "encoder"
    is_layer = is_in_encoder and path[1].startswith("layer_")
    if not is_layer or context.method_name != "__call__":
      return result
    layer = int(path[1].removeprefix("layer_"))
    return jnp.where(skipped[layer], args[0], result[0]), result[1]

  return intercept


def run(
  model: Model,
  variables: Any,
  batch: dict[str, jax.Array],
  skipped: jax.Array,
) -> Pass:
  """Returns the results of a batch without some layers.

  Args:
    model: model whose layers are not looped (`memory` is "stored").
    variables: result of `make_variables`.
    batch: arrays of the objective, with `weights`.
    skipped: bool [l], True for layers to replace by the identity.
  """
  objective = LOSSES[model.objective]
  inputs = [batch[name] for name in objective.inputs]
  apply = functools.partial(model.apply, variables, train=False)
  with nn.intercept_methods(_skipping(skipped)):
    output, state = apply(*inputs, mutable=["intermediates"])
    logits = apply(inputs[0]) if model.objective in WITH_CLASSES else None
  extra = jnp.zeros(len(batch["weights"]), jnp.float32)
  _, sums = objective.sums(output, batch, extra, 0.0)
  hidden = state["intermediates"]["encoder"]["hidden"]
  log_p = None if logits is None else jax.nn.log_softmax(logits)
  return Pass(tuple(hidden), sums, log_p)


def measure(
  model: Model, variables: Any, batch: dict[str, Any], batch_size: int = 8
) -> dict[str, np.ndarray]:
  """Returns the values of `MEASURES` for every layer, [l] each.

  Let h be the input of a layer and c its change, so that h + c is its output.
  `contribution` is the mean of |c| / |h| over tokens, and `cosine` the mean
  cosine of c and h. `later` is the mean of |c' - c| / |c| over tokens, where c'
  is the change of a later layer when this one is replaced by the identity, for
  the later layer with the greatest mean; it is 0 for the last layer. `loss` is
  the mean loss without the layer minus that with it. `divergence` and `overlap`
  compare the outputs with the final norm and the head after this layer
  (logit lens): the mean KL divergence, and the share of the likeliest five
  classes, or of the likeliest with fewer than ten, that both have. They need an
  objective in `WITH_CLASSES`.

  Args:
    model: model from `models.build`.
    variables, batch: arguments of `run`.
    batch_size: number of examples of a forward pass; all examples for an
      objective whose loss depends on the batch.
  """
  config = model.config
  if LOSSES[model.objective].sees_batch:
    batch_size = len(batch["weights"])
  model = model.clone(config=dataclasses.replace(config, memory="stored"))
  starts = range(0, len(batch["weights"]), batch_size)
  parts = (
    {name: x[start : start + batch_size] for name, x in batch.items()}
    for start in starts
  )
  sums = [jax.device_get(_sums(model, variables, part)) for part in parts]
  total = jax.tree.map(lambda *values: np.sum(values, 0, float), *sums)
  result = {
    name: total[name] / total[count]
    for count, names in _MEANS.items()
    for name in names
    if name in total
  }
  result["later"] = np.triu(result["later"], 1).max(1)
  means = LOSSES[model.objective].means
  losses = [
    means(jax.tree.map(lambda x, i=layer: x[i], total["without"]))["loss"]
    for layer in range(config.num_layers)
  ]
  result["loss"] = np.array(losses, float) - means(total["with"])["loss"]
  return {name: result[name] for name in MEASURES if name in result}


@functools.partial(jax.jit, static_argnums=0)
def _sums(
  model: Model, variables: Any, batch: dict[str, jax.Array]
) -> dict[str, Any]:
  """Returns sums over a batch whose means are the values of `MEASURES`.

  Args:
    model, variables, batch: arguments of `run`.

  Returns:
    `tokens` and `outputs`, the numbers of tokens and of labelled outputs; the
    sums [l] of `contribution`, `cosine`, `divergence` and `overlap`; `later`
    [l, l], of each layer without another; and `with` and `without`, the sums
    of the objective with all layers, and without each.
  """
  ids, *_ = model.close_holes(batch["inputs"])
  mask = model.mask(ids)
  labelled = batch["weights"] > 0
  layers = jnp.arange(model.config.num_layers)
  full = run(model, variables, batch, layers < 0)
  before, changes = jnp.stack(full.hidden[:-1]), _changes(full.hidden)
  size, change = _norm(before), _norm(changes)
  result: dict[str, Any] = {
    "tokens": mask.sum(),
    "outputs": labelled.sum(),
    "with": full.sums,
    "contribution": _total(change / _positive(size), mask),
    "cosine": _total(
      (before * changes).sum(-1) / _positive(size * change), mask
    ),
  }

  def of_layer(layer: jax.Array) -> dict[str, Any]:
    # Compare with a pass without the layer.
    other = run(model, variables, batch, layers == layer)
    moved = _norm(_changes(other.hidden) - changes)
    sums = {
      "without": other.sums,
      "later": _total(moved / _positive(change), mask),
    }
    if full.log_p is None:
      return sums
    # Compare with a pass that ends after the layer.
    lens = run(model, variables, batch, layers > layer).log_p
    assert lens is not None
    compared = zip(
      ("divergence", "overlap"), _compare(full.log_p, lens), strict=True
    )
    return sums | {name: _total(x, labelled) for name, x in compared}

  # One layer after the other, in one compiled program.
  return result | jax.lax.map(of_layer, layers)


def _changes(hidden: Iterable[jax.Array]) -> jax.Array:
  """Returns what each layer adds to its input, [l, b, n, d]."""
  pairs = itertools.pairwise(hidden)
  return jnp.stack([after - before for before, after in pairs])


def _norm(x: jax.Array) -> jax.Array:
  return jnp.linalg.norm(x, axis=-1)


def _positive(x: jax.Array) -> jax.Array:
  return jnp.where(x > 0, x, 1)


def _total(values: jax.Array, where: jax.Array) -> jax.Array:
  """Returns the sums of values [..., *where.shape] where `where` is True."""
  axes = tuple(range(-where.ndim, 0))
  return jnp.where(where, values, 0).sum(axes)


def _compare(log_p: jax.Array, other: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns KL(p | q), and the share of the likeliest classes in common.

  Args:
    log_p, other: log p and log q, [..., c].
  """
  p = jnp.exp(log_p)
  # A class of probability 0, such as padding, adds nothing.
  divergence = jnp.where(p > 0, p * (log_p - other), 0).sum(-1)
  count = MOST_CLASSES if p.shape[-1] >= 2 * MOST_CLASSES else 1
  likeliest = (jax.lax.top_k(x, count)[1] for x in (log_p, other))
  first, second = likeliest
  shared = (first[..., :, None] == second[..., None, :]).any(-1)
  return divergence, shared.mean(-1)
