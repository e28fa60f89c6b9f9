"""Images as sequences of grey pixels: LRA Image, Pathfinder and Path-X."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxformers.data.engine.packed import Packed
from jaxformers.tasks.splits import replace_all

# Vocabularies of pixels: where id 0 is the value 0, and where it is padding.
VALUES = tuple(str(value) for value in range(256))
PADDED_VALUES = ("<pad>", *VALUES)


@dataclasses.dataclass(frozen=True)
class PixelProtocol:
  """Encoding of pixels as tokens, and division into splits.

  Attributes:
    pad_is_zero: True for ids that are the pixel values, so that black counts as
      padding and is never attended to, as in LRA and Skyformer; False for
      value + 1.
    scale: (mean, deviation) of pixel values to normalise by; None for ids.
    torch_split: True for PyTorch's `random_split` with seed 42; False for
      slices.
  """

  pad_is_zero: bool = False
  scale: tuple[float, float] | None = None
  torch_split: bool = False

  def apply(self, splits: Mapping[str, Packed]) -> dict[str, Packed]:
    """Returns the splits with the tokens of the protocol."""
    shift = 0 if self.pad_is_zero or self.scale else 1
    return replace_all(splits, shift=shift, scale=self.scale)

  @property
  def vocabulary(self) -> tuple[str, ...]:
    """Meaning of each id; empty for real numbers."""
    if self.scale:
      return ()
    return VALUES if self.pad_is_zero else PADDED_VALUES
