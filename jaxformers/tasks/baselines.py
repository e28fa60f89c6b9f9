"""Rules without a model, which a model has to beat on the test split.

A rule is a function of a `Task`: it is fitted on train, and returns its score
on test, in the metric of the task's objective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxformers.data.engine.packed import Packed
from jaxformers.data.images.splits import Images
from jaxformers.tasks.task import Task


def majority_class(task: Task) -> float:
  """Scores the rule that always says the most frequent class of train."""
  train, test = task.splits["train"].labels, task.splits["test"].labels
  return float(np.mean(test == np.bincount(train).argmax()))


def first_token_rule(task: Task) -> float:
  """Scores the rule that looks at the first token alone.

  The rule says the most frequent class of train among examples that begin so.
  """

  def first(split: Packed) -> np.ndarray:
    return split.tokens[split.starts].astype(np.int64) + split.shift

  train, test = task.splits["train"], task.splits["test"]
  # Count classes by first token, and say the most frequent one.
  counts = np.zeros((task.vocab_size, task.num_classes), np.int64)
  np.add.at(counts, (first(train), train.labels), 1)
  return float(np.mean(counts.argmax(1)[first(test)] == test.labels))


def histograms(split: Packed, size: int) -> np.ndarray:
  """Returns the share of each id among the tokens; ids are below `size`.

  Args:
    split: sequences.
    size: number of ids.

  Returns:
    float64 [num_inputs * count, size], a row of zeros for an empty sequence.
  """
  # Count ids, and divide by the length; an empty sequence has length 1.
  rows = np.stack(
    [np.bincount(split[k], minlength=size) for k in range(len(split.starts))]
  )
  return rows / np.maximum(rows.sum(1, keepdims=True), 1)


def histogram_regression(task: Task) -> float:
  """Scores a logistic regression on the histogram of the uncut sequence.

  Order and position of the tokens play no part.
  """
  size = max(task.vocab_size, 257)
  return _regression(task, lambda split: histograms(split, size), penalty=1e-4)


def pixel_regression(task: Task) -> float:
  """Scores a logistic regression on pixels, one weight a pixel and class."""

  def pixels(split: Packed | Images) -> np.ndarray:
    # All images have the length of the first.
    packed = split.packed if isinstance(split, Images) else split
    assert isinstance(packed, Packed)  # Files of images differ in size.
    at = packed.starts[:, None] + np.arange(packed.sizes[0])
    return packed.tokens[at].astype(np.float32)

  return _regression(task, pixels, penalty=0.1)


def bag_regression(task: Task) -> float:
  """Scores a logistic regression on the set of tokens of the cut sequence.

  For vocabularies that are too large for `histogram_regression`: a row has ones
  where a token occurs, divided by their norm.
  """
  from scipy import sparse

  def bags(split: Packed) -> Any:
    # Lay the rows end to end, as SciPy's compressed rows want them.
    rows = [np.unique(split[k][: task.max_len]) for k in range(len(split))]
    counts = np.array([len(row) for row in rows])
    values = np.repeat(1 / np.sqrt(np.maximum(counts, 1)), counts)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    shape = (len(rows), task.vocab_size)
    return sparse.csr_array((values, np.concatenate(rows), offsets), shape)

  return _regression(task, bags, penalty=1e-5, standardise=False)


def histogram_similarity(task: Task) -> float:
  """Scores the rule that compares the byte histograms of a pair.

  A pair is of class 1 if their cosine is above the threshold that has the best
  accuracy on train.
  """

  def cosines(split: Packed) -> np.ndarray:
    rows = histograms(split, max(task.vocab_size, 257))
    a, b = rows[0::2], rows[1::2]
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return (a * b).sum(1) / np.maximum(norms, 1e-12)

  train, test = task.splits["train"], task.splits["test"]
  # Sort the pairs of train by cosine.
  train_cosines = cosines(train)
  order = np.argsort(train_cosines)
  labels = train.labels[order]
  # For every k: number of correct pairs if all from the k-th on are class 1.
  zeros_below = np.concatenate([[0], np.cumsum(labels == 0)])
  ones_above = np.concatenate([np.cumsum((labels == 1)[::-1])[::-1], [0]])
  k = int((zeros_below + ones_above).argmax())
  # Pairs above the cosine before the k-th are of class 1.
  threshold = np.concatenate([[-np.inf], train_cosines[order]])[k]
  return float(np.mean((cosines(test) > threshold) == test.labels))


def _regression(
  task: Task,
  features: Callable[[Any], Any],
  penalty: float,
  standardise: bool = True,
) -> float:
  """Returns the test accuracy of a logistic regression, fitted by L-BFGS.

  Args:
    task: task whose classes are told apart.
    features: function from a split to [count, features].
    penalty: weight of half the squared L2 norm of the weights.
    standardise: True to give every feature mean 0 and deviation 1 on train;
      False for features that may be sparse.
  """
  from scipy import optimize, special  # Imported late: half a second.

  train, test = task.splits["train"], task.splits["test"]
  x, z = features(train), features(test)
  if standardise:
    # Drop features that are constant in train.
    mean, deviation = x.mean(0), x.std(0)
    used = deviation > 0
    x, z = ((h - mean)[:, used] / deviation[used] for h in (x, z))
  classes = int(train.labels.max()) + 1
  shape = (x.shape[1] + 1, classes)
  target = np.eye(classes, dtype=x.dtype)[train.labels]

  def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
    # Cross-entropy and penalty, and their gradient; the last row is the bias.
    w = flat.reshape(shape).astype(x.dtype)
    log_p = special.log_softmax(x @ w[:-1] + w[-1], axis=1)
    error = (np.exp(log_p) - target) / x.shape[0]
    loss = -(target * log_p).sum() / x.shape[0]
    loss += penalty / 2 * (w[:-1] ** 2).sum()
    gradient = np.vstack([x.T @ error + penalty * w[:-1], error.sum(0)])
    return float(loss), gradient.ravel().astype(np.float64)

  # Start from zero; the problem is convex.
  start = np.zeros(shape).ravel()
  fit = optimize.minimize(
    objective, start, jac=True, method="L-BFGS-B", options={"maxiter": 200}
  )
  w = fit.x.reshape(shape)
  return float(np.mean((z @ w[:-1] + w[-1]).argmax(1) == test.labels))


MAJORITY = {"majority class": majority_class}
PIXELS = MAJORITY | {"linear on pixels": pixel_regression}
HISTOGRAMS = MAJORITY | {"histogram regression": histogram_regression}
