"""The modules of TransJect, which own the parameters of `layer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import SmallCount, Weight, refuse_unused
from jaxformers.foundations.registry import choose
from jaxformers.models.blocks.contract import BLOCKS
from jaxformers.models.mixer import MIXERS
from jaxformers.models.transject.gate import GATINGS
from jaxformers.models.transject.layer import (
  Experts,
  TransJectLayers,
  Weights,
  fold,
  mixture,
  residual_weight,
)
from jaxformers.models.transject.sigma import eigenvalues, learned_sigma
from jaxformers.models.variables import DERIVED, rotation
from jaxformers.models.variants import MODELS, Variant

MODELS.register("transject")(
  Variant("transject", "injective", source="TransJect")
)
MODELS.register("random_transject")(
  Variant(
    "transject",
    "injective",
    {"sigma": "learned"},
    source="TransJect",
    bounded='mixer.num_experts=1 or mixer.gating="certified"',
  )
)

SIGMAS = ("eigenvalues", "learned")


class ResidualScale(nn.Module):
  """Scale a = alpha / L of one layer (equation 5), float32 in [0, 1/L)."""

  num_layers: int

  @nn.compact
  def __call__(self) -> jax.Array:
    r = self.param("alpha", nn.initializers.zeros, ())
    return residual_weight(r) / self.num_layers


@MIXERS.register("transject")
class TransJect(nn.Module):
  """Residual branch f(x) = (alpha / L) sum_e lambda_e ELU(x U_e Sigma V_e).

  Tokens are mixed only in Sigma and in the gate. Sigma is computed once from
  the embedded sequence, and carried from layer to layer. On the tokens of one
  sample, x + f(x) is injective and Lipschitz: the distance of two tokens
  changes by a factor from 1 - alpha/L to 1 + alpha/L. With the gating
  "certified" this also holds for two sequences with equal Sigma; with the
  paper's gate it does not (docs/theory.md).

  Attributes:
    num_experts: number E of experts.
    gating: "paper" for the gate of the paper's authors, a softmax over pooled
      expert outputs, or "certified" for `gate.certified_gate`.
    sigma: "eigenvalues" of the embedded tokens (TransJect), or "learned" for
      one vector for all samples (Random-TransJect).
    reconstruction_weight: weight of the reconstruction error in the loss, for
      "eigenvalues". The authors' weight is also 1e-3, but of an error that is
      n^2 / d^2 times as large (`sigma.eigenvalues`).
    residual: `ResidualScale` that the block shares; None to create one.
    orthogonal_map: name of the map to the rotations, in `orthogonal.MAPS`.
    dtype: compute type; parameters, Sigma and gate are float32.
  """

  num_experts: SmallCount = 4
  gating: str = "paper"
  sigma: str = "eigenvalues"
  reconstruction_weight: Weight = 1e-3
  residual: nn.Module | None = None
  orthogonal_map: str = "cayley"
  dtype: Any = jnp.float32

  @nn.compact
  def weights(
    self, x: jax.Array, mask: jax.Array, carry: Any
  ) -> tuple[Experts, jax.Array]:
    """Returns the weights of the mixture, and Sigma.

    Args:
      x: tokens [b, n, d]; the embedded tokens if `carry` is None.
      mask: bool [b, n], True at tokens.
      carry: Sigma, or None before the first layer, which computes Sigma.
    """
    d = x.shape[-1]
    if self.num_experts < 1:
      raise UserError(
        f"num_experts={self.num_experts} is below 1: give 1 or more."
      )
    shape = (self.num_experts, d, d)
    # Create the residual scale, the rotations of all experts, and the gate.
    a = (self.residual or ResidualScale(1, name="residual"))()
    u = rotation(self, "u", shape, self.orthogonal_map)
    v = rotation(self, "v", shape, self.orthogonal_map)
    if choose("gating", self.gating, GATINGS) == "paper":
      w = self.param("gate", nn.initializers.normal(d**-0.5), (d,))
    else:  # Start small: the layer is divided by a constant that grows with w.
      init = nn.initializers.normal(0.1 * d**-0.5)
      w = self.param("gate", init, (self.num_experts, d))
    # The first layer computes Sigma; later layers receive it as the carry.
    sigma = self._first_sigma(x, mask) if carry is None else carry
    return Experts(u, v, w, a, self.get_variable(DERIVED, "folded")), sigma

  def __call__(
    self, x: jax.Array, *, mask: jax.Array, carry: Any, train: bool
  ) -> tuple[jax.Array, jax.Array]:
    del train
    experts, sigma = self.weights(x, mask, carry)
    y, _ = mixture(
      x.astype(self.dtype), experts, sigma, mask, gating=self.gating
    )
    return y, sigma

  @nn.nowrap
  def layers(self, num_layers: int, activation: str = "elu") -> TransJectLayers:
    """Returns the layers around this mixer as pure functions.

    Args:
      num_layers: number of layers.
      activation: activation of the feed-forward.
    """
    return TransJectLayers(
      num_layers,
      self.gating,
      self.sigma,
      self.reconstruction_weight,
      self.orthogonal_map,
      jnp.dtype(self.dtype),
      self.num_experts,
      activation,
    )

  def _first_sigma(self, x: jax.Array, mask: jax.Array) -> jax.Array:
    d = x.shape[-1]
    if choose("sigma", self.sigma, SIGMAS) == "learned":
      reason = "a learned Sigma reconstructs no tokens: remove it."
      refuse_unused(self, ("reconstruction_weight",), reason)
      s = self.param("sigma", nn.initializers.uniform(1.0), (d,))
      sigma, error = learned_sigma(s), None
    else:
      basis = rotation(self, "basis", (d, d), self.orthogonal_map)
      sigma, error = eigenvalues(x, basis, mask)
    # Report Sigma and its error in the collections of the model.
    self.layers(1).sown(sigma, error).sow(self)
    return sigma


@BLOCKS.register("injective")
class Injective(nn.Module):
  """TransJect's layer: no normalisation, residuals scaled by a = alpha/L.

  The layer is y = x + a G(x), then y + a H(y), with the mixture of experts G
  and the orthogonal feed-forward H. G and H are 1-Lipschitz and a < 1/L, so the
  distance of two tokens of one sample changes by a factor from (1 - a)^2 to
  (1 + a)^2.

  Source: TransJect, equations 5 to 8.

  Attributes:
    mixer: function of a name and of the shared `residual` that returns the
      `TransJect`.
    num_layers: number L of layers of the encoder.
    layer: index of this layer, from 0; not used here.
    activation: activation of the feed-forward H: "elu", or "maxmin", which
      keeps the norm of gradients.
    orthogonal_map: name of the map to the rotations, in `orthogonal.MAPS`.
    dtype: compute type; parameters are float32.
  """

  concatenate_positions: ClassVar[bool] = True
  final_norm: ClassVar[bool] = False
  # Stacked matrices that are applied one after the other. Unlike stacks of
  # experts, they are not split over devices.
  in_turn: ClassVar[tuple[str, ...]] = ("feed_forward",)

  mixer: Callable[..., TransJect]
  num_layers: SmallCount
  layer: int = 0
  activation: str = "elu"
  orthogonal_map: str = "cayley"
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self, x: jax.Array, *, mask: jax.Array, carry: Any, train: bool
  ) -> tuple[jax.Array, Any]:
    del train
    d = x.shape[-1]
    # Mixture and feed-forward share one residual scale.
    residual = ResidualScale(self.num_layers, name="residual")
    mixer = self.mixer(name="mixer", residual=residual)
    experts, sigma = mixer.weights(x, mask, carry)
    w = rotation(self, "feed_forward", (2, d, d), self.orthogonal_map)
    bias = self.param("bias", nn.initializers.zeros, (2, d))
    # Apply the layer as a pure function, which has an inverse.
    layers = mixer.layers(self.num_layers, self.activation)
    y, side = layers.forward(Weights(experts, w, bias), x, sigma, mask)
    self.sow("intermediates", layers.side_name, side)
    return y, sigma

  @nn.nowrap
  def invertible(self) -> TransJectLayers | None:
    """Returns all layers as pure functions, for an unbound block.

    Returns None for subclasses, whose forward pass may differ.
    """
    mixer = self.mixer(parent=None)
    if type(self) is not Injective or type(mixer) is not TransJect:
      return None
    return mixer.layers(self.num_layers, self.activation)

  @nn.nowrap
  def derive(
    self, params: Mapping[str, Any], rotations: Mapping[str, Any]
  ) -> dict[str, Any]:
    """Returns the products of each layer's weights that a step computes once.

    Args:
      params: parameters of the stack of layers.
      rotations: orthogonal matrices of the stack of layers.
    """
    return fold(params, rotations, self.orthogonal_map)
