"""Segmenter: semantic segmentation with a mask transformer.

Source: Strudel et al. 2021, https://arxiv.org/abs/2105.05633, section 3.2.
NeuTRENO's table 2 is measured with this model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.models.blocks.contract import BLOCKS
from jaxformers.models.blocks.streams import expand, reduce
from jaxformers.models.config import ModelConfig, field_names
from jaxformers.models.model import (
  CLASSES,
  Make,
  Model,
  bind_block,
  bind_encoder,
  bind_mixer,
  check_mixer,
)
from jaxformers.models.norm import LayerNorm


def unit(x: jax.Array) -> jax.Array:
  """Returns x [..., d] divided by its Euclidean norm; 0 where x is 0."""
  square = jnp.square(x).sum(-1, keepdims=True)
  return x * jax.lax.rsqrt(jnp.maximum(square, 1e-24))


class MaskTransformer(nn.Module):
  """Decoder: maps patches x [b, n, d] to class scores, float32 [b, n, c].

  A learned vector for each class is appended to the patches, and a few layers
  are applied. The carry of these layers starts with None, so NeuTRENO's term
  uses the first values of the decoder, not of the encoder. The score is the
  cosine of patch and class after a linear map of each, followed by a LayerNorm
  over the classes.

  Attributes:
    block: factory of a block; called with a name and the index of the layer.
    num_layers: number of layers of the decoder.
    num_classes: number of classes c.
  """

  block: Callable[..., nn.Module]
  num_layers: int
  num_classes: int

  @nn.compact
  def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
    b, n, d = x.shape
    init = nn.initializers.normal(0.02)
    # Append a learned vector for each class to the patches.
    x = nn.Dense(d, kernel_init=init, name="project")(x)
    classes = self.param("classes", init, (self.num_classes, d))
    classes = jnp.broadcast_to(classes[None], (b, self.num_classes, d))
    x = jnp.concatenate([x, classes.astype(x.dtype)], 1)
    # Apply the layers to patches and classes together, without padding.
    mask = jnp.ones(x.shape[:2], bool)
    carry: Any = None
    blocks = [
      self.block(name=f"layer_{i}", layer=i) for i in range(self.num_layers)
    ]
    streams = getattr(blocks[0], "streams", 1)
    x = expand(x, streams)
    for block in blocks:
      x, carry = block(x, mask=mask, carry=carry, train=train)
    x = reduce(x, streams)
    # Score by the cosine of patch and class, after a linear map of each.
    x = LayerNorm(name="norm")(x)
    init = nn.initializers.normal(d**-0.5)
    patches = x[:, :n] @ self.param("project_patches", init, (d, d))
    classes = x[:, n:] @ self.param("project_classes", init, (d, d))
    scores = jnp.einsum("bnd,bcd->bnc", unit(patches), unit(classes))
    return LayerNorm(name="norm_classes")(scores)


# Defaults of the options of the decoder.
DECODER = {"num_layers": 2, "dropout_rate": 0.1}


def decoder_options(config: ModelConfig) -> dict[str, Any]:
  """Returns the options `ModelConfig.head`, completed by `DECODER`."""
  return {**DECODER, **config.head}


def decoder_len(config: ModelConfig) -> int:
  """Returns the number of tokens in the decoder: patches plus classes."""
  return config.num_tokens + config.num_classes


def decoder_block(config: ModelConfig) -> Make:
  """Returns the factory of a layer of the decoder.

  These layers have no drop path, and the dropout rate of the decoder.
  """
  # Replace the rates of the encoder's block.
  head = decoder_options(config)
  fields = field_names(BLOCKS[config.block_name])
  changes = {
    "drop_path_rate": 0.0,
    "dropout_rate": head["dropout_rate"],
  }
  # Keep only options that the block has.
  changes = {name: rate for name, rate in changes.items() if name in fields}
  return bind_block(
    config,
    decoder_mixer(config),
    decoder_len(config),
    head["num_layers"],
    **changes,
  )


def decoder_mixer(config: ModelConfig) -> Make | None:
  """Returns the factory of the decoder's mixer; None for blocks without one."""
  options = config.mixer_options(config.head.get("mixer_defaults", {}))
  return bind_mixer(config, decoder_len(config), options)


@CLASSES.register("segmentation")
class Segmenter(Model):
  """Segmenter: images [b, height, width, 3] -> f32 [b, height, width, c].

  The logits of the pixels are the scores of the patches, interpolated
  bilinearly.

  Options of `ModelConfig.head`:
    num_layers: number of layers of the decoder, 2 by default.
    dropout_rate: dropout rate of the decoder's branches, 0.1 by default.
    mixer_defaults: defaults of the decoder's mixer that differ from the
      encoder's.
  """

  @nn.compact
  def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
    config = self.config
    encoder = bind_encoder(config)(name="encoder")
    # Encode the patches.
    x = encoder(images, mask=self.mask(images), train=train)
    # Score every patch. The decoder does not read the class token.
    decoder = MaskTransformer(
      block=decoder_block(config),
      num_layers=decoder_options(config)["num_layers"],
      num_classes=config.num_classes,
      name="decoder",
    )
    x = decoder(x[:, config.cls :], train=train)
    # Arrange the scores on the grid of patches, and resize it to the image.
    height, width, _ = config.image
    rows, columns = height // config.patch_size, width // config.patch_size
    x = x.reshape(len(x), rows, columns, -1)
    shape = (len(x), height, width, x.shape[-1])
    return jax.image.resize(x, shape, "bilinear")

  @nn.nowrap
  def stacks(self) -> dict[str, nn.Module]:
    """Returns an unbound block of the encoder and one of the decoder."""
    return {
      **super().stacks(),
      "decoder": decoder_block(self.config)(parent=None),
    }

  @nn.nowrap
  def check(self) -> None:
    """Raises UserError for wrong options of the layers, by tracing them."""
    super().check()
    config = self.config
    check_mixer(config, decoder_mixer(config), decoder_len(config))
