"""Losses and metrics, as sums over examples.

Sums are divided only at the end, so that every example counts the same on any
number of devices and in any number of parts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import Registry

LOSSES: Registry = Registry("objective")
MANY_CLASSES = 100  # From this number on, top-5 accuracy is counted, too.

Batch = dict[str, jax.Array]
Sums = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Objective:
  """Loss and metric of a kind of model, as functions of a batch.

  Attributes:
    metric: name of the score that papers report.
    higher: True if a higher metric is better.
    inputs: names of the arrays of a batch that are arguments of the model.
    sums: maps (output of the model, batch, sown losses, label smoothing) to the
      sum to minimise, and to the sums to report: `objective` (the same sum),
      `loss`, `count` and more.
    means: maps sums over a split to plain numbers: `loss`, `count` and the
      metric. This is the only division.
    collect: maps (output of the model, batch) to arrays [b] for a metric that
      is not a mean over examples. The `weights` of the batch are added to these
      arrays, and `Split.score` maps the arrays of a whole split, without
      padding, to the metric. None if `means` has the metric.
    sees_batch: True if the loss of an example depends on the other examples of
      its batch. Such a batch is divided only if the config says so.
  """

  metric: str
  higher: bool
  inputs: tuple[str, ...]
  sums: Callable[[jax.Array, Batch, jax.Array, float], tuple[jax.Array, Sums]]
  means: Callable[[Mapping[str, Any]], dict[str, Any]]
  collect: Callable[[jax.Array, Batch], dict[str, jax.Array]] | None = None
  sees_batch: bool = False


def sown_losses(collection: Any, count: int) -> jax.Array:
  """Returns the sum of all sown losses of each example, float32 [b].

  Args:
    collection: Linen collection `losses`, which may be empty. Every leaf has
      one value per example, [b], or two per pair, [2 b], whose mean counts.
    count: number of examples b.
  """
  return sum(
    (leaf.reshape(count, -1).mean(1) for leaf in jax.tree.leaves(collection)),
    start=jnp.zeros(count, jnp.float32),
  )


def _summed(values: jax.Array, weights: jax.Array) -> jax.Array:
  """Returns the weighted sum; a weight of 0 hides even NaN."""
  return jnp.where(weights > 0, weights * values, 0).sum()


def classification(
  logits: jax.Array, batch: Batch, extra: jax.Array, smoothing: float = 0.0
) -> tuple[jax.Array, Sums]:
  """Returns softmax cross-entropy and sown losses, summed over real examples.

  Args:
    logits: float32 [b, c].
    batch: `targets` int32 [b] and `weights` float32 [b], 0 for padding. For
      images that are mixed from two, also `others` int32 [b], the class of the
      second image, and `shares` float32 [b], the share of `targets`.
    extra: float32 [b], sown losses, added to the loss that is minimised.
    smoothing: share of the target that is spread over all classes in the loss
      that is minimised (Szegedy et al. 2016); `loss` has none.

  Returns:
    The sum to minimise, and the sums to report, float32 scalars: `objective`
    (the same sum), `loss` (cross-entropy without smoothing), `correct` (counted
    by the class with the greater share), `count`, and with `MANY_CLASSES` or
    more classes `correct_top5`.
  """
  weights, targets = batch["weights"], batch["targets"]
  log_p = jax.nn.log_softmax(logits, axis=-1)

  def cross_entropy(classes: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(log_p, classes[:, None], 1)[:, 0]

  # Cross-entropy, shared between both classes of a mixed image.
  loss, truth = cross_entropy(targets), targets
  if "others" in batch:
    share, others = batch["shares"], batch["others"]
    loss = share * loss + (1 - share) * cross_entropy(others)
    truth = jnp.where(share >= 0.5, targets, others)
  # Count correct predictions.
  hits = {"correct": (weights * (logits.argmax(-1) == truth)).sum()}
  if logits.shape[-1] >= MANY_CLASSES:
    _, top5 = jax.lax.top_k(logits, 5)
    hits["correct_top5"] = (weights * (top5 == truth[:, None]).any(-1)).sum()
  # Smooth the targets of the loss that is minimised.
  smoothed = _smooth(loss, log_p, smoothing)
  return _report(loss, smoothed, extra, weights, hits)


def _report(
  loss: jax.Array,
  smoothed: jax.Array,
  extra: jax.Array,
  weights: jax.Array,
  others: Sums,
) -> tuple[jax.Array, Sums]:
  """Returns the sum to minimise, and the sums to report.

  Args:
    loss, smoothed, extra: [b], losses of each example: the reported loss, the
      minimised loss, and the sown losses, which are minimised as well.
    weights: [b], 0 for padding.
    others: further sums to report.
  """
  objective = _summed(smoothed, weights) + _summed(extra, weights)
  sums = {"loss": _summed(loss, weights), "count": weights.sum(), **others}
  return objective, {"objective": objective, **sums}


def _smooth(loss: jax.Array, log_p: jax.Array, smoothing: float) -> jax.Array:
  """Returns (1 - s) loss - s mean(log_p), the loss of smoothed targets.

  Args:
    loss: [...], cross-entropy of the targets without smoothing.
    log_p: [..., c], log-probabilities of all classes.
    smoothing: share s of the target that is spread over all classes.
  """
  if not smoothing:
    return loss
  return (1 - smoothing) * loss - smoothing * log_p.mean(-1)


def classification_means(total: Mapping[str, Any]) -> dict[str, Any]:
  """Returns `loss`, `accuracy`, `count`, and `accuracy_top5` if counted.

  Args:
    total: sums of `classification` over a split.
  """
  sums = {"loss": "loss", "accuracy": "correct"}
  if "correct_top5" in total:
    sums["accuracy_top5"] = "correct_top5"
  count = max(float(total["count"]), 1.0)
  means = {key: float(total[name]) / count for key, name in sums.items()}
  return means | {"count": int(total["count"])}


def language(
  log_p: jax.Array, batch: Batch, extra: jax.Array, smoothing: float = 0.0
) -> tuple[jax.Array, Sums]:
  """Returns the negative log-likelihood, summed over weighted tokens.

  Args:
    log_p: log-probabilities of the targets, float32 [b, n].
    batch: `weights` float32 [b, n], 0 for tokens that do not count.
    extra: float32 [b], sown losses, which are added to the minimised loss once
      per sequence.
    smoothing: must be 0.

  Raises:
    UserError: if smoothing is not 0.
  """
  _refuse_smoothing(smoothing)
  # Sum over tokens; sown losses count once per sequence with any weight.
  weights = batch["weights"]
  loss = _summed(-log_p, weights)
  objective = loss + _summed(extra, weights.max(1))
  sums = {"objective": objective, "loss": loss, "count": weights.sum()}
  return objective, sums


def _refuse_smoothing(smoothing: float) -> None:
  """Raises UserError for label smoothing of a model without classes."""
  if smoothing:
    raise UserError(
      f"label_smoothing={smoothing} applies to classes only: set it to 0 for "
      "models of tokens, values, answers or sentences."
    )


def language_means(total: Mapping[str, Any]) -> dict[str, Any]:
  """Returns `loss` (nats per token), `perplexity` (its exp) and `count`.

  Args:
    total: sums of `language` over a split.
  """
  loss = float(total["loss"]) / max(float(total["count"]), 1.0)
  # Avoid an overflow of the exponential.
  perplexity = math.exp(loss) if loss < 700 else math.inf
  return {"loss": loss, "perplexity": perplexity, "count": int(total["count"])}


def values(
  predicted: jax.Array, batch: Batch, extra: jax.Array, smoothing: float = 0.0
) -> tuple[jax.Array, Sums]:
  """Returns the absolute error, summed over weighted tokens.

  Args:
    predicted: float32 [b, n].
    batch: `targets` and `weights`, float32 [b, n].
    extra: float32 [b], sown losses; see `language`.
    smoothing: must be 0.

  Raises:
    UserError: if smoothing is not 0.
  """
  return language(
    -jnp.abs(predicted - batch["targets"]), batch, extra, smoothing
  )


def values_means(total: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the mean absolute error as `loss` and `error`, and `count`.

  Args:
    total: sums of `values` over a split.
  """
  error = float(total["loss"]) / max(float(total["count"]), 1.0)
  return {"loss": error, "error": error, "count": int(total["count"])}


def token_classification(
  logits: jax.Array, batch: Batch, extra: jax.Array, smoothing: float = 0.0
) -> tuple[jax.Array, Sums]:
  """Returns the cross-entropy of tokens, and counts of right answers.

  Args:
    logits: float32 [b, n, c].
    batch: `targets` int32 [b, n], and `weights` float32 [b, n], 0 for tokens
      without a label.
    extra: float32 [b], sown losses; see `language`.
    smoothing: see `classification`.

  Returns:
    The sum to minimise, and the sums to report, float32 scalars: `objective`
    (the same sum), `loss`, `count` (of labels), `correct`, `chance` (expected
    number of correct labels if each of the c classes is drawn alike); and the
    same for whole sequences: `sequences`, `right_sequences` (all labels are
    predicted) and `chance_sequences`.
  """
  weights, targets = batch["weights"], batch["targets"]
  classes = logits.shape[-1]
  log_p = jax.nn.log_softmax(logits, axis=-1)
  safe = jnp.clip(targets, 0, classes - 1)
  each = -jnp.take_along_axis(log_p, safe[..., None], -1)[..., 0]
  objective = _summed(_smooth(each, log_p, smoothing), weights)
  objective += _summed(extra, weights.max(1))
  # Count right tokens, and sequences whose labels are all right.
  is_labelled = weights > 0
  is_right = logits.argmax(-1) == targets
  has_labels = is_labelled.any(1)
  all_right = has_labels & (is_right | ~is_labelled).all(1)
  guessed = jnp.float32(classes) ** -is_labelled.sum(1)
  count = weights.sum()
  return objective, {
    "objective": objective,
    "loss": _summed(each, weights),
    "count": count,
    "correct": _summed(is_right, weights),
    "chance": count / classes,
    "sequences": has_labels.sum().astype(jnp.float32),
    "right_sequences": all_right.sum().astype(jnp.float32),
    "chance_sequences": jnp.where(has_labels, guessed, 0).sum(),
  }


def token_means(total: Mapping[str, Any]) -> dict[str, Any]:
  """Returns `loss`, `accuracy`, `sequence_accuracy` and `count` of sequences.

  `scaled_accuracy` and `scaled_sequence_accuracy` are (a - chance) /
  (1 - chance), with the share of right answers of a model that draws each of
  the classes alike: 0 is chance, and 1 is perfect.

  Args:
    total: sums of `token_classification` over a split.
  """
  sums = {key: float(value) for key, value in total.items()}
  labels = max(sums["count"], 1.0)
  sequences = max(sums["sequences"], 1.0)

  def scale(right: float, guessed: float) -> float:
    return (right - guessed) / max(1 - guessed, 1e-9)

  tokens = sums["correct"] / labels
  all_right = sums["right_sequences"] / sequences
  return {
    "loss": sums["loss"] / labels,
    "accuracy": tokens,
    "sequence_accuracy": all_right,
    "scaled_accuracy": scale(tokens, sums["chance"] / labels),
    "scaled_sequence_accuracy": scale(
      all_right, sums["chance_sequences"] / sequences
    ),
    "count": int(sums["sequences"]),
  }


def segmentation(
  logits: jax.Array, batch: Batch, extra: jax.Array, smoothing: float = 0.0
) -> tuple[jax.Array, Sums]:
  """Returns the cross-entropy of pixels, and the areas for mean IoU.

  Differs from Segmenter: the mean is over the counted pixels of each image and
  then over images, so that every image has the same weight; Segmenter averages
  over all pixels of a batch.

  Args:
    logits: float32 [b, h, w, c].
    batch: `targets` int32 [b, h, w], -1 for pixels that do not count, and
      `weights` float32 [b].
    extra: float32 [b], sown losses, added to the loss that is minimised.
    smoothing: see `classification`.

  Returns:
    The results of `classification`, where the loss is the mean over the counted
    pixels of an image and `count` is the number of images. The sums also have
    the number of pixels of each class, float32 [c]: `hits` (correct),
    `predicted` and `labelled`. They are exact up to 2^24 per batch.
  """
  weights, targets = batch["weights"], batch["targets"]
  # Replace labels that do not count by a class that exists.
  counted = targets >= 0
  safe = jnp.where(counted, targets, 0)
  log_p = jax.nn.log_softmax(logits, axis=-1)
  # Cross-entropy of every pixel [b, h, w], and its mean over each image [b].
  loss = -jnp.take_along_axis(log_p, safe[..., None], -1)[..., 0]
  num_pixels = jnp.maximum(counted.sum((1, 2)), 1)

  def mean_per_image(loss: jax.Array) -> jax.Array:
    return jnp.where(counted, loss, 0).sum((1, 2)) / num_pixels

  # Areas of all classes, without images that are padding.
  is_real = weights[:, None, None] > 0
  areas = confusion_areas(logits.argmax(-1), targets, logits.shape[-1], is_real)
  smoothed = mean_per_image(_smooth(loss, log_p, smoothing))
  return _report(mean_per_image(loss), smoothed, extra, weights, areas)


def confusion_areas(
  predicted: jax.Array, targets: jax.Array, classes: int, real: Any = True
) -> Sums:
  """Returns pixels per class, float32 [c]: `hits`, `predicted`, `labelled`.

  Args:
    predicted: int32 [...], predicted classes.
    targets: int32 [...], -1 for pixels that do not count.
    classes: number of classes c.
    real: [...], False for further pixels that do not count.
  """
  counted = (targets >= 0) & real

  def area(labels: jax.Array, where: jax.Array) -> jax.Array:
    # Give pixels that do not count an extra class, which is cut off.
    bins = jnp.where(where, labels, classes).ravel()
    return jnp.bincount(bins, length=classes + 1)[:-1].astype(jnp.float32)

  return {
    "hits": area(targets, counted & (predicted == targets)),
    "predicted": area(predicted, counted),
    "labelled": area(targets, counted),
  }


def segmentation_means(total: Mapping[str, Any]) -> dict[str, Any]:
  """Returns `loss`, `mean_iou`, pixel `accuracy` and `count` of images.

  Intersection over union is computed per class over the whole split. The mean
  is over the classes that a label or a prediction has, as in mmsegmentation,
  whose numbers the papers report.

  Args:
    total: sums of `segmentation` over a split.
  """
  return {
    "loss": float(total["loss"]) / max(float(total["count"]), 1.0),
    **overlap(total),
    "count": int(total["count"]),
  }


def overlap(total: Mapping[str, Any]) -> dict[str, float]:
  """Returns `mean_iou` and pixel `accuracy`.

  Args:
    total: sums of `confusion_areas`.
  """
  hits, predicted, labelled = (
    np.asarray(total[name], np.float64)
    for name in ("hits", "predicted", "labelled")
  )
  # Intersection over union of the classes that occur.
  union = predicted + labelled - hits
  present = union > 0
  iou = hits[present] / union[present]
  return {
    "mean_iou": float(iou.mean()) if present.any() else 0.0,
    "accuracy": float(hits.sum() / max(labelled.sum(), 1.0)),
  }


MAX_ANSWER = 30  # Tokens of the longest answer, as in BERT's run_squad.py.


def spans(
  logits: jax.Array, batch: Batch, extra: jax.Array, smoothing: float = 0.0
) -> tuple[jax.Array, Sums]:
  """Returns the cross-entropy of the first and the last token of an answer.

  Source: Devlin et al. 2019, section 4.2: the mean of both cross-entropies.

  Args:
    logits: float32 [b, n, 2], for the first and for the last token.
    batch: `targets` int32 [b, 2], positions of these tokens, and `weights` [b].
    extra: float32 [b], sown losses; see `classification`.
    smoothing: must be 0.

  Returns:
    The results of `classification`; `correct` counts answers with both ends
    right.
  """
  _refuse_smoothing(smoothing)
  weights, targets = batch["weights"], batch["targets"]
  log_p = jax.nn.log_softmax(logits, axis=1)
  chosen = jnp.take_along_axis(log_p, targets[:, None], 1)[:, 0]  # [b, 2]
  loss = -chosen.mean(1)
  is_right = (logits.argmax(1) == targets).all(1)
  hits = {"correct": (weights * is_right).sum()}
  return _report(loss, loss, extra, weights, hits)


def best_spans(logits: jax.Array, batch: Batch) -> dict[str, jax.Array]:
  """Returns the best answer in each window of a text.

  Differs from BERT's code, which searches only the 20 best first and last
  tokens: this searches all answers of up to `MAX_ANSWER` tokens.

  Args:
    logits: float32 [b, n, 2].
    batch: `places` int32 [b, n]: 2 where an answer may begin, 1 where it may
      only continue or end, 0 elsewhere; `numbers` int32 [b], of the windows.

  Returns:
    `numbers`; `scores` float32 [b], the sum of both logits, -inf if no answer
    can begin; `starts` and `stops` int32 [b], positions of the first and the
    last token.
  """
  # Mask the positions where an answer cannot begin or end.
  places, n = batch["places"], logits.shape[1]
  first = jnp.where(places == 2, logits[..., 0], -jnp.inf)
  last = jnp.where(places > 0, logits[..., 1], -jnp.inf)
  # Add the logits of all pairs of a first and a last token, [b, length, n].
  length = min(MAX_ANSWER, n)
  padded = jnp.pad(last, ((0, 0), (0, length)), constant_values=-jnp.inf)
  scores = jnp.stack([first + padded[:, k : k + n] for k in range(length)], 1)
  best = scores.reshape(len(scores), -1).argmax(1).astype(jnp.int32)
  # The index is k n + start, with k tokens after the first one.
  starts = best % n
  return {
    "numbers": batch["numbers"],
    "scores": scores.max((1, 2)),
    "starts": starts,
    "stops": starts + best // n,
  }


TEMPERATURE = 0.05  # Temperature of the similarities in SimCSE.


def sentences(
  vectors: jax.Array, batch: Batch, extra: jax.Array, smoothing: float = 0.0
) -> tuple[jax.Array, Sums]:
  """Returns the contrastive loss of pairs, or the error of scored pairs.

  The contrastive loss is the cross-entropy of finding the second sentence of a
  pair among all second sentences of the batch. Its logits are the cosines over
  `TEMPERATURE`. Pairs with `scores` of people have the squared difference of
  cosine and score instead, which does not depend on the other pairs.

  Source: Gao et al. 2021, https://arxiv.org/abs/2104.08821, equation 1.

  Args:
    vectors: [b, 2, d].
    batch: `weights` [b]; in evaluation also `scores` float32 [b] in [0, 1].
    extra: float32 [b], sown losses; see `classification`.
    smoothing: must be 0.

  Returns:
    The results of `classification`. `correct` counts the sentences whose
    partner is the nearest, and is missing if there are scores.
  """
  _refuse_smoothing(smoothing)
  weights = batch["weights"]
  # Scored pairs: squared error of the cosine.
  if "scores" in batch:
    loss = jnp.square(_cosines(vectors) - batch["scores"])
    return _report(loss, loss, extra, weights, {})
  # Compare every first sentence with every second one that is not padding.
  first, second = _unit(vectors[:, 0]), _unit(vectors[:, 1])
  # One pass of bfloat16 is too coarse for so small a temperature.
  logits = jnp.matmul(first, second.T, precision="highest") / TEMPERATURE
  logits = jnp.where(weights[None] > 0, logits, jnp.finfo(logits.dtype).min)
  loss = -jnp.diagonal(jax.nn.log_softmax(logits, axis=1))
  is_right = logits.argmax(1) == jnp.arange(len(logits))
  hits = {"correct": (weights * is_right).sum()}
  return _report(loss, loss, extra, weights, hits)


def similarities(vectors: jax.Array, batch: Batch) -> dict[str, jax.Array]:
  """Returns the cosines of pairs [b, 2, d], and the numbers of the pairs."""
  return {"numbers": batch["numbers"], "cosines": _cosines(vectors)}


def _cosines(vectors: jax.Array) -> jax.Array:
  return (_unit(vectors[:, 0]) * _unit(vectors[:, 1])).sum(-1)


def _unit(x: jax.Array) -> jax.Array:
  """Returns x [..., d] divided by its norm; 0 where x is 0."""
  square = jnp.square(x).sum(-1, keepdims=True)
  return x * jax.lax.rsqrt(jnp.maximum(square, 1e-24))


def collected_means(total: Mapping[str, Any]) -> dict[str, Any]:
  """Returns `loss`, `count`, and `accuracy` if it was counted.

  Args:
    total: sums of `spans` or `sentences`, whose metric is collected.
  """
  if "correct" in total:
    return classification_means(total)
  count = int(total["count"])
  return {"loss": float(total["loss"]) / max(count, 1), "count": count}


_INPUTS = ("inputs",)
_WITH_TARGETS = ("inputs", "targets", "weights")

LOSSES.register("classification")(
  Objective("accuracy", True, _INPUTS, classification, classification_means)
)
LOSSES.register("language_model")(
  Objective("perplexity", False, _WITH_TARGETS, language, language_means)
)
for _name in ("masked_tokens", "next_tokens"):
  LOSSES.register(_name)(
    Objective("perplexity", False, _WITH_TARGETS, language, language_means)
  )
for _name in ("masked_values", "next_values"):
  LOSSES.register(_name)(
    Objective("error", False, _WITH_TARGETS, values, values_means)
  )
LOSSES.register("token_classification")(
  Objective("accuracy", True, _INPUTS, token_classification, token_means)
)
LOSSES.register("segmentation")(
  Objective("mean_iou", True, _INPUTS, segmentation, segmentation_means)
)
LOSSES.register("spans")(
  Objective("f1", True, _INPUTS, spans, collected_means, best_spans)
)
LOSSES.register("sentences")(
  Objective(
    "spearman",
    True,
    _INPUTS,
    sentences,
    collected_means,
    similarities,
    sees_batch=True,
  )
)
