"""Block of the depth-efficiency papers: attention without feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax

from jaxformers.foundations.ranges import Fraction, SmallCount
from jaxformers.models.blocks.contract import BLOCKS
from jaxformers.models.dropout import make_dropout


@BLOCKS.register("attention_only")
class AttentionOnly(nn.Module):
  """Block that computes mixer(x) or x + mixer(x).

  The block has no normalisation and no feed-forward.

  Source: Levine et al. 2020, https://arxiv.org/abs/2006.12467, equations 3 and
  4. Their network is this block with the mixer `linearized`.

  Attributes:
    mixer: factory of the mixer; called with a name.
    num_layers: number of layers of the encoder; not used here.
    layer: index of this layer, from 0; not used here.
    residual: True for x + mixer(x), False for mixer(x).
    dropout_rate: dropout rate after the mixer, in training.
  """

  concatenate_positions: ClassVar[bool] = False
  has_segments: ClassVar[bool] = True  # The mask may be numbers.
  final_norm: ClassVar[bool] = False

  mixer: Callable[..., nn.Module]
  num_layers: SmallCount
  layer: int = 0
  residual: bool = False
  dropout_rate: Fraction = 0.0

  @nn.compact
  def __call__(
    self, x: jax.Array, *, mask: jax.Array, carry: Any, train: bool
  ) -> tuple[jax.Array, Any]:
    y, carry = self.mixer(name="mixer")(x, mask=mask, carry=carry, train=train)
    y = make_dropout(self, self.dropout_rate, train=train)(y).astype(x.dtype)
    return (x + y if self.residual else y), carry
