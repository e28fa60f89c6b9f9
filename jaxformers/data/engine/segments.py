"""A text as one stream of tokens, in windows that predict what follows."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxformers.data.engine import digests
from jaxformers.data.engine.packed import Packed
from jaxformers.errors import UserError


@dataclasses.dataclass(frozen=True)
class Segments:
  """Windows of a stream; window k begins at token k * stride.

  Every token but the first is predicted exactly once: by the first window as
  far as it reaches, then by the last `stride` places of each. With a stride of
  the length the windows stand side by side, as in training; with a stride of 1
  every token is predicted from the whole length before it, as in the
  evaluation of NeuTRENO's table 3.

  Attributes:
    tokens: the stream, any integer type.
    length: n, tokens of a window.
    stride: 1 to n.
    shift: added to every token read: 1 keeps id 0 for padding.
    most: so many of the windows, evenly spaced from the first on; 0 for all.

  Raises:
    UserError: for a stride or a number of windows out of range, or fewer than
      two tokens.
  """

  tokens: np.ndarray
  length: int
  stride: int
  shift: int = 0
  most: int = 0

  def __post_init__(self) -> None:
    if self.most < 0:
      raise UserError(f"most={self.most}: it is not negative; 0 is all.")
    if not 1 <= self.stride <= self.length:
      raise UserError(
        f"stride={self.stride} is not in 1 to {self.length}, the tokens of a "
        "window: between the windows tokens would be left out."
      )
    if len(self.tokens) < 2:
      raise UserError(
        f"A text of {len(self.tokens)} tokens has nothing to predict: check "
        "the files of this split."
      )

  @property
  def windows(self) -> int:
    """How many the stream has."""
    predicted = len(self.tokens) - 1
    return 1 + max(0, -(-(predicted - self.length) // self.stride))

  def __len__(self) -> int:
    return min(self.most or self.windows, self.windows)

  def lengths(self) -> np.ndarray:
    """n for every window: all are padded alike."""
    return np.full(len(self), self.length, np.int64)

  def reading(self) -> dict[str, Any]:
    """How the stream is cut, as plain JSON."""
    return {"first_id": self.shift, "length": self.length}

  def _numbers(self, indices: np.ndarray) -> np.ndarray:
    """Which windows of the stream some of the split are."""
    return np.asarray(indices, np.int64) * self.windows // len(self)

  def predicted(self) -> np.ndarray:
    """The places in the stream that windows predict, int64, in order."""
    ends = self._numbers(np.arange(len(self))) * self.stride + self.length + 1
    own = ends[:, None] + np.arange(-self.stride, 0)
    places = np.concatenate([np.arange(1, self.length + 1), own[1:].ravel()])
    return places[places < len(self.tokens)]

  def digest(self) -> str:
    """Digest of all tokens."""
    return digests.of_array(self.tokens)

  def batch(
    self,
    indices: np.ndarray,
    max_len: int = 0,
    key: tuple[int, int, int] | None = None,
  ) -> dict[str, np.ndarray]:
    """Some windows.

    Args:
      indices: integers [b] within the split.
      max_len: of no meaning; windows are of one length.
      key: of augmentation, which there is none of text.

    Returns:
      inputs and targets, int32 [b, n], the targets one token on; and weights,
      float32 [b, n], 1 at the targets that this window predicts.
    """
    del max_len, key
    numbers = self._numbers(indices)
    starts = numbers * self.stride
    places = starts[:, None] + np.arange(self.length + 1)
    there = places < len(self.tokens)
    found = self.tokens[np.where(there, places, 0)].astype(np.int32)
    found = np.where(there, found + self.shift, 0)
    own = np.arange(self.length) >= self.length - self.stride
    first = numbers[:, None] == 0
    weights = there[:, 1:] & (own | first)
    return {
      "inputs": found[:, :-1] * there[:, 1:],
      "targets": found[:, 1:],
      "weights": weights.astype(np.float32),
    }


def stream(packed: Packed) -> np.ndarray:
  """All sequences of a split end to end; nothing is copied if they are so."""
  whole = len(packed.tokens) == int(packed.sizes.sum())
  if whole and (packed.starts[1:] == packed.stops[:-1]).all():
    return packed.tokens
  return np.concatenate([packed.raw(k) for k in range(len(packed.starts))])
