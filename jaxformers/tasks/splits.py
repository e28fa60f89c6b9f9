"""Which examples train, choose the checkpoint, and test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import numpy as np

from jaxformers.data.engine.packed import Packed
from jaxformers.data.images.scenes import Scenes
from jaxformers.data.images.splits import Images
from jaxformers.errors import UserError

Split = TypeVar("Split", Packed, Images, Scenes)


def hold_out(train: Split, count: int) -> dict[str, Split]:
  """`train` without, and `validation` with only, the examples of highest key.

  Keys are hashes of the texts, so the choice depends on nothing else, and a
  text that occurs twice does not stand on both sides, but for one at the edge.

  Raises:
    UserError: if nothing would be left to train on.
  """
  if count >= len(train):
    raise UserError(
      f"{count:,} examples cannot be held out of {len(train):,}: choose fewer."
    )
  order = np.argsort(train.keys, kind="stable")
  kept, held = np.sort(order[:-count]), np.sort(order[-count:])
  return {"train": train.select(kept), "validation": train.select(held)}


def slices(packed: Split, shares: Mapping[str, float]) -> dict[str, Split]:
  """Consecutive parts, in percent as tensorflow-datasets cuts `train[:90%]`."""
  parts, start, share = {}, 0, 0.0
  for name, own in shares.items():
    share += own
    stop = round(len(packed) * share / 100)
    parts[name] = packed.select(slice(start, stop))
    start = stop
  return parts


def torch_random(
  packed: Split, held: Mapping[str, float], seed: int = 42
) -> dict[str, Split]:
  """PyTorch's `random_split`, as S4, S5 and Mega use it.

  Args:
    packed: in whatever order; the split is drawn in that of its keys, which is
      the order of the authors' files.
    held: names of the parts after `train`, and their shares, rounded down.
    seed: of PyTorch's generator.
  """
  by_key = np.argsort(packed.keys, kind="stable")
  order = by_key[torch_permutation(len(packed), seed)]
  counts = {name: int(len(packed) * share) for name, share in held.items()}
  counts = {"train": len(packed) - sum(counts.values()), **counts}
  parts, start = {}, 0
  for name, count in counts.items():
    parts[name] = packed.select(order[start : start + count])
    start += count
  return parts


def torch_permutation(size: int, seed: int) -> np.ndarray:
  """`torch.randperm(size)` after `manual_seed(seed)` on the CPU, int64 [size].

  Fisher and Yates from the front, by 32-bit numbers of the Mersenne twister,
  as PyTorch draws them for sizes up to 2^32 / 20.
  """
  twister = np.random.MT19937()
  twister._legacy_seeding(seed)
  drawn = twister.random_raw(max(size - 1, 0))
  order = list(range(size))
  for i, number in enumerate(drawn.tolist()):
    j = i + number % (size - i)
    order[i], order[j] = order[j], order[i]
  return np.array(order, np.int64)
