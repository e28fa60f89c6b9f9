"""Planted pairs: a generated task that requires token mixing.

Every example has equal numbers of the marks "a" and "b" among blanks. In the
class "paired" every a has a b at a fixed distance. In the class "free" the
places of a and b are drawn independently. The places form a ring, so the token
at any place has the same distribution in both classes. A model without token
mixing is therefore at chance, even if it uses tokens, places and counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxformers.data.engine import encodings
from jaxformers.data.engine.preparation import open_splits
from jaxformers.data.engine.source import Keyed, Source
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Count, PositiveCount
from jaxformers.foundations.registry import choose
from jaxformers.tasks import baselines
from jaxformers.tasks.inputs import TOKENIZERS, Ids
from jaxformers.tasks.splits import hold_out
from jaxformers.tasks.task import TASKS, Task

PROTOCOLS = ("jaxformers",)
LABELS = ("free", "paired")
VOCABULARY = (encodings.PAD, ".", "a", "b")  # Id 0 is padding.


def places(
  rng: np.random.Generator, length: int, count: int, distance: int, label: int
) -> tuple[np.ndarray, np.ndarray]:
  """Draws the places of the marks a and b, int [count] each, all different.

  Args:
    rng: generator of the places.
    length: number of places.
    count: number of marks of each kind.
    distance: number of places from an a to its b, modulo `length`.
    label: 1 for pairs, 0 for independent places.
  """
  # Draw until no a and b share a place.
  while True:
    first = rng.choice(length, count, replace=False)
    start = first if label else rng.choice(length, count, replace=False)
    second = (start + distance) % length
    if not np.isin(first, second).any():
      return first, second


def generated(
  seed: int,
  num_train: int,
  num_test: int,
  length: int,
  num_pairs: int,
  distance: int,
) -> Source:
  """Returns the source of the examples; each class has probability 1/2.

  Args:
    seed: seed of the data, not of the run.
    num_train: number of examples of train; validation is held out of train.
    num_test: number of examples of test.
    length, num_pairs, distance: see `load_planted_pairs`.

  Raises:
    UserError: if there are too many marks, or the distance is out of range.
  """
  if not 0 < distance < length or 4 * num_pairs > length:
    raise UserError(
      f"length={length}, num_pairs={num_pairs}, distance={distance}: give a "
      "distance from 1 to length - 1, and at most length / 4 pairs."
    )
  counts = {"train": num_train, "test": num_test}
  sizes = {"length": length, "num_pairs": num_pairs, "distance": distance}

  def examples(number: int, count: int) -> Iterator[Keyed]:
    # Draw the label, then write a (id 2) and b (id 3) among blanks (id 1).
    rng = np.random.default_rng([seed, number])
    for key in range(count):
      label = int(rng.integers(2))
      ids = np.ones(length, np.uint8)
      first, second = places(rng, length, num_pairs, distance, label)
      ids[first], ids[second] = 2, 3
      yield key, {"ids": ids, "label": LABELS[label]}

  def read(archive: Path | None) -> Mapping[str, Iterator[Keyed]]:
    del archive  # The examples are generated.
    splits = enumerate(counts.items())
    return {split: examples(number, count) for number, (split, count) in splits}

  return Source(
    name="planted_pairs",
    features={"ids": np.uint8, "label": LABELS},
    read=read,
    settings={"seed": seed, **counts, **sizes},
    shuffled=False,
  )


@TOKENIZERS.register("marks")
def _marks(vocabulary: Sequence[str], tokenizer_json: str) -> Ids:
  """Returns a function from marks such as "a..b" to ids; it ignores spaces."""
  del tokenizer_json
  table = {mark: i for i, mark in enumerate(vocabulary) if i}

  def ids(text: str) -> np.ndarray:
    marks = "".join(text.split())
    if unknown := sorted({*marks} - table.keys()):
      raise UserError(f"{unknown[0]!r} is no mark: use {' '.join(table)}.")
    return np.array([table[mark] for mark in marks], np.uint8)

  return ids


@TASKS.register("planted_pairs")
def load_planted_pairs(
  *,
  data_dir: str = "",
  protocol: str = "jaxformers",
  seed: Count = 0,
  num_train: PositiveCount = 20_000,
  num_validation: PositiveCount = 1_000,
  num_test: PositiveCount = 2_000,
  length: PositiveCount = 256,
  num_pairs: PositiveCount = 16,
  distance: PositiveCount = 19,
) -> Task:
  """Generates sequences; the class is "paired" if their marks form pairs.

  Args:
    data_dir: folder of prepared data; see `data_folder`.
    protocol: "jaxformers".
    seed: seed of the data, not of the run.
    num_train: number of training examples.
    num_validation: number of validation examples, which choose the checkpoint.
    num_test: number of test examples.
    length: number of tokens of an example.
    num_pairs: number of marks of each of the two kinds.
    distance: number of places from an a to its b, modulo `length`.
  """
  # Generate train and validation together, and hold out validation by key.
  choose("protocol of planted_pairs", protocol, PROTOCOLS)
  origin = generated(
    seed, num_train + num_validation, num_test, length, num_pairs, distance
  )
  splits, info = open_splits(origin, encodings.ids(), data_dir)
  return Task(
    name="planted_pairs",
    protocol=protocol,
    splits={**splits, **hold_out(splits["train"], num_validation)},
    vocabulary=VOCABULARY,
    tokenizer="marks",
    max_len=length,
    num_classes=len(LABELS),
    classes=LABELS,
    trivial=baselines.HISTOGRAMS,
    info=info,
  )
