"""Orthogonal matrices of a whole model, by one batched call for each size.

A module stores an array under a name that ends in `_skew`, or in `_orthogonal`
for the map "matrix" (see `parameter_name`). `rotations` maps all of them at
once, and the modules read the results from the collection `rotations`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxformers.orthogonal.maps import MAPS

SKEW = "_skew"
ORTHOGONAL = "_orthogonal"


def parameter_name(name: str, mapping: str) -> str:
  """Returns the name of the parameter that holds orthogonal matrices.

  Under the map "matrix" it is `name`_orthogonal: the parameter holds the
  matrices, which the optimiser must keep orthogonal (`training.riemannian`).
  Under other maps it is `name`_skew, which any optimiser can change.

  Args:
    name: name of the matrices.
    mapping: name of the map, in `MAPS`.
  """
  return name + (ORTHOGONAL if mapping == "matrix" else SKEW)


def _last(path: tuple[Any, ...]) -> str:
  return str(getattr(path[-1], "key", path[-1]))


def is_skew(path: tuple[Any, ...]) -> bool:
  """True if a path of `jax.tree_util` names unconstrained parameters."""
  return _last(path).endswith(SKEW)


def is_orthogonal(path: tuple[Any, ...]) -> bool:
  """True if a path of `jax.tree_util` names matrices kept orthogonal."""
  return _last(path).endswith(ORTHOGONAL)


def is_parameter(path: tuple[Any, ...]) -> bool:
  """True if a path of `jax.tree_util` names parameters of rotations."""
  return is_skew(path) or is_orthogonal(path)


def _at_least_float32(a: jax.Array) -> jax.Array:
  return a.astype(jnp.promote_types(a.dtype, jnp.float32))


Map = Callable[[jax.Array], jax.Array]


def rotations(
  params: Mapping[str, Any],
  name: str,
  bases: Mapping[str, Any] | None = None,
  *,
  spread: Callable[[Map], Map] = lambda mapping: mapping,
) -> dict[str, Any]:
  """Returns the orthogonal matrices of a model, one batched call for each size.

  Args:
    params: tree of parameters; leaves named `*_skew` or `*_orthogonal` have the
      shape [..., d, d].
    name: name of the map, in `MAPS`.
    bases: rotations to start from, in a tree like the result, or None for
      identities; a result is its base times the mapped parameter.
    spread: function of the map [k, d, d] -> [k, d, d] that returns one which
      distributes the k matrices over devices.

  Returns:
    Linen collection `rotations`: the tree of these leaves alone, each mapped to
    rotations in float32 or wider; {} if there are none.
  """
  # Find the parameters of orthogonal matrices.
  mapping = spread(MAPS[name])
  flattened = jax.tree_util.tree_flatten_with_path(params)[0]
  leaves = [(path, leaf) for path, leaf in flattened if is_parameter(path)]
  # Map all matrices of one size in one call.
  mapped: dict[tuple[Any, ...], jax.Array] = {}
  for d in sorted({leaf.shape[-1] for _, leaf in leaves}):
    group = [(path, leaf) for path, leaf in leaves if leaf.shape[-1] == d]
    flat = [_at_least_float32(leaf).reshape((-1, d, d)) for _, leaf in group]
    stacked = mapping(jnp.concatenate(flat))
    start = 0
    for (path, leaf), part in zip(group, flat, strict=True):
      stop = start + len(part)
      mapped[path] = stacked[start:stop].reshape(leaf.shape)
      start = stop
  # Put the results into a tree with the paths of the parameters.
  tree: dict[str, Any] = {}
  for path, matrices in mapped.items():
    node = tree
    for entry in path[:-1]:
      node = node.setdefault(entry.key, {})
    node[path[-1].key] = matrices
  # Multiply by the bases.
  if bases is None:
    return tree
  return jax.tree.map(
    lambda base, q: jnp.matmul(base, q, precision=jax.lax.Precision.HIGHEST),
    dict(bases),
    tree,
  )
