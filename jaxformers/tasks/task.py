"""What a task is, and the numbers that cost nothing to reach on it."""

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
    name: in `TASKS`.
    protocol: under which its numbers are comparable.
    splits: `train`, `validation` and `test`: `Packed` sequences, `Images`,
      or `Segments` of text.
    selection: which split chooses the checkpoint; "test" where a published
      protocol has it so, for those numbers cannot be compared with others.
    vocabulary: what each id stands for; empty if tokens are real numbers. Id 0
      is padding: what is 0 is never attended to.
    max_len: sequences are cut to this.
    num_classes: labels run from 0; 0 for language models.
    trivial: names of rules without a model, and functions of the task that
      compute their score on test, in the metric of the objective.
    info: where the data come from, as in `info.json`.
    padded_len: what the pool "padded_mean" divides by; 0 for max_len.
    num_inputs: sequences of an example: 2 for pairs.
    tokenizer: for word pieces, in the format of `tokenizers`; "" otherwise.
    objective: what is learned: "classification", "language_model" or
      "segmentation".
    image: (height, width, channels), or () for sequences.
    classes: the names of the classes, where there are such.
    tokenize: the ids of a text, all of it and without marks around it; None for
      tasks whose inputs are no text.
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
    """Ids run from 0 to vocab_size - 1; 0 if tokens are real numbers."""
    return len(self.vocabulary)

  def sizes(self) -> dict[str, int]:
    """What `models.build` takes from a task."""
    names = "vocab_size max_len padded_len num_classes num_inputs objective"
    return {name: getattr(self, name) for name in (*names.split(), "image")}

  def encode(self, text: str, length: int = 0) -> np.ndarray:
    """Ids of a text as a model of this task reads one, int32 [n], not padded.

    Args:
      text: of the user, say; what the vocabulary has not is what it is in the
        task's own examples.
      length: tokens at most, marks included; 0 for max_len.

    Raises:
      UserError: for a task of no text, or a text that is none of the task's.
    """
    if self.tokenize is None:
      raise UserError(f"The inputs of {self.name} are no text.")
    train = self.splits["train"]
    marks = {name: getattr(train, name, 0) for name in ("start", "end")}
    one = pack([self.tokenize(text)], np.zeros(1, np.int32), **marks)
    n = min(int(one.lengths()[0]), length or self.max_len)
    return one.batch(np.array([0]), n)["inputs"][0]

  def baselines(self) -> dict[str, float]:
    """What each trivial rule, fitted on train, scores on test."""
    return {name: rule(self) for name, rule in self.trivial.items()}

  def description(self) -> dict[str, Any]:
    """What numbers depend on, as plain JSON: it is kept in the checkpoint."""
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
  """Where prepared data stands; made if it is not there.

  The argument, or $JAXFORMERS_DATA_DIR, or ~/.cache/jaxformers.

  Raises:
    UserError: if it cannot be written, or none is chosen and the home
      directory is unknown.
  """
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
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise UserError(
      f"The data directory {folder} cannot be made ({error.strerror}): pass "
      "--config.data_dir=PATH or set JAXFORMERS_DATA_DIR."
    ) from None
  return folder


def majority_class(task: Task) -> float:
  """Always the most frequent class of train."""
  train, test = task.splits["train"].labels, task.splits["test"].labels
  return float(np.mean(test == np.bincount(train).argmax()))


def first_token_rule(task: Task) -> float:
  """The most frequent class of train given the first token."""
  train, test = task.splits["train"], task.splits["test"]
  counts = np.zeros((task.vocab_size, task.num_classes), np.int64)
  np.add.at(counts, (_first(train), train.labels), 1)
  return float(np.mean(counts.argmax(1)[_first(test)] == test.labels))


def _first(split: Packed) -> np.ndarray:
  return split.tokens[split.starts].astype(np.int64) + split.shift


def histograms(split: Packed, size: int) -> np.ndarray:
  """How often each id below size occurs, over the length.

  Returns:
    float64 [num_inputs * count, size], a row of zeros for an empty sequence.
  """
  rows = np.stack(
    [np.bincount(split[k], minlength=size) for k in range(len(split.starts))]
  )
  return rows / np.maximum(rows.sum(1, keepdims=True), 1)


def histogram_regression(task: Task) -> float:
  """A logistic regression on the histogram of the whole, uncut sequence.

  Order and position of the tokens play no part.
  """
  train, test = task.splits["train"], task.splits["test"]
  size = max(task.vocab_size, 257)
  x, z = (histograms(split, size) for split in (train, test))
  return regression(x, train.labels, z, test.labels, penalty=1e-4)


def pixel_regression(task: Task) -> float:
  """A logistic regression on the pixels, one weight a pixel and class."""
  train, test = task.splits["train"], task.splits["test"]
  x, z = (_pixels(split) for split in (train, test))
  return regression(x, train.labels, z, test.labels, penalty=0.1)


def _pixels(split: Packed | Images) -> np.ndarray:
  packed = split.packed if isinstance(split, Images) else split
  length = int(packed.stops[0] - packed.starts[0])
  at = packed.starts[:, None] + np.arange(length)
  return packed.tokens[at].astype(np.float32)


def histogram_similarity(task: Task) -> float:
  """Pairs by the cosine of their byte histograms, over a threshold or not.

  The threshold is the one of the best accuracy on train.
  """

  def cosines(split: Packed) -> np.ndarray:
    rows = histograms(split, max(task.vocab_size, 257))
    a, b = rows[0::2], rows[1::2]
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return (a * b).sum(1) / np.maximum(norms, 1e-12)

  train, test = task.splits["train"], task.splits["test"]
  own = cosines(train)
  order = np.argsort(own)
  labels = train.labels[order]
  # Correct if all above the k-th are called 1 and the others 0.
  correct = np.concatenate([[0], np.cumsum(labels == 0)]) + np.concatenate(
    [np.cumsum((labels == 1)[::-1])[::-1], [0]]
  )
  k = int(correct.argmax())
  threshold = np.concatenate([[-np.inf], own[order]])[k]
  return float(np.mean((cosines(test) > threshold) == test.labels))


def bag_regression(task: Task) -> float:
  """A logistic regression on which tokens occur in the cut sequence.

  For vocabularies that are too large for `histogram_regression`: every row has
  ones where a token occurs, over their norm.
  """
  train, test = task.splits["train"], task.splits["test"]
  x, z = (_bags(split, task) for split in (train, test))
  return _fitted(x, train.labels, z, test.labels, penalty=1e-5)


def _bags(split: Packed, task: Task) -> Any:
  from scipy import sparse

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
  """The test accuracy of a logistic regression, fitted by L-BFGS.

  Args:
    x, z: features of train and test [count, features]; standardised by train.
    labels, test_labels: [count].
    penalty: L2, on the weights.
  """
  mean, deviation = x.mean(0), x.std(0)
  used = deviation > 0
  x, z = ((h - mean)[:, used] / deviation[used] for h in (x, z))
  return _fitted(x, labels, z, test_labels, penalty)


def _fitted(
  x: Any, labels: np.ndarray, z: Any, test_labels: np.ndarray, penalty: float
) -> float:
  """`regression` without the standardisation; x and z may be sparse."""
  from scipy import optimize, special  # Half a second; needed here alone.

  classes = int(labels.max()) + 1
  shape = (x.shape[1] + 1, classes)
  target = np.eye(classes, dtype=x.dtype)[labels]

  def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
    w = flat.reshape(shape).astype(x.dtype)
    log_p = special.log_softmax(x @ w[:-1] + w[-1], axis=1)
    error = (np.exp(log_p) - target) / x.shape[0]
    loss = -(target * log_p).sum() / x.shape[0]
    loss += penalty / 2 * (w[:-1] ** 2).sum()
    gradient = np.vstack([x.T @ error + penalty * w[:-1], error.sum(0)])
    return float(loss), gradient.ravel().astype(np.float64)

  fit = optimize.minimize(
    objective,
    np.zeros(shape).ravel(),
    jac=True,
    method="L-BFGS-B",
    options={"maxiter": 200},
  )
  w = fit.x.reshape(shape)
  return float(np.mean((z @ w[:-1] + w[-1]).argmax(1) == test_labels))
