"""Images as sequences of grey pixels: LRA Image, Pathfinder and Path-X."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxformers.data.engine.packed import Packed
from jaxformers.tasks.splits import replace_all

# Vocabularies of pixels: id 0 is the pixel value 0 in VALUES, and padding in
# PADDED_VALUES.
VALUES = tuple(str(value) for value in range(256))
PADDED_VALUES = ("<pad>", *VALUES)


@dataclasses.dataclass(frozen=True)
class PixelProtocol:
  """Encoding of pixels as tokens, and kind of the division into splits.

  Attributes:
    pad_is_zero: True to use pixel values as ids, so black pixels are padding
      and are masked in attention, as in LRA and Skyformer; False for value + 1.
    scale: (mean, deviation) that normalise pixel values; None for ids.
    torch_split: True for PyTorch's `random_split` with seed 42; False for
      consecutive slices.
  """

  pad_is_zero: bool = False
  scale: tuple[float, float] | None = None
  torch_split: bool = False

  def apply(self, splits: Mapping[str, Packed]) -> dict[str, Packed]:
    """Returns the splits with the tokens of the protocol."""
    # Shift ids by 1 if 0 is padding only.
    shift = 0 if self.pad_is_zero or self.scale else 1
    return replace_all(splits, shift=shift, scale=self.scale)

  @property
  def vocabulary(self) -> tuple[str, ...]:
    """Meaning of each id; empty for real numbers."""
    if self.scale:
      return ()
    return VALUES if self.pad_is_zero else PADDED_VALUES
