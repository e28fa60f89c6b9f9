"""The one encoder: embedding, layers; mixer and block differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.models.attention import dropout_layer
from jaxformers.models.blocks import invertible
from jaxformers.models.blocks.contract import layer_norm
from jaxformers.models.embedding import num_patches
from jaxformers.models.parallel import whole_tokens

ACTIVATIONS = ("stored", *invertible.LOOPED)


class Encoder(nn.Module):
  """Embeds tokens and applies L blocks: ids [b, n] -> x [b, n, d].

  Every layer's output is sown as `hidden` into `intermediates`, the embedding
  as the first of them. The embedding can be moved by giving the collection
  `perturbations`, {"encoder": {"embedded": [b, n, d]}}, which is added to it.

  Attributes:
    embedding: makes the `Embedding`; called with a name, and whether positions
      stand beside the tokens.
    block: makes a block; called with a name. Its class says how positions
      enter and whether a LayerNorm ends the encoder.
    num_layers: L.
    dropout_rate: after the embedding, in training.
    activations: what the backward pass takes: "stored", what the forward pass
      left; "recomputed", the layers' inputs alone; "reversible", the encoder's
      output alone, see `invertible.reversible`. (Unless the layers are
      injective, XLA on CPUs stores what it would recompute all the same.)

  Between the layers x is float32 whatever the compute type is: the small steps
  of a ReZero start would be lost in half precision.
  """

  embedding: Callable[..., nn.Module]
  block: Callable[..., nn.Module]
  num_layers: int
  dropout_rate: float
  activations: str = "stored"

  @nn.compact
  def __call__(
    self, ids: jax.Array, *, mask: jax.Array, train: bool
  ) -> jax.Array:
    """ids [b, n]; mask of what comes out, so [b, n + 1] with `cls`."""
    blocks = [
      self.block(name=f"layer_{i}", layer=i) for i in range(self.num_layers)
    ]
    kind = blocks[0]
    embed = self.embedding(
      concatenate=kind.concatenate_positions, name="embedding"
    )
    x = whole_tokens(embed(ids))
    x = dropout_layer(self.dropout_rate, train)(x)
    x = self.perturb("embedded", x)
    self.sow("intermediates", "hidden", x)
    layers = invertible.layers_of(kind)
    looped = layers is not None and self.activations in invertible.LOOPED
    if looped and not self.is_initializing():
      return self._looped(layers, x, mask)

    def call(
      block: nn.Module, x: jax.Array, mask: jax.Array, carry: Any
    ) -> tuple[jax.Array, Any]:
      return block(x, mask=mask, carry=carry, train=train)

    if self.activations == "recomputed":
      call = nn.remat(call)
    carry = None
    for block in blocks:
      x, carry = call(block, x, mask, carry)
      x = whole_tokens(x)
      self.sow("intermediates", "hidden", x)
    if kind.final_norm:
      x = layer_norm(x, "norm", kind.norm_epsilon)
    return x

  def _looped(
    self, layers: invertible.InvertibleLayers, x: jax.Array, mask: jax.Array
  ) -> jax.Array:
    """Runs injective layers as one loop, undone or made again backwards."""
    keep_hidden = self.is_mutable_collection("intermediates")
    outputs, shared = invertible.run_layers(
      layers,
      self.variables,
      x,
      mask,
      memory=self.activations,
      keep_hidden=keep_hidden,
    )
    for collection, arrays in shared.sown.items():
      for name, array in arrays.items():
        self.sow(collection, name, array)
    if keep_hidden:
      for hidden in outputs.hidden:
        self.sow("intermediates", "hidden", hidden)
      for i in range(self.num_layers):
        side = jax.tree.map(lambda leaf, i=i: leaf[i], outputs.sides)
        self.sow("intermediates", layers.side_name, side)
    return outputs.y


class Classifier(nn.Module):
  """Tokens to float32 logits [b, num_classes].

  Tokens are ids [b, n], 0 at padding, or float32 [b, n], none of them padding;
  [b, 2, n] for pairs, which one encoder reads apart; or the patches of images,
  float32 [b, height, width, c]. Built by
  `jaxformers.models.build`; `apply({"params": params}, ids, train=False)` is a
  pure function.

  Attributes:
    encoder: makes the `Encoder`; called with a name.
    head: makes the `ClassifierHead`; called with a name.
    orthogonal_map: of every orthogonal matrix in the model.
    num_inputs: 1, or 2 for pairs.
    real: whether tokens are real numbers.
    cls: whether the encoder puts a token of its own in front.
    image: (height, width, c), or () for sequences.
    patch_size: side of the patches of images.
  """

  objective: ClassVar[str] = "classification"

  encoder: Callable[..., nn.Module]
  head: Callable[..., nn.Module]
  orthogonal_map: str
  num_inputs: int = 1
  real: bool = False
  cls: bool = False
  image: tuple[int, ...] = ()
  patch_size: int = 0

  @nn.compact
  def __call__(self, ids: jax.Array, *, train: bool) -> jax.Array:
    if self.num_inputs > 1:
      ids = ids.reshape(-1, ids.shape[-1])
    mask = self.mask(ids)
    x = self.encoder(name="encoder")(ids, mask=mask, train=train)
    return self.head(name="head")(x, mask, train=train)

  def mask(self, ids: jax.Array) -> jax.Array:
    """Where the encoder's tokens are, for ids as in a call -> bool [b, n].

    The sequences of pairs stand one after the other, [2b, n]; with a token in
    front [b, n + 1].
    """
    if self.image:
      n = num_patches(self.image, self.patch_size) + self.cls
      return jnp.ones((len(ids), n), bool)
    ids = ids.reshape(-1, ids.shape[-1])
    mask = jnp.ones(ids.shape, bool) if self.real else ids > 0
    if self.cls:
      mask = jnp.pad(mask, ((0, 0), (1, 0)), constant_values=True)
    return mask

  def example(self, length: int = 2) -> jax.Array:
    """One input of `length` tokens, or one image; zeros.

    Parameters do not depend on the length.
    """
    if self.image:
      return jnp.zeros((1, *self.image))
    several = () if self.num_inputs == 1 else (self.num_inputs,)
    shape = (1, *several, length)
    return jnp.zeros(shape, jnp.float32 if self.real else jnp.int32)
