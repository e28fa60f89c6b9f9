"""The one encoder: embedding, positions, layers; mixer and block differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.models import reversible
from jaxformers.models.attention import dropout_layer
from jaxformers.models.blocks import layer_norm
from jaxformers.registry import choose

ACTIVATIONS = ("stored", "recomputed", "reversible")
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
    ValueError: for a length that is no square, or d not divisible by 4.
  """
  side = math.isqrt(length)
  if side**2 != length or d % 4:
    raise ValueError(
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


class Embedding(nn.Module):
  """Tokens [b, n] and their positions -> float32 [b, n, d].

  Attributes:
    vocab_size: ids run from 0 (padding) to vocab_size - 1; 0 if tokens are real
      numbers, which enter by a linear map.
    max_len: number of positions, for "learned" and "sinusoid_2d".
    d_model: d.
    positions: "sinusoid", "learned", or "sinusoid_2d" for pixels row by row.
    concatenate: half of the channels for the token and half for its position,
      which is injective (TransJect, section 4.4), instead of their sum.
    cls: whether a learned vector that starts at zero stands before the tokens,
      at position 0 -> [b, n + 1, d].
  """

  vocab_size: int
  max_len: int
  d_model: int
  positions: str = "sinusoid"
  concatenate: bool = False
  cls: bool = False

  @nn.compact
  def __call__(self, ids: jax.Array) -> jax.Array:
    choose("positions", self.positions, POSITIONS)
    if self.concatenate and self.d_model % 2:
      raise ValueError(
        f"d_model={self.d_model} is odd: half of the channels are for the "
        "token and half for its position. Choose an even d_model."
      )
    d = self.d_model // 2 if self.concatenate else self.d_model
    scale = 1.0 if self.concatenate else 0.02
    init = nn.initializers.normal(scale)
    if self.vocab_size:
      x = nn.Embed(self.vocab_size, d, embedding_init=init, name="tokens")(ids)
    else:
      x = nn.Dense(d, kernel_init=init, name="values")(ids[..., None])
    if self.cls:
      own = self.param("cls", nn.initializers.zeros, (d,))
      own = jnp.broadcast_to(own[None, None], (len(x), 1, d))
      x = jnp.concatenate([own, x], 1)
    n, max_len = x.shape[1], self.max_len + self.cls
    if self.positions != "sinusoid" and n > max_len:
      raise ValueError(
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
    return x


class Encoder(nn.Module):
  """Embeds tokens and applies L blocks: ids [b, n] -> x [b, n, d].

  Every layer's output is sown as `hidden` into `intermediates`, the embedding
  as the first of them. The embedding can be moved by giving the collection
  `perturbations`, {"encoder": {"embedded": [b, n, d]}}, which is added to it.

  Attributes:
    block: makes a block; called with a name. Its class says how positions
      enter and whether a LayerNorm ends the encoder.
    num_layers: L.
    vocab_size, max_len, d_model, positions, cls: see `Embedding`.
    dropout_rate: after the embedding, in training.
    activations: what the backward pass takes: "stored", what the forward pass
      left; "recomputed", the layers' inputs alone; "reversible", the encoder's
      output alone, see `reversible.run`. (Unless the layers are TransJect's,
      XLA on CPUs stores what it would have to recompute all the same.)

  Between the layers x is float32 whatever the compute type is: the small steps
  of a ReZero start would be lost in half precision.
  """

  block: Callable[..., nn.Module]
  num_layers: int
  vocab_size: int
  max_len: int
  d_model: int
  positions: str
  dropout_rate: float
  cls: bool = False
  activations: str = "stored"

  @nn.compact
  def __call__(
    self, ids: jax.Array, *, mask: jax.Array, train: bool
  ) -> jax.Array:
    """ids [b, n]; mask of what comes out, so [b, n + 1] with `cls`."""
    blocks = [self.block(name=f"layer_{i}") for i in range(self.num_layers)]
    kind = blocks[0]
    x = Embedding(
      self.vocab_size,
      self.max_len,
      self.d_model,
      self.positions,
      kind.concatenate_positions,
      self.cls,
      name="embedding",
    )(ids)
    x = dropout_layer(self.dropout_rate, train)(x)
    x = self.perturb("embedded", x)
    self.sow("intermediates", "hidden", x)
    looped = self.activations != "stored" and reversible.has_form(kind)
    if looped and not self.is_initializing():
      return self._looped(x, mask)

    def call(
      block: nn.Module, x: jax.Array, mask: jax.Array, carry: Any
    ) -> tuple[jax.Array, Any]:
      return block(x, mask=mask, carry=carry, train=train)

    if self.activations == "recomputed":
      call = nn.remat(call)
    carry = None
    for block in blocks:
      x, carry = call(block, x, mask, carry)
      self.sow("intermediates", "hidden", x)
    if kind.final_norm:
      x = layer_norm(x, "norm")
    return x

  def _looped(self, x: jax.Array, mask: jax.Array) -> jax.Array:
    """TransJect's layers as one loop, undone or made again backwards."""
    block = self.block(parent=None)
    form, mixer = reversible.form(block), block.mixer(parent=None)
    sigma, error = reversible.first_sigma(x, mask, self.variables, form)
    if form.sigma == "eigenvalues":
      self.sow("losses", "reconstruction", mixer.reconstruction_weight * error)
      self.sow("intermediates", "reconstruction", error)
    layers = reversible.layers(self.variables, form)
    stacked = jax.tree.map(lambda *own: jnp.stack(own), *layers)
    if not self.is_mutable_collection("intermediates"):
      backwards = self.activations == "reversible"
      run = reversible.run if backwards else reversible.recomputed
      return run(form, stacked, x, sigma, mask)
    y, (hidden, gates) = reversible.scan(form, stacked, x, sigma, mask)
    self.sow("intermediates", "sigma", sigma)
    for one, weights in zip(hidden, gates, strict=True):
      self.sow("intermediates", "hidden", one)
      self.sow("intermediates", "gate", weights)
    return y


class Classifier(nn.Module):
  """Tokens to float32 logits [b, num_classes].

  Tokens are ids [b, n], 0 at padding, or float32 [b, n], none of them padding;
  [b, 2, n] for pairs, which one encoder reads apart. Built by
  `jaxformers.models.build`; `apply({"params": params}, ids, train=False)` is a
  pure function.

  Attributes:
    encoder: makes the `Encoder`; called with a name.
    head: makes the `ClassifierHead`; called with a name.
    orthogonal_map: of every orthogonal matrix in the model.
    num_inputs: 1, or 2 for pairs.
    real: whether tokens are real numbers.
    cls: whether the encoder puts a token of its own in front.
  """

  encoder: Callable[..., nn.Module]
  head: Callable[..., nn.Module]
  orthogonal_map: str
  num_inputs: int = 1
  real: bool = False
  cls: bool = False

  @nn.compact
  def __call__(self, ids: jax.Array, *, train: bool) -> jax.Array:
    if self.num_inputs > 1:
      ids = ids.reshape(-1, ids.shape[-1])
    mask = self.mask(ids)
    x = self.encoder(name="encoder")(ids, mask=mask, train=train)
    return self.head(name="head")(x, mask)

  def mask(self, ids: jax.Array) -> jax.Array:
    """Where the encoder's tokens are, for ids as in a call -> bool [b, n].

    The sequences of pairs stand one after the other, [2b, n]; with a token in
    front [b, n + 1].
    """
    ids = ids.reshape(-1, ids.shape[-1])
    mask = jnp.ones(ids.shape, bool) if self.real else ids > 0
    if self.cls:
      mask = jnp.pad(mask, ((0, 0), (1, 0)), constant_values=True)
    return mask

  def example(self) -> jax.Array:
    """The smallest input that there is; parameters do not depend on it."""
    shape = (1, 2) if self.num_inputs == 1 else (1, self.num_inputs, 2)
    return jnp.zeros(shape, jnp.float32 if self.real else jnp.int32)
