"""Texts whose tokens are deleted at random, for certificates of edits.

A classifier that is trained on such texts is made smooth by a vote over many
random deletions; see `analysis.evaluation.edits`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxformers.data.engine.packed import Packed
from jaxformers.data.engine.split import Key, Split, row_seeds
from jaxformers.foundations import ranges
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Fraction
from jaxformers.tasks.task import Task


@dataclasses.dataclass(frozen=True)
class Deleted(Split):
  """Split of texts of which each token is deleted with a probability.

  Tokens are deleted before texts are cut. What remains moves together, so that
  places do not tell what is gone. Training deletes other tokens each time that
  it reads a text; in evaluation they depend only on the index of the text.

  Attributes:
    split: split with one sequence of ids per example.
    rate: probability p that a token is deleted.
  """

  split: Packed
  rate: float

  def __len__(self) -> int:
    return len(self.split)

  def lengths(self) -> np.ndarray:
    """Returns lengths that texts hardly exceed, int64 [count]; see `left`."""
    return left(self.split.lengths(), self.rate)

  def digest(self) -> str:
    """Returns the digest of the whole texts."""
    return self.split.digest()

  def reading(self) -> dict[str, Any]:
    """Returns the settings that turn texts into inputs, as plain JSON."""
    return {**self.split.reading(), "deletion": self.rate}

  def select(self, indices: Any) -> Deleted:
    """Returns the split of the examples at `indices`, in this order."""
    return dataclasses.replace(self, split=self.split.select(indices))

  def batch(
    self, indices: np.ndarray, max_len: int, key: Key | None = None
  ) -> dict[str, np.ndarray]:
    """Returns a batch of examples, cut and padded with 0 on the right.

    Args:
      indices: numbers of the examples in the split, integers [b].
      max_len: n, the number of tokens of every row of the batch.
      key: seed, step and row, the seed of the deletions; None to draw them from
        the indices.

    Returns:
      inputs, int32 [b, n]; targets, int32 [b].
    """
    longest = int(self.split.lengths()[indices].max(initial=1))
    batch = self.split.batch(indices, longest)
    ids = batch["inputs"]
    seeds = row_seeds(indices, key, 7, 8)
    rows = [np.random.default_rng(seed).random(longest) for seed in seeds]
    drawn = np.stack(rows)
    return batch | {"inputs": keep(ids, drawn >= self.rate, max_len)}


def keep(ids: np.ndarray, kept: np.ndarray, n: int) -> np.ndarray:
  """Returns the kept tokens of sequences, moved to the left, [b, n].

  Args:
    ids: ids, [b, m], 0 at padding.
    kept: True at the tokens to keep, bool [b, m].
    n: length to which rows are cut or padded with 0.
  """
  kept = kept & (ids > 0)
  rows, places = np.nonzero(kept)
  # Number the kept tokens of each row from 0.
  places = (kept.cumsum(1) - 1)[rows, places]
  out = np.zeros((len(ids), n), ids.dtype)
  fits = places < n
  out[rows[fits], places[fits]] = ids[kept][fits]
  return out


def left(lengths: Any, rate: float) -> Any:
  """Returns how many tokens random deletion leaves at most, nearly always.

  It is the mean plus four standard deviations of the binomial distribution, and
  at least one. What exceeds it is cut.

  Args:
    lengths: numbers of tokens, int64 [count].
    rate: probability that a token is deleted.
  """
  n = np.asarray(lengths)
  most = np.ceil(n * (1 - rate) + 4 * np.sqrt(n * rate * (1 - rate)))
  return np.clip(most.astype(np.int64), 1, np.maximum(n, 1))


def delete(task: Task, deletion: Fraction) -> Task:
  """Returns a task whose texts lose tokens at random.

  Its `max_len` falls to `left(max_len)`: a model reads what is left of texts of
  the old length, and training costs as much less.

  Args:
    task: classification task of one sequence of ids.
    deletion: probability that a token is deleted; 0 for the task as it is.

  Raises:
    UserError: for another task.
  """
  ranges.check(delete, {"deletion": deletion}, "config.task")
  if not deletion:
    return task
  reading = task.splits["train"].reading()
  marked = reading.get("start_id") or reading.get("end_id")
  is_plain = task.objective == "classification" and task.num_inputs == 1
  if not (is_plain and task.vocabulary and not marked and not task.image):
    raise UserError(
      f"config.task.deletion={deletion} is for the classification of one "
      "sequence of ids without ids that open or close it, and "
      f"{task.name} ({task.protocol}) is another task: remove the option, or "
      "set special_tokens=False where the task has it."
    )
  return dataclasses.replace(
    task,
    protocol=f"{task.protocol}, deletion {deletion:g}",
    splits={name: Deleted(s, deletion) for name, s in task.splits.items()},
    max_len=int(left(task.max_len, deletion)),
    padded_len=0,
    trivial={},
  )
