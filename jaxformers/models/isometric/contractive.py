"""Residual layers whose mixer is a contraction of whole sequences.

TransJect's layer with another mixer: x + a M(x), then y + a H(y) with the
orthogonal feed-forward H. Where M expands no distance of two sequences, the
layer changes these by (1 - a)^2 to (1 + a)^2, and a fixed point undoes it.
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
from jaxformers.foundations.registry import choose
from jaxformers.models.blocks.contract import BLOCKS
from jaxformers.models.blocks.fixed_point import enough_steps, solve
from jaxformers.models.blocks.invertible import (
  Bound,
  Change,
  InvertibleLayers,
)
from jaxformers.models.isometric.layer import BOUNDS
from jaxformers.models.transject.layer import (
  interval,
  orthogonal_feed_forward,
  residual_weight,
)
from jaxformers.models.variables import find_rotations, rotation
from jaxformers.models.variants import ALWAYS, MODELS


@BLOCKS.register("contractive")
class Contractive(nn.Module):
  """x + a M(x), then y + a H(y), for a mixer M that expands no distance.

  H is TransJect's orthogonal feed-forward. The encoder is injective and
  Lipschitz as a function of the whole sequence, with the products of (1 - a)^2
  and (1 + a)^2 over its layers as constants; if M reads earlier tokens alone,
  so do the layer and its inverse.

  Source: TransJect, equations 5 to 8, with M in place of the mixture.

  Attributes:
    mixer: makes the mixer, which is bounded (`is_bounded`, `gain`); called with
      a name.
    num_layers: number L of layers of the encoder.
    layer: index of this layer, from 0; not used here.
    a: "budget" for TransJect's a = alpha / L, or "wide", a up to a_max.
    a_max: greatest a of "wide", below 1.
    orthogonal_map: in `orthogonal.MAPS`.
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
    """Returns the layer of x; with `branch`, what that branch adds to x.

    Args:
      x: [b, n, d].
      mask: [b, n], True at tokens.
      carry: None: these mixers hand nothing on.
      train: True in training.
      branch: "mixer", "feed_forward", or "" for the layer.
    """
    d = x.shape[-1]
    choose("a", self.a, BOUNDS)
    a = self.strength(self.param("alpha", nn.initializers.constant(0.5), ()))
    mixer = self.mixer(name="mixer")
    w = rotation(self, "feed_forward", (2, d, d), self.orthogonal_map)
    bias = self.param("bias", nn.initializers.zeros, (2, d))

    def mix(x: jax.Array) -> jax.Array:
      y, _ = mixer(x.astype(self.dtype), mask=mask, carry=carry, train=train)
      # Padding passes as it is, so that it is undone, too.
      y = jnp.where(mask[..., None], y, 0)
      return a.astype(x.dtype) * y.astype(x.dtype)

    def feed_forward(x: jax.Array) -> jax.Array:
      y = orthogonal_feed_forward(x.astype(self.dtype), w, bias)
      return a.astype(x.dtype) * y.astype(x.dtype)

    if branch == "mixer":
      return mix(x), carry
    if branch == "feed_forward":
      return feed_forward(x), carry
    x = x + mix(x)
    return x + feed_forward(x), carry

  @nn.nowrap
  def strength(self, r: jax.Array) -> jax.Array:
    """Returns a of a layer from its free parameter: |tanh r| times a bound."""
    bound = self.a_max if self.a == "wide" else 1 / self.num_layers
    return bound * residual_weight(r)

  @nn.nowrap
  def invertible(self) -> ContractiveLayers:
    """Returns all layers as pure functions.

    Raises:
      UserError: for a mixer without a bound.
    """
    choose("a", self.a, BOUNDS)
    mixer = self.mixer(parent=None)
    if not getattr(mixer, "is_bounded", False):
      models = sorted(
        name
        for name, variant in MODELS.items()
        if (variant.block, variant.bounded) == ("contractive", ALWAYS)
      )
      raise UserError(
        "The block 'contractive' needs a mixer that expands no distance, and "
        f"{type(mixer).__name__} has no bound: take the mixer of one of the "
        f"models {', '.join(models)}, with its options."
      )
    return ContractiveLayers(self.num_layers, jnp.dtype(self.dtype), self)


@dataclasses.dataclass(frozen=True)
class ContractiveLayers(InvertibleLayers):
  """The layers of `Contractive`, each undone by two fixed points.

  The mixer's is one of whole sequences, since their distance is what it does
  not expand.

  Attributes:
    num_layers: number of layers.
    dtype: compute type.
    block: an unbound layer.
  """

  num_layers: int
  dtype: Any
  block: Contractive

  @property
  def least_layers(self) -> int:  # type: ignore[override]
    """Number of layers from which on training may undo them."""
    return 1 if self.block.a == "wide" else 2

  def weights(self, variables: Mapping[str, Any]) -> list[Any]:
    """Returns the collections of every layer."""
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
    """Returns the layer's output; its inverse needs nothing beside it."""
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
    """Returns the layer's input: the feed-forward is undone, then the mixer."""
    del shared, side
    a = self.block.strength(weights["params"]["alpha"])
    rates = constants or {"mixer": a, "feed_forward": a}
    how = {
      "max_steps": self.max_steps() if max_steps is None else max_steps,
      "dtype": self.dtype,
    }
    middle, _ = solve(
      y,
      lambda z: self._apply(weights, z, mask, branch="feed_forward"),
      rates["feed_forward"],
      mask,
      **how,
    )
    # A sequence is one vector to the iteration; padding is no part of it.
    shape = y.shape
    flat = jnp.where(mask[..., None], middle, 0).reshape(shape[0], -1)

    def mix(z: jax.Array) -> jax.Array:
      z = self._apply(weights, z.reshape(shape), mask, branch="mixer")
      return z.reshape(shape[0], -1)

    x, _ = solve(flat, mix, rates["mixer"], mask.any(1), **how)
    return jnp.where(mask[..., None], x.reshape(shape), middle)

  def max_steps(self) -> int:
    """Returns how many steps of a fixed point float64 needs at the most."""
    budget = 1 / self.num_layers
    return enough_steps(self.block.a_max if self.block.a == "wide" else budget)

  def constants(self, weights: Any, shared: None) -> dict[str, float]:
    """Returns a times the gain of the mixer, and a |W_1| |W_2|, in float64."""
    a = float(self.block.strength(weights["params"]["alpha"]))
    collections = {
      kind: tree["mixer"] for kind, tree in weights.items() if "mixer" in tree
    }
    gain = self.block.mixer(parent=None).gain(collections)
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

    Tokens of one sample meet in the mixer, so that nothing is said of their
    distances.
    """
    constants = self.constants(weights, shared)
    bounds = interval(constants["mixer"], constants["feed_forward"])
    a = float(self.block.strength(weights["params"]["alpha"]))
    return {"a": a, **constants, "sequences": bounds}

  def bound(self, weights: Any, shared: None, *, exact: bool = True) -> Bound:
    """Returns bounds of the output: see `InvertibleLayers.bound`."""
    a = self.block.strength(weights["params"]["alpha"])
    rates: tuple[Any, ...] = (a, a)
    if exact:
      rates = tuple(self.constants(weights, shared).values())

    def move(change: Change, n: Any) -> Change:
      for rate in rates:
        change = change.add_branch(rate, n)
      return change

    return move

  def _apply(
    self, weights: Any, x: jax.Array, mask: jax.Array, branch: str = ""
  ) -> jax.Array:
    y, _ = self.block.apply(
      weights, x, mask=mask, carry=None, train=False, branch=branch
    )
    return y
