"""Segmenter: a class for every pixel, from a mask transformer.

Source: Strudel et al. 2021, https://arxiv.org/abs/2105.05633, section 3.2; the
form that NeuTRENO's table 2 is measured with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.models.blocks.contract import layer_norm
from jaxformers.models.embedding import num_patches


def unit(x: jax.Array) -> jax.Array:
  """x [..., d] over its Euclidean norm; 0 where x is."""
  square = jnp.square(x).sum(-1, keepdims=True)
  return x * jax.lax.rsqrt(jnp.maximum(square, 1e-24))


class MaskTransformer(nn.Module):
  """Patches x [b, n, d] to scores of every class, float32 [b, n, c].

  A learned vector for each class joins the patches in a few layers, whose carry
  begins anew: under NeuTRENO's term they are held to the decoder's own first
  values. A score is the cosine of patch and class after a linear map of each;
  a LayerNorm over the classes ends it.

  Attributes:
    block: makes a block; called with a name and the number of the layer.
    num_layers: of the decoder.
    num_classes: c.
  """

  block: Callable[..., nn.Module]
  num_layers: int
  num_classes: int

  @nn.compact
  def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
    b, n, d = x.shape
    init = nn.initializers.normal(0.02)
    x = nn.Dense(d, kernel_init=init, name="project")(x)
    classes = self.param("classes", init, (self.num_classes, d))
    classes = jnp.broadcast_to(classes[None], (b, self.num_classes, d))
    x = jnp.concatenate([x, classes.astype(x.dtype)], 1)
    mask = jnp.ones(x.shape[:2], bool)
    carry: Any = None
    for i in range(self.num_layers):
      block = self.block(name=f"layer_{i}", layer=i)
      x, carry = block(x, mask=mask, carry=carry, train=train)
    x = layer_norm(x, "norm")
    init = nn.initializers.normal(d**-0.5)
    patches = x[:, :n] @ self.param("project_patches", init, (d, d))
    classes = x[:, n:] @ self.param("project_classes", init, (d, d))
    scores = jnp.einsum("bnd,bcd->bnc", unit(patches), unit(classes))
    return layer_norm(scores, "norm_classes")


class Segmenter(nn.Module):
  """Images [b, height, width, 3] to logits float32 [b, height, width, c].

  The scores of the patches are interpolated bilinearly. Built by
  `jaxformers.models.build` with objective="segmentation".

  Attributes:
    encoder: makes the `Encoder`; called with a name.
    decoder: makes the `MaskTransformer`; called with a name.
    orthogonal_map: of every orthogonal matrix in the model.
    image: (height, width, channels).
    patch_size: side of a patch.
    cls: whether the encoder puts a token of its own in front.
  """

  objective: ClassVar[str] = "segmentation"

  encoder: Callable[..., nn.Module]
  decoder: Callable[..., nn.Module]
  orthogonal_map: str
  image: tuple[int, ...]
  patch_size: int
  cls: bool = True

  @nn.compact
  def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
    mask = self.mask(images)
    x = self.encoder(name="encoder")(images, mask=mask, train=train)
    x = self.decoder(name="decoder")(x[:, int(self.cls) :], train=train)
    height, width, _ = self.image
    rows, columns = height // self.patch_size, width // self.patch_size
    x = x.reshape(len(x), rows, columns, -1)
    shape = (len(x), height, width, x.shape[-1])
    return jax.image.resize(x, shape, "bilinear")

  def mask(self, images: jax.Array) -> jax.Array:
    """Where the encoder's tokens are: everywhere -> bool [b, n]."""
    n = num_patches(self.image, self.patch_size) + self.cls
    return jnp.ones((len(images), n), bool)

  def example(self, length: int = 0) -> jax.Array:
    """One image of zeros; `length` plays no part."""
    del length
    return jnp.zeros((1, *self.image))
