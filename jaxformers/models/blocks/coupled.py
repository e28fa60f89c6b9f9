"""Coupled layers, which make any mixer invertible.

A layer splits the channels into two halves, and updates one half from the other
in turn.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import (
  Deviation,
  Fraction,
  PositiveShare,
  Size,
  SmallCount,
)
from jaxformers.foundations.registry import choose
from jaxformers.models.activations import ACTIVATIONS, SLOPES
from jaxformers.models.blocks.contract import BLOCKS
from jaxformers.models.blocks.invertible import (
  KEYS,
  Bound,
  Change,
  InvertibleLayers,
  Shared,
  lesser,
)
from jaxformers.models.blocks.two_branches import dense
from jaxformers.models.dropout import make_dropout
from jaxformers.models.mixer import bounded_distance
from jaxformers.models.norm import NORMS

PER_TOKEN = ("layer", "rms", "scale", "none")  # Norms of one token.


@BLOCKS.register("coupled")
class Coupled(nn.Module):
  """Coupled layer: y1 = x1 + F(norm x2), then y2 = x2 + G(norm y1).

  x1 and x2 are the halves of the channels, F is any mixer, and G is a
  feed-forward, W2 GELU(W1 x). For all F and G the layer is a bijection of
  sequences. Its inverse is x2 = y2 - G(norm y1), then x1 = y1 - F(norm x2). The
  inverse needs no iteration, and its only error is the rounding of four sums.
  So the layer can be trained in the memory of one layer
  (`model.memory="reversible"`), also with dropout.

  With norm_type="none" and a mixer that has a Lipschitz constant, the layer has
  a Lipschitz constant: see `CoupledLayers.certificate`.

  Source: Gomez et al. 2017, https://arxiv.org/abs/1707.04585, equation 8, after
  Dinh et al. 2015, https://arxiv.org/abs/1410.8516. Kitaev et al. 2020
  (Reformer) use it with attention, to save memory.

  Attributes:
    mixer: factory of the mixer, which has d / 2 channels; called with a name.
    num_layers: number of layers of the encoder.
    layer: index of this layer, from 0; not used here.
    mlp_dim: width of the feed-forward.
    activation: activation of the feed-forward.
    dropout_rate: dropout rate after the mixer, inside and after the
      feed-forward.
    norm_type: norm of all layers and of the end of the encoder, "layer", "rms"
      or "scale"; "none" for no norms.
    norm_epsilon: epsilon of every norm.
    init_std: standard deviation of the feed-forward's kernels at
      initialization; 0 for Xavier's initializer.
    dtype: compute type; parameters and norms are float32.
  """

  concatenate_positions: ClassVar[bool] = False

  mixer: Callable[..., nn.Module]
  num_layers: SmallCount
  layer: int = 0
  mlp_dim: Size = 128
  activation: str = "gelu"
  dropout_rate: Fraction = 0.0
  norm_type: str = "layer"
  norm_epsilon: PositiveShare = 1e-5
  init_std: Deviation = 0.0
  dtype: Any = jnp.float32

  @property
  def final_norm(self) -> bool:
    """True for a norm at the end of the encoder."""
    return self.norm_type != "none"

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    *,
    mask: jax.Array,
    carry: Any,
    train: bool,
    inverse: bool = False,
  ) -> tuple[jax.Array, Any]:
    """Returns the output of the layer for x; with `inverse`, its input."""
    d = x.shape[-1]
    self._check_options(d)
    # Draw the keys before the branches, so that both directions use the same.
    dropouts = [
      make_dropout(self, self.dropout_rate, train=train) for _ in range(3)
    ]
    mixer = self.mixer(name="mixer")

    # F, on half of the channels.
    def mix(x: jax.Array) -> tuple[jax.Array, Any]:
      y, new = mixer(
        self._norm(x, "norm_mixer"), mask=mask, carry=carry, train=train
      )
      return dropouts[0](y).astype(x.dtype), new

    # G, on half of the channels.
    def feed_forward(x: jax.Array) -> jax.Array:
      activation = ACTIVATIONS[
        choose("activation", self.activation, ACTIVATIONS)
      ]
      start = (self.init_std, self.dtype)
      y = dense(self._norm(x, "norm_mlp"), self.mlp_dim, "up", *start)
      y = dense(dropouts[1](activation(y)), d // 2, "down", *start)
      return dropouts[2](y).astype(x.dtype)

    first, second = jnp.split(x, 2, -1)
    # Invert: x2 = y2 - G(norm y1), then x1 = y1 - F(norm x2).
    if inverse:
      second = second - feed_forward(first)
      change, carry = mix(second)
      return jnp.concatenate([first - change, second], -1), carry
    # Apply: y1 = x1 + F(norm x2), then y2 = x2 + G(norm y1).
    change, carry = mix(second)
    first = first + change
    return jnp.concatenate([first, second + feed_forward(first)], -1), carry

  def _check_options(self, d: int) -> None:
    if d % 2:
      raise UserError(
        f"d_model={d} is odd, but coupled layers split the channels into "
        "halves: choose an even d_model."
      )
    choose("norm of coupled halves", self.norm_type, PER_TOKEN)

  def _norm(self, x: jax.Array, name: str) -> jax.Array:
    if self.norm_type == "none":
      return x
    return NORMS[self.norm_type](self.norm_epsilon, name=name)(x)

  @nn.nowrap
  def invertible(self) -> CoupledLayers | None:
    """Returns all layers as pure functions, or None if there is no inverse.

    If layers differ by their number (`Attention.differs_by_layer`), an inverse
    does not have the carry of each. The result is then None.
    """
    if getattr(self.mixer(parent=None), "differs_by_layer", False):
      return None
    return CoupledLayers(self.num_layers, jnp.dtype(self.dtype), self)


@dataclasses.dataclass(frozen=True)
class CoupledLayers(InvertibleLayers):
  """Layers of `Coupled` as pure functions. They share the first mixer's carry.

  Attributes:
    num_layers: number of layers.
    dtype: compute type.
    block: unbound layer.
  """

  num_layers: int
  dtype: Any
  block: Coupled

  def weights(self, variables: Mapping[str, Any]) -> list[Any]:
    """Returns the collections of every layer; in training, also its key."""
    layers = [self._collections(variables, i) for i in range(self.num_layers)]
    # Drop entries that only the first layer has: it uses them only to make the
    # carry, see `shared`.
    return [_like(layer, layers[-1]) for layer in layers]

  def _collections(
    self, variables: Mapping[str, Any], layer: int
  ) -> dict[str, Any]:
    """Returns all collections of a layer; in training, also its key."""
    name = f"layer_{layer}"
    collections = {
      kind: tree[name]
      for kind, tree in variables.items()
      if kind in ("params", "rotations", "random") and name in tree
    }
    # Keys exist only in training.
    keys = variables.get(KEYS)
    mixer = self.block.mixer(parent=None)
    tools = getattr(getattr(mixer, "signature", None), "tools", ())
    # Add the arrays that the mixer draws once, if it does not redraw them.
    if "draw" in tools and not (mixer.redraw and keys is not None):
      collections.setdefault("random", self._draw(collections, layer))
    return collections | ({} if keys is None else {KEYS: keys[layer]})

  def _draw(self, collections: Mapping[str, Any], layer: int) -> dict[str, Any]:
    """Returns the arrays that a layer's mixer draws as part of an encoder.

    They depend on the path and on the greatest length of the mixer, but not on
    the tokens.
    """
    # Build the layer with the options of the unbound block, at the path
    # "encoder/layer_i".
    options = {
      field.name: getattr(self.block, field.name)
      for field in dataclasses.fields(self.block)
      if field.name not in ("parent", "name")
    }
    name = f"layer_{layer}"
    inside = functools.partial(
      _Around, functools.partial(Coupled, **options), name
    )
    up = collections["params"]["up"]["kernel"]
    length = self.block.mixer(parent=None).max_len
    # Apply it to zeros, and return the arrays that it draws.
    example = jnp.zeros((1, length, 2 * up.shape[0]))
    _, drawn = _Around(inside, "encoder").apply(
      {kind: {"encoder": {name: tree}} for kind, tree in collections.items()},
      example,
      mask=jnp.ones((1, length), bool),
      carry=None,
      train=False,
      mutable=["random"],
    )
    return drawn["random"]["encoder"][name] if drawn else {}

  def shared(
    self, variables: Mapping[str, Any], x: jax.Array, mask: jax.Array
  ) -> Shared:
    """Returns the carry and the sown losses of the first layer's mixer."""
    weights = self._collections(variables, 0)
    (_, carry), sown = self._apply(weights, x, mask, None, mutable=["losses"])
    losses = {
      name: value[0]
      for name, value in sown.get("losses", {}).get("mixer", {}).items()
    }
    return Shared(carry, {"losses": losses})

  def forward(
    self,
    weights: Any,
    x: jax.Array,
    shared: Any,
    mask: jax.Array,
    side: None = None,
  ) -> tuple[jax.Array, None]:
    """Returns the output of the layer, and None: its inverse needs no side."""
    return self._apply(weights, x, mask, shared)[0], None

  def inverse(
    self,
    weights: Any,
    y: jax.Array,
    shared: Any,
    mask: jax.Array,
    side: None,
    *,
    constants: Mapping[str, Any] | None = None,
    max_steps: int = 0,
  ) -> jax.Array:
    """Returns the input of the layer, in closed form."""
    del side, constants, max_steps
    return self._apply(weights, y, mask, shared, inverse=True)[0]

  def _rates(self, weights: Any) -> tuple[float, float] | None:
    """Returns Lipschitz constants (f, g) of F and G in float64, or None.

    They are for the Frobenius norm of whole sequences.
    """
    block = self.block
    mixer = block.mixer(parent=None)
    if block.norm_type != "none" or bounded_distance(mixer) != "sequences":
      return None
    # f is the gain of the mixer; g is |W2| |W1| times the activation's slope.
    collections = {
      kind: tree["mixer"]
      for kind, tree in weights.items()
      if kind != KEYS and "mixer" in tree
    }
    up, down = (
      np.linalg.norm(np.asarray(weights["params"][name]["kernel"], float), 2)
      for name in ("up", "down")
    )
    return mixer.gain(collections), SLOPES[block.activation] * float(up * down)

  def certificate(
    self, weights: Any, shared: Any, norm: float
  ) -> dict[str, Any]:
    """Returns the Lipschitz constants of F and G, and the interval `sequences`.

    Each of the two updates of the layer, and its inverse, changes a distance by
    a factor of at most s = (f + sqrt(f^2 + 4)) / 2, the norm of
    [[1, f], [0, 1]]. The result is {} if the layer has norms, or if the mixer
    has no Lipschitz constant.
    """
    del shared, norm
    rates = self._rates(weights)
    if rates is None:
      return {}
    # The layer composes both updates, so the factors multiply.
    greatest = math.prod(map(_shear, rates))
    f, g = rates
    interval = 1 / greatest, greatest
    return {"mixer": f, "feed_forward": g, "sequences": interval}

  def bound(
    self, weights: Any, shared: Any, *, exact: bool = True
  ) -> Bound | None:
    """Returns bounds on the change of the output: see `InvertibleLayers.bound`.

    The result is None if there is no certificate, and for exact=False.
    """
    del shared
    rates = self._rates(weights) if exact else None
    if rates is None:
      return None

    def move(change: Change, n: Any) -> Change:
      # Each update adds a branch of one half to the other half.
      for rate in rates:
        # Bound mean and norm, and use norm / sqrt(n) if it is the better bound.
        mean = change.mean + rate * change.norm / n**0.5
        norm = _shear(rate) * change.norm
        mean = lesser(mean, norm / n**0.5)
        change = Change.within(norm, n)._replace(mean=mean)
      return change

    return move

  def _apply(
    self, weights: Any, x: jax.Array, mask: jax.Array, carry: Any, **how: Any
  ) -> Any:
    """Applies the layer; it is in training if there is a key."""
    collections = {k: v for k, v in weights.items() if k != KEYS}
    rngs = None
    if KEYS in weights:
      key = jax.random.wrap_key_data(weights[KEYS])
      # Derive separate streams for dropout and for redrawn arrays.
      rngs = {"dropout": key, "random": jax.random.fold_in(key, 1)}
    return self.block.apply(
      collections,
      x,
      mask=mask,
      carry=carry,
      train=rngs is not None,
      rngs=rngs,
      **how,
    )


def _shear(rate: float) -> float:
  """Returns the norm of [[1, rate], [0, 1]]."""
  return (rate + math.sqrt(rate**2 + 4)) / 2


def _like(tree: Any, other: Any) -> Any:
  """Returns the entries of nested mappings whose names are also in `other`."""
  if not isinstance(other, Mapping):
    return tree
  return {name: _like(tree[name], below) for name, below in other.items()}


class _Around(nn.Module):
  """Wrapper that calls a module under a name, so that its path has the name."""

  make: Callable[..., nn.Module]
  child: str

  @nn.compact
  def __call__(self, *args: Any, **options: Any) -> Any:
    return self.make(name=self.child)(*args, **options)
