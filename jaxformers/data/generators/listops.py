"""ListOps: nested operations on digits, generated.

The distribution is that of LRA's generator: a node at depth 1 to max_depth - 1
is an operation with probability 1/4, with 2 to max_args arguments and one of
four operators, otherwise a digit; at max_depth it is a digit. A tree is kept if
its length in tokens (an operation counts its operator, its arguments and its
closing bracket) lies strictly between min_length and max_length, once.

Instead of one tree at a time, a block of trees grows level by level as flat
arrays, with the children of a node next to each other: sizes and values are
sums over segments from the deepest level up, places in the text from the root
down.

Source: Nangia and Bowman 2018, https://arxiv.org/abs/1804.06028, with LRA's
settings.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import hashlib
import itertools
import os
from collections.abc import Iterator

import numpy as np

from jaxformers.data.engine.packed import Packed, pack
from jaxformers.errors import UserError
from jaxformers.registry import choose

PAD = 0
ROOTS = 2_000  # Trees that are grown together: a block.
OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
TOKENS = (*OPERATORS, *"0123456789", "]")  # Token i has id i + 1.
IDS = {token: i + 1 for i, token in enumerate(TOKENS)}
END = IDS["]"]
FIRST_DIGIT = IDS["0"]


@dataclasses.dataclass(frozen=True)
class Settings:
  """What is generated. The defaults are LRA's; the seed is ours.

  Attributes:
    seed: of the whole data set.
    num_train, num_validation, num_test: examples of each split.
    max_depth: deepest level of a tree; the root is at 1.
    max_args: greatest number of arguments.
    min_length, max_length: a tree's tokens lie strictly between.
    test_min_length, test_max_length: the same for the test split alone, to see
      how a model generalises; 0 for those of training.
    operators: which of MIN, MAX, MED and SM there are.
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

  def __post_init__(self) -> None:
    """Raises UserError where no tree could be made."""
    if self.max_args < 2 or self.max_depth < 2:
      raise UserError(
        f"max_args={self.max_args}, max_depth={self.max_depth}: both must be "
        "at least 2."
      )
    if min(self.num_train, self.num_validation, self.num_test) < 1:
      raise UserError(
        f"num_train={self.num_train}, num_validation={self.num_validation}, "
        f"num_test={self.num_test}: every split needs an example."
      )
    for one in (self, self.for_test()):
      if one.max_length - one.min_length < 2 or one.max_length < 5:
        raise UserError(
          f"No tree is longer than {one.min_length} and shorter than "
          f"{one.max_length} tokens: widen min_length and max_length, or "
          "test_min_length and test_max_length."
        )
    if not self.operators.split():
      raise UserError("operators is empty: name some of MIN, MAX, MED, SM.")
    for operator in self.operators.split():
      choose("operator", f"[{operator}", OPERATORS)

  def for_test(self) -> Settings:
    """The settings by which the test split is drawn."""
    lengths = (
      self.test_min_length or self.min_length,
      self.test_max_length or self.max_length,
    )
    if lengths == (self.min_length, self.max_length):
      return self
    return dataclasses.replace(
      self,
      min_length=lengths[0],
      max_length=lengths[1],
      test_min_length=0,
      test_max_length=0,
    )


@dataclasses.dataclass
class _Level:
  """The nodes of one depth of a block of trees, trees and siblings in order.

  tree [k]: index of the tree. operator [k]: 0 to 3, or -1 for a digit.
  digit [k]. children [j]: number of arguments of each of the j operations.
  """

  tree: np.ndarray
  operator: np.ndarray
  digit: np.ndarray
  children: np.ndarray

  @property
  def inner(self) -> np.ndarray:
    """Which nodes are operations, bool [k]."""
    return self.operator >= 0

  def starts(self) -> np.ndarray:
    """Where the arguments of each operation start in the next level."""
    return np.cumsum(self.children) - self.children

  def keep(self, kept: np.ndarray) -> _Level:
    """The nodes of some trees only. kept: bool [trees]."""
    nodes = kept[self.tree]
    children = self.children[nodes[self.inner]]
    return _Level(
      self.tree[nodes], self.operator[nodes], self.digit[nodes], children
    )


def _grow(
  rng: np.random.Generator, count: int, settings: Settings
) -> list[_Level]:
  """Trees whose root is an operation, without those that are surely too long.

  A digit at the root would be rejected for its length, so leaving it out does
  not change what is kept.
  """
  tree, levels = np.arange(count), []
  known = [OPERATORS.index(f"[{o}") for o in settings.operators.split()]
  size = np.zeros(count, np.int64)
  for depth in range(1, settings.max_depth + 1):
    inner = rng.random(len(tree)) <= 0.25
    if depth == 1:
      inner[:] = True
    elif depth == settings.max_depth:
      inner[:] = False
    drawn = rng.integers(0, len(known), len(tree))
    operator = np.where(inner, np.array(known)[drawn], -1)
    digit = rng.integers(0, 10, len(tree))
    children = rng.integers(2, settings.max_args + 1, int(inner.sum()))
    levels.append(_Level(tree, operator, digit, children))
    size += np.bincount(tree, 1 + inner, count).astype(np.int64)
    short = size < settings.max_length  # The others grow no further.
    parents = tree[inner]
    grows = short[parents]
    tree = np.repeat(parents[grows], children[grows])
    if not len(tree):
      break
  return [level.keep(short) for level in levels]


def _sizes(levels: list[_Level]) -> list[np.ndarray]:
  """The number of tokens under every node, level by level."""
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
  """The value of every tree, 0 to 9, in the order of the trees."""
  below = np.zeros(0, np.int64)
  for level in reversed(levels):
    value = level.digit.copy()
    if len(level.children):
      starts, counts = level.starts(), level.children
      owner = np.repeat(np.arange(len(counts)), counts)
      ordered = np.sort(owner * 10 + below) % 10
      low, high = starts + (counts - 1) // 2, starts + counts // 2
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
  """The ids of all trees end to end, uint8."""
  text = np.zeros(int(sizes[0].sum()), np.uint8)
  place = np.cumsum(sizes[0]) - sizes[0]
  for depth, level in enumerate(levels):
    token = np.where(level.inner, level.operator + 1, level.digit + FIRST_DIGIT)
    text[place] = token
    opened = place[level.inner]
    text[opened + sizes[depth][level.inner] - 1] = END
    if len(level.children):
      below = sizes[depth + 1]
      before = np.cumsum(below) - below
      first = np.repeat(before[level.starts()], level.children)
      place = np.repeat(opened + 1, level.children) + before - first
  return text


def trees(
  settings: Settings, block: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """The accepted trees of one block: a function of (seed, block) alone.

  Returns:
    ids uint8 [total], offsets int64 [count + 1] and values int64 [count].
  """
  rng = np.random.default_rng([settings.seed, block])
  levels = _grow(rng, ROOTS, settings)
  size = np.zeros(ROOTS, np.int64)
  size[levels[0].tree] = _sizes(levels)[0]
  kept = (size > settings.min_length) & (size < settings.max_length)
  levels = [level.keep(kept) for level in levels]
  levels = [level for level in levels if len(level.tree)]
  if not levels:
    nothing = np.zeros(0, np.int64)
    return nothing.astype(np.uint8), np.zeros(1, np.int64), nothing
  sizes = _sizes(levels)
  offsets = np.concatenate([[0], np.cumsum(sizes[0])])
  return _write(levels, sizes), offsets, _values(levels)


def _blocks(settings: Settings) -> Iterator[tuple[np.ndarray, ...]]:
  """All blocks in order, made ahead by threads: NumPy lets them run at once."""
  workers = os.cpu_count() or 1
  with concurrent.futures.ThreadPoolExecutor(workers) as pool:
    ahead = collections.deque(
      pool.submit(trees, settings, block) for block in range(2 * workers)
    )
    for block in itertools.count(len(ahead)):
      yield ahead.popleft().result()
      ahead.append(pool.submit(trees, settings, block))


def _distinct(
  settings: Settings, seen: set[bytes]
) -> Iterator[tuple[np.ndarray, int]]:
  """Every accepted tree with its value, none twice, in a fixed order."""
  barren = 0
  for ids, offsets, values in _blocks(settings):
    fresh = 0
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
  """The three splits, disjoint: no tree occurs twice in the whole data set.

  The test split comes first, then validation, then train, from one stream: a
  smaller training set is the start of a larger one and leaves the others as
  they are.
  """
  seen: set[bytes] = set()
  stream = _distinct(settings, seen)
  testing = settings.for_test()
  apart = stream if testing is settings else _distinct(testing, seen)
  plan = {
    "test": (apart, settings.num_test),
    "validation": (stream, settings.num_validation),
    "train": (stream, settings.num_train),
  }
  splits = {}
  for name, (source, count) in plan.items():
    rows = [next(source) for _ in range(count)]
    splits[name] = pack(
      [tree for tree, _ in rows], np.array([value for _, value in rows])
    )
  return splits
