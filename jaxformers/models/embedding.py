"""Embeddings of tokens or patches, and of their positions."""

from __future__ import annotations

import functools
import math
from typing import Annotated

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import (
  Count,
  Deviation,
  Factor,
  Interval,
  Length,
  PositiveCount,
  Share,
  SmallCount,
  Width,
)
from jaxformers.foundations.registry import choose
from jaxformers.models.adaptive import AdaptiveEmbedding
from jaxformers.models.cache import count_tokens, is_decoding
from jaxformers.models.norm import LayerNorm
from jaxformers.models.parallel import repeat
from jaxformers.models.segments import is_packed, places, tokens

POSITIONS = ("sinusoid", "sinusoid_2d", "learned", "none")


# Number of multiples of max_len up to which positions exist after a state.
MULTIPLES = 1_024
# Most numbers of a table of sinusoids, [n, d], that is a constant of a program.
LARGEST_TABLE = 2**26
BLOCK = 4_096  # Rows of the near positions in larger ones.


def sinusoids(length: int, d: int, step: int = 1) -> np.ndarray:
  """Returns sinusoidal positions 0, step, 2 step, ..., float32 [length, d].

  Channel 2i of position p is sin(p / 10000^(2i/d)), channel 2i + 1 its cosine.

  Source: Vaswani et al. 2017, section 3.5. Differs from TransJect's code, which
  doubles the exponent: half of the channels are then nearly constant.
  """
  return _waves(length, d, step)[:, :d]


def _waves(length: int, d: int, step: int = 1) -> np.ndarray:
  """Returns `sinusoids` with a cosine for each sine, also if d is odd."""
  # Interleave sines and cosines of each rate.
  rates = 10000.0 ** (-np.arange(0, d, 2) / d)
  angles = step * np.arange(length)[:, None] * rates[None]
  both = np.stack([np.sin(angles), np.cos(angles)], axis=-1)
  return both.reshape(length, -1).astype(np.float32)


def _turned(near: jax.Array, far: jax.Array, d: int) -> jax.Array:
  """Returns the sinusoids of sums of positions near and far, [..., d].

  The far position turns the sine and the cosine of each rate.
  """
  (sin, cos), (far_sin, far_cos) = (
    (x[..., ::2], x[..., 1::2]) for x in (near, far)
  )
  turned = [sin * far_cos + cos * far_sin, cos * far_cos - sin * far_sin]
  both = jnp.stack(turned, -1)
  return both.reshape(*both.shape[:-2], -1)[..., :d]


def traced_sinusoids(length: int, d: int) -> jax.Array:
  """Returns `sinusoids`; a program computes large ones from two tables.

  Programs of more than 2 GiB, with their constants, cannot be compiled.
  """
  if length * d <= LARGEST_TABLE:
    return jnp.asarray(sinusoids(length, d))
  near = jnp.asarray(_waves(BLOCK, d))
  far = jnp.asarray(_waves(-(-length // BLOCK), d, BLOCK))
  return _turned(near, far[:, None], d).reshape(-1, d)[:length]


def sinusoids_2d(length: int, d: int) -> np.ndarray:
  """Returns sinusoidal positions of the pixels of a square image.

  Half of the channels are sines and cosines of the row, half of the column. The
  d / 4 wavelengths are spaced geometrically, from four image sides to eight
  pixels. With the rates of `sinusoids`, 1 to 1 / 10000 per pixel, most channels
  would hardly change over 32 pixels.

  Args:
    length: number of pixels.
    d: number of channels.

  Returns:
    Positions, row by row, float32 [length, d].

  Raises:
    UserError: for a length that is not a square, or d not divisible by 4.
  """
  side = math.isqrt(length)
  if side**2 != length or d % 4:
    raise UserError(
      f'positions="sinusoid_2d" with {length} positions in {d} channels needs '
      "the pixels of a square image and channels divisible by 4: choose "
      '"sinusoid" or "learned".'
    )
  # Compute sines and cosines of one axis, [side, d / 2].
  rates = np.pi * np.geomspace(0.5 / side, 0.25, d // 4)
  angles = np.arange(side)[:, None] * rates[None]
  waves = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
  # Give half of the channels to the row and half to the column.
  rows, columns = np.divmod(np.arange(length), side)
  both = np.concatenate([waves[rows], waves[columns]], axis=-1)
  return both.astype(np.float32)


def num_patches(image: tuple[int, ...], patch_size: int) -> int:
  """Returns the number of patches of an image (height, width, channels).

  Raises:
    UserError: for a patch size that does not divide height and width.
  """
  height, width, _ = image
  if patch_size < 1 or height % patch_size or width % patch_size:
    raise UserError(
      f"patch_size={patch_size} does not divide an image of {height} x {width} "
      "pixels: choose a divisor, such as 4 for 32 x 32 or 16 for 224 x 224."
    )
  return (height // patch_size) * (width // patch_size)


def patches(images: jax.Array, patch_size: int) -> jax.Array:
  """Cuts images [b, height, width, c] into patches [b, n, patch_size^2 c].

  Patches are ordered row by row, and so are the pixels of a patch. The channels
  of a pixel are adjacent.
  """
  b, height, width, c = images.shape
  # Split both axes into patches, and join the axes of a patch.
  rows, columns = height // patch_size, width // patch_size
  x = images.reshape(b, rows, patch_size, columns, patch_size, c)
  return x.swapaxes(2, 3).reshape(b, rows * columns, patch_size**2 * c)


def _fan_in_uniform() -> nn.initializers.Initializer:
  """Returns PyTorch's initializer of convolutions: U(-b, b), b^2 = 1/fan_in."""
  return nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def second_part(ids: jax.Array, separator: int) -> jax.Array:
  """Returns int32 [b, n]: 1 after the first separator of a row, 0 elsewhere."""
  ends = (ids == separator).astype(jnp.int32)
  return jnp.minimum(jnp.cumsum(ends, -1) - ends, 1)


def check_width(d_model: int, *, concatenate: bool) -> None:
  """Raises UserError for an odd width if positions are concatenated."""
  if concatenate and d_model % 2:
    raise UserError(
      f"d_model={d_model} is odd, but half of the channels are for the token "
      "and half for its position. Choose an even d_model."
    )


class Embedding(nn.Module):
  """Embeds tokens [b, n] and their positions -> float32 [b, n, d].

  Images [b, height, width, c] are cut into patches.

  Attributes:
    vocab_size: number of ids, which are 0 (padding) to vocab_size - 1; 0 if
      tokens are real numbers, which a linear map embeds.
    max_len: number of positions, for "learned" and "sinusoid_2d".
    d_model: width d.
    positions: "sinusoid", "learned", "sinusoid_2d" for pixels row by row, or
      "none" for mixers that depend on the order of tokens, or for encoders that
      are to ignore it.
    concatenate: True to concatenate the vectors of token and position, half of
      the channels each, instead of adding them. This is injective (TransJect,
      section 4.4). Without positions, tokens have all channels.
    cls: number of learned tokens that are prepended, 0 to 2: a class token, and
      a distillation token. The output is then [b, n + cls, d], and these tokens
      have the first positions. They are initialized to zero before ids and
      numbers, and like learned positions before patches.
    patch_size: side of the patches of images; 0 for tokens.
    masked: True if real numbers may be masked, that is, NaN. A masked number is
      embedded as 0, with 1 in a second input channel that is 0 otherwise.
    separator: id that ends the first of two parts of a sequence; 0 for
      sequences of one part. Each part has a learned vector (`segments`, zero at
      initialization), which is added to its tokens.
    cutoffs, div_value: see `AdaptiveEmbedding`.
    scale: factor of the token vectors, applied before positions are added.
    init_std: standard deviation of the token vectors at initialization; 0 for
      0.02, or for 1 with `concatenate`.
    norm_epsilon: epsilon of a LayerNorm after the positions are added, as in
      BERT; 0 for no LayerNorm.
  """

  vocab_size: Count
  max_len: Length
  d_model: Width
  positions: str = "sinusoid"
  concatenate: bool = False
  cls: int = 0
  patch_size: Annotated[int, Interval("[0, 2^16]")] = 0
  masked: bool = False
  separator: Count = 0
  cutoffs: tuple[PositiveCount, ...] = ()
  div_value: SmallCount = 1
  scale: Factor = 1.0
  init_std: Deviation = 0.0
  norm_epsilon: Share = 0.0

  @property
  def has_channels(self) -> bool:
    """True if half of the channels of a token encode its position."""
    return self.concatenate and self.positions != "none"

  @nn.compact
  def __call__(
    self, ids: jax.Array, mask: jax.Array | None = None
  ) -> jax.Array:
    """Embeds tokens [b, n], or steps of time series [b, n, c].

    Args:
      ids: tokens.
      mask: mask, which gives the positions when decoding, or numbers of packed
        rows, [b, n].
    """
    # Check the options that depend on each other.
    choose("positions", self.positions, POSITIONS)
    check_width(self.d_model, concatenate=self.has_channels)
    d = self.d_model // 2 if self.has_channels else self.d_model
    if self.cutoffs and not self.vocab_size:
      raise UserError(
        f"cutoffs={self.cutoffs} split a vocabulary, but the inputs are real "
        "numbers or patches: remove cutoffs."
      )
    # Embed the tokens, [b, n, d].
    init = nn.initializers.normal(1.0 if self.concatenate else 0.02)
    token_init = init
    if self.init_std:
      token_init = nn.initializers.normal(self.init_std)
    x = self._embed_tokens(ids, d, token_init)
    if self.separator:
      # Add the vector of the part.
      segments = self.param("segments", nn.initializers.zeros, (2, d))
      x = x + jnp.take(segments, second_part(ids, self.separator), axis=0)
    if self.cls:
      start = init if self.patch_size else nn.initializers.zeros
      # Prepend the learned tokens. A single one is a vector, as in checkpoints.
      token = self.param("cls", start, (d,) if self.cls == 1 else (self.cls, d))
      token = jnp.broadcast_to(
        token.reshape(1, self.cls, d), (x.shape[0], self.cls, d)
      )
      x = jnp.concatenate([token, x], 1)
    x = self._add_positions(x, mask, init)
    # Normalise the sum, as in BERT.
    if self.norm_epsilon:
      x = LayerNorm(self.norm_epsilon, name="norm")(x)
    return x

  def _add_positions(
    self,
    x: jax.Array,
    mask: jax.Array | None,
    init: nn.initializers.Initializer,
  ) -> jax.Array:
    """Adds or concatenates the vectors of positions to tokens x [b, n, d]."""
    if self.positions == "none":
      return x
    if mask is not None and is_decoding(self):
      # Continue after the tokens in the cache.
      count = jnp.where(tokens(mask), count_tokens(self, mask), 0)
      positions = self._positions_at(count, x.shape[2], init)
    elif mask is not None and is_packed(mask):
      # Positions begin again in each example.
      is_table = self.positions != "sinusoid"
      length = min(x.shape[1], self.max_len) if is_table else x.shape[1]
      positions = self._embed_positions(length, x.shape[2], init)
      # Tokens after the end of a table have no vector, and become NaN.
      at = jnp.where(tokens(mask), places(mask), 0)
      positions = jnp.take(positions, at, 0, mode="fill")
    else:
      positions = self._embed_positions(x.shape[1], x.shape[2], init)
      positions = repeat(positions, x.shape[0])
    if self.has_channels:
      return jnp.concatenate([x, positions], -1)
    return x + positions

  def _positions_at(
    self, places: jax.Array, d: int, init: nn.initializers.Initializer
  ) -> jax.Array:
    """Returns the vectors of positions [b, n]; NaN for those without one."""
    take = functools.partial(jnp.take, axis=0, mode="fill")
    if self.positions != "sinusoid":
      return take(self._embed_positions(self.max_len, d, init), places)
    # Add a multiple of max_len, or of a block of a large table.
    is_large = self.max_len * d > LARGEST_TABLE
    step = BLOCK if is_large else self.max_len
    count = max(MULTIPLES, 2 * self.max_len // step)
    near = take(_waves(step, d), places % step)
    far = take(_waves(count, d, step), places // step)
    return _turned(near, far, d)

  def _embed_positions(
    self, n: int, d: int, init: nn.initializers.Initializer
  ) -> jax.Array:
    """Returns the vectors of the first n positions, [n, d]."""
    max_len = self.max_len + self.cls
    if self.positions != "sinusoid" and n > max_len:
      raise UserError(
        f"A sequence of {n} tokens is longer than the table of "
        f'positions="{self.positions}" with max_len={self.max_len}: raise '
        "max_len or cut the sequence."
      )
    if self.positions == "learned":
      return self.param("positions", init, (max_len, d))[:n]
    if self.positions == "sinusoid":
      return traced_sinusoids(n, d)
    # Prepended tokens have no position in the image: their vector is 0.
    table = np.pad(sinusoids_2d(self.max_len, d), ((self.cls, 0), (0, 0)))
    return jnp.asarray(table[:n])

  def _embed_tokens(
    self, ids: jax.Array, d: int, init: nn.initializers.Initializer
  ) -> jax.Array:
    """Returns the vectors of tokens or patches, [b, n, d]."""
    if self.patch_size:
      x = patches(ids, self.patch_size)
      x = nn.Dense(d, kernel_init=_fan_in_uniform(), name="patches")(x)
    # Large vocabularies can have one table for each cluster of words.
    elif self.cutoffs:
      x = AdaptiveEmbedding(
        self.vocab_size, d, self.cutoffs, self.div_value, init, name="tokens"
      )(ids)
    elif self.vocab_size:
      x = nn.Embed(self.vocab_size, d, embedding_init=init, name="tokens")(ids)
    else:
      # Embed real numbers by a linear map of [value, is_masked], and steps of a
      # time series [b, n, c] by a linear map of their channels.
      values = ids if ids.ndim == 3 else ids[..., None]
      if ids.ndim == 3:
        values = jnp.where(jnp.isnan(values), 0, values)
      elif self.masked:
        is_masked = jnp.isnan(values)
        values = jnp.where(is_masked, 0, values)
        values = jnp.concatenate([values, is_masked.astype(values.dtype)], -1)
      x = nn.Dense(d, kernel_init=init, name="values")(values)
    # Skip a multiplication by 1.
    return x * self.scale if self.scale != 1 else x
