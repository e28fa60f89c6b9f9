"""Collections that a model is applied to: parameters, and what is made of them.

This is the only place that knows the orthogonal matrices of a model and the
products that its blocks make of them. A block declares these by a method
`derive(params, rotations)`, and stacked matrices that are not experts by
`in_turn`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, Protocol

import flax.linen as nn
import jax

from jaxformers import orthogonal
from jaxformers.foundations.errors import UserError

DERIVED = "derived"  # The collection of what blocks make of parameters alone.


class Placement(Protocol):
  """Where parameters lie on a mesh of devices; `training.layout.Layout`."""

  def rotations(
    self, params: Any, orthogonal_map: str, in_turn: frozenset[str]
  ) -> dict[str, Any]:
    """Returns `orthogonal.rotations`, the work shared by devices.

    Args:
      params: a tree of parameters.
      orthogonal_map: name of the map, in `orthogonal.MAPS`.
      in_turn: names of parameters whose stacked matrices stay together.
    """

  def gather(self, params: Any) -> Any:
    """Returns parameters as a step reads them."""


def make_variables(
  model: Any, params: Mapping[str, Any], placement: Placement | None = None
) -> dict[str, Any]:
  """Returns the Linen collections that `model.apply` takes.

  Args:
    model: from `models.build`.
    params: its parameters.
    placement: where they lie on a mesh; None for one device.

  Returns:
    `params`; `rotations`, the orthogonal matrices that a map makes of them; and
    `derived`, the products that blocks make of both.
  """
  if placement is None:
    # Compiled once for each model: called outside of a compiled function, the
    # maps would compile their branches in every call.
    make = _make_compiled if _makes_anything(model, params) else _make
    return {"params": params, **make(model, params)}
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
  """Returns what a model computes in evaluation, compiled once for a shape.

  Args:
    model: from `models.build`.
    variables: result of `make_variables`.
    inputs: as the model takes them, [b, ...].
  """
  return model.apply(variables, inputs, train=False)


def _makes_anything(model: Any, params: Mapping[str, Any]) -> bool:
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
  """Returns rotations, and the products that blocks declare."""
  derived = {}
  for stack, block in model.stacks().items():
    if derive := getattr(block, "derive", None):
      derived[stack] = derive(params[stack], rotations.get(stack, {}))
  return {"rotations": rotations, DERIVED: derived}


def of_stack(variables: Mapping[str, Any], stack: str) -> dict[str, Any]:
  """Returns the collections of one stack of layers, as its block sees them.

  Args:
    variables: from `make_variables`.
    stack: "encoder" or "decoder".
  """
  return {name: tree.get(stack, {}) for name, tree in variables.items()}


def find_rotations(
  variables: Mapping[str, Any], orthogonal_map: str
) -> Mapping[str, Any]:
  """Returns the orthogonal matrices of a stack, made here if they are missing.

  Args:
    variables: collections of the stack; a caller may give `params` alone.
    orthogonal_map: name of the map, in `orthogonal.MAPS`.
  """
  return variables.get("rotations") or orthogonal.rotations(
    variables["params"], orthogonal_map
  )


def rotation(
  module: nn.Module, name: str, shape: tuple[int, ...], orthogonal_map: str
) -> jax.Array:
  """Returns the orthogonal matrices of a parameter, float32 `shape`.

  Reads them from the collection `rotations` if the caller provides it (see
  `orthogonal.rotations`): a train step maps all matrices of a model in one
  call. Otherwise maps the parameter here, with the same result.

  Args:
    module: the Linen module that owns the parameter, inside its call.
    name: name of the matrices; the parameter is called `name`_skew, or
      `name`_orthogonal under the map "matrix".
    shape: shape of the parameter, [..., d, d].
    orthogonal_map: name of the map, in `orthogonal.MAPS`.
  """
  full = orthogonal.parameter_name(name, orthogonal_map)
  if module.has_variable("rotations", full):
    return module.get_variable("rotations", full)

  def initializer(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    a = orthogonal.initializer(key, shape)
    return orthogonal.cayley(a) if orthogonal_map == "matrix" else a

  return orthogonal.MAPS[orthogonal_map](module.param(full, initializer, shape))


def semi_orthogonal(
  module: nn.Module, name: str, shape: tuple[int, int], orthogonal_map: str
) -> jax.Array:
  """Returns a matrix with orthonormal rows or columns, float32 `shape`.

  A matrix [d, k d] is [Q_1 ... Q_k] / sqrt(k) with rotations Q_i, which has
  orthonormal rows; [k d, d] has these below each other. A square one is a
  rotation.

  Args:
    module, name, orthogonal_map: as for `rotation`.
    shape: rows and columns; one must be a multiple of the other.

  Raises:
    UserError: for another shape.
  """
  d, longer = sorted(shape)
  count, rest = divmod(longer, d)
  if rest:
    raise UserError(
      f"Orthogonal kernels of shape {shape} are rotations beside each other: "
      f"{longer} must be a multiple of {d}, such as {d * count}."
    )
  q = rotation(module, name, (count, d, d), orthogonal_map) / math.sqrt(count)
  return (q.swapaxes(0, 1) if shape[0] == d else q).reshape(shape)
