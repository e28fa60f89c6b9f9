"""Generates ListOps: nested operations on digits.

Trees have the distribution of LRA's generator. A node at depth 1 to
max_depth - 1 is an operation with probability 1/4, otherwise a digit; a node at
max_depth is a digit. An operation has 2 to max_args arguments and one of four
operators. The length of a tree is its number of tokens: an operation counts its
operator, its arguments and its closing bracket. A tree is kept if its length
lies strictly between min_length and max_length, and if it is no duplicate.

A block of many trees grows level by level as flat arrays. The children of a
node are adjacent, so sizes and values are segment reductions from the deepest
level up (`_sizes`, `_values`). Places in the text are computed from the root
down (`_write`).

Source: Nangia and Bowman 2018, https://arxiv.org/abs/1804.06028, with LRA's
settings.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import os
from collections.abc import Iterator

import numpy as np

from jaxformers.data.engine.loader import prefetch
from jaxformers.data.engine.packed import Packed, pack
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import choose

PAD = 0
ROOTS = 2_000  # Number of trees that grow together in a block.
OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
TOKENS = (*OPERATORS, *"0123456789", "]")  # Token i has id i + 1.
IDS = {token: i + 1 for i, token in enumerate(TOKENS)}
END = IDS["]"]
FIRST_DIGIT = IDS["0"]
# Settings without effect if there are no short examples.
SHORT = ("num_short", "short_min_length", "short_max_length")


@dataclasses.dataclass(frozen=True)
class Settings:
  """Settings of a data set. The defaults are LRA's, except the seed.

  Attributes:
    seed: seed of the whole data set.
    num_train, num_validation, num_test: number of examples of each split.
    max_depth: depth of the deepest level of a tree; the root is at depth 1.
    max_args: largest number of arguments of an operation.
    min_length, max_length: exclusive bounds of the number of tokens.
    test_min_length, test_max_length: exclusive bounds of the number of tokens
      in the test split, to measure generalisation to other lengths; 0 for
      min_length and max_length.
    operators: names of the operators, from MIN, MAX, MED and SM.
    num_short: number of further training examples, which are shorter.
    short_min_length, short_max_length: exclusive bounds of their number of
      tokens; the second one is at most min_length + 1.
  """

  seed: int = 0
  num_train: int = 96_000
  num_validation: int = 2_000
  num_test: int = 2_000
  max_depth: int = 10
  max_args: int = 10
  min_length: int = 500
  max_length: int = 2_000
  test_min_length: int = 0
  test_max_length: int = 0
  operators: str = "MIN MAX MED SM"
  num_short: int = 0
  short_min_length: int = 20
  short_max_length: int = 200

  def __post_init__(self) -> None:
    """Raises UserError for values out of range, or if no tree can exist."""
    if self.max_args < 2 or self.max_depth < 2:
      raise UserError(
        f"max_args={self.max_args}, max_depth={self.max_depth}: choose at "
        "least 2 for both."
      )
    if min(self.num_train, self.num_validation, self.num_test) < 1:
      raise UserError(
        f"num_train={self.num_train}, num_validation={self.num_validation}, "
        f"num_test={self.num_test}: choose at least 1 for every split."
      )
    # The smallest tree is an operation on two digits: 4 tokens.
    if self.max_length - self.min_length < 2 or self.max_length < 5:
      raise UserError(
        f"No tree is longer than {self.min_length} and shorter than "
        f"{self.max_length} tokens: widen min_length and max_length, "
        "test_min_length and test_max_length, or short_min_length and "
        "short_max_length."
      )
    self.for_test()  # Checks the lengths of the test split.
    if self.num_short:
      if self.short_max_length > self.min_length + 1:
        raise UserError(
          f"short_max_length={self.short_max_length} is greater than "
          f"min_length + 1 = {self.min_length + 1}: lower it."
        )
      self.for_short()  # Checks the lengths of the short examples.
    if not self.operators.split():
      raise UserError("operators is empty: choose from MIN, MAX, MED and SM.")
    for operator in self.operators.split():
      choose("operator", f"[{operator}", OPERATORS)

  def for_test(self) -> Settings:
    """Returns the settings of the test split."""
    # Return the same object if the lengths are equal: `generate` then shares
    # one stream of trees.
    least = self.test_min_length or self.min_length
    most = self.test_max_length or self.max_length
    if (least, most) == (self.min_length, self.max_length):
      return self
    return self._between(least, most)

  def for_short(self) -> Settings:
    """Returns the settings of the short training examples."""
    return self._between(self.short_min_length, self.short_max_length)

  def _between(self, least: int, most: int) -> Settings:
    """Returns the settings of one split with other lengths."""
    return dataclasses.replace(
      self,
      min_length=least,
      max_length=most,
      test_min_length=0,
      test_max_length=0,
      num_short=0,
    )


@dataclasses.dataclass
class _Level:
  """The k nodes of one depth of a block, sorted by tree and then by sibling.

  Attributes:
    tree: index of the tree of each node, [k].
    operator: operator of each node, 0 to 3, or -1 for a digit, [k].
    digit: value of each digit, [k].
    children: number of arguments of each of the j operations, [j].
  """

  tree: np.ndarray
  operator: np.ndarray
  digit: np.ndarray
  children: np.ndarray

  @property
  def inner(self) -> np.ndarray:
    """Mask of the nodes that are operations, bool [k]."""
    return self.operator >= 0

  def starts(self) -> np.ndarray:
    """Returns where each operation's arguments begin in the next level."""
    return np.cumsum(self.children) - self.children

  def keep(self, kept: np.ndarray) -> _Level:
    """Returns the nodes of the trees where `kept`, bool [trees], is True."""
    nodes = kept[self.tree]
    children = self.children[nodes[self.inner]]
    return _Level(
      self.tree[nodes], self.operator[nodes], self.digit[nodes], children
    )


def _grow(
  rng: np.random.Generator, count: int, settings: Settings
) -> list[_Level]:
  """Grows trees whose roots are operations; drops trees that become too long.

  No root is a digit: a tree of one digit is too short to be kept.

  Args:
    rng: generator of operators, digits and numbers of arguments.
    count: number of roots.
    settings: depth, arguments, lengths and operators.

  Returns:
    The levels of the remaining trees, from the root down.
  """
  tree, levels = np.arange(count), []
  operators = [OPERATORS.index(f"[{o}") for o in settings.operators.split()]
  size = np.zeros(count, np.int64)
  for depth in range(1, settings.max_depth + 1):
    # Draw which nodes of this depth are operations.
    inner = rng.random(len(tree)) <= 0.25
    if depth == 1:
      inner[:] = True
    elif depth == settings.max_depth:
      inner[:] = False
    # Draw operators, digits and numbers of arguments.
    drawn = rng.integers(0, len(operators), len(tree))
    operator = np.where(inner, np.array(operators)[drawn], -1)
    digit = rng.integers(0, 10, len(tree))
    children = rng.integers(2, settings.max_args + 1, int(inner.sum()))
    levels.append(_Level(tree, operator, digit, children))
    # Count tokens: one per digit, two per operation (operator and bracket).
    size += np.bincount(tree, 1 + inner, count).astype(np.int64)
    # Add the arguments of operations in trees that are not too long.
    short = size < settings.max_length
    parents = tree[inner]
    grows = short[parents]
    tree = np.repeat(parents[grows], children[grows])
    if not len(tree):
      break
  return [level.keep(short) for level in levels]


def _sizes(levels: list[_Level]) -> list[np.ndarray]:
  """Returns the number of tokens of every node's subtree, level by level."""
  # size(digit) = 1; size(operation) = 2 + sum of the sizes of its arguments.
  sizes: list[np.ndarray] = []
  below = np.zeros(0, np.int64)
  for level in reversed(levels):
    size = np.ones(len(level.tree), np.int64)
    if len(level.children):
      size[level.inner] = 2 + np.add.reduceat(below, level.starts())
    sizes.append(size)
    below = size
  return sizes[::-1]


def _values(levels: list[_Level]) -> np.ndarray:
  """Returns the value of every tree, 0 to 9, in the order of the trees."""
  below = np.zeros(0, np.int64)
  for level in reversed(levels):
    value = level.digit.copy()
    if len(level.children):
      starts, counts = level.starts(), level.children
      # Sort the arguments of each operation, for the median.
      owner = np.repeat(np.arange(len(counts)), counts)
      ordered = np.sort(owner * 10 + below) % 10
      low, high = starts + (counts - 1) // 2, starts + counts // 2
      # Apply MIN, MAX, MED and SM to all nodes, then choose by operator.
      choices = (
        np.minimum.reduceat(below, starts),
        np.maximum.reduceat(below, starts),
        (ordered[low] + ordered[high]) // 2,
        np.add.reduceat(below, starts) % 10,
      )
      value[level.inner] = np.choose(level.operator[level.inner], choices)
    below = value
  return below


def _write(levels: list[_Level], sizes: list[np.ndarray]) -> np.ndarray:
  """Returns the ids of all trees end to end, uint8 [total].

  Args:
    levels: nodes of the trees, from the root down.
    sizes: number of tokens of every node's subtree; see `_sizes`.
  """
  # Place the roots: each tree begins where the previous one ends.
  text = np.zeros(int(sizes[0].sum()), np.uint8)
  place = np.cumsum(sizes[0]) - sizes[0]
  for depth, level in enumerate(levels):
    # Write operators and digits at the places of their nodes, then brackets.
    token = np.where(level.inner, level.operator + 1, level.digit + FIRST_DIGIT)
    text[place] = token
    opened = place[level.inner]
    text[opened + sizes[depth][level.inner] - 1] = END
    if len(level.children):
      # Place each argument after its operator and its earlier siblings.
      below = sizes[depth + 1]
      before = np.cumsum(below) - below
      first = np.repeat(before[level.starts()], level.children)
      place = np.repeat(opened + 1, level.children) + before - first
  return text


def trees(
  settings: Settings, block: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Generates the accepted trees of a block, a function of (seed, block).

  Args:
    settings: settings of the data set.
    block: number of the block.

  Returns:
    ids uint8 [total], offsets int64 [count + 1] and values int64 [count].
  """
  # Grow the trees of the block.
  rng = np.random.default_rng([settings.seed, block])
  levels = _grow(rng, ROOTS, settings)
  # Keep the trees whose lengths are allowed.
  size = np.zeros(ROOTS, np.int64)
  size[levels[0].tree] = _sizes(levels)[0]
  kept = (size > settings.min_length) & (size < settings.max_length)
  levels = [level.keep(kept) for level in levels]
  levels = [level for level in levels if len(level.tree)]
  if not levels:
    empty = np.zeros(0, np.int64)
    return empty.astype(np.uint8), np.zeros(1, np.int64), empty
  # Write the remaining trees, and compute their values.
  sizes = _sizes(levels)
  offsets = np.concatenate([[0], np.cumsum(sizes[0])])
  return _write(levels, sizes), offsets, _values(levels)


def _distinct(
  settings: Settings, seen: set[bytes]
) -> Iterator[tuple[np.ndarray, int]]:
  """Yields distinct accepted trees with their values, in a fixed order.

  Args:
    settings: settings of the data set.
    seen: hashes of the trees yielded so far; new hashes are added.

  Raises:
    UserError: if a hundred consecutive blocks hold no new tree.
  """
  barren = 0  # Number of consecutive blocks without a new tree.
  # Generate blocks in threads: NumPy releases the interpreter's lock.
  workers = os.cpu_count() or 1
  make = functools.partial(trees, settings)
  blocks = prefetch(make, itertools.count(), ahead=2 * workers, threads=workers)
  for ids, offsets, values in blocks:
    fresh = 0
    # Yield the trees whose hash is new, in the order of the block.
    for start, stop, value in zip(offsets, offsets[1:], values, strict=False):
      tree = ids[start:stop]
      digest = hashlib.blake2b(tree.tobytes(), digest_size=16).digest()
      if digest not in seen:
        seen.add(digest)
        fresh += 1
        yield tree, int(value)
    barren = 0 if fresh else barren + 1
    if barren == 100:
      raise UserError(
        f"{100 * ROOTS:,} roots gave no new tree for {settings}: widen the "
        "lengths, allow more depth or arguments, or ask for fewer examples."
      )


def generate(settings: Settings) -> dict[str, Packed]:
  """Generates three disjoint splits: no tree occurs twice in the data set.

  Takes the test split first, then validation, then train, from one stream. So
  a smaller training set is the beginning of a larger one, and the other splits
  do not depend on its size. Short training examples come last, and may be
  others if num_train is larger.
  """
  seen: set[bytes] = set()
  stream = _distinct(settings, seen)
  # A test split with other lengths needs a separate stream.
  for_test = settings.for_test()
  test = stream if for_test is settings else _distinct(for_test, seen)
  plan = {
    "test": (test, settings.num_test),
    "validation": (stream, settings.num_validation),
    "train": (stream, settings.num_train),
  }
  # Draw the splits in this order from the streams.
  splits = {}
  for name, (source, count) in plan.items():
    drawn = list(itertools.islice(source, count))
    if name == "train" and settings.num_short:
      short = _distinct(settings.for_short(), seen)
      drawn += itertools.islice(short, settings.num_short)
    rows, values = zip(*drawn, strict=True)
    splits[name] = pack(rows, np.array(values))
  return splits
