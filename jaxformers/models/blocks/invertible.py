"""The contract of layers that can be undone, and training that undoes them.

A block whose layers are injective offers them as pure functions of their
weights: forward, inverse and certificate (`InvertibleLayers`). Reversible
training, `analysis.certificates` and the property tests need nothing else, so
they work for every block that has the method `invertible`.
"""

from __future__ import annotations

import abc
import functools
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

# Collection of the layers' random keys in training, uint32 [l, ...].
KEYS = "keys"
# Ways to have what the backward pass needs, besides storing it.
LOOPED = ("recomputed", "reversible")
Interval = tuple[float, float]


class Shared(NamedTuple):
  """Quantities of a batch that all layers share, made once from its embedding.

  Attributes:
    value: pytree of arrays, such as TransJect's Sigma; None if nothing.
    sown: arrays for Linen's collections, {"losses": {"name": array}}.
  """

  value: Any
  sown: Mapping[str, Mapping[str, jax.Array]]

  def sow(self, module: nn.Module) -> None:
    """Puts `sown` into the collections of a module, inside its call."""
    for collection, arrays in self.sown.items():
      for name, array in arrays.items():
        module.sow(collection, name, array)


class Change(NamedTuple):
  """Bounds of how far a sequence of n tokens was moved.

  Attributes:
    norm: Frobenius norm of the difference.
    total: sum over tokens of the norms of their differences.
    mean: norm of the difference of the means over tokens.
  """

  norm: Any
  total: Any
  mean: Any

  def add_branch(self, rate: Any, n: Any) -> Change:
    """Returns the bounds after a residual branch of a Lipschitz constant.

    For a branch in which tokens meet, so that every token may move.

    Args:
      rate: the constant, for whole sequences.
      n: number of tokens.
    """
    mean = self.mean + rate * self.norm / n**0.5
    norm = (1 + rate) * self.norm
    return Change(norm, n**0.5 * norm, lesser(mean, norm / n**0.5))


Bound = Callable[[Change, Any], Change]


def lesser(x: Any, y: Any) -> Any:
  """Returns the lesser of two arrays, in NumPy's float64 or in JAX."""
  return (jnp if isinstance(x, jax.Array) else np).minimum(x, y)


class InvertibleLayers(abc.ABC):
  """Layers of an encoder as pure functions; hashable, without arrays.

  A layer maps x [b, n, d] to y [b, n, d]. `weights` is any pytree of arrays,
  of the same structure in every layer; `shared` is `Shared.value`; `side` is
  what the inverse needs besides y, such as the gate's weights. Integers among
  the arrays, such as random keys, have no gradient.

  Attributes:
    num_layers: number of layers.
    dtype: compute type; x and y are float32 or wider.
    side_name: name under which modules sow `side` into `intermediates`.
    least_layers: number of layers from which on training may undo them.
  """

  side_name: ClassVar[str] = "side"
  least_layers: ClassVar[int] = 1

  num_layers: int
  dtype: Any

  @abc.abstractmethod
  def weights(self, variables: Mapping[str, Any]) -> list[Any]:
    """Returns the weights of every layer.

    Args:
      variables: collections of the encoder, as `make_variables` has them;
        what is missing besides `params` is made of these. `KEYS` in training.
    """

  def shared(
    self, variables: Mapping[str, Any], x: jax.Array, mask: jax.Array
  ) -> Shared:
    """Returns what the layers share, from the embedded tokens x [b, n, d]."""
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
    """Returns y and `side`, which is not computed again where it is given."""

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
    """Returns x, right at tokens.

    Args:
      weights, y, shared, mask, side: as for `forward`.
      constants: as `constants` has them; None for what exact weights have.
      max_steps: limit of each iteration, if the inverse is one.
    """

  def constants(self, weights: Any, shared: Any) -> dict[str, float]:
    """Returns Lipschitz constants of the branches that iteration undoes.

    In float64, from the actual weights; {} for an inverse without iteration.
    """
    del weights, shared
    return {}

  def certificate(
    self, weights: Any, shared: Any, norm: float
  ) -> dict[str, Any]:
    """Returns what is guaranteed of one layer; {} if nothing is.

    `tokens` and `sequences` are intervals: the factors by which the distance of
    two tokens of one sample, and of two sequences under one mask, may change; a
    layer has one of them or both. Other entries are the numbers that they come
    from.

    Args:
      weights, shared: as for `forward`.
      norm: greatest Frobenius norm of a sample before the layer.
    """
    del weights, shared, norm
    return {}

  def bound(
    self, weights: Any, shared: Any, *, exact: bool = True
  ) -> Bound | None:
    """Returns how far a layer's output moves if its input moves at most so.

    For any two sequences of n tokens under one mask; None where no such bound
    holds everywhere.

    Args:
      weights, shared: as for `forward`; `shared` does not change.
      exact: True for float64 and the norms of the weights at hand; False for
        arrays of JAX and rotations taken for orthogonal, for gradients.

    Returns:
      A function from a `Change` at the layer's input, arrays of one shape, and
      n in that shape, to the `Change` at its output.
    """
    del weights, shared, exact
    return None

  def scope(self) -> str:
    """Returns the pairs that `sequences` speaks of, as a noun phrase."""
    return "Two sequences under one mask"

  def remarks(self, *, bounded: bool) -> list[str]:
    """Returns sentences that a reader of the certificate needs.

    Args:
      bounded: True if the lower bound for sequences is above 0.
    """
    del bounded
    return []

  def parts(self, weights: Any, x: jax.Array, shared: Any) -> jax.Array | None:
    """Returns what each expert makes of x, [b, e, n, d]; None without."""
    del weights, x, shared
    return None


def layers_of(block: Any) -> InvertibleLayers | None:
  """Returns the layers of which an unbound block is one, or None."""
  offer = getattr(block, "invertible", None)
  return offer() if offer else None


def shared_by_all(
  layers: InvertibleLayers, variables: Mapping[str, Any], d: int
) -> Any:
  """Returns what layers share if it does not depend on tokens.

  For layers that have a `bound`, such as those with a learned Sigma; of others
  it is what a blank token gives.

  Args:
    layers: the layers.
    variables: collections of the encoder.
    d: number of channels.
  """
  blank, mask = jnp.zeros((1, 1, d)), jnp.ones((1, 1), bool)
  return layers.shared(variables, blank, mask).value


def require_layers(block: Any) -> InvertibleLayers:
  """Returns `layers_of(block)`.

  Raises:
    UserError: if the block has none.
  """
  layers = layers_of(block)
  if layers is None:
    raise UserError(
      f"{type(block).__name__} layers cannot be run backwards: that needs "
      f"injective layers, such as those of the models {model_names()}."
    )
  return layers


def model_names() -> str:
  """Returns the names of the models whose layers can be undone."""
  return ", ".join(
    name
    for name, variant in sorted(MODELS.items())
    if hasattr(BLOCKS[variant.block], "invertible")
  )


# At the full precision of float32, on accelerators too, where less is the
# default: a branch that rounds is a step function, and steps are not undone.
# Half precision rounds alike forwards and backwards.
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
    y: [b, n, d], the output of the last layer.
    hidden: the outputs of all layers, [l, b, n, d]; None if not asked for.
    sides: sides of all layers, with an axis of layers in front; None
      likewise.
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
  """Runs all layers as one loop, whose backward pass stores no activations.

  Args:
    layers: the layers.
    variables: collections of the encoder.
    x: [b, n, d], embedded tokens.
    mask: [b, n], True at tokens.
    memory: "recomputed" or "reversible".
    keep_hidden: True to return what is between the layers; its gradient then
      stores everything.
  """
  # Make once what all layers share, and stack weights to loop over layers.
  shared = layers.shared(variables, x, mask)
  stacked = jax.tree.map(
    lambda *leaves: jnp.stack(leaves), *layers.weights(variables)
  )
  args = (layers, stacked, x, shared.value, mask)
  if keep_hidden:
    return stored(*args), shared
  run = reversible if memory == "reversible" else recomputed
  return Outputs(run(*args)), shared


def stored(
  layers: InvertibleLayers,
  stacked: Any,
  x: jax.Array,
  shared: Any,
  mask: jax.Array,
) -> Outputs:
  """Runs all layers in order, and keeps what is between them.

  Args:
    layers: the layers.
    stacked: weights of all layers, with an axis of layers in front.
    x, shared, mask: as for `InvertibleLayers.forward`.
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
  """Returns the output of the last layer; arguments are those of `stored`.

  Its gradient keeps the input of every layer, and runs the layer again.
  """

  # In a loop nothing merges the second run with the first.
  @functools.partial(jax.checkpoint, prevent_cse=False)
  def step(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
    return forward(layers, weights, x, shared, mask)[0], None

  return jax.lax.scan(step, x, stacked)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def reversible(
  layers: InvertibleLayers,
  stacked: Any,
  x: jax.Array,
  shared: Any,
  mask: jax.Array,
) -> jax.Array:
  """Returns the output of the last layer; arguments are those of `stored`.

  Its gradient keeps that output and what the inverse needs besides it, and
  undoes one layer after the other. The gradient of the undone input is rounding
  away from that of the true one: in half precision, the rounding of the
  branches.
  """
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

  # Keep the output and the sides alone; inputs are found by the inverse.
  y, sides = jax.lax.scan(step, x, stacked)
  return y, (stacked, shared, mask, y, sides)


def _reversible_backward(
  layers: InvertibleLayers, kept: Any, g: jax.Array
) -> tuple[Any, ...]:
  stacked, shared, mask, y, sides = kept

  def step(carry: Any, layer: tuple[Any, Any]) -> tuple[Any, Any]:
    y, g, g_shared = carry
    weights, side = layer
    # Undo the layer, then run it forwards from its input for the gradient.
    x = inverse(layers, weights, y, shared, mask, side)

    def run(x: jax.Array, numbers: Any, common: Any) -> jax.Array:
      given = _put_back(numbers, weights), x, _put_back(common, shared)
      return forward(layers, *given, mask)[0]

    _, pull = jax.vjp(run, x, _floats(weights), _floats(shared))
    # All layers add to the gradient of what they share.
    g, g_weights, more = pull(g)
    return (x, g, jax.tree.map(jnp.add, g_shared, more)), g_weights

  # Loop from the last layer to the first.
  start = (y, g, jax.tree.map(jnp.zeros_like, _floats(shared)))
  (_, g, g_shared), g_stacked = jax.lax.scan(
    step, start, (stacked, sides), reverse=True
  )
  return g_stacked, g, g_shared, None


def _floats(tree: Any) -> Any:
  """Returns a tree with None in place of arrays of integers."""

  def keep(leaf: jax.Array) -> jax.Array | None:
    return leaf if jnp.issubdtype(leaf.dtype, jnp.inexact) else None

  return jax.tree.map(keep, tree)


def _put_back(floats: Any, tree: Any) -> Any:
  """Returns a tree with its floats replaced; undoes `_floats`."""
  return jax.tree.map(
    lambda new, old: old if new is None else new,
    floats,
    tree,
    is_leaf=lambda leaf: leaf is None,
  )


reversible.defvjp(_reversible_forward, _reversible_backward)
