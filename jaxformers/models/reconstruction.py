"""Models that predict masked or next tokens of their inputs, to pre-train."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.models.mixer import kernel_init
from jaxformers.models.model import CLASSES, Model


@CLASSES.register("masked_tokens")
@CLASSES.register("masked_values")
@CLASSES.register("next_tokens")
@CLASSES.register("next_values")
class Reconstruction(Model):
  """Pre-training model: tokens [b, n] -> log p of targets or values, [b, n].

  The model is an encoder and one linear map, `decoder`. A model that is
  initialized from the encoder does not use the decoder.

  For "masked" objectives, masked ids are replaced by an additional last id.
  Masked numbers are NaN; the embedding reads 0 and a flag instead. For "next"
  objectives, the mixer must have a causal form.

  For "tokens" objectives, the result is log p of each target, one of
  `num_classes`. Inputs may still be numbers, such as pixels in 256 classes. For
  "values" objectives, the result is the predicted number.

  Source: Amos et al. 2024, https://arxiv.org/abs/2310.02980, section 3.
  """

  @nn.compact
  def __call__(
    self,
    inputs: jax.Array,
    targets: jax.Array | None = None,
    weights: jax.Array | None = None,
    *,
    train: bool,
  ) -> jax.Array:
    """Returns log p of all classes or of `targets`, or the predicted numbers.

    Args:
      inputs: int32 ids or float32 numbers, [b, n].
      targets: right classes, int32 [b, n]; None for log p of all classes.
        Ignored for "values" objectives.
      weights: ignored.
      train: True in training.

    Returns:
      float32 [b, n, c] for log p of all classes; otherwise float32 [b, n].
    """
    del weights
    config = self.config
    x = self.encode_tokens(inputs, train=train)
    width = 1 if config.has_values else config.num_classes
    init = kernel_init(0.02)
    y = nn.Dense(width, kernel_init=init, name="decoder")(x)
    if config.has_values:
      return y[..., 0]
    # Without targets, return log p of all classes.
    log_p = jax.nn.log_softmax(y, axis=-1)
    if targets is None:
      return log_p
    chosen: Any = targets[..., None]
    return jnp.take_along_axis(log_p, chosen, -1)[..., 0]
