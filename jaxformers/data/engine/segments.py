"""Windows of one stream of tokens, for models that predict the next token."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxformers.data.engine import digests
from jaxformers.data.engine.packed import Packed
from jaxformers.data.engine.split import Key, Split
from jaxformers.foundations.errors import UserError


@dataclasses.dataclass(frozen=True)
class Segments(Split):
  """Windows of a stream of tokens; window k begins at token k * stride.

  Every token but the first is predicted exactly once: the first window predicts
  all its targets, and every later window predicts its last `stride` targets.
  If the stride equals the length, the windows are adjacent, as in training. If
  the stride is 1, every token is predicted from `length` tokens before it, as
  in the evaluation of NeuTRENO's table 3.

  Attributes:
    tokens: tokens of the stream, any integer type [total].
    length: n, the number of tokens of a window.
    stride: number of tokens between the starts of two windows, 1 to n.
    shift: number added to every stored token; 1 keeps id 0 for padding.
    most: number of evenly spaced windows to keep, the first included; 0 for
      all.

  Raises:
    UserError: for a stride or a number of windows out of range, or a stream of
      fewer than two tokens.
  """

  tokens: np.ndarray
  length: int
  stride: int
  shift: int = 0
  most: int = 0

  def __post_init__(self) -> None:
    if self.most < 0:
      raise UserError(
        f"most={self.most} is negative: give a number of windows, or 0 for all."
      )
    if not 1 <= self.stride <= self.length:
      raise UserError(
        f"stride={self.stride} is not in 1 to {self.length}, the tokens of a "
        "window: a larger stride would skip tokens between the windows."
      )
    if len(self.tokens) < 2:
      raise UserError(
        f"A text of {len(self.tokens)} tokens has nothing to predict: check "
        "the files of this split."
      )

  @property
  def windows(self) -> int:
    """Number of windows of the whole stream."""
    predicted = len(self.tokens) - 1
    return 1 + max(0, -(-(predicted - self.length) // self.stride))

  def __len__(self) -> int:
    return min(self.most or self.windows, self.windows)

  def lengths(self) -> np.ndarray:
    """Returns n for every window, int64 [windows]: all have the same length."""
    return np.full(len(self), self.length, np.int64)

  def reading(self) -> dict[str, Any]:
    """Returns how the stream is cut into windows, as plain JSON."""
    return {"first_id": self.shift, "length": self.length}

  def scoring(self) -> dict[str, Any]:
    """Returns the stride of scoring, and the number of windows if not all."""
    part = {"windows": self.most} if self.most else {}
    return {"stride": self.stride, **part}

  def _numbers(self, indices: np.ndarray) -> np.ndarray:
    """Returns the numbers in the stream of the windows at `indices`."""
    # The kept windows are evenly spaced.
    return np.asarray(indices, np.int64) * self.windows // len(self)

  def predicted(self) -> np.ndarray:
    """Returns the predicted places of the stream in order, int64."""
    ends = self._numbers(np.arange(len(self))) * self.stride + self.length + 1
    # The first window predicts all targets, later ones the last `stride`.
    last = ends[1:, None] + np.arange(-self.stride, 0)
    places = np.append(np.arange(1, self.length + 1), last)
    return places[places < len(self.tokens)]

  def digest(self) -> str:
    """Returns the digest of all tokens."""
    return digests.of_array(self.tokens)

  def batch(
    self,
    indices: np.ndarray,
    max_len: int = 0,
    key: Key | None = None,
  ) -> dict[str, np.ndarray]:
    """Returns a batch of windows.

    Args:
      indices: numbers of the windows in the split, integers [b].
      max_len: number of tokens to which the windows are cut; 0 for all.
      key: ignored, because text is not augmented.

    Returns:
      inputs and targets, int32 [b, n], where a target is the token after its
      input; and weights, float32 [b, n], 1 at the targets that the window
      predicts, else 0.
    """
    del key
    # Read n + 1 tokens of each window, 0 after the end of the stream.
    numbers = self._numbers(indices)
    places = numbers[:, None] * self.stride + np.arange(self.length + 1)
    is_inside = places < len(self.tokens)
    tokens = self.tokens[np.where(is_inside, places, 0)].astype(np.int32)
    tokens = np.where(is_inside, tokens + self.shift, 0)
    # Set the weight 1 at targets that no earlier window predicts.
    is_new = np.arange(self.length) >= self.length - self.stride
    is_first = numbers[:, None] == 0
    weights = is_inside[:, 1:] & (is_new | is_first)
    batch = {
      "inputs": tokens[:, :-1] * is_inside[:, 1:],
      "targets": tokens[:, 1:],
      "weights": weights.astype(np.float32),
    }
    return {name: x[:, : max_len or None] for name, x in batch.items()}


def stream(packed: Packed) -> np.ndarray:
  """Returns all sequences of a split end to end, without a copy if possible."""
  # Return the stored array if it holds all sequences in order.
  is_complete = len(packed.tokens) == int(packed.sizes.sum())
  if is_complete and (packed.starts[1:] == packed.stops[:-1]).all():
    return packed.tokens
  return np.concatenate([packed.raw(k) for k in range(len(packed.starts))])
