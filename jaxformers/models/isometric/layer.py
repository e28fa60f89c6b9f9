"""Isometric layers as pure functions: forward, inverse and certificate.

F X = filter(X Q_1) Q_2 with rotations Q and all-pass filters on the ring of
tokens keeps every distance of two sequences: |F X - F Y| = |X - Y|. What
follows it acts on every token alone, and changes distances by 1 - a to 1 + a.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformers import orthogonal
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
    mixing: Q_1 and Q_2, [2, d, d], orthogonal.
    sections: eigenvalues of the filter on d / 2 complex channels.
    a: float32 scalar in [0, 1).
    bias: [1, d]; or [2, d] of the feed-forward.
    feed_forward: [2, d, d], orthogonal; None for the form "pointwise".
  """

  mixing: jax.Array
  sections: Sections
  a: jax.Array
  bias: jax.Array
  feed_forward: jax.Array | None = None


def strength(r: jax.Array, num_layers: int, a: str, a_max: float) -> jax.Array:
  """Returns the a of a layer from an unconstrained r, a scalar in [0, 1).

  Args:
    r: free number; alpha = |tanh r|.
    num_layers: number L of layers.
    a: "budget" for 1 - (1 - alpha / L)^2, so that no distance shrinks more than
      in a layer of TransJect, or grows more; "wide" for alpha a_max.
    a_max: greatest a of "wide".
  """
  alpha = residual_weight(r)
  if a == "wide":
    return a_max * alpha
  return jnp.minimum(1 - jnp.square(1 - alpha / num_layers), 1 - 1e-6)


def fold(u: jax.Array, a: jax.Array) -> jax.Array:
  """Returns u + a |u|, whose slopes are 1 + a and 1 - a."""
  return u + a * jnp.abs(u)


def unfold(y: jax.Array, a: jax.Array) -> jax.Array:
  """Returns the u with fold(u, a) = y."""
  return y / jnp.where(y > 0, 1 + a, 1 - a)


@dataclasses.dataclass(frozen=True)
class IsometricLayers(InvertibleLayers):
  """The layers of the block `isometric`.

  Form "pointwise": psi(F X + b) with psi(u) = u + a |u|, undone in closed form.
  Form "feed_forward": Z = F X, then Z + a H(Z) with TransJect's orthogonal
  feed-forward H, of which every token is undone by a fixed point.

  Source: the filter is Schroeder's comb reverberator (1961) closed to a ring;
  TransJect, equations 7 and 8, for H.

  Attributes:
    num_layers: number of layers.
    form: in `FORMS`.
    a, a_max: see `strength`.
    dilations: tokens between two steps of each group of channels; () for
      those of `ring.spread_dilations`.
    max_len: greatest number of tokens.
    orthogonal_map: in `orthogonal.MAPS`.
    dtype: compute type of products; filters are float32 or wider.
  """

  num_layers: int
  form: str
  a: str
  a_max: float
  dilations: tuple[int, ...]
  max_len: int
  orthogonal_map: str
  dtype: Any

  def weights(self, variables: Mapping[str, Any]) -> list[Weights]:
    """Returns the weights of every layer."""
    params = variables["params"]
    rotations = find_rotations(variables, self.orthogonal_map)
    name = functools.partial(
      orthogonal.parameter_name, orthogonal_map=self.orthogonal_map
    )

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
    """Returns a of a layer from its free parameter."""
    return strength(r, self.num_layers, self.a, self.a_max)

  def mix(
    self,
    weights: Weights,
    x: jax.Array,
    mask: jax.Array,
    *,
    inverse: bool = False,
  ) -> jax.Array:
    """Returns F X, or the X with F X = x; float32 or wider, [b, n, d]."""
    matrices = weights.mixing.astype(self.dtype)
    if inverse:
      matrices = matrices[::-1].swapaxes(1, 2)
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
    """Returns the layer's output; its inverse needs nothing beside it."""
    z = self.mix(weights, x, mask)
    if weights.feed_forward is None:
      return fold(z + weights.bias.astype(z.dtype)[None], weights.a), None
    return z + self._feed_forward(weights, z), None

  def _feed_forward(self, weights: Weights, z: jax.Array) -> jax.Array:
    assert weights.feed_forward is not None
    y = orthogonal_feed_forward(
      z.astype(self.dtype), weights.feed_forward, weights.bias
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
    if weights.feed_forward is None:
      z = unfold(y, weights.a) - weights.bias.astype(y.dtype)[None]
      return self.mix(weights, z, mask, inverse=True)
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

  def max_steps(self) -> int:
    """Returns how many steps of the fixed point float64 needs at the most."""
    budget = 1 - (1 - 1 / self.num_layers) ** 2
    return enough_steps(self.a_max if self.a == "wide" else budget)

  def constants(self, weights: Weights, shared: None) -> dict[str, float]:
    """Returns a |W_1| |W_2| of the feed-forward, by float64 singular values."""
    if weights.feed_forward is None:
      return {}
    return {"feed_forward": float(weights.a) * _norms(weights.feed_forward)[1]}

  def certificate(
    self, weights: Weights, shared: None, norm: float
  ) -> dict[str, Any]:
    """Returns a, and by how much the distance of two sequences may change.

    For all sequences of one mask, in the Frobenius norm. The rotations count
    with their actual singular values. Tokens of one sample meet in the filter,
    so that nothing is said of their distances.
    """
    least, greatest = _norms(weights.mixing)
    a = float(weights.a)
    if weights.feed_forward is not None:
      a = self.constants(weights, shared)["feed_forward"]
    interval = least * max(0.0, 1 - a), greatest * (1 + a)
    return {"a": float(weights.a), "sequences": interval}

  def bound(
    self, weights: Weights, shared: None, *, exact: bool = True
  ) -> Bound:
    """Returns bounds of the output: see `InvertibleLayers.bound`.

    The mean over a ring is its frequency 0, whose norm the filter keeps; what
    follows acts on tokens, and adds at most a |difference|.
    """
    greatest = 1.0
    rate: jax.Array | float = weights.a
    if exact:
      _, greatest = _norms(weights.mixing)
      constants = self.constants(weights, shared)
      rate = constants.get("feed_forward", float(weights.a))

    def move(change: Change, n: Any) -> Change:
      turned = Change(*(greatest * size for size in change))
      return turned.add_branch(rate, n)

    return move


def _norms(matrices: jax.Array) -> tuple[float, float]:
  """Returns products of the least and the greatest singular values."""
  values = np.linalg.svd(np.asarray(matrices, np.float64), compute_uv=False)
  return float(values.min(-1).prod()), float(values.max(-1).prod())
