"""The block of state-space models: a mixer with a gate of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax

from jaxformers.foundations.ranges import Fraction, PositiveShare, SmallCount
from jaxformers.models.blocks.contract import BLOCKS
from jaxformers.models.dropout import drop_channels
from jaxformers.models.norm import NORMS, normalize


@BLOCKS.register("one_branch")
class OneBranch(nn.Module):
  """x + dropout(mixer(norm x)), or norm(x + dropout(mixer(x))).

  There is no feed-forward: S4's, S5's and the LRU's mixers end in a gate.
  Their published configurations have BatchNorm, norm_type="batch", which lets
  samples see each other in training; the default is a norm of one token.

  Source: Gu et al. 2022, https://arxiv.org/abs/2111.00396, appendix D.2, as in
  Smith et al. 2023 and Orvieto et al. 2023.

  Attributes:
    mixer: makes the mixer; called with a name.
    num_layers: number of layers of the encoder; not used here.
    layer: index of this layer, from 0; not used here.
    norm_first: False for the norm after the sum.
    norm_type: in `NORMS`, of every norm of the encoder.
    norm_epsilon: epsilon of every norm.
    final_norm: True for a norm at the end of the encoder, as in S4's code with
      the norm first; S5's and the LRU's have none.
    dropout_rate: share of the channels that are dropped after the mixer in
      training, at all tokens of a sample.
  """

  concatenate_positions: ClassVar[bool] = False

  mixer: Callable[..., nn.Module]
  num_layers: SmallCount
  layer: int = 0
  norm_first: bool = True
  norm_type: str = "layer"
  norm_epsilon: PositiveShare = 1e-5
  final_norm: bool = False
  dropout_rate: Fraction = 0.0

  @nn.compact
  def __call__(
    self, x: jax.Array, *, mask: jax.Array, carry: Any, train: bool
  ) -> tuple[jax.Array, Any]:
    norm = NORMS[self.norm_type](self.norm_epsilon, name="norm")
    normalized = functools.partial(normalize, norm, mask=mask, train=train)
    y = normalized(x) if self.norm_first else x
    y, carry = self.mixer(name="mixer")(y, mask=mask, carry=carry, train=train)
    y = drop_channels(self, y, self.dropout_rate, train=train)
    x = x + y.astype(x.dtype)
    return (x if self.norm_first else normalized(x)), carry
