"""What a task is, and the numbers that cost nothing to reach on it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import scipy.optimize
import scipy.special

from jaxformers.data.packed import Packed
from jaxformers.registry import Registry

TASKS: Registry = Registry("task")


@dataclasses.dataclass(frozen=True)
class Task:
  """Splits and sizes of a classification task under a named protocol.

  Attributes:
    name: in `TASKS`.
    protocol: under which its numbers are comparable.
    splits: `train`, `validation` and `test`.
    selection: which split chooses the checkpoint; "test" where a published
      protocol has it so, for those numbers cannot be compared with others.
    vocab_size: ids run from 0 (padding) to vocab_size - 1.
    max_len: sequences are cut and padded to this.
    num_classes: labels run from 0.
    trivial: names of rules without a model, and functions of the task that
      compute their test accuracy.
    info: where the data come from, as in `info.json`.
  """

  name: str
  protocol: str
  splits: Mapping[str, Packed]
  selection: str
  vocab_size: int
  max_len: int
  num_classes: int
  trivial: Mapping[str, Callable[[Task], float]]
  info: Mapping[str, Any]

  def baselines(self) -> dict[str, float]:
    """The test accuracy of each trivial rule, fitted on train."""
    return {name: rule(self) for name, rule in self.trivial.items()}


def data_folder(data_dir: str) -> Path:
  """Where prepared data stands; made if it is not there.

  The argument, or $JAXFORMERS_DATA_DIR, or ~/.cache/jaxformers.

  Raises:
    ValueError: if it cannot be written.
  """
  chosen = data_dir or os.environ.get("JAXFORMERS_DATA_DIR", "")
  folder = Path(chosen or "~/.cache/jaxformers").expanduser().absolute()
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise ValueError(
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
  return split.tokens[split.offsets[:-1]].astype(np.int64) + split.shift


def histograms(split: Packed, size: int) -> np.ndarray:
  """How often each id below size occurs, over the length -> [count, size]."""
  rows = np.stack(
    [np.bincount(split[i], minlength=size) for i in range(len(split))]
  )
  return rows / rows.sum(1, keepdims=True)


def histogram_regression(task: Task) -> float:
  """A logistic regression on the histogram of the whole, uncut sequence.

  Frequencies are standardised by train; L2 penalty 1e-4 on the weights, fitted
  by L-BFGS. Order and position of the tokens play no part.
  """
  train, test = task.splits["train"], task.splits["test"]
  x, z = (histograms(split, task.vocab_size) for split in (train, test))
  mean, deviation = x.mean(0), x.std(0)
  used = deviation > 0
  x, z = ((h - mean)[:, used] / deviation[used] for h in (x, z))
  shape = (x.shape[1] + 1, task.num_classes)
  target = np.eye(task.num_classes)[train.labels]

  def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
    w = flat.reshape(shape)
    log_p = scipy.special.log_softmax(x @ w[:-1] + w[-1], axis=1)
    error = (np.exp(log_p) - target) / len(x)
    loss = -(target * log_p).sum() / len(x) + 1e-4 / 2 * (w[:-1] ** 2).sum()
    gradient = np.vstack([x.T @ error + 1e-4 * w[:-1], error.sum(0)])
    return loss, gradient.ravel()

  fit = scipy.optimize.minimize(
    objective, np.zeros(shape).ravel(), jac=True, method="L-BFGS-B"
  )
  w = fit.x.reshape(shape)
  return float(np.mean((z @ w[:-1] + w[-1]).argmax(1) == test.labels))
