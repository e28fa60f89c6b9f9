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
    is_layer = len(path) == 2 and path[1].startswith("layer_")
    if not is_layer or context.method_name != "__call__":
      return result
    layer = int(path[1].removeprefix("layer_"))
    return jnp.where(skipped[layer], args[0], result[0]), result[1]

  return intercept


@functools.partial(jax.jit, static_argnums=0)
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
  model: Model, variables: Any, batch: dict[str, jax.Array]
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
  """
  config = model.config
  model = model.clone(config=dataclasses.replace(config, memory="stored"))
  ids, *_ = model.close_holes(batch["inputs"])
  mask = model.mask(ids)
  layers = jnp.arange(config.num_layers)
  full = run(model, variables, batch, layers < 0)
  changes = _changes(full.hidden)
  means = LOSSES[model.objective].means
  result: dict[str, list[Any]] = {name: [] for name in MEASURES}
  for layer, (h, c) in enumerate(zip(full.hidden, changes, strict=False)):
    size, change = _norm(h), _norm(c)
    result["contribution"].append(_mean(change / _positive(size), mask))
    cosine = (h * c).sum(-1) / _positive(size * change)
    result["cosine"].append(_mean(cosine, mask))
    # Compare with a pass without the layer.
    other = run(model, variables, batch, layers == layer)
    losses = [means(done.sums)["loss"] for done in (other, full)]
    result["loss"].append(losses[0] - losses[1])
    pairs = zip(changes, _changes(other.hidden), strict=True)
    relative = [
      _mean(_norm(b - a) / _positive(_norm(a)), mask) for a, b in pairs
    ]
    result["later"].append(max(relative[layer + 1 :], default=0.0))
    # Compare with a pass that ends after the layer.
    if full.log_p is None:
      continue
    lens = run(model, variables, batch, layers > layer).log_p
    divergence, overlap = _compare(full.log_p, lens)
    where = batch["weights"] > 0
    result["divergence"].append(_mean(divergence, where))
    result["overlap"].append(_mean(overlap, where))
  return {k: np.array(v, float) for k, v in result.items() if v}


def _changes(hidden: Iterable[jax.Array]) -> list[jax.Array]:
  return [after - before for before, after in itertools.pairwise(hidden)]


def _norm(x: jax.Array) -> jax.Array:
  return jnp.linalg.norm(x, axis=-1)


def _positive(x: jax.Array) -> jax.Array:
  return jnp.where(x > 0, x, 1)


def _mean(values: jax.Array, where: jax.Array) -> float:
  return float(values.mean(where=where))


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
