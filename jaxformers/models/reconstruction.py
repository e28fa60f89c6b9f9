"""Models of their own inputs, for pre-training: masked tokens or next ones."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.models.mixer import kernel_init
from jaxformers.models.model import CLASSES, Model, bind_encoder


@CLASSES.register("masked_tokens")
@CLASSES.register("masked_values")
@CLASSES.register("next_tokens")
@CLASSES.register("next_values")
class Reconstruction(Model):
  """Tokens [b, n] to log p of targets, or to values, float32 [b, n].

  An encoder and one linear map, `decoder`, which a model that begins with the
  encoder does not take over. Under "masked" objectives a masked id is one more
  id, the last; a masked number is NaN, and enters as 0 with a 1 beside it.
  Under "next" objectives the mixer must have a causal form.

  Under "tokens" objectives the result is log p of each target, of
  `num_classes`; inputs may be numbers all the same, as pixels in 256 classes.
  Under "values" objectives it is the number itself.

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
    """Log p of all classes [b, n, c], or given `targets` [b, n] of these alone.

    Args:
      inputs: int32 ids or float32 numbers, [b, n].
      targets: int32 [b, n]; ignored where the result is a number.
      weights: ignored.
      train: True in training.
    """
    del weights
    config = self.config
    encoder = bind_encoder(config)(name="encoder")
    inputs, move_back = self.close_holes(inputs)
    x = move_back(encoder(inputs, mask=self.mask(inputs), train=train))
    # A class token in front has no target.
    x = x[:, config.cls :].astype(jnp.float32)
    width = 1 if config.has_values else config.num_classes
    init = kernel_init(0.02)
    y = nn.Dense(width, kernel_init=init, name="decoder")(x)
    if config.has_values:
      return y[..., 0]
    log_p = jax.nn.log_softmax(y, axis=-1)
    if targets is None:
      return log_p
    chosen: Any = targets[..., None]
    return jnp.take_along_axis(log_p, chosen, -1)[..., 0]
