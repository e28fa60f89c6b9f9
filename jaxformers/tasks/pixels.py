"""Images as sequences of grey pixels: LRA Image, Pathfinder and Path-X."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxformers.data.engine.packed import Packed

# What stands for each pixel when 0 is a value, and when it is padding.
VALUES = tuple(str(value) for value in range(256))
PADDED_VALUES = ("<pad>", *VALUES)


@dataclasses.dataclass(frozen=True)
class Protocol:
  """How a pixel becomes a token, and how examples are split.

  Attributes:
    pad_is_zero: ids are the pixel values, so that black is taken for padding
      and never attended to, as in LRA and Skyformer; otherwise value + 1.
    scale: (mean, deviation) of pixel values, which then are real numbers.
    torch_split: by PyTorch's `random_split` with seed 42, not by slices.
  """

  pad_is_zero: bool = False
  scale: tuple[float, float] | None = None
  torch_split: bool = False

  def apply(self, splits: Mapping[str, Packed]) -> dict[str, Packed]:
    """The splits, read as the protocol has it."""
    shift = 0 if self.pad_is_zero or self.scale else 1
    return {
      name: dataclasses.replace(split, shift=shift, scale=self.scale)
      for name, split in splits.items()
    }

  def vocabulary(self) -> dict[str, Any]:
    """The field of that name for `Task`."""
    if self.scale:
      return {"vocabulary": ()}
    return {"vocabulary": VALUES if self.pad_is_zero else PADDED_VALUES}
