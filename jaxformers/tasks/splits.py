"""Divides examples into splits for training, validation and test."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from jaxformers.data.engine.packed import Packed
from jaxformers.data.engine.series import Series
from jaxformers.data.images.scenes import Scenes
from jaxformers.data.images.splits import Images
from jaxformers.foundations.errors import UserError
from jaxformers.tasks.token_labels import TokenLabels

Stored = TypeVar("Stored", Packed, Series, Images, Scenes, TokenLabels)


def replace_all(
  splits: Mapping[str, Stored], **fields: Any
) -> dict[str, Stored]:
  """Returns the splits with new values of some fields."""
  return {n: dataclasses.replace(s, **fields) for n, s in splits.items()}


def hold_out(train: Stored, count: int) -> dict[str, Stored]:
  """Moves the examples with the highest keys from `train` to `validation`.

  Keys are hashes of the texts, so the choice depends only on the texts. Copies
  of a text are in the same split, with one possible exception: a text at the
  boundary.

  Args:
    train: split to divide.
    count: number of examples of `validation`.

  Raises:
    UserError: if no example would remain for training.
  """
  if not 0 < count < len(train):
    raise UserError(
      f"{count:,} examples cannot be held out of {len(train):,}: hold out at "
      "least one and leave at least one, or give a validation split."
    )
  # Divide by key; both parts keep the order of the examples.
  order = np.argsort(train.keys, kind="stable")
  lower, highest = np.sort(order[:-count]), np.sort(order[-count:])
  return {"train": train.select(lower), "validation": train.select(highest)}


def with_validation(
  splits: Mapping[str, Stored], count: int
) -> dict[str, Stored]:
  """Adds `validation`, which is held out of train or equal to the test split.

  Args:
    splits: splits `train` and `test`.
    count: number of training examples to hold out; 0 to use the test split.
  """
  if count:
    return {**splits, **hold_out(splits["train"], count)}
  return {**splits, "validation": splits["test"]}


def slices(packed: Stored, shares: Mapping[str, float]) -> dict[str, Stored]:
  """Divides a split into consecutive parts, like `train[:90%]` in TFDS.

  Args:
    packed: split to divide.
    shares: names of the parts, and their shares in percent.
  """
  # Round the end of every part to an example.
  totals = itertools.accumulate(shares.values(), initial=0.0)
  ends = [round(len(packed) * total / 100) for total in totals]
  bounds = zip(shares, itertools.pairwise(ends), strict=True)
  return {name: packed.select(slice(*pair)) for name, pair in bounds}


def torch_random(
  packed: Stored, held: Mapping[str, float], seed: int = 42
) -> dict[str, Stored]:
  """Divides a split like PyTorch's `random_split`, which S4, S5 and Mega use.

  Args:
    packed: examples in any order. They are first sorted by their keys, into the
      order of the authors' files.
    held: names of the parts after `train`, and their shares; counts are rounded
      down.
    seed: seed of PyTorch's generator.
  """
  # Permute the examples in the order of the authors' files.
  by_key = np.argsort(packed.keys, kind="stable")
  order = by_key[torch_permutation(len(packed), seed)]
  counts: list[int] = [int(len(packed) * share) for share in held.values()]
  # `train` gets the first places of the permutation, all that remain.
  starts = len(packed) - sum(counts) + np.cumsum([0, *counts[:-1]])
  parts = zip(("train", *held), np.split(order, starts), strict=True)
  return {name: packed.select(indices) for name, indices in parts}


def torch_permutation(size: int, seed: int) -> np.ndarray:
  """Returns `torch.randperm(size)` after `manual_seed(seed)`, int64 [size].

  On the CPU and for sizes up to 2^32 / 20, PyTorch uses the Fisher-Yates
  shuffle from the front, with 32-bit numbers of the Mersenne twister.
  """
  # Draw all numbers, then swap each place with itself or a later place.
  twister = np.random.MT19937()
  twister._legacy_seeding(seed)
  drawn = twister.random_raw(max(size - 1, 0))
  order = list(range(size))
  for i, number in enumerate(drawn.tolist()):
    j = i + number % (size - i)
    order[i], order[j] = order[j], order[i]
  return np.array(order, np.int64)
