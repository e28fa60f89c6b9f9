"""Collections that `model.apply` takes: parameters, and arrays made from them.

Only this module computes the orthogonal matrices of a model and the products
that blocks derive from parameters. A block declares such products in a method
`derive(params, rotations)`. It lists stacked matrices that are not experts in
the attribute `in_turn`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, Protocol

import flax.linen as nn
import jax

from jaxformers import orthogonal

DERIVED = "derived"  # Collection of the products that blocks derive.


class Placement(Protocol):
  """Placement of parameters on a mesh, such as `training.layout.Layout`."""

  def rotations(
    self, params: Any, orthogonal_map: str, in_turn: frozenset[str]
  ) -> dict[str, Any]:
    """Returns `orthogonal.rotations`, computed by all devices together.

    Args:
      params: tree of parameters.
      orthogonal_map: name of the map, in `orthogonal.MAPS`.
      in_turn: names of parameters whose stacked matrices are not split over
        devices.
    """

  def gather(self, params: Any) -> Any:
    """Returns parameters in the placement that a step reads."""


def make_variables(
  model: Any, params: Mapping[str, Any], placement: Placement | None = None
) -> dict[str, Any]:
  """Returns the Linen collections that `model.apply` takes.

  Args:
    model: model from `models.build`.
    params: parameters of the model.
    placement: placement of the parameters on a mesh; None for one device.

  Returns:
    The collections `params`; `rotations`, the orthogonal matrices that a map
    makes from parameters; and `derived`, the products that blocks derive from
    both.
  """
  if placement is None:
    # Compile once for each model: outside a compiled function, the maps would
    # compile their branches in every call.
    make = _make_compiled if _makes_anything(model, params) else _make
    return {"params": params, **make(model, params)}
  # Compute the rotations on the mesh, then gather the parameters.
  in_turn = frozenset(
    orthogonal.parameter_name(name, model.orthogonal_map)
    for block in model.stacks().values()
    for name in getattr(block, "in_turn", ())
  )
  rotations = placement.rotations(params, model.orthogonal_map, in_turn)
  params = placement.gather(params)
  return {"params": params, **_with_derived(model, params, rotations)}


@functools.partial(jax.jit, static_argnums=0)
def outputs(model: Any, variables: Any, inputs: jax.Array) -> jax.Array:
  """Returns the outputs of a model in evaluation.

  The function is compiled once for each shape of inputs.

  Args:
    model: model from `models.build`.
    variables: result of `make_variables`.
    inputs: inputs of the model, [b, ...].
  """
  return model.apply(variables, inputs, train=False)


def _makes_anything(model: Any, params: Mapping[str, Any]) -> bool:
  """Returns True if a model has rotations or derived products."""
  paths = jax.tree_util.tree_flatten_with_path(params)[0]
  blocks = model.stacks().values()
  return any(orthogonal.is_parameter(path) for path, _ in paths) or any(
    hasattr(block, "derive") for block in blocks
  )


def _make(model: Any, params: Mapping[str, Any]) -> dict[str, Any]:
  rotations = orthogonal.rotations(params, model.orthogonal_map)
  return _with_derived(model, params, rotations)


_make_compiled = jax.jit(_make, static_argnums=0)


def _with_derived(
  model: Any, params: Mapping[str, Any], rotations: dict[str, Any]
) -> dict[str, Any]:
  """Returns the collections of rotations and of products that blocks derive."""
  derived = {}
  for stack, block in model.stacks().items():
    if derive := getattr(block, "derive", None):
      derived[stack] = derive(params[stack], rotations.get(stack, {}))
  return {"rotations": rotations, DERIVED: derived}


def of_stack(variables: Mapping[str, Any], stack: str) -> dict[str, Any]:
  """Returns the collections of one stack of layers.

  Args:
    variables: result of `make_variables`.
    stack: name of the stack, "encoder" or "decoder".
  """
  return {name: tree.get(stack, {}) for name, tree in variables.items()}


def find_rotations(
  variables: Mapping[str, Any], orthogonal_map: str
) -> Mapping[str, Any]:
  """Returns the orthogonal matrices of a stack; computes them if missing.

  Args:
    variables: collections of the stack, of which only `params` is required.
    orthogonal_map: name of the map, in `orthogonal.MAPS`.
  """
  return variables.get("rotations") or orthogonal.rotations(
    variables["params"], orthogonal_map
  )


def rotation(
  module: nn.Module, name: str, shape: tuple[int, ...], orthogonal_map: str
) -> jax.Array:
  """Returns the orthogonal matrices of a parameter, float32 `shape`.

  The matrices are read from the collection `rotations` if it exists, because a
  training step maps all matrices of a model in one call (see
  `orthogonal.rotations`). Otherwise the parameter is mapped here, with the same
  result.

  Args:
    module: Linen module that owns the parameter; call this inside its call.
    name: name of the matrices. The parameter is called `name`_skew, or
      `name`_orthogonal for the map "matrix".
    shape: shape of the parameter, [..., d, d].
    orthogonal_map: name of the map, in `orthogonal.MAPS`.
  """
  full = orthogonal.parameter_name(name, orthogonal_map)
  if module.has_variable("rotations", full):
    return module.get_variable("rotations", full)

  # The map "matrix" stores rotations: start from the Cayley map.
  def initializer(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    a = orthogonal.initializer(key, shape)
    return orthogonal.cayley(a) if orthogonal_map == "matrix" else a

  return orthogonal.MAPS[orthogonal_map](module.param(full, initializer, shape))


def semi_orthogonal(
  module: nn.Module, name: str, shape: tuple[int, int], orthogonal_map: str
) -> jax.Array:
  """Returns a matrix with orthonormal rows or columns, float32 `shape`.

  A matrix [d, k d] is [Q_1 ... Q_k] / sqrt(k) with rotations Q_i, and has
  orthonormal rows. A matrix [k d, d] stacks the rotations vertically, and has
  orthonormal columns. A square matrix is a rotation. Any other matrix is the
  beginning of a rotation of the greater size, whose cost it has.

  Args:
    module, name, orthogonal_map: arguments of `rotation`.
    shape: numbers of rows and columns.
  """
  d, longer = sorted(shape)
  count, rest = divmod(longer, d)
  size = (1, longer, longer) if rest else (count, d, d)
  return rectangular(rotation(module, name, size, orthogonal_map), shape)


def rectangular(q: Any, shape: tuple[int, int]) -> Any:
  """Returns the matrix of `semi_orthogonal` that rotations make.

  Args:
    q: rotations, [k, d, d].
    shape: numbers of rows and columns.
  """
  rows, columns = shape
  count, d, _ = q.shape
  if d > min(shape):
    return q[0, :rows, :columns]
  q = q / math.sqrt(count)
  return (q.swapaxes(0, 1) if rows == d else q).reshape(shape)
