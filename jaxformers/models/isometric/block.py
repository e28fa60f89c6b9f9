"""The module of isometric layers, which owns their parameters."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Fraction, Interval, Length, SmallCount
from jaxformers.foundations.registry import choose
from jaxformers.models.blocks.contract import BLOCKS
from jaxformers.models.isometric.layer import (
  FORMS,
  IsometricLayers,
  Weights,
  check_bound,
)
from jaxformers.models.kinds import EIGENVALUES
from jaxformers.models.mixers.allpass import Sections
from jaxformers.models.variables import rotation
from jaxformers.models.variants import ALWAYS, MODELS, Variant

MODELS.register("isometric")(Variant("", "isometric", bounded=ALWAYS))


@BLOCKS.register("isometric")
class Isometric(nn.Module):
  """Mixes tokens by an isometry F, then applies a nonlinearity to each token.

  The layer is psi(F X + b), or Z + a H(Z) with Z = F X; see
  `layer.IsometricLayers`. The encoder is injective and Lipschitz as a function
  of the whole sequence: distances change by factors from the product of 1 - a
  to the product of 1 + a over its layers.

  No causal form: on a ring the last tokens reach the first.

  Source: new here; the filters are those of Schroeder 1961 (Natural sounding
  artificial reverberation), closed to a ring. docs/theory.md names other work.

  Attributes:
    num_layers: number L of layers of the encoder.
    layer: index of this layer, from 0; not used here.
    form: form of the layer, "pointwise" or "feed_forward".
    a: bound of a: "budget" for TransJect's constants, or "wide" for a_max.
    a_max: greatest a with a="wide", below 1.
    num_sections: number of all-pass sections in cascade.
    dilations: delays of the sections in tokens, one per group of channels; four
      times their number must divide d. () for dilations from 1 to an eighth of
      max_len (`ring.spread_dilations`).
    max_len: greatest number of tokens.
    activation: activation of H in the form "feed_forward": "elu" or "maxmin".
    orthogonal_map: name of the map to the rotations, in `orthogonal.MAPS`.
    dtype: compute type of products; parameters and filters are float32.
  """

  concatenate_positions: ClassVar[bool] = False
  final_norm: ClassVar[bool] = False
  in_turn: ClassVar[tuple[str, ...]] = ("mixing", "feed_forward")
  kinds: ClassVar[dict[str, str]] = {
    "decay": EIGENVALUES,
    "angle": EIGENVALUES,
  }

  num_layers: SmallCount
  layer: int = 0
  form: str = "pointwise"
  a: str = "wide"
  a_max: Fraction = 0.9
  num_sections: Annotated[int, Interval("[1, 100]")] = 2
  dilations: tuple[Annotated[int, Interval("[1, 2^15)")], ...] = ()
  max_len: Length = 1_024
  activation: str = "elu"
  orthogonal_map: str = "cayley"
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self, x: jax.Array, *, mask: jax.Array, carry: Any, train: bool
  ) -> tuple[jax.Array, Any]:
    del train
    # Check the options.
    d = x.shape[-1]
    groups = 4 * len(self.dilations)
    if groups and d % groups:
      raise UserError(
        f"d_model={d} with {len(self.dilations)} dilations: each dilation has "
        f"groups of 4 channels, so d_model must be a multiple of {groups}."
      )
    # The form "feed_forward" has two biases, "pointwise" has one.
    shape = (self.num_sections, d // 2)
    count = 2 if choose("form", self.form, FORMS) == "feed_forward" else 1
    check_bound(self)
    if count == 1 and self.activation != "elu":
      raise UserError(
        f'activation={self.activation!r} applies to form="feed_forward" only: '
        "remove one of the two."
      )
    # Create the parameters: Q_1 and Q_2, lambda, a, b, and W_1 and W_2.
    layers = self.invertible()
    weights = Weights(
      rotation(self, "mixing", (2, d, d), self.orthogonal_map),
      Sections.make(self, shape),
      layers.strength(self.param("alpha", nn.initializers.constant(0.5), ())),
      self.param("bias", nn.initializers.zeros, (count, d)),
      rotation(self, "feed_forward", (2, d, d), self.orthogonal_map)
      if count == 2
      else None,
    )
    # Apply the layer as a pure function, which has an inverse.
    y, _ = layers.forward(weights, x, None, mask)
    return y, carry

  @nn.nowrap
  def invertible(self) -> IsometricLayers:
    """Returns all layers as pure functions."""
    return IsometricLayers(
      self.num_layers,
      self.form,
      self.a,
      self.a_max,
      tuple(self.dilations),
      self.max_len,
      self.orthogonal_map,
      jnp.dtype(self.dtype),
      self.activation,
    )
