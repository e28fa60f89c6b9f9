"""Models that predict a class for every token of a sequence."""

from __future__ import annotations

import flax.linen as nn
import jax

from jaxformers.models.mixer import kernel_init
from jaxformers.models.model import CLASSES, Model


@CLASSES.register("token_classification")
class TokenClassifier(Model):
  """Token classifier: tokens [b, n] -> logits, float32 [b, n, num_classes].

  The model is an encoder and one linear map, `decoder`. Inputs are ids, 0 at
  padding, or real numbers. Logits at padding have no meaning. If
  `ModelConfig.causal` is True, the logits of a token depend only on this token
  and on earlier ones.
  """

  @nn.compact
  def __call__(self, inputs: jax.Array, *, train: bool) -> jax.Array:
    x = self.encode_tokens(inputs, train=train)
    init, width = kernel_init(0.02), self.config.num_classes
    return nn.Dense(width, kernel_init=init, name="decoder")(x)
