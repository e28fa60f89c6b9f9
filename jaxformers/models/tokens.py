"""Models that predict a class for every token of a sequence."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.foundations.errors import UserError
from jaxformers.models.embedding import traced_sinusoids
from jaxformers.models.mixer import kernel_init
from jaxformers.models.model import CLASSES, Model
from jaxformers.models.segments import Packed


class Bottleneck(nn.Module):
  """Describes every token by its place and the state of the last token.

  The sum of this state and a sinusoid of the place passes through two linear
  maps with GELU, a LayerNorm before each, and one at the end.

  Differs from the source, which adds the place to the state before the last
  norm of the encoder, orders the channels of the sinusoid by sine and cosine,
  and has RMSNorm in its benchmark.

  Source: the auto-encoder of MAD (Poli et al. 2024,
  https://arxiv.org/abs/2403.17844; `AutoEncoder` of mad-lab 0f49a45).
  """

  @nn.compact
  def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the description of the tokens, float32 [b, n, d].

    Args:
      x: states of the tokens, float32 [b, n, d].
      mask: True at tokens, False at padding, bool [b, n].
    """
    n, d = x.shape[-2:]
    last = jnp.where(mask, jnp.arange(n), 0).max(1)
    state = jnp.take_along_axis(x, last[:, None, None], 1)
    # Count places without padding.
    y = state + traced_sinusoids(n, d)[mask.cumsum(1) - 1]
    for layer in range(2):
      y = nn.LayerNorm(name=f"norm_{layer}")(y)
      y = nn.gelu(
        nn.Dense(d, kernel_init=kernel_init(0.02), name=f"{layer}")(y)
      )
    return nn.LayerNorm(name="norm")(y)


@CLASSES.register("token_classification")
class TokenClassifier(Model):
  """Token classifier: tokens [b, n] -> logits, float32 [b, n, num_classes].

  The model is an encoder and one linear map, `decoder`. Inputs are ids, 0 at
  padding, or real numbers. Logits at padding have no meaning. If
  `ModelConfig.causal` is True, the logits of a token depend only on this token
  and on earlier ones; but with the option `bottleneck` of `ModelConfig.head`
  all logits are computed from the state of the last token, by `Bottleneck`.
  """

  takes_packed = True

  @property
  def has_bottleneck(self) -> bool:
    """True if all labels are computed from the state of the last token."""
    return bool(self.config.head.get("bottleneck", False))

  @nn.nowrap
  def reads_packed(self, *, has_state: bool = False) -> bool:
    """Returns False if the labels depend on the last token; see `Model`."""
    return not self.has_bottleneck and super().reads_packed(has_state=has_state)

  @nn.nowrap
  def check_causal(self) -> None:
    """Raises UserError also if all labels depend on the last token."""
    if self.has_bottleneck:
      raise UserError(
        "head.bottleneck=True reads the last token of a sequence, which parts "
        "of it do not have: remove it to carry states."
      )
    super().check_causal()

  @nn.compact
  def __call__(
    self, inputs: jax.Array, *, train: bool, packed: Packed | None = None
  ) -> jax.Array:
    x = self.encode_tokens(inputs, train=train, packed=packed)
    if self.has_bottleneck:
      mask = self.mask(inputs)[:, self.config.cls :]
      x = Bottleneck(name="head")(x, mask)
    init, width = kernel_init(0.02), self.config.num_classes
    return nn.Dense(width, kernel_init=init, name="decoder")(x)
