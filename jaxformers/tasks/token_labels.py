"""Splits with a label for every token, and trivial rules for them."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxformers.data.engine import digests, encodings
from jaxformers.data.engine.packed import Packed
from jaxformers.data.engine.preparation import open_splits
from jaxformers.data.engine.source import Keyed, Source
from jaxformers.data.engine.split import Key, Split
from jaxformers.foundations.errors import UserError
from jaxformers.tasks.task import Task

OBJECTIVE = "token_classification"
NO_LABEL = 0  # Stored class of a token without a label.
MOST_STORED = (1 << 16) - 1  # Largest stored id or class.
CHUNK = 512  # Number of examples that the rules read at a time.


@dataclasses.dataclass(frozen=True)
class TokenLabels(Split):
  """Sequences with a class, or no class, for each token.

  Attributes:
    inputs: split of the sequences, whose own labels are ignored.
    classes: for each sequence of `inputs`, the class of each token plus one,
      and `NO_LABEL` for tokens without a class.
  """

  inputs: Any
  classes: Packed

  def __len__(self) -> int:
    return len(self.inputs)

  @property
  def keys(self) -> np.ndarray:
    """Identifiers of the examples, uint64 [count]."""
    return self.inputs.keys

  def lengths(self) -> np.ndarray:
    """Returns the number of tokens of every example, int64 [count]."""
    return self.inputs.lengths()

  def digest(self) -> str:
    """Returns the digest of all sequences and classes."""
    return digests.of_parts(self.inputs.digest(), self.classes.digest())

  def reading(self) -> dict[str, Any]:
    """Returns the settings that turn tokens into inputs, as plain JSON."""
    return self.inputs.reading()

  def select(self, indices: Any) -> TokenLabels:
    """Returns the split of the examples at `indices`, in this order."""
    return TokenLabels(
      self.inputs.select(indices), self.classes.select(indices)
    )

  def batch(
    self,
    indices: np.ndarray,
    max_len: int,
    key: Key | None = None,
  ) -> dict[str, np.ndarray]:
    """Returns a batch of examples, cut and padded on the right.

    Args:
      indices: numbers of the examples in the split, integers [b].
      max_len: n, the number of tokens of every row of the batch.
      key: ignored, because sequences are not augmented.

    Returns:
      inputs, int32 or float32 [b, n], or time series float32 [b, n, c];
      targets, int32 [b, n], the classes, and 0 where there is none; weights,
      float32 [b, n], 1 at tokens with a class and 0 elsewhere.
    """
    del key
    inputs = self.inputs.batch(indices, max_len)["inputs"]
    stored = self.classes.batch(indices, inputs.shape[1])["inputs"]
    is_labelled = stored != NO_LABEL
    if inputs.ndim == 3:
      # Steps of time series without any number are masked.
      is_labelled &= ~np.isnan(inputs).all(-1)
    return {
      "inputs": inputs,
      "targets": np.where(is_labelled, stored - 1, 0),
      "weights": is_labelled.astype(np.float32),
    }


def from_pairs(packed: Packed) -> TokenLabels:
  """Returns the split whose examples are stored as two sequences each.

  Args:
    packed: for each example, the ids, and the classes plus one.
  """
  parts = (
    dataclasses.replace(
      packed,
      starts=packed.starts[first::2],
      stops=packed.stops[first::2],
      num_inputs=1,
    )
    for first in (0, 1)
  )
  return TokenLabels(*parts)


# Sequences of a split: (tokens, classes), counted from 0, with a negative class
# at tokens without one.
Rows = Iterable[tuple[np.ndarray, np.ndarray]]


def open_generated(
  name: str,
  settings: Mapping[str, Any],
  splits: Mapping[str, Rows],
  data_dir: str,
) -> tuple[dict[str, TokenLabels], dict[str, Any]]:
  """Opens generated sequences; generates them if they are not prepared.

  Args:
    name: name of the task.
    settings: settings that determine the sequences.
    splits: generators of the sequences, by split, which are read in this order.
    data_dir: folder of prepared data; see `data_folder`.

  Returns:
    The splits, in which ids are the tokens plus one, and a description of their
    origin.
  """

  def examples(rows: Rows) -> Iterator[Keyed]:
    for key, (tokens, classes) in enumerate(rows):
      ids, stored = (
        np.asarray(1 + row).astype(np.uint16) for row in (tokens, classes)
      )
      yield key, {"ids": ids, "classes": stored}

  source = Source(
    name=name,
    features={"ids": np.uint16, "classes": np.uint16},
    read=lambda _: {split: examples(rows) for split, rows in splits.items()},
    settings=settings,
    shuffled=False,
  )
  encoding = encodings.ids("ids", "classes", dtype=np.uint16)
  packed, info = open_splits(source, encoding, data_dir)
  return {split: from_pairs(each) for split, each in packed.items()}, info


MOST_REPEATS = 200  # Draws in a row without a new sequence.
DRAWN = 2_048  # Largest number of sequences of a draw.


def distinct(
  draw: Callable[[int], Rows], count: int, seen: set[bytes]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Yields (tokens, classes) of sequences that were not drawn before.

  Args:
    draw: function that draws a number of random sequences.
    count: number of sequences to yield.
    seen: sequences that are taken; the new ones are added.

  Raises:
    UserError: if there are not enough different sequences.
  """
  left, repeats = count, 0
  while left:
    added = 0
    for tokens, classes in draw(min(left, DRAWN)):
      key = tokens.astype(np.uint16).tobytes()
      if key not in seen:
        seen.add(key)
        added += 1
        yield tokens, classes
    left -= added
    repeats = 0 if added else repeats + 1
    if repeats > MOST_REPEATS:
      raise UserError(
        f"Only {count - left:,} of {count:,} further sequences were found that "
        "differ from all others: ask for fewer, or for longer ones."
      )


def _labelled(task: Task, name: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Yields (ids, classes) of the tokens with a class, a chunk at a time."""
  split = task.splits[name]
  for first in range(0, len(split), CHUNK):
    indices = np.arange(first, min(first + CHUNK, len(split)))
    n = int(split.lengths()[indices].max())
    batch = split.batch(indices, n)
    at = batch["weights"] > 0
    yield batch["inputs"][at], batch["targets"][at]


def majority_label(task: Task) -> float:
  """Scores the rule that always predicts the most frequent label of train."""
  counts = np.zeros(task.num_classes, np.int64)
  for _, classes in _labelled(task, "train"):
    counts += np.bincount(classes, minlength=task.num_classes)
  return _share(task, lambda ids: np.full(len(ids), counts.argmax()))


def token_rule(task: Task) -> float:
  """Scores the rule that predicts a label from its own token.

  It predicts the most frequent label of train among tokens with the same id.
  """
  counts = np.zeros((task.vocab_size, task.num_classes), np.int64)
  for ids, classes in _labelled(task, "train"):
    np.add.at(counts, (ids, classes), 1)
  best = counts.argmax(1)
  return _share(task, lambda ids: best[ids])


def _share(task: Task, predict: Any) -> float:
  """Returns the share of test's labels that a function of ids predicts."""
  right = total = 0
  for ids, classes in _labelled(task, "test"):
    right += int((predict(ids) == classes).sum())
    total += len(classes)
  return right / max(total, 1)


RULES = {"majority label": majority_label}
RULES_OF_IDS = RULES | {"label by token": token_rule}


@dataclasses.dataclass(frozen=True)
class Recipe:
  """Description of generated sequences with a class per token.

  Attributes:
    name: name of the task.
    protocol: name of the protocol.
    problem: name of the problem.
    tokens: names of the tokens.
    classes: names of the classes.
    draw: function from a generator, a number of sequences, and the least and
      the greatest length to the sequences.
    lengths: least and greatest length in training.
    held_out_lengths: the same for validation and test.
    settings: other settings that determine the sequences.
    longest: number of tokens of a sequence of the greatest length.
    causal: True if a token may see only itself and earlier tokens.
    trivial: trivial rules by name.
    draw_train: the same function for training sequences; None for `draw`.
  """

  name: str
  protocol: str
  problem: str
  tokens: tuple[str, ...]
  classes: tuple[str, ...]
  draw: Callable[[np.random.Generator, int, int, int], Rows]
  lengths: tuple[int, int]
  held_out_lengths: tuple[int, int]
  settings: Mapping[str, Any]
  longest: int
  causal: bool
  trivial: Mapping[str, Callable[[Task], float]]
  draw_train: Callable[[np.random.Generator, int, int, int], Rows] | None = None


def generate(
  recipe: Recipe,
  data_dir: str,
  seed: int,
  counts: tuple[int, int, int],
  further: Sequence[int],
) -> Task:
  """Returns the task of a recipe; generates its sequences once.

  Train shares no sequence with another split, and no two sequences of the other
  splits are equal. If all sequences have one length, no two training sequences
  are equal, either. If lengths vary, a fifth of all sequences, chosen by a
  hash, is kept for the other splits, and train may repeat a short sequence:
  then train has every length about equally often.

  Each split has its own seed. Validation and test do not depend on the number
  of training examples, or on further test splits of other lengths.

  Args:
    recipe: description of the sequences.
    data_dir: folder of prepared data; see `data_folder`.
    seed: seed of the data.
    counts: numbers of examples of train, validation and each test split.
    further: lengths of further test splits of one length each.

  Raises:
    UserError: for a length twice or below 2, or for too many examples.
  """
  if len({*further}) < len(further) or min(further, default=2) < 2:
    raise UserError(
      f"test_lengths={[*further]}: give different lengths of at least 2."
    )
  if max(len(recipe.tokens), len(recipe.classes)) >= MOST_STORED:
    raise UserError(
      f"{len(recipe.tokens):,} tokens and {len(recipe.classes):,} classes: "
      f"give less than {MOST_STORED:,} of each."
    )
  packed, info = open_generated(
    recipe.name,
    {
      "protocol": recipe.protocol,
      "problem": recipe.problem,
      "seed": seed,
      "counts": _joined(counts),
      "lengths": _joined((*recipe.lengths, *recipe.held_out_lengths)),
      **recipe.settings,
      "test_lengths": _joined(further),
    },
    _draws(recipe, seed, counts, further),
    data_dir,
  )
  sides = "" if recipe.causal else ", both sides"
  return Task(
    name=recipe.name,
    protocol=f"{recipe.protocol}, {recipe.problem}{sides}",
    splits=packed,
    vocabulary=(encodings.PAD, *recipe.tokens),
    max_len=recipe.longest,
    num_classes=len(recipe.classes),
    classes=recipe.classes,
    objective=OBJECTIVE,
    causal=recipe.causal,
    test_lengths=(*further,),
    trivial=recipe.trivial,
    info=info,
  )


def _draws(
  recipe: Recipe,
  seed: int,
  counts: tuple[int, int, int],
  further: Sequence[int],
) -> dict[str, Rows]:
  """Returns the generators of all splits; see `generate` for the arguments.

  They have to be read in their order.
  """
  num_train, num_validation, num_test = counts
  # Number, seed and lengths of each split. Train is drawn last, and takes no
  # sequence of another split.
  splits = {
    **{f"test_{n}": (num_test, 2 + n, (n, n)) for n in further},
    "test": (num_test, 2, recipe.held_out_lengths),
    "validation": (num_validation, 1, recipe.held_out_lengths),
    "train": (num_train, 0, recipe.lengths),
  }
  least, most = recipe.lengths
  has_lengths = least < most
  seen: set[bytes] = set()

  def rows(count: int, number: int, lengths: tuple[int, int]) -> Rows:
    rng = np.random.default_rng([seed, number])
    is_train = number == 0
    make = (is_train and recipe.draw_train) or recipe.draw

    def draw(chunk: int) -> Rows:
      drawn = make(rng, chunk, *lengths)
      # Only lengths of training have a part that is kept for the other splits.
      if not has_lengths or lengths[0] > most:
        return drawn
      return (row for row in drawn if _is_held_out(row[0]) != is_train)

    if is_train and has_lengths:
      return _repeat(draw, count)
    return distinct(draw, count, seen)

  return {name: rows(*split) for name, split in splits.items()}


def _is_held_out(tokens: np.ndarray) -> bool:
  """Returns True for a fifth of all sequences, by a hash of their tokens."""
  return zlib.crc32(tokens.astype(np.uint16).tobytes()) % 5 == 0


def _repeat(
  draw: Callable[[int], Rows], count: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Yields `count` sequences, which may be equal."""
  left = count
  while left:
    for row in draw(min(left, DRAWN)):
      yield row
      left -= 1


def _joined(numbers: Iterable[int]) -> str:
  """Returns numbers as a part of the name of a folder."""
  return "+".join(map(str, numbers))
