"""Isometric layers as pure functions: forward, inverse and certificate.

F X = filter(X Q_1) Q_2, with rotations Q and all-pass filters on the ring of
tokens, preserves the distance of two sequences: |F X - F Y| = |X - Y|. The
nonlinearity after F acts on each token separately, and changes distances by a
factor from 1 - a to 1 + a.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformers import orthogonal
from jaxformers.foundations.ranges import refuse_unused
from jaxformers.foundations.registry import choose
from jaxformers.models.blocks.fixed_point import enough_steps, solve
from jaxformers.models.blocks.invertible import (
  Bound,
  Change,
  InvertibleLayers,
)
from jaxformers.models.isometric.ring import ring_filter, spread_dilations
from jaxformers.models.mixers.allpass import Sections
from jaxformers.models.parallel import product
from jaxformers.models.transject.layer import (
  orthogonal_feed_forward,
  residual_weight,
)
from jaxformers.models.variables import find_rotations

FORMS = ("pointwise", "feed_forward")
BOUNDS = ("budget", "wide")


class Weights(NamedTuple):
  """Weights of a layer.

  Attributes:
    mixing: orthogonal matrices Q_1 and Q_2, [2, d, d].
    sections: parameters of the filter on d / 2 complex channels.
    a: strength of the nonlinearity, float32 scalar in [0, 1).
    bias: bias of the form "pointwise", [1, d], or of "feed_forward", [2, d].
    feed_forward: orthogonal matrices of the feed-forward, [2, d, d]; None for
      the form "pointwise".
  """

  mixing: jax.Array
  sections: Sections
  a: jax.Array
  bias: jax.Array
  feed_forward: jax.Array | None = None


def check_bound(block: Any) -> None:
  """Raises UserError for an unknown `a`, or for an `a_max` without effect."""
  if choose("a", block.a, BOUNDS) == "budget":
    reason = "a='budget' sets the bound: set a='wide', or remove it."
    refuse_unused(block, ("a_max",), reason)


def strength(r: jax.Array, num_layers: int, a: str, a_max: float) -> jax.Array:
  """Returns the strength a of a layer, in [0, 1), from an unconstrained r.

  Args:
    r: unconstrained scalar; alpha = |tanh r|.
    num_layers: number L of layers.
    a: "budget" for a = 1 - (1 - alpha / L)^2, with which distances shrink and
      grow at most as in a layer of TransJect; "wide" for a = alpha a_max.
    a_max: greatest a with a="wide".
  """
  alpha = residual_weight(r)
  if a == "wide":
    return a_max * alpha
  return jnp.minimum(1 - jnp.square(1 - alpha / num_layers), 1 - 1e-6)


def fold(u: jax.Array, a: jax.Array) -> jax.Array:
  """Returns psi(u) = u + a |u|, whose slopes are 1 + a and 1 - a."""
  return u + a * jnp.abs(u)


def unfold(y: jax.Array, a: jax.Array) -> jax.Array:
  """Inverts `fold`: returns the u with fold(u, a) = y."""
  return y / jnp.where(y > 0, 1 + a, 1 - a)


@dataclasses.dataclass(frozen=True)
class IsometricLayers(InvertibleLayers):
  """Layers of the block `isometric`.

  The form "pointwise" is psi(F X + b) with psi(u) = u + a |u|, and is inverted
  in closed form. The form "feed_forward" is Z = F X, then Z + a H(Z) with
  TransJect's orthogonal feed-forward H; a fixed point per token inverts it.

  Source: the filter is Schroeder's comb reverberator (1961) closed to a ring;
  TransJect, equations 7 and 8, for H.

  Attributes:
    num_layers: number of layers.
    form: form of the layers, in `FORMS`.
    a, a_max: see `strength`.
    dilations: dilation, in tokens, of each group of channels; () for
      `ring.spread_dilations`.
    max_len: greatest number of tokens.
    orthogonal_map: name of the map to the rotations, in `orthogonal.MAPS`.
    dtype: compute type of products; filters are float32 or wider.
    activation: activation of H.
  """

  num_layers: int
  form: str
  a: str
  a_max: float
  dilations: tuple[int, ...]
  max_len: int
  orthogonal_map: str
  dtype: Any
  activation: str = "elu"

  def weights(self, variables: Mapping[str, Any]) -> list[Weights]:
    """Returns the weights of every layer."""
    params = variables["params"]
    rotations = find_rotations(variables, self.orthogonal_map)
    name = functools.partial(
      orthogonal.parameter_name, orthogonal_map=self.orthogonal_map
    )

    # Collect the parameters and the orthogonal matrices of one layer.
    def layer_weights(layer: str) -> Weights:
      free, matrices = params[layer], rotations[layer]
      return Weights(
        matrices[name("mixing")],
        Sections(free["decay"], free["angle"]),
        self.strength(free["alpha"]),
        free["bias"],
        matrices.get(name("feed_forward")),
      )

    return [layer_weights(f"layer_{i}") for i in range(self.num_layers)]

  def strength(self, r: jax.Array) -> jax.Array:
    """Returns the strength a of a layer from its unconstrained parameter r."""
    return strength(r, self.num_layers, self.a, self.a_max)

  def mix(
    self,
    weights: Weights,
    x: jax.Array,
    mask: jax.Array,
    *,
    inverse: bool = False,
  ) -> jax.Array:
    """Returns F x, or F^-1 x with `inverse`, [b, n, d] in float32 or wider."""
    # The inverse applies the transposes Q_2.T and Q_1.T.
    matrices = weights.mixing.astype(self.dtype)
    if inverse:
      matrices = matrices[::-1].swapaxes(1, 2)
    # Rotate, filter on the ring, rotate.
    first, second = matrices
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y = product(x.astype(self.dtype), first).astype(wide)
    dilations = self.dilations or spread_dilations(x.shape[-1], self.max_len)
    y = ring_filter(y, weights.sections, mask, dilations, inverse=inverse)
    return product(y.astype(self.dtype), second).astype(wide)

  def forward(
    self,
    weights: Weights,
    x: jax.Array,
    shared: None,
    mask: jax.Array,
    side: None = None,
  ) -> tuple[jax.Array, None]:
    """Returns the output, and None: the inverse needs no side information."""
    # F x, then psi or the residual feed-forward.
    z = self.mix(weights, x, mask)
    if weights.feed_forward is None:
      return fold(z + weights.bias.astype(z.dtype)[None], weights.a), None
    return z + self._feed_forward(weights, z), None

  def _feed_forward(self, weights: Weights, z: jax.Array) -> jax.Array:
    assert weights.feed_forward is not None
    y = orthogonal_feed_forward(
      z.astype(self.dtype), weights.feed_forward, weights.bias, self.activation
    )
    return weights.a * y.astype(z.dtype)

  def inverse(
    self,
    weights: Weights,
    y: jax.Array,
    shared: None,
    mask: jax.Array,
    side: None,
    *,
    constants: Mapping[str, Any] | None = None,
    max_steps: int | None = None,
  ) -> jax.Array:
    """Returns the layer's input; see `InvertibleLayers.inverse`."""
    # Invert psi(F X + b) in closed form.
    if weights.feed_forward is None:
      z = unfold(y, weights.a) - weights.bias.astype(y.dtype)[None]
      return self.mix(weights, z, mask, inverse=True)
    # Invert Z + a H(Z) by a fixed point, then F.
    rate = (constants or {"feed_forward": weights.a})["feed_forward"]
    z, _ = solve(
      y,
      lambda z: self._feed_forward(weights, z),
      rate,
      mask,
      max_steps=self.max_steps() if max_steps is None else max_steps,
      dtype=self.dtype,
    )
    return self.mix(weights, z, mask, inverse=True)

  def reversible_layers(self) -> int:
    """Returns how many layers in succession are inverted in training.

    In the form "pointwise" an inverse divides by 1 + a and 1 - a. Averaged
    over both signs, it multiplies the relative size of a rounding error by
    (1 + a^2) / (1 - a^2). The error may reach 1e-3 with the greatest a.
    """
    if self.form != "pointwise":
      return self.num_layers
    a = min(self.a_max if self.a == "wide" else self._budget(), 1 - 1e-6)
    factor = math.log((1 + a**2) / (1 - a**2))
    allowed = math.log(1e-3 / (float(jnp.finfo(self.dtype).eps) / 2))
    if allowed < 0:
      return 0
    # Compare without a division, because a may be 0.
    if factor * self.num_layers <= allowed:
      return self.num_layers
    return math.floor(allowed / factor)

  def _budget(self) -> float:
    """Returns the greatest strength with a="budget"."""
    return 1 - (1 - 1 / self.num_layers) ** 2

  def max_steps(self) -> int:
    """Returns the greatest number of fixed-point steps that float64 needs."""
    return enough_steps(self.a_max if self.a == "wide" else self._budget())

  def constants(self, weights: Weights, shared: None) -> dict[str, float]:
    """Returns the Lipschitz constant `a` |W_1| |W_2| of the feed-forward.

    The norms are singular values in float64.
    """
    if weights.feed_forward is None:
      return {}
    return {"feed_forward": float(weights.a) * _norms(weights.feed_forward)[1]}

  def certificate(
    self, weights: Weights, shared: None, norm: float
  ) -> dict[str, Any]:
    """Returns the strength `a`, and the factors of distances of sequences.

    The interval holds for all sequences with equal masks, in the Frobenius
    norm. It uses the actual singular values of the rotations. There is no
    interval for two tokens of one sample, since the filter mixes them.
    """
    least, greatest = _norms(weights.mixing)
    a = float(weights.a)
    if weights.feed_forward is not None:
      a = self.constants(weights, shared)["feed_forward"]
    # Multiply the singular values of the rotations and the slopes.
    interval = least * max(0.0, 1 - a), greatest * (1 + a)
    return {"a": float(weights.a), "sequences": interval}

  def bound(
    self, weights: Weights, shared: None, *, exact: bool = True
  ) -> Bound:
    """Returns bounds of the output's change: see `InvertibleLayers.bound`.

    The filter preserves the norm of the mean over the ring, because the mean
    is the component of frequency 0. The nonlinearity acts on each token
    separately, and adds at most a |difference|.
    """
    greatest = 1.0
    rate: jax.Array | float = weights.a
    if exact:
      _, greatest = _norms(weights.mixing)
      constants = self.constants(weights, shared)
      rate = constants.get("feed_forward", float(weights.a))

    # Multiply by the bound of F, then apply the bound of a residual branch.
    def move(change: Change, n: Any) -> Change:
      norm, mean = greatest * change.norm, greatest * change.mean
      turned = Change.within(norm, n)._replace(mean=mean)
      return turned.add_branch(rate, n)

    return move


def _norms(matrices: jax.Array) -> tuple[float, float]:
  """Returns the products of the least and of the greatest singular values.

  Args:
    matrices: matrices of one layer, [k, d, d].
  """
  values = np.linalg.svd(np.asarray(matrices, np.float64), compute_uv=False)
  return float(values.min(-1).prod()), float(values.max(-1).prod())
