"""Trivial baselines without a model, for comparison on the test split.

A baseline is a function of a `Task`. It fits a simple rule on train, and
returns the rule's score on test, in the metric of the task's objective.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxformers.data.engine.packed import Packed
from jaxformers.data.images.splits import Images
from jaxformers.tasks.task import Task


def majority_class(task: Task) -> float:
  """Scores the rule that always predicts the most frequent class of train."""
  train, test = task.splits["train"].labels, task.splits["test"].labels
  return float(np.mean(test == np.bincount(train).argmax()))


def first_token_rule(task: Task) -> float:
  """Scores the rule that predicts the class from the first token.

  The rule predicts the most frequent class among the examples of train with
  this first token.
  """

  def first(split: Packed) -> np.ndarray:
    return split.tokens[split.starts].astype(np.int64) + split.shift

  train, test = task.splits["train"], task.splits["test"]
  # Count classes by first token, and predict the most frequent class.
  counts = np.zeros((task.vocab_size, task.num_classes), np.int64)
  np.add.at(counts, (first(train), train.labels), 1)
  return float(np.mean(counts.argmax(1)[first(test)] == test.labels))


def histograms(split: Packed, size: int) -> np.ndarray:
  """Returns the share of each id among the tokens of every sequence.

  Args:
    split: split of packed sequences.
    size: number of ids; all ids are below `size`.

  Returns:
    Shares, float64 [num_inputs * count, size]; zeros for an empty sequence.
  """
  # Count ids, and divide by the length; an empty sequence has length 1.
  rows = np.stack(
    [np.bincount(split[k], minlength=size) for k in range(len(split.starts))]
  )
  return rows / np.maximum(rows.sum(1, keepdims=True), 1)


def histogram_regression(task: Task) -> float:
  """Scores a logistic regression on the histogram of the uncut sequence.

  The histogram does not depend on the order of the tokens.
  """
  size = max(task.vocab_size, 257)
  return regression(task, lambda split: histograms(split, size), penalty=1e-4)


def pixel_regression(task: Task) -> float:
  """Scores a logistic regression with one weight per pixel and class."""

  def pixels(split: Packed | Images) -> np.ndarray:
    # Gather the pixels [count, n]: all images have the length of the first.
    packed = split.packed if isinstance(split, Images) else split
    assert isinstance(packed, Packed)  # Files of images differ in size.
    at = packed.starts[:, None] + np.arange(packed.sizes[0])
    return packed.tokens[at].astype(np.float32)

  return regression(task, pixels, penalty=0.1)


def bag_regression(task: Task) -> float:
  """Scores a logistic regression on the set of tokens of the cut sequence.

  Used for vocabularies that are too large for `histogram_regression`. A row has
  ones at the tokens that occur in the sequence, and is divided by its norm.
  """
  from scipy import sparse

  def bags(split: Packed) -> Any:
    # Concatenate the rows in SciPy's compressed sparse row format.
    rows = [np.unique(split[k][: task.max_len]) for k in range(len(split))]
    counts = np.array([len(row) for row in rows])
    values = np.repeat(1 / np.sqrt(np.maximum(counts, 1)), counts)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    shape = (len(rows), task.vocab_size)
    return sparse.csr_array((values, np.concatenate(rows), offsets), shape)

  return regression(task, bags, penalty=1e-5, standardise=False)


def histogram_similarity(task: Task) -> float:
  """Scores the rule that compares the byte histograms of a pair.

  The rule predicts class 1 if the cosine of the two histograms is above a
  threshold, which is chosen for the best accuracy on train.
  """

  def cosines(split: Packed) -> np.ndarray:
    # Compute a . b / (|a| |b|) of the two histograms of every pair, [count].
    rows = histograms(split, max(task.vocab_size, 257))
    a, b = rows[0::2], rows[1::2]
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return (a * b).sum(1) / np.maximum(norms, 1e-12)

  return _threshold_rule(task, cosines)


def word_similarity(task: Task) -> float:
  """Scores the rule that compares the sets of words of a pair.

  A word is a run of tokens without the most frequent token of train, which is
  the space if tokens are the bytes or characters of a text. A word of c of the
  n sequences of train has the weight log((1 + n) / (1 + c)). The rule predicts
  class 1 if the cosine of the two weighted sets is above a threshold, which is
  chosen for the best accuracy on train.
  """
  train = task.splits["train"]
  space = int(np.bincount(train.tokens).argmax()) + train.shift

  def words(split: Packed, k: int) -> set[str]:
    # Write every id as the character with this number.
    text = split[k].astype("<u4").tobytes().decode("utf-32-le")
    return set(text.split(chr(space))) - {""}

  number = len(train.starts)
  counts = Counter(word for k in range(number) for word in words(train, k))

  def norm2(chosen: set[str]) -> float:
    weights = (math.log((1 + number) / (1 + counts[word])) for word in chosen)
    return math.fsum(weight**2 for weight in weights)

  def cosine(split: Packed, k: int) -> float:
    a, b = words(split, k), words(split, k + 1)
    return norm2(a & b) / max(math.sqrt(norm2(a) * norm2(b)), 1e-12)

  return _threshold_rule(
    task,
    lambda split: np.array(
      [cosine(split, k) for k in range(0, len(split.starts), 2)]
    ),
  )


def _threshold_rule(
  task: Task, similarities: Callable[[Any], np.ndarray]
) -> float:
  """Scores the rule that predicts class 1 for pairs above a threshold.

  Args:
    task: task with pairs of sequences.
    similarities: function from a split to a number for every pair, [count].
  """
  train, test = task.splits["train"], task.splits["test"]
  # Sort the pairs of train by similarity.
  values = similarities(train)
  order = np.argsort(values)
  labels = train.labels[order]
  # For every k, count the correct pairs if all pairs from the k-th on are
  # predicted as class 1.
  zeros_below = np.concatenate([[0], np.cumsum(labels == 0)])
  ones_above = np.concatenate([np.cumsum((labels == 1)[::-1])[::-1], [0]])
  k = int((zeros_below + ones_above).argmax())
  # Predict class 1 above the value of the pair before the k-th.
  threshold = np.concatenate([[-np.inf], values[order]])[k]
  return float(np.mean((similarities(test) > threshold) == test.labels))


def regression(
  task: Task,
  features: Callable[[Any], Any],
  penalty: float,
  standardise: bool = True,
) -> float:
  """Returns the test accuracy of a logistic regression, fitted by L-BFGS.

  Args:
    task: classification task.
    features: function from a split to the features, [count, features].
    penalty: factor of half the squared L2 norm of the weights.
    standardise: True to give every feature mean 0 and deviation 1 on train;
      False for features that may be sparse.
  """
  from scipy import optimize, special  # Slow to import: half a second.

  # Compute the features: x of train, z of test.
  train, test = task.splits["train"], task.splits["test"]
  x, z = features(train), features(test)
  if standardise:
    # Standardise: (h - mean) / deviation. Drop features that are constant.
    mean, deviation = x.mean(0), x.std(0)
    used = deviation > 0
    x, z = ((h - mean)[:, used] / deviation[used] for h in (x, z))
  # Encode the classes of train as one-hot targets [count, classes].
  classes = int(train.labels.max()) + 1
  shape = (x.shape[1] + 1, classes)
  target = np.eye(classes, dtype=x.dtype)[train.labels]

  def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
    # Compute cross-entropy plus penalty / 2 |w|^2, and its gradient. The last
    # row of the weights is the bias.
    w = flat.reshape(shape).astype(x.dtype)
    log_p = special.log_softmax(x @ w[:-1] + w[-1], axis=1)
    error = (np.exp(log_p) - target) / x.shape[0]
    loss = -(target * log_p).sum() / x.shape[0]
    loss += penalty / 2 * (w[:-1] ** 2).sum()
    gradient = np.vstack([x.T @ error + penalty * w[:-1], error.sum(0)])
    return float(loss), gradient.ravel().astype(np.float64)

  # Minimise from zero: the problem is convex.
  start = np.zeros(shape).ravel()
  fit = optimize.minimize(
    objective, start, jac=True, method="L-BFGS-B", options={"maxiter": 200}
  )
  # Score the most probable classes on test.
  w = fit.x.reshape(shape)
  return float(np.mean((z @ w[:-1] + w[-1]).argmax(1) == test.labels))


MAJORITY = {"majority class": majority_class}
PIXELS = MAJORITY | {"linear on pixels": pixel_regression}
PAIRS = MAJORITY | {
  "histogram similarity": histogram_similarity,
  "word similarity": word_similarity,
}
HISTOGRAMS = MAJORITY | {"histogram regression": histogram_regression}
