"""The record of a task, and rules without a model that score on it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxformers import paths
from jaxformers.data.engine.packed import Packed, pack
from jaxformers.data.images.splits import Images
from jaxformers.errors import UserError
from jaxformers.registry import Registry

TASKS: Registry = Registry("task")


@dataclasses.dataclass(frozen=True)
class Task:
  """Splits and sizes of a task under a named protocol.

  Attributes:
    name: name in `TASKS`.
    protocol: name of the protocol; scores under another do not compare.
    splits: `train`, `validation` and `test`: `Packed` sequences, `Images`,
      `Scenes` or `Segments` of text.
    selection: name of the split that chooses the checkpoint; "test" where a
      published protocol says so, whose scores compare with no others.
    vocabulary: meaning of each id; empty if tokens are real numbers. Id 0 is
      padding, which is never attended to.
    max_len: length that sequences are cut to.
    num_classes: number of classes; 0 for language models.
    trivial: names of rules without a model, and functions of the task that
      compute their score on test, in the metric of the objective.
    info: where the data come from, as in `info.json`.
    padded_len: divisor of the pool "padded_mean"; 0 for max_len.
    num_inputs: number of sequences of an example: 2 for pairs.
    tokenizer: tokenizer of word pieces as JSON of `tokenizers`; "" for others.
    objective: "classification", "language_model" or "segmentation".
    image: (height, width, channels), or () for sequences.
    classes: names of the classes, if they have names.
    tokenize: function from a text to its ids, without marks around them; None
      for tasks whose inputs are no text.
  """

  name: str
  protocol: str
  splits: Mapping[str, Any]
  selection: str
  vocabulary: tuple[str, ...]
  max_len: int
  num_classes: int
  trivial: Mapping[str, Callable[[Task], float]]
  info: Mapping[str, Any]
  padded_len: int = 0
  num_inputs: int = 1
  tokenizer: str = ""
  objective: str = "classification"
  image: tuple[int, ...] = ()
  classes: tuple[str, ...] = ()
  tokenize: Callable[[str], np.ndarray] | None = None

  @property
  def vocab_size(self) -> int:
    """Number of ids; 0 if tokens are real numbers."""
    return len(self.vocabulary)

  def sizes(self) -> dict[str, int]:
    """Returns the sizes that `models.build` takes from a task."""
    names = "vocab_size max_len padded_len num_classes num_inputs objective"
    return {name: getattr(self, name) for name in (*names.split(), "image")}

  def encode(self, text: str, length: int = 0) -> np.ndarray:
    """Returns the ids of a text as a model reads it, int32 [n], not padded.

    Args:
      text: any text; unknown words become what they are in the task's examples.
      length: largest number of tokens, marks included; 0 for max_len.

    Raises:
      UserError: for a task of no text, or a text that the task cannot read.
    """
    if self.tokenize is None:
      raise UserError(
        f"The inputs of {self.name} are no text: choose a task of texts."
      )
    # Open and close the text as the task does its examples.
    train = self.splits["train"]
    marks = {name: getattr(train, name, 0) for name in ("start", "end")}
    split = pack([self.tokenize(text)], np.zeros(1, np.int32), **marks)
    n = min(int(split.lengths()[0]), length or self.max_len)
    return split.batch(np.array([0]), n)["inputs"][0]

  def baselines(self) -> dict[str, float]:
    """Returns the score of each trivial rule, fitted on train, on test."""
    return {name: rule(self) for name, rule in self.trivial.items()}

  def description(self) -> dict[str, Any]:
    """Returns what scores depend on, as plain JSON for the checkpoint."""
    # A digest stands for the vocabulary, which may have 270,000 words.
    train = self.splits["train"]
    words = json.dumps(self.vocabulary).encode()
    return {
      "task": self.name,
      "protocol": self.protocol,
      "selection": self.selection,
      "examples": {name: len(split) for name, split in self.splits.items()},
      "vocab_size": self.vocab_size,
      "vocabulary_sha256": hashlib.sha256(words).hexdigest(),
      "max_len": self.max_len,
      "padded_len": self.padded_len or self.max_len,
      "data": {name: split.digest() for name, split in self.splits.items()},
      **train.reading(),
    }


def data_folder(data_dir: str) -> Path:
  """Returns the folder of prepared data; makes it if it is missing.

  Args:
    data_dir: path of the folder; "" for $JAXFORMERS_DATA_DIR, or else
      ~/.cache/jaxformers.

  Raises:
    UserError: if it cannot be written, or none is chosen and the home
      directory is unknown.
  """
  # Resolve the path, which may begin with ~.
  chosen = data_dir or os.environ.get("JAXFORMERS_DATA_DIR", "")
  try:
    folder = paths.expand(chosen or "~/.cache/jaxformers").absolute()
  except ValueError:
    if chosen:
      raise
    raise UserError(
      "The data directory ~/.cache/jaxformers is unknown, because HOME is not "
      "set and this user has no home directory: pass --data_dir (prepare) or "
      "--config.data_dir=PATH, or set JAXFORMERS_DATA_DIR."
    ) from None
  # Make it now, so that a wrong path fails before anything is read.
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise UserError(
      f"The data directory {folder} cannot be made ({error.strerror}): pass "
      "--config.data_dir=PATH or set JAXFORMERS_DATA_DIR."
    ) from None
  return folder


def majority_class(task: Task) -> float:
  """Scores the rule that always says the most frequent class of train."""
  train, test = task.splits["train"].labels, task.splits["test"].labels
  return float(np.mean(test == np.bincount(train).argmax()))


def first_token_rule(task: Task) -> float:
  """Scores the rule that looks at the first token alone.

  The rule says the most frequent class of train among examples that begin so.
  """
  train, test = task.splits["train"], task.splits["test"]
  # Count classes by first token, and say the most frequent one.
  counts = np.zeros((task.vocab_size, task.num_classes), np.int64)
  np.add.at(counts, (_first(train), train.labels), 1)
  return float(np.mean(counts.argmax(1)[_first(test)] == test.labels))


def _first(split: Packed) -> np.ndarray:
  return split.tokens[split.starts].astype(np.int64) + split.shift


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
  train, test = task.splits["train"], task.splits["test"]
  size = max(task.vocab_size, 257)
  x, z = (histograms(split, size) for split in (train, test))
  return regression(x, train.labels, z, test.labels, penalty=1e-4)


def pixel_regression(task: Task) -> float:
  """Scores a logistic regression on pixels, one weight a pixel and class."""
  train, test = task.splits["train"], task.splits["test"]
  x, z = (_pixels(split) for split in (train, test))
  return regression(x, train.labels, z, test.labels, penalty=0.1)


def _pixels(split: Packed | Images) -> np.ndarray:
  # All images have the length of the first.
  packed = split.packed if isinstance(split, Images) else split
  length = int(packed.stops[0] - packed.starts[0])
  at = packed.starts[:, None] + np.arange(length)
  return packed.tokens[at].astype(np.float32)


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


def bag_regression(task: Task) -> float:
  """Scores a logistic regression on the set of tokens of the cut sequence.

  For vocabularies that are too large for `histogram_regression`: a row has ones
  where a token occurs, divided by their norm.
  """
  train, test = task.splits["train"], task.splits["test"]
  x, z = (_bags(split, task) for split in (train, test))
  return _fitted(x, train.labels, z, test.labels, penalty=1e-5)


def _bags(split: Packed, task: Task) -> Any:
  """Returns which tokens occur in each sequence, sparse [count, vocab_size]."""
  from scipy import sparse

  # Lay the rows end to end, as SciPy's compressed rows want them.
  rows = [np.unique(split[k][: task.max_len]) for k in range(len(split.starts))]
  counts = np.array([len(row) for row in rows])
  values = np.repeat(1 / np.sqrt(np.maximum(counts, 1)), counts)
  offsets = np.concatenate([[0], np.cumsum(counts)])
  shape = (len(rows), task.vocab_size)
  return sparse.csr_array((values, np.concatenate(rows), offsets), shape)


def regression(
  x: np.ndarray,
  labels: np.ndarray,
  z: np.ndarray,
  test_labels: np.ndarray,
  penalty: float,
) -> float:
  """Returns the test accuracy of a logistic regression, fitted by L-BFGS.

  Args:
    x, z: features of train and test [count, features]; standardised by train.
    labels, test_labels: classes of train and test [count].
    penalty: weight of half the squared L2 norm of the weights.
  """
  # Drop features that are constant in train.
  mean, deviation = x.mean(0), x.std(0)
  used = deviation > 0
  x, z = ((h - mean)[:, used] / deviation[used] for h in (x, z))
  return _fitted(x, labels, z, test_labels, penalty)


def _fitted(
  x: Any, labels: np.ndarray, z: Any, test_labels: np.ndarray, penalty: float
) -> float:
  """Does `regression` without the standardisation; x and z may be sparse."""
  from scipy import optimize, special  # Imported late: half a second.

  classes = int(labels.max()) + 1
  shape = (x.shape[1] + 1, classes)
  target = np.eye(classes, dtype=x.dtype)[labels]

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
  fit = optimize.minimize(
    objective,
    np.zeros(shape).ravel(),
    jac=True,
    method="L-BFGS-B",
    options={"maxiter": 200},
  )
  w = fit.x.reshape(shape)
  return float(np.mean((z @ w[:-1] + w[-1]).argmax(1) == test_labels))
