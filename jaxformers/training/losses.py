"""Losses of examples, as sums: nothing is divided before the end."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.errors import UserError
from jaxformers.registry import Registry

LOSSES: Registry = Registry("objective")
MANY = 100  # Classes, from which on the best five count, too.

Batch = dict[str, jax.Array]
Sums = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Objective:
  """What a kind of model is trained and scored by.

  Attributes:
    metric: the name of the score that its papers quote.
    higher: whether more of it is better.
    inputs: of a batch, what the model is called with.
    sums: of the model's output, a batch, what was sown, and label smoothing,
      the sum to minimise and the sums to report, among them `objective` (the
      same), `loss` and `count`.
    means: of sums over a whole split, plain numbers: `loss`, `count` and the
      metric. The one division.
  """

  metric: str
  higher: bool
  inputs: Callable[[Batch], tuple[jax.Array, ...]]
  sums: Callable[[jax.Array, Batch, jax.Array, float], tuple[jax.Array, Sums]]
  means: Callable[[Mapping[str, Any]], dict[str, Any]]


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


def _summed(values: jax.Array, weights: jax.Array) -> jax.Array:
  """The weighted sum; weight 0 silences even NaN."""
  return jnp.where(weights > 0, weights * values, 0).sum()


def classification(
  logits: jax.Array, batch: Batch, extra: jax.Array, smoothing: float = 0.0
) -> tuple[jax.Array, Sums]:
  """Softmax cross-entropy and what else was sown, summed over real examples.

  Args:
    logits: float32 [b, c].
    batch: `targets` int32 [b] and `weights` float32 [b], 0 for padding. Of
      images that are mixed of two, also `others` int32 [b], the class of the
      other, and `shares` float32 [b], the share of `targets`.
    extra: float32 [b], added to the loss that is minimised.
    smoothing: probability that the target spreads over all classes, in what is
      minimised (Szegedy et al. 2016); `loss` is without.

  Returns:
    The sum to minimise, and the sums `objective` (the same), `loss`
    (cross-entropy alone), `correct` (of the target with the greater share),
    `count`, and from a hundred classes on `correct_top5`: float32 scalars.
  """
  weights, targets = batch["weights"], batch["targets"]
  log_p = jax.nn.log_softmax(logits, axis=-1)

  def cross_entropy(of: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(log_p, of[:, None], 1)[:, 0]

  loss, truth = cross_entropy(targets), targets
  if "others" in batch:
    share, others = batch["shares"], batch["others"]
    loss = share * loss + (1 - share) * cross_entropy(others)
    truth = jnp.where(share >= 0.5, targets, others)
  minimised = loss
  if smoothing:
    minimised = (1 - smoothing) * loss - smoothing * log_p.mean(-1)
  objective = _summed(minimised, weights) + _summed(extra, weights)
  hit = logits.argmax(-1) == truth
  sums = {
    "objective": objective,
    "loss": _summed(loss, weights),
    "correct": (weights * hit).sum(),
    "count": weights.sum(),
  }
  if logits.shape[-1] >= MANY:
    _, best = jax.lax.top_k(logits, 5)
    sums["correct_top5"] = (weights * (best == truth[:, None]).any(-1)).sum()
  return objective, sums


def classification_means(total: Mapping[str, Any]) -> dict[str, Any]:
  """`loss`, `accuracy`, `count`; `accuracy_top5` where it was counted."""
  count = max(float(total["count"]), 1.0)
  means = {
    "loss": float(total["loss"]) / count,
    "accuracy": float(total["correct"]) / count,
    "count": int(total["count"]),
  }
  if "correct_top5" in total:
    means["accuracy_top5"] = float(total["correct_top5"]) / count
  return means


def language(
  log_p: jax.Array, batch: Batch, extra: jax.Array, smoothing: float = 0.0
) -> tuple[jax.Array, Sums]:
  """The negative log-likelihood of tokens, summed over those with weight.

  Args:
    log_p: of the targets, float32 [b, n].
    batch: `weights` float32 [b, n].
    extra: float32 [b], added to the loss that is minimised, once a sequence.
    smoothing: 0.

  Raises:
    UserError: for any smoothing.
  """
  if smoothing:
    raise UserError(
      f"label_smoothing={smoothing} is for classes: leave it 0 with language "
      "models."
    )
  weights = batch["weights"]
  loss = _summed(-log_p, weights)
  objective = loss + _summed(extra, weights.max(1))
  return objective, {
    "objective": objective,
    "loss": loss,
    "count": weights.sum(),
  }


def language_means(total: Mapping[str, Any]) -> dict[str, Any]:
  """`loss` in nats a token, `perplexity`, exp of it, and `count` of tokens."""
  loss = float(total["loss"]) / max(float(total["count"]), 1.0)
  perplexity = math.exp(loss) if loss < 700 else math.inf
  return {"loss": loss, "perplexity": perplexity, "count": int(total["count"])}


def segmentation(
  logits: jax.Array, batch: Batch, extra: jax.Array, smoothing: float = 0.0
) -> tuple[jax.Array, Sums]:
  """Cross-entropy of pixels, and what mean IoU is counted from.

  Differs from Segmenter: the mean is over the counted pixels of each image and
  then over images, so that every image weighs the same; theirs is over all
  pixels of a batch.

  Args:
    logits: float32 [b, h, w, c].
    batch: `targets` int32 [b, h, w], -1 where a pixel is not to be counted, and
      `weights` float32 [b].
    extra: float32 [b], added to the loss that is minimised.
    smoothing: as in `classification`.

  Returns:
    As `classification`, where loss is the mean over an image's counted pixels
    and `count` the images; and of every class, float32 [c], the pixels `hits`
    (right), `predicted` and `labelled`, which are exact up to 2^24 a batch.
  """
  weights, targets = batch["weights"], batch["targets"]
  counted = targets >= 0
  safe = jnp.where(counted, targets, 0)
  log_p = jax.nn.log_softmax(logits, axis=-1)
  loss = -jnp.take_along_axis(log_p, safe[..., None], -1)[..., 0]
  minimised = loss
  if smoothing:
    minimised = (1 - smoothing) * loss - smoothing * log_p.mean(-1)
  pixels = jnp.maximum(counted.sum((1, 2)), 1)

  def over(loss: jax.Array) -> jax.Array:
    return jnp.where(counted, loss, 0).sum((1, 2)) / pixels

  objective = _summed(over(minimised), weights) + _summed(extra, weights)
  areas = confusion_areas(
    logits.argmax(-1), targets, logits.shape[-1], weights[:, None, None] > 0
  )
  return objective, {
    "objective": objective,
    "loss": _summed(over(loss), weights),
    "count": weights.sum(),
    **areas,
  }


def confusion_areas(
  predicted: jax.Array, targets: jax.Array, classes: int, real: Any = True
) -> Sums:
  """The pixels of every class, float32 [c]: `hits`, `predicted`, `labelled`.

  Args:
    predicted: int32 [...], classes.
    targets: int32 [...], -1 where a pixel is not counted at all.
    classes: c.
    real: [...], False where a pixel is not counted either.
  """
  counted = (targets >= 0) & real

  def area(of: jax.Array, where: jax.Array) -> jax.Array:
    place = jnp.where(where, of, classes).ravel()
    return jnp.bincount(place, length=classes + 1)[:-1].astype(jnp.float32)

  return {
    "hits": area(targets, counted & (predicted == targets)),
    "predicted": area(predicted, counted),
    "labelled": area(targets, counted),
  }


def segmentation_means(total: Mapping[str, Any]) -> dict[str, Any]:
  """`loss`, `mean_iou`, pixel `accuracy` and `count` of images.

  Intersection over union is that of the whole split, class by class; the mean
  is over the classes that a label or a prediction has, as in
  mmsegmentation, whose numbers the papers quote.
  """
  return {
    "loss": float(total["loss"]) / max(float(total["count"]), 1.0),
    **overlap(total),
    "count": int(total["count"]),
  }


def overlap(total: Mapping[str, Any]) -> dict[str, float]:
  """`mean_iou` and pixel `accuracy` of sums of `confusion_areas`."""
  hits, predicted, labelled = (
    np.asarray(total[name], np.float64)
    for name in ("hits", "predicted", "labelled")
  )
  union = predicted + labelled - hits
  present = union > 0
  iou = hits[present] / union[present]
  return {
    "mean_iou": float(iou.mean()) if present.any() else 0.0,
    "accuracy": float(hits.sum() / max(labelled.sum(), 1.0)),
  }


LOSSES.register("classification")(
  Objective(
    "accuracy",
    True,
    lambda batch: (batch["inputs"],),
    classification,
    classification_means,
  )
)
LOSSES.register("language_model")(
  Objective(
    "perplexity",
    False,
    lambda batch: (batch["inputs"], batch["targets"], batch["weights"]),
    language,
    language_means,
  )
)
LOSSES.register("segmentation")(
  Objective(
    "mean_iou",
    True,
    lambda batch: (batch["inputs"],),
    segmentation,
    segmentation_means,
  )
)
