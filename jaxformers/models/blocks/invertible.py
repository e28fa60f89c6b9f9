"""Contract of invertible layers, and reversible training.

A block with injective layers has a method `invertible`, which returns all
layers as pure functions of their weights: forward, inverse and certificate
(`InvertibleLayers`). Reversible training, `analysis.certificates` and the
property tests use only these functions, so they work for every such block.
"""

from __future__ import annotations

import abc
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.foundations.errors import UserError
from jaxformers.models.blocks.contract import BLOCKS
from jaxformers.models.blocks.fixed_point import MAX_STEPS
from jaxformers.models.variants import MODELS

# Collection of the random keys of the layers in training, uint32 [l, ...].
KEYS = "keys"
# Alternatives to storing activations for the backward pass.
LOOPED = ("recomputed", "reversible")
Interval = tuple[float, float]


class Shared(NamedTuple):
  """Values that all layers share, computed once from the embedded batch.

  Attributes:
    value: pytree of arrays, such as TransJect's Sigma; None for no values.
    sown: arrays to sow into Linen collections, {"losses": {"name": array}}.
  """

  value: Any
  sown: Mapping[str, Mapping[str, jax.Array]]

  def sow(self, module: nn.Module) -> None:
    """Sows `sown` into the collections of a module, during its call."""
    for collection, arrays in self.sown.items():
      for name, array in arrays.items():
        module.sow(collection, name, array)


class Change(NamedTuple):
  """Upper bounds on the change of a sequence of n tokens.

  Attributes:
    norm: bound on the Frobenius norm of the difference.
    total: bound on the sum over tokens of the norms of their differences.
    mean: bound on the norm of the difference of the means over tokens.
    farthest: bound on the greatest norm of the difference of two tokens at one
      place.
  """

  norm: Any
  total: Any
  mean: Any
  farthest: Any

  @classmethod
  def within(cls, norm: Any, n: Any) -> Change:
    """Returns the bounds of any change with a bound on its Frobenius norm."""
    return cls(norm, n**0.5 * norm, norm / n**0.5, norm)

  def add_branch(
    self, rate: Any, n: Any, distance: str = "sequences"
  ) -> Change:
    """Returns the bounds after adding a residual branch that mixes tokens.

    Because the branch mixes tokens, every token may change.

    Args:
      rate: Lipschitz constant of the branch, for whole sequences.
      n: number of tokens.
      distance: distance of the constant: "sequences" for Frobenius norms,
        "farthest" for the greatest distance of two tokens.
    """
    if distance == "farthest":
      # All tokens, and so their mean, change by at most `step` in the branch.
      step = rate * self.farthest
      farthest = self.farthest + step
      return Change(
        lesser(self.norm + n**0.5 * step, n**0.5 * farthest),
        lesser(self.total + n * step, n * farthest),
        lesser(self.mean + step, farthest),
        farthest,
      )
    # |change of the mean| <= Frobenius norm / sqrt(n).
    mean = self.mean + rate * self.norm / n**0.5
    norm = (1 + rate) * self.norm
    farthest = self.farthest + rate * self.norm
    return Change.within(norm, n)._replace(
      mean=lesser(mean, norm / n**0.5), farthest=lesser(farthest, norm)
    )


Bound = Callable[[Change, Any], Change]


def lesser(x: Any, y: Any) -> Any:
  """Returns the elementwise minimum of two arrays, in NumPy or in JAX."""
  return (jnp if isinstance(x, jax.Array) else np).minimum(x, y)


class InvertibleLayers(abc.ABC):
  """Layers of an encoder as pure functions. Objects are hashable.

  A layer maps x [b, n, d] to y [b, n, d]. `weights` is any pytree of arrays
  with the same structure in every layer. `shared` is `Shared.value`. `side` is
  the side information that the inverse needs besides y, such as the weights of
  a gate. Arrays of integers, such as random keys, have no gradient.

  Attributes:
    num_layers: number of layers.
    dtype: compute type; x and y are float32 or wider.
    side_name: name under which modules sow `side` into `intermediates`.
    least_layers: least number of layers with which reversible training is
      allowed.
  """

  side_name: ClassVar[str] = "side"
  least_layers: ClassVar[int] = 1

  num_layers: int
  dtype: Any

  @abc.abstractmethod
  def weights(self, variables: Mapping[str, Any]) -> list[Any]:
    """Returns the weights of every layer.

    Args:
      variables: collections of the encoder, from `make_variables`. Collections
        other than `params` are computed from `params` if absent. In training,
        the collection `KEYS` has the random keys of the layers.
    """

  def shared(
    self, variables: Mapping[str, Any], x: jax.Array, mask: jax.Array
  ) -> Shared:
    """Returns the values that all layers share, from the embedded tokens x."""
    del variables, x, mask
    return Shared(None, {})

  @abc.abstractmethod
  def forward(
    self,
    weights: Any,
    x: jax.Array,
    shared: Any,
    mask: jax.Array,
    side: Any = None,
  ) -> tuple[jax.Array, Any]:
    """Returns (y, side); uses `side` instead of computing it, if given."""

  @abc.abstractmethod
  def inverse(
    self,
    weights: Any,
    y: jax.Array,
    shared: Any,
    mask: jax.Array,
    side: Any,
    *,
    constants: Mapping[str, Any] | None = None,
    max_steps: int = MAX_STEPS,
  ) -> jax.Array:
    """Returns the input x of a layer, which is correct at tokens.

    Args:
      weights, y, shared, mask, side: arguments and results of `forward`.
      constants: Lipschitz constants, from the method `constants`; None for the
        constants that hold for exact weights.
      max_steps: greatest number of steps of each iteration, if there is one.
    """

  def reversible_layers(self) -> int:
    """Returns how many layers in succession are inverted in training.

    The inverses may amplify rounding, so the outputs of further layers are
    stored. A result of 0 means that not even one layer is inverted well.
    """
    return self.num_layers

  def constants(self, weights: Any, shared: Any) -> dict[str, float]:
    """Returns Lipschitz constants of the branches that an iteration inverts.

    They are computed in float64 from the actual weights. The result is {} for
    an inverse without iteration.
    """
    del weights, shared
    return {}

  def certificate(
    self, weights: Any, shared: Any, norm: float
  ) -> dict[str, Any]:
    """Returns the guarantees for one layer, or {} if there are none.

    The entries `tokens`, `sequences` and `farthest` are intervals. They contain
    the factors by which the layer can change the distance of two tokens of one
    sample; the Frobenius norm of the difference of two sequences under one
    mask; and the greatest distance of two tokens at one place of such
    sequences. A layer has at least one of these entries. Intervals of different
    entries are never multiplied. The other entries are the numbers from which
    the intervals are computed.

    Args:
      weights, shared: arguments of `forward`.
      norm: greatest Frobenius norm of a sample before the layer.
    """
    del weights, shared, norm
    return {}

  def bound(
    self, weights: Any, shared: Any, *, exact: bool = True
  ) -> Bound | None:
    """Returns a bound on the output's change, given a bound on the input's.

    The bound holds for any two sequences of n tokens under one mask. The result
    is None if there is no such bound for all sequences.

    Args:
      weights, shared: arguments of `forward`; `shared` is the same for both
        sequences.
      exact: True for float64 and the norms of the actual weights; False for a
        differentiable bound in JAX, which assumes that rotations are exactly
        orthogonal.

    Returns:
      A function (change, n) -> change, from a `Change` of the layer's input to
      a `Change` of its output. The entries of a change and n are arrays of one
      shape.
    """
    del weights, shared, exact
    return None

  def scope(self) -> str:
    """Returns a noun phrase for the pairs for which `sequences` holds."""
    return "Two sequences under one mask"

  def remarks(self, *, bounded: bool) -> list[str]:
    """Returns sentences that explain the certificate to its reader.

    Args:
      bounded: True if the lower bound for sequences is above 0.
    """
    del bounded
    return []

  def parts(self, weights: Any, x: jax.Array, shared: Any) -> jax.Array | None:
    """Returns the outputs of the experts, [b, e, n, d]; None if none exist."""
    del weights, x, shared
    return None


def layers_of(block: Any) -> InvertibleLayers | None:
  """Returns all layers of a block as pure functions.

  Returns None if the block is not invertible.

  Args:
    block: unbound block.
  """
  offer = getattr(block, "invertible", None)
  return offer() if offer else None


def shared_by_all(
  layers: InvertibleLayers, variables: Mapping[str, Any], d: int
) -> Any:
  """Returns the values that layers share, computed from a blank token.

  These values are exact for layers with a `bound`, such as a learned Sigma. For
  other layers the values depend on the tokens.

  Args:
    layers: layers as pure functions.
    variables: collections of the encoder.
    d: number of channels.
  """
  blank, mask = jnp.zeros((1, 1, d)), jnp.ones((1, 1), bool)
  return layers.shared(variables, blank, mask).value


def require_layers(block: Any) -> InvertibleLayers:
  """Returns `layers_of(block)`, or raises an error if it is None.

  Raises:
    UserError: if the block is not invertible.
  """
  layers = layers_of(block)
  if layers is None:
    raise UserError(
      f"{type(block).__name__} layers cannot be inverted. Choose a model with "
      f"injective layers: {model_names()}."
    )
  return layers


def model_names() -> str:
  """Returns the names of the models whose layers can be inverted."""
  return ", ".join(
    name
    for name, variant in sorted(MODELS.items())
    if hasattr(BLOCKS[variant.block], "invertible")
  )


# Use the full precision of float32 also on accelerators, where the default is
# lower. A branch that rounds is a step function, which cannot be inverted. In
# half precision, forward and inverse round residual branches in the same way.
_precise = functools.partial(jax.default_matmul_precision, "highest")


def forward(
  layers: InvertibleLayers, weights: Any, x: jax.Array, *rest: Any
) -> tuple[jax.Array, Any]:
  """Returns `layers.forward(weights, x, *rest)` at full precision."""
  with _precise():
    return layers.forward(weights, x, *rest)


def inverse(
  layers: InvertibleLayers, weights: Any, y: jax.Array, *rest: Any, **how: Any
) -> jax.Array:
  """Returns `layers.inverse(weights, y, *rest)` at full precision."""
  with _precise():
    return layers.inverse(weights, y, *rest, **how)


class Outputs(NamedTuple):
  """Result of a loop over layers.

  Attributes:
    y: output of the last layer, [b, n, d].
    hidden: outputs of all layers, [l, b, n, d]; None if not requested.
    sides: side outputs of all layers, with a leading axis of layers; None if
      not requested.
  """

  y: jax.Array
  hidden: jax.Array | None = None
  sides: Any = None


def run_layers(
  layers: InvertibleLayers,
  variables: Mapping[str, Any],
  x: jax.Array,
  mask: jax.Array,
  *,
  memory: str,
  keep_hidden: bool,
) -> tuple[Outputs, Shared]:
  """Runs all layers in loops, whose backward pass stores few activations.

  Args:
    layers: layers as pure functions.
    variables: collections of the encoder.
    x: embedded tokens, [b, n, d].
    mask: [b, n], True at tokens.
    memory: "recomputed" or "reversible".
    keep_hidden: True to return the outputs of all layers. The backward pass
      then stores all activations.
  """
  # Compute the shared values once, and stack the weights to loop over layers.
  shared = layers.shared(variables, x, mask)
  stacked = jax.tree.map(
    lambda *leaves: jnp.stack(leaves), *layers.weights(variables)
  )
  args = (layers, stacked, x, shared.value, mask)
  if keep_hidden:
    return stored(*args), shared
  # Otherwise recompute or invert the layers in the backward pass.
  run = reversible if memory == "reversible" else recomputed
  return Outputs(run(*args)), shared


def stored(
  layers: InvertibleLayers,
  stacked: Any,
  x: jax.Array,
  shared: Any,
  mask: jax.Array,
) -> Outputs:
  """Runs all layers in order, and returns the outputs of all of them.

  Args:
    layers: layers as pure functions.
    stacked: weights of all layers, with a leading axis of layers.
    x, shared, mask: arguments of `InvertibleLayers.forward`.
  """

  def step(x: jax.Array, weights: Any) -> tuple[jax.Array, Any]:
    y, side = forward(layers, weights, x, shared, mask)
    return y, (y, side)

  y, (hidden, sides) = jax.lax.scan(step, x, stacked)
  return Outputs(y, hidden, sides)


def recomputed(
  layers: InvertibleLayers,
  stacked: Any,
  x: jax.Array,
  shared: Any,
  mask: jax.Array,
) -> jax.Array:
  """Returns the output of the last layer; arguments as for `stored`.

  The forward pass stores the input of every layer, and the backward pass runs
  each layer again. Nothing is inverted, so the default precision is enough.
  """

  # In a scan, XLA cannot merge the second run with the first.
  @functools.partial(jax.checkpoint, prevent_cse=False)
  def step(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
    return layers.forward(weights, x, shared, mask)[0], None

  return jax.lax.scan(step, x, stacked)[0]


def reversible(
  layers: InvertibleLayers,
  stacked: Any,
  x: jax.Array,
  shared: Any,
  mask: jax.Array,
) -> jax.Array:
  """Returns the output of the last layer; arguments as for `stored`.

  The forward pass stores this output, the side outputs, and the output of every
  `layers.reversible_layers()` layers. The backward pass inverts one layer after
  the other, and computes gradients at the inverted inputs. They differ from the
  exact gradients by rounding; in half precision, by the rounding of the
  branches.
  """
  count = max(layers.reversible_layers(), 1)
  if count >= layers.num_layers:
    return _reversible(layers, stacked, x, shared, mask)

  def step(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
    return _reversible(layers, weights, x, shared, mask), None

  def group(w: jax.Array) -> jax.Array:
    return w[:end].reshape(-1, count, *w.shape[1:])

  # Loop over groups of layers, and over the rest.
  end = layers.num_layers // count * count
  x, _ = jax.lax.scan(step, x, jax.tree.map(group, stacked))
  if end < layers.num_layers:
    x, _ = step(x, jax.tree.map(operator.itemgetter(slice(end, None)), stacked))
  return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _reversible(
  layers: InvertibleLayers,
  stacked: Any,
  x: jax.Array,
  shared: Any,
  mask: jax.Array,
) -> jax.Array:
  """Runs layers of which only the last output and the sides are stored."""
  return _reversible_forward(layers, stacked, x, shared, mask)[0]


def _reversible_forward(
  layers: InvertibleLayers,
  stacked: Any,
  x: jax.Array,
  shared: Any,
  mask: jax.Array,
) -> tuple[jax.Array, Any]:
  def step(x: jax.Array, weights: Any) -> tuple[jax.Array, Any]:
    return forward(layers, weights, x, shared, mask)

  # Store only the output and the sides. The inverse computes the inputs.
  y, sides = jax.lax.scan(step, x, stacked)
  return y, (stacked, shared, mask, y, sides)


def _reversible_backward(
  layers: InvertibleLayers, kept: Any, g: jax.Array
) -> tuple[Any, ...]:
  stacked, shared, mask, y, sides = kept

  def step(carry: Any, layer: tuple[Any, Any]) -> tuple[Any, Any]:
    y, g, g_shared = carry
    weights, side = layer
    # Invert the layer, then apply it to its input to compute the gradient.
    # The next step of the loop inverts the layer before, from its output x.
    x = inverse(layers, weights, y, shared, mask, side)

    def run(x: jax.Array, numbers: Any, common: Any) -> jax.Array:
      arguments = _put_back(numbers, weights), x, _put_back(common, shared)
      return forward(layers, *arguments, mask)[0]

    _, pull = jax.vjp(run, x, _floats(weights), _floats(shared))
    # Sum the gradients of the shared values over the layers.
    g, g_weights, more = pull(g)
    return (x, g, jax.tree.map(jnp.add, g_shared, more)), g_weights

  # Loop from the last layer to the first.
  start = (y, g, jax.tree.map(jnp.zeros_like, _floats(shared)))
  (_, g, g_shared), g_stacked = jax.lax.scan(
    step, start, (stacked, sides), reverse=True
  )
  return g_stacked, g, g_shared, None


def _floats(tree: Any) -> Any:
  """Returns a tree in which arrays of integers are replaced by None."""

  # Only floats have gradients.
  def keep(leaf: jax.Array) -> jax.Array | None:
    return leaf if jnp.issubdtype(leaf.dtype, jnp.inexact) else None

  return jax.tree.map(keep, tree)


def _put_back(floats: Any, tree: Any) -> Any:
  """Returns `tree` with its floats replaced by `floats`, from `_floats`."""
  return jax.tree.map(
    lambda new, old: old if new is None else new,
    floats,
    tree,
    is_leaf=lambda leaf: leaf is None,
  )


_reversible.defvjp(_reversible_forward, _reversible_backward)
