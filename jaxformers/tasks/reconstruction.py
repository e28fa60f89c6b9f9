"""Pre-training on the inputs of a task: predict masked tokens or next tokens.

Source: Amos et al. 2024 ("Never Train from Scratch"),
https://arxiv.org/abs/2310.02980, section 3.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np

from jaxformers.data.engine.packed import Packed
from jaxformers.data.engine.split import Key, Split, row_seeds
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Interval
from jaxformers.foundations.registry import choose
from jaxformers.tasks.task import Task

OBJECTIVES = ("masked", "causal")
TARGETS = ("values", "classes")
RATE = 0.15  # Default share of masked tokens, as in the source and in BERT.
MASKS = ("<mask>", "[MASK]")  # Names of the mask token in vocabularies.
CHUNK = 256  # Number of examples that the baselines read at a time.


@dataclasses.dataclass(frozen=True)
class MaskedTokens(Split):
  """Split whose targets are its inputs.

  Attributes:
    split: split with one sequence of ids or real numbers per example.
    rate: share of the tokens that are masked and predicted; 0 to predict the
      next token. Masks are drawn again whenever training reads an example; in
      evaluation they depend only on the index of the example.
    mask_id: id of a masked token; masked real numbers become NaN.
    as_classes: the same examples as ids, which are then the targets of real
      numbers; None to use the inputs as targets.
  """

  split: Any
  rate: float
  mask_id: int = 0
  as_classes: Any = None

  def __len__(self) -> int:
    return len(self.split)

  def lengths(self) -> np.ndarray:
    """Returns the number of tokens of every example, int64 [count]."""
    return self.split.lengths()

  def digest(self) -> str:
    """Returns the digest of the examples."""
    return self.split.digest()

  def reading(self) -> dict[str, Any]:
    """Returns the settings of inputs and targets, as plain JSON."""
    masks = {"mask_rate": self.rate, "mask_id": self.mask_id}
    classes = self.as_classes is not None
    return {**self.split.reading(), **masks, "as_classes": classes}

  def select(self, indices: Any) -> MaskedTokens:
    """Returns the split of the examples at `indices`, in this order."""
    classes = self.as_classes and self.as_classes.select(indices)
    split = self.split.select(indices)
    return dataclasses.replace(self, split=split, as_classes=classes)

  def batch(
    self,
    indices: np.ndarray,
    max_len: int,
    key: Key | None = None,
  ) -> dict[str, np.ndarray]:
    """Returns a batch of examples, padded on the right.

    Args:
      indices: numbers of the examples in the split, integers [b].
      max_len: n, the number of tokens of every row of the batch.
      key: seed, step and row, the seed of the masks; None to draw the masks of
        an example from its index.

    Returns:
      inputs, int32 or float32 [b, n]; targets, int32 or float32 [b, n]; and
      weights, float32 [b, n], 1 where a target is predicted, else 0.
    """
    # Read the inputs, and the targets: inputs or classes.
    inputs = self.split.batch(indices, max_len)["inputs"]
    targets = inputs
    if self.as_classes is not None:
      targets = self.as_classes.batch(indices, max_len)["inputs"]
    is_token = self._is_token(inputs)
    if not self.rate:
      # The target is the next token; the last token of a row has no target.
      following = np.zeros_like(targets)
      following[:, :-1] = targets[:, 1:]
      is_target = np.zeros_like(is_token)
      is_target[:, :-1] = is_token[:, 1:]
      return _weighted(inputs, following, is_target)
    # Mask tokens with probability `rate`, and predict them.
    drawn = self._draw(indices, inputs.shape[1], key)
    is_target = is_token & (drawn < self.rate)
    mask = np.nan if inputs.dtype == np.float32 else self.mask_id
    masked = np.where(is_target, np.asarray(mask, inputs.dtype), inputs)
    return _weighted(masked, targets, is_target)

  def _is_token(self, inputs: np.ndarray) -> np.ndarray:
    """Returns True at tokens other than padding, start and end, bool [b, n]."""
    if inputs.dtype == np.float32:
      return np.ones(inputs.shape, bool)
    marks = [getattr(self.split, name, 0) for name in ("start", "end")]
    return (inputs > 0) & ~np.isin(inputs, [mark for mark in marks if mark])

  def _draw(self, indices: np.ndarray, n: int, key: Key | None) -> np.ndarray:
    """Draws uniform numbers in [0, 1), float64 [b, n].

    The numbers of a row do not depend on the other rows or the padded length.
    """
    seeds = row_seeds(indices, key, 5, 6)
    return np.stack([np.random.default_rng(seed).random(n) for seed in seeds])


def _weighted(
  inputs: np.ndarray, targets: np.ndarray, is_target: np.ndarray
) -> dict[str, np.ndarray]:
  weights = is_target.astype(np.float32)
  return {"inputs": inputs, "targets": targets, "weights": weights}


def reconstruct(
  task: Task,
  objective: str,
  mask_rate: Annotated[float, Interval("(0, 1)")] = RATE,
  targets: str = "values",
) -> Task:
  """Returns the task of predicting masked or next tokens of a task's inputs.

  The two sequences of a pair become two examples.

  Args:
    task: classification task of sequences.
    objective: "masked" to predict masked tokens, "causal" to predict the next
      token.
    mask_rate: share of masked tokens; for "masked" only.
    targets: targets of real numbers: "values", scored by the mean absolute
      error, or "classes", scored by the perplexity over the 256 values of a
      pixel.

  Raises:
    UserError: for an unknown name, for options that do not apply, or for a task
      that does not classify sequences.
  """
  # Find the id of the mask token, or add one to the vocabulary.
  _check_options(task, objective, mask_rate, targets)
  real, is_masked = not task.vocabulary, objective == "masked"
  vocabulary, mask_id = task.vocabulary, 0
  if is_masked and not real:
    mask_ids = [vocabulary.index(name) for name in MASKS if name in vocabulary]
    mask_id = mask_ids[0] if mask_ids else len(vocabulary)
    vocabulary = vocabulary if mask_ids else (*vocabulary, MASKS[0])
  num_classes = 256 if real else task.vocab_size
  rate = mask_rate if is_masked else 0.0

  def wrap(split: Packed) -> MaskedTokens:
    # Separate pairs, and read real numbers as classes if chosen.
    split = _single(split)
    classes = None
    if targets == "classes":
      classes = dataclasses.replace(split, scale=None)
    return MaskedTokens(split, rate, mask_id, classes)

  # Replace the splits, the classes, the objective and the baseline.
  has_values = real and targets == "values"
  kind = "values" if has_values else "tokens"
  return dataclasses.replace(
    task,
    protocol=f"{task.protocol}, {objective}"
    + (f" {rate:g}" if is_masked else ""),
    splits={name: wrap(split) for name, split in task.splits.items()},
    vocabulary=vocabulary,
    num_classes=0 if has_values else num_classes,
    num_inputs=1,
    objective=f"{'masked' if is_masked else 'next'}_{kind}",
    trivial={"median": median} if has_values else {"unigram": unigram},
    classes=(),
  )


def _check_options(
  task: Task, objective: str, mask_rate: float, targets: str
) -> None:
  """Raises UserError for arguments that `reconstruct` cannot combine."""
  choose("objective of config.task", objective, OBJECTIVES)
  choose("targets of config.task", targets, TARGETS)
  if task.image or task.channels or task.objective != "classification":
    has = "images in patches" if task.image else "another objective"
    has = "several channels" if task.channels else has
    raise UserError(
      f"config.task.objective={objective!r} is for sequences with classes, and "
      f"{task.name} has {has}. Remove the option, or choose a task of Long "
      "Range Arena, IMDb or AG's News."
    )
  if targets == "classes" and task.vocabulary:
    raise UserError(
      "config.task.targets='classes' is for real numbers, but the ids of "
      f"{task.name} are classes already: remove the option."
    )
  if targets == "classes" and not getattr(task.splits["train"], "scale", None):
    raise UserError(
      "config.task.targets='classes' is for pixels, and "
      f"{task.name} has other numbers: remove the option."
    )
  if objective != "masked" and mask_rate != RATE:
    raise UserError(
      f"config.task.mask_rate={mask_rate} is the share of masked tokens, but "
      "config.task.objective='causal' masks none: remove the option."
    )


def _single(split: Packed) -> Packed:
  """Returns the split in which every sequence is a separate example."""
  count = getattr(split, "num_inputs", 1)
  if count == 1:
    return split
  labels, keys = (np.repeat(x, count) for x in (split.labels, split.keys))
  return dataclasses.replace(split, num_inputs=1, labels=labels, keys=keys)


def _predicted(task: Task, name: str) -> Iterator[np.ndarray]:
  """Yields the predicted targets of a split, `CHUNK` examples at a time."""
  split = task.splits[name]
  for first in range(0, len(split), CHUNK):
    indices = np.arange(first, min(first + CHUNK, len(split)))
    n = min(int(split.lengths()[indices].max()), task.max_len)
    batch = split.batch(indices, n)
    yield batch["targets"][batch["weights"] > 0]


def unigram(task: Task) -> float:
  """Returns the perplexity of test under the frequencies of train's targets.

  p(w) = (c(w) + 1) / sum over v of (c(v) + 1), with the counts c of train.
  """
  size = task.num_classes

  def counts(name: str) -> np.ndarray:
    parts = (np.bincount(t, minlength=size) for t in _predicted(task, name))
    return sum(parts, np.zeros(size))

  shares = counts("train") + 1
  test = counts("test")
  log_p = np.log(shares / shares.sum())
  return math.exp(-(test * log_p).sum() / max(test.sum(), 1))


def median(task: Task) -> float:
  """Returns the mean absolute error of the median of train's targets."""
  middle = np.median(np.concatenate(list(_predicted(task, "train"))))
  test = np.concatenate(list(_predicted(task, "test")))
  return float(np.abs(test - middle).mean())
