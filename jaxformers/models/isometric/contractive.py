"""Residual layers whose mixer is nonexpansive (1-Lipschitz).

The layer is TransJect's with another mixer M: x + a M(x), then y + a H(y) with
the orthogonal feed-forward H. It changes the distance of two sequences by a
factor from (1 - a)^2 to (1 + a)^2. Fixed-point iterations invert it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Fraction, SmallCount
from jaxformers.models.blocks.contract import BLOCKS
from jaxformers.models.blocks.fixed_point import LENGTHS, enough_steps, solve
from jaxformers.models.blocks.invertible import (
  Bound,
  Change,
  InvertibleLayers,
)
from jaxformers.models.isometric.layer import check_bound
from jaxformers.models.mixer import bounded_distance
from jaxformers.models.transject.layer import (
  interval,
  orthogonal_feed_forward,
  residual_weight,
)
from jaxformers.models.variables import find_rotations, rotation
from jaxformers.models.variants import ALWAYS, MODELS


@BLOCKS.register("contractive")
class Contractive(nn.Module):
  """x + a M(x), then y + a H(y), for a nonexpansive mixer M.

  H is TransJect's orthogonal feed-forward. The encoder is injective and
  Lipschitz as a function of the whole sequence: distances change by factors
  from the product of (1 - a)^2 to the product of (1 + a)^2 over its layers. If
  M is causal, the layer and its inverse are causal.

  Source: TransJect, equations 5 to 8, with M instead of the mixture.

  Attributes:
    mixer: function of a name that returns the mixer, which must be bounded
      (`models.mixer`).
    num_layers: number L of layers of the encoder.
    layer: index of this layer, from 0; not used here.
    a: bound of a: "budget" for TransJect's a = alpha / L, or "wide" for a_max.
    a_max: greatest a with a="wide", below 1.
    activation: activation of H, "elu" or "maxmin".
    orthogonal_map: name of the map to the rotations, in `orthogonal.MAPS`.
    dtype: compute type; parameters are float32.
  """

  concatenate_positions: ClassVar[bool] = False
  final_norm: ClassVar[bool] = False
  in_turn: ClassVar[tuple[str, ...]] = ("mixing", "feed_forward")

  mixer: Callable[..., nn.Module]
  num_layers: SmallCount
  layer: int = 0
  a: str = "wide"
  a_max: Fraction = 0.9
  activation: str = "elu"
  orthogonal_map: str = "cayley"
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    *,
    mask: jax.Array,
    carry: Any,
    train: bool,
    branch: str = "",
  ) -> tuple[jax.Array, Any]:
    """Returns the layer's output, or only the output of one residual branch.

    Args:
      x: tokens, [b, n, d].
      mask: bool [b, n], True at tokens.
      carry: None, since these mixers do not use a carry.
      train: True in training.
      branch: "mixer" for a M(x), "feed_forward" for a H(x), or "" for the whole
        layer.
    """
    # Create the parameters.
    d = x.shape[-1]
    check_bound(self)
    a = self.strength(self.param("alpha", nn.initializers.constant(0.5), ()))
    mixer = self.mixer(name="mixer")
    w = rotation(self, "feed_forward", (2, d, d), self.orthogonal_map)
    bias = self.param("bias", nn.initializers.zeros, (2, d))

    # a M(x)
    def mix(x: jax.Array) -> jax.Array:
      y, _ = mixer(x.astype(self.dtype), mask=mask, carry=carry, train=train)
      # Add nothing to padding, so that the inverse restores it.
      y = jnp.where(mask[..., None], y, 0)
      return a.astype(x.dtype) * y.astype(x.dtype)

    # a H(x)
    def feed_forward(x: jax.Array) -> jax.Array:
      y = orthogonal_feed_forward(
        x.astype(self.dtype), w, bias, self.activation
      )
      return a.astype(x.dtype) * y.astype(x.dtype)

    # Return one branch, or the layer: x + a M(x), then y + a H(y).
    if branch == "mixer":
      return mix(x), carry
    if branch == "feed_forward":
      return feed_forward(x), carry
    x = x + mix(x)
    return x + feed_forward(x), carry

  @nn.nowrap
  def strength(self, r: jax.Array) -> jax.Array:
    """Returns a from the unconstrained parameter r: |tanh r| times a bound."""
    bound = self.a_max if self.a == "wide" else 1 / self.num_layers
    return bound * residual_weight(r)

  @nn.nowrap
  def invertible(self) -> ContractiveLayers:
    """Returns all layers as pure functions.

    Raises:
      UserError: if the mixer has no bound.
    """
    check_bound(self)
    # Check that the mixer is bounded.
    mixer = self.mixer(parent=None)
    if not bounded_distance(mixer):
      # List the models whose mixer is bounded.
      models = sorted(
        name
        for name, variant in MODELS.items()
        if (variant.block, variant.bounded) == ("contractive", ALWAYS)
      )
      raise UserError(
        "The block 'contractive' needs a nonexpansive mixer, but "
        f"{type(mixer).__name__} has no bound: use the mixer and the options "
        f"of one of the models {', '.join(models)}."
      )
    return ContractiveLayers(self.num_layers, jnp.dtype(self.dtype), self)


@dataclasses.dataclass(frozen=True)
class ContractiveLayers(InvertibleLayers):
  """Layers of the block `contractive`, inverted by two fixed points each.

  The distance of two sequences is the Frobenius norm of their difference, or
  for the attention of `mixers.nonexpansive` the greatest distance of two
  tokens.

  The fixed point of the mixer is computed for whole sequences, since the mixer
  is a contraction with respect to the distance of whole sequences.

  Attributes:
    num_layers: number of layers.
    dtype: compute type.
    block: an unbound `Contractive` module.
  """

  num_layers: int
  dtype: Any
  block: Contractive

  @property
  def distance(self) -> str:
    """Distance of sequences for which the bounds hold, in `LENGTHS`."""
    return bounded_distance(self.block.mixer(parent=None))

  @property
  def least_layers(self) -> int:  # type: ignore[override]
    """Least number of layers for which training may invert the layers."""
    return 1 if self.block.a == "wide" else 2

  def weights(self, variables: Mapping[str, Any]) -> list[Any]:
    """Returns the collections `params` and `rotations` of every layer."""
    rotations = find_rotations(variables, self.block.orthogonal_map)
    names = [f"layer_{i}" for i in range(self.num_layers)]
    return [
      {"params": variables["params"][name], "rotations": rotations[name]}
      for name in names
    ]

  def forward(
    self,
    weights: Any,
    x: jax.Array,
    shared: None,
    mask: jax.Array,
    side: None = None,
  ) -> tuple[jax.Array, None]:
    """Returns the layer's output, and None as the inverse needs no side."""
    del shared, side
    return self._apply(weights, x, mask), None

  def inverse(
    self,
    weights: Any,
    y: jax.Array,
    shared: None,
    mask: jax.Array,
    side: None,
    *,
    constants: Mapping[str, Any] | None = None,
    max_steps: int | None = None,
  ) -> jax.Array:
    """Returns the layer's input: inverts the feed-forward, then the mixer."""
    del shared, side
    # The contraction rates and the stopping rule of the iterations.
    a = self.block.strength(weights["params"]["alpha"])
    rates = constants or {"mixer": a, "feed_forward": a}
    how = {
      "max_steps": self.max_steps() if max_steps is None else max_steps,
      "dtype": self.dtype,
    }
    # Invert y + a H(y) for each token.
    middle, _ = solve(
      y,
      lambda z: self._apply(weights, z, mask, branch="feed_forward"),
      rates["feed_forward"],
      mask,
      **how,
    )
    # Invert x + a M(x) for each sequence, with padding 0.
    x, _ = solve(
      jnp.where(mask[..., None], middle, 0),
      lambda z: self._apply(weights, z, mask, branch="mixer"),
      rates["mixer"],
      mask.any(1),
      length=LENGTHS[self.distance],
      **how,
    )
    # The mixer adds nothing to padding, whose input is `middle`.
    return jnp.where(mask[..., None], x, middle)

  def max_steps(self) -> int:
    """Returns the greatest number of fixed-point steps that float64 needs."""
    budget = 1 / self.num_layers
    return enough_steps(self.block.a_max if self.block.a == "wide" else budget)

  def constants(self, weights: Any, shared: None) -> dict[str, float]:
    """Returns Lipschitz constants of both branches, in float64.

    They are a times the gain of the mixer, and a |W_1| |W_2|.
    """
    # The gain of the mixer.
    a = float(self.block.strength(weights["params"]["alpha"]))
    collections = {
      kind: tree["mixer"] for kind, tree in weights.items() if "mixer" in tree
    }
    gain = self.block.mixer(parent=None).gain(collections)
    # |W_1| |W_2| of the feed-forward.
    (w,) = (
      np.linalg.norm(np.asarray(matrices, np.float64), 2, (-2, -1)).prod()
      for name, matrices in weights["rotations"].items()
      if name.startswith("feed_forward")
    )
    return {"mixer": a * gain, "feed_forward": a * float(w)}

  def certificate(
    self, weights: Any, shared: None, norm: float
  ) -> dict[str, Any]:
    """Returns a, both constants, and the interval of two sequences.

    The interval is for the distance `distance`. There is no interval for two
    tokens of one sample, since the mixer mixes them.
    """
    constants = self.constants(weights, shared)
    bounds = interval(constants["mixer"], constants["feed_forward"])
    a = float(self.block.strength(weights["params"]["alpha"]))
    return {"a": a, **constants, self.distance: bounds}

  def bound(self, weights: Any, shared: None, *, exact: bool = True) -> Bound:
    """Returns bounds of the output's change: see `InvertibleLayers.bound`."""
    a = self.block.strength(weights["params"]["alpha"])
    rates: tuple[Any, ...] = (a, a)
    if exact:
      rates = tuple(self.constants(weights, shared).values())

    distance = self.distance

    # Apply the bound of a residual branch once per branch.
    def move(change: Change, n: Any) -> Change:
      for rate in rates:
        change = change.add_branch(rate, n, distance)
      return change

    return move

  def _apply(
    self, weights: Any, x: jax.Array, mask: jax.Array, branch: str = ""
  ) -> jax.Array:
    y, _ = self.block.apply(
      weights, x, mask=mask, carry=None, train=False, branch=branch
    )
    return y
