"""Block of state-space models, whose mixers contain a gate."""

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
  """Block x + dropout(mixer(norm x)), or norm(x + dropout(mixer(x))).

  The block has no feed-forward, because the mixers of S4, S5 and the LRU end in
  a gate. Their published configurations use BatchNorm (norm_type="batch"), with
  which samples depend on each other in training. The default norm acts on
  single tokens.

  Source: Gu et al. 2022, https://arxiv.org/abs/2111.00396, appendix D.2, as in
  Smith et al. 2023 and Orvieto et al. 2023.

  Attributes:
    mixer: factory of the mixer; called with a name.
    num_layers: number of layers of the encoder; not used here.
    layer: index of this layer, from 0; not used here.
    norm_first: True for the norm before the mixer; False for the norm after the
      sum.
    norm_type: name of all norms of the encoder, in `NORMS`.
    norm_epsilon: epsilon of every norm.
    final_norm: True for a norm at the end of the encoder, as in S4's code with
      norm_first. The code of S5 and of the LRU has no such norm.
    dropout_rate: share of the channels that are dropped after the mixer in
      training, at all tokens of a sample.
  """

  concatenate_positions: ClassVar[bool] = False
  has_segments: ClassVar[bool] = True  # The mask may be numbers.

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
    # Apply norm, mixer and dropout, and add the result to x.
    y = normalized(x) if self.norm_first else x
    y, carry = self.mixer(name="mixer")(y, mask=mask, carry=carry, train=train)
    y = drop_channels(self, y, self.dropout_rate, train=train)
    x = x + y.astype(x.dtype)
    return (x if self.norm_first else normalized(x)), carry
