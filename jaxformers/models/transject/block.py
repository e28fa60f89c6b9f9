"""The modules of TransJect: they own the parameters of `layer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import SmallCount, Weight
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
  """a = alpha / L of one layer (equation 5), a float32 scalar in [0, 1/L)."""

  num_layers: int

  @nn.compact
  def __call__(self) -> jax.Array:
    r = self.param("alpha", nn.initializers.zeros, ())
    return residual_weight(r) / self.num_layers


@MIXERS.register("transject")
class TransJect(nn.Module):
  """sum_e lambda_e (alpha / L) ELU(x U_e Sigma V_e): what a layer adds to x.

  Tokens meet only in Sigma, made once from the embedded sequence and carried
  from layer to layer, and in the gate. For two tokens of one sample x plus
  this is injective and Lipschitz: distances change by 1 - alpha/L to
  1 + alpha/L. For two sequences the gating "certified" gives the same, if they
  have one Sigma; the paper's gate does not (docs/theory.md).

  Attributes:
    num_experts: number E of experts.
    gating: "paper", the softmax over pooled expert outputs of the paper's
      authors, or "certified", see `gate.certified_gate`.
    sigma: "eigenvalues" of the embedded tokens (TransJect), or "learned", one
      vector for all samples (Random-TransJect).
    reconstruction_weight: weight of the reconstruction error in the loss, for
      "eigenvalues". 1e-3 is also the authors', of an error that is n^2 / d^2
      times as large (`sigma.eigenvalues`).
    residual: the block's `ResidualScale`, shared with it; a new one if None.
    orthogonal_map: in `orthogonal.MAPS`.
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
    """Returns the weights of the mixture, and Sigma: `carry`, if there is one.

    Args:
      x: [b, n, d], embedded tokens where carry is None.
      mask: [b, n], True at tokens.
      carry: Sigma, or None before the first layer.
    """
    d = x.shape[-1]
    if self.num_experts < 1:
      raise UserError(
        f"num_experts={self.num_experts}: at least one is needed."
      )
    shape = (self.num_experts, d, d)
    # Parameters: residual scale, rotations of all experts, and the gate.
    a = (self.residual or ResidualScale(1, name="residual"))()
    u = rotation(self, "u", shape, self.orthogonal_map)
    v = rotation(self, "v", shape, self.orthogonal_map)
    if choose("gating", self.gating, GATINGS) == "paper":
      w = self.param("gate", nn.initializers.normal(d**-0.5), (d,))
    else:  # Small, for the layer is divided by what grows with it.
      init = nn.initializers.normal(0.1 * d**-0.5)
      w = self.param("gate", init, (self.num_experts, d))
    # The first layer makes Sigma; the later ones receive it as the carry.
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
  def layers(self, num_layers: int) -> TransJectLayers:
    """Returns the layers around this mixer as pure functions."""
    return TransJectLayers(
      num_layers,
      self.gating,
      self.sigma,
      self.reconstruction_weight,
      self.orthogonal_map,
      jnp.dtype(self.dtype),
    )

  def _first_sigma(self, x: jax.Array, mask: jax.Array) -> jax.Array:
    d = x.shape[-1]
    if choose("sigma", self.sigma, SIGMAS) == "learned":
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

  x + a G(x) with G the mixture of experts, then x + a H(x) with H the
  orthogonal feed-forward. G and H are 1-Lipschitz and a < 1/L, so distances of
  two tokens of one sample change by (1 - a)^2 to (1 + a)^2.

  Source: TransJect, equations 5 to 8.

  Attributes:
    mixer: makes the `TransJect`; called with a name and the shared `residual`.
    num_layers: number L of layers of the encoder.
    layer: index of this layer, from 0; not used here.
    orthogonal_map: in `orthogonal.MAPS`.
    dtype: compute type; parameters are float32.
  """

  concatenate_positions: ClassVar[bool] = True
  final_norm: ClassVar[bool] = False
  # Stacked matrices that every token meets one after the other: they are not
  # spread over devices as experts are.
  in_turn: ClassVar[tuple[str, ...]] = ("feed_forward",)

  mixer: Callable[..., TransJect]
  num_layers: SmallCount
  layer: int = 0
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
    # Apply the layer as the same pure function that the inverse undoes.
    layers = mixer.layers(self.num_layers)
    y, side = layers.forward(Weights(experts, w, bias), x, sigma, mask)
    self.sow("intermediates", layers.side_name, side)
    return y, sigma

  @nn.nowrap
  def invertible(self) -> TransJectLayers | None:
    """Returns all layers as pure functions, for an unbound block.

    None for classes made of these, whose forward pass may differ.
    """
    mixer = self.mixer(parent=None)
    if type(self) is not Injective or type(mixer) is not TransJect:
      return None
    return mixer.layers(self.num_layers)

  @nn.nowrap
  def derive(
    self, params: Mapping[str, Any], rotations: Mapping[str, Any]
  ) -> dict[str, Any]:
    """Returns the products that a step makes of the parameters of all layers.

    Args:
      params: parameters of the stack of layers.
      rotations: its orthogonal matrices.
    """
    return fold(params, rotations, self.orthogonal_map)
