"""How what a model reads becomes vectors: tokens or patches, and positions."""

from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.errors import UserError
from jaxformers.models.adaptive import AdaptiveEmbedding
from jaxformers.registry import choose

POSITIONS = ("sinusoid", "sinusoid_2d", "learned")


def sinusoids(length: int, d: int) -> np.ndarray:
  """sin(p / 10000^(2i/d)) and its cosine, interleaved -> f32 [length, d].

  Source: Vaswani et al. 2017, section 3.5. (TransJect's code doubles the
  exponent, which leaves half of the channels nearly constant.)
  """
  rates = 10000.0 ** (-np.arange(0, d, 2) / d)
  angles = np.arange(length)[:, None] * rates[None]
  both = np.stack([np.sin(angles), np.cos(angles)], axis=-1)
  return both.reshape(length, -1)[:, :d].astype(np.float32)


def sinusoids_2d(length: int, d: int) -> np.ndarray:
  """Sines and cosines of row and column, square image -> f32 [length, d].

  d / 4 rates, spaced geometrically from a wavelength of four images to one of
  eight pixels. Not the form with rates from 1 to 1 / 10000 a pixel, most of
  whose channels hardly change over 32 pixels.

  Raises:
    UserError: for a length that is no square, or d not divisible by 4.
  """
  side = math.isqrt(length)
  if side**2 != length or d % 4:
    raise UserError(
      f'positions="sinusoid_2d" with {length} positions in {d} channels: it '
      "needs the pixels of a square image and channels divisible by 4. Choose "
      '"sinusoid" or "learned".'
    )
  rates = np.pi * np.geomspace(0.5 / side, 0.25, d // 4)
  angles = np.arange(side)[:, None] * rates[None]
  waves = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
  rows, columns = np.divmod(np.arange(length), side)
  both = np.concatenate([waves[rows], waves[columns]], axis=-1)
  return both.astype(np.float32)


def num_patches(image: tuple[int, ...], patch_size: int) -> int:
  """The patches of an image (height, width, channels).

  Raises:
    UserError: for a patch that does not divide the image.
  """
  height, width, _ = image
  if patch_size < 1 or height % patch_size or width % patch_size:
    raise UserError(
      f"patch_size={patch_size} does not divide an image of {height} x {width} "
      "pixels: choose one that does, such as 4 for 32 x 32 or 16 for 224 x 224."
    )
  return (height // patch_size) * (width // patch_size)


def patches(images: jax.Array, patch_size: int) -> jax.Array:
  """Images [b, height, width, c], row by row -> [b, n, patch_size^2 c].

  In a patch the pixels stand row by row, and their channels last.
  """
  b, height, width, c = images.shape
  rows, columns = height // patch_size, width // patch_size
  x = images.reshape(b, rows, patch_size, columns, patch_size, c)
  return x.swapaxes(2, 3).reshape(b, rows * columns, patch_size**2 * c)


def _fan_in_uniform() -> nn.initializers.Initializer:
  """Uniform in +-1 / sqrt(fan in): PyTorch's convolutions, and so DeiT's."""
  return nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def check_width(d_model: int, *, concatenate: bool) -> None:
  """Raises UserError for an odd width whose halves are token and position."""
  if concatenate and d_model % 2:
    raise UserError(
      f"d_model={d_model} is odd: half of the channels are for the token and "
      "half for its position. Choose an even d_model."
    )


class Embedding(nn.Module):
  """Tokens [b, n] and their positions -> float32 [b, n, d].

  Or images [b, height, width, c], cut into patches.

  Attributes:
    vocab_size: ids run from 0 (padding) to vocab_size - 1; 0 if tokens are real
      numbers, which enter by a linear map.
    max_len: number of positions, for "learned" and "sinusoid_2d".
    d_model: d.
    positions: "sinusoid", "learned", or "sinusoid_2d" for pixels row by row.
    concatenate: half of the channels for the token and half for its position,
      which is injective (TransJect, section 4.4), instead of their sum.
    cls: whether a learned vector stands before the tokens, at position 0
      -> [b, n + 1, d]. It starts at zero, before patches as the positions do.
    patch_size: side of the patches of images; 0 for tokens.
    cutoffs, div_value: see `AdaptiveEmbedding`.
    scale: what the tokens' vectors are multiplied with before positions are
      added.
    init_std: deviation of the tokens' vectors at the start; 0 for 0.02, or for
      1 beside positions.
    norm_epsilon: of a LayerNorm of the sum (BERT's); 0 for none.
  """

  vocab_size: int
  max_len: int
  d_model: int
  positions: str = "sinusoid"
  concatenate: bool = False
  cls: bool = False
  patch_size: int = 0
  cutoffs: tuple[int, ...] = ()
  div_value: int = 1
  scale: float = 1.0
  init_std: float = 0.0
  norm_epsilon: float = 0.0

  @nn.compact
  def __call__(self, ids: jax.Array) -> jax.Array:
    choose("positions", self.positions, POSITIONS)
    check_width(self.d_model, concatenate=self.concatenate)
    d = self.d_model // 2 if self.concatenate else self.d_model
    if self.cutoffs and not self.vocab_size:
      raise UserError(
        f"cutoffs={self.cutoffs} are of a vocabulary, and what is read here "
        "are real numbers or patches: leave them out."
      )
    init = nn.initializers.normal(1.0 if self.concatenate else 0.02)
    own = nn.initializers.normal(self.init_std) if self.init_std else init
    x = self._vectors(ids, d, own)
    if self.cls:
      start = init if self.patch_size else nn.initializers.zeros
      own = self.param("cls", start, (d,))
      own = jnp.broadcast_to(own[None, None], (len(x), 1, d))
      x = jnp.concatenate([own, x], 1)
    n, max_len = x.shape[1], self.max_len + self.cls
    if self.positions != "sinusoid" and n > max_len:
      raise UserError(
        f'A sequence of {n} tokens has no positions="{self.positions}" beyond '
        f"max_len={self.max_len}: raise max_len or cut the sequence."
      )
    if self.positions == "learned":
      places = self.param("positions", init, (max_len, d))[:n]
    elif self.positions == "sinusoid":
      places = jnp.asarray(sinusoids(n, d))
    else:
      # A token in front has no place in the image.
      table = np.pad(
        sinusoids_2d(self.max_len, d), ((int(self.cls), 0), (0, 0))
      )
      places = jnp.asarray(table[:n])
    places = jnp.broadcast_to(places[None], x.shape)
    x = jnp.concatenate([x, places], -1) if self.concatenate else x + places
    if self.norm_epsilon:
      x = nn.LayerNorm(self.norm_epsilon, name="norm")(x)
    return x

  def _vectors(
    self, ids: jax.Array, d: int, init: nn.initializers.Initializer
  ) -> jax.Array:
    """What each token or patch is without its position, [b, n, d]."""
    if self.patch_size:
      x = patches(ids, self.patch_size)
      x = nn.Dense(d, kernel_init=_fan_in_uniform(), name="patches")(x)
    elif self.cutoffs:
      x = AdaptiveEmbedding(
        self.vocab_size, d, self.cutoffs, self.div_value, init, name="tokens"
      )(ids)
    elif self.vocab_size:
      x = nn.Embed(self.vocab_size, d, embedding_init=init, name="tokens")(ids)
    else:
      x = nn.Dense(d, kernel_init=init, name="values")(ids[..., None])
    return x * self.scale if self.scale != 1 else x
