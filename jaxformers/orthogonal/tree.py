"""All orthogonal matrices of a model by one batched call for each size.

A module stores an array under a name that ends in `_skew`, or in `_orthogonal`
for the map "matrix" (see `parameter_name`). `rotations` maps them all at once;
the modules then read the results from the collection `rotations`.
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
  """What a parameter of orthogonal matrices is called under a map.

  `name`_orthogonal if it holds the matrices themselves, which an optimiser
  has to keep orthogonal (`training.riemannian`), or else `name`_skew, which
  any optimiser can work on.
  """
  return name + (ORTHOGONAL if mapping == "matrix" else SKEW)


def _last(path: tuple[Any, ...]) -> str:
  return str(getattr(path[-1], "key", path[-1]))


def is_skew(path: tuple[Any, ...]) -> bool:
  """Whether a path of `jax.tree_util` names unconstrained parameters."""
  return _last(path).endswith(SKEW)


def is_orthogonal(path: tuple[Any, ...]) -> bool:
  """Whether a path of `jax.tree_util` names matrices kept orthogonal."""
  return _last(path).endswith(ORTHOGONAL)


def is_parameter(path: tuple[Any, ...]) -> bool:
  """Whether a path of `jax.tree_util` names what orthogonal matrices are of."""
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
  """The orthogonal matrices of a model, by one batched call for each size.

  Args:
    params: a tree of parameters; its leaves named `*_skew` or `*_orthogonal`
      are [..., d, d].
    name: of the map, in `MAPS`.
    bases: rotations to start from, a tree like the result, or None for the
      identities: a matrix is its base times what its parameter maps to.
    spread: makes of the map [k, d, d] -> [k, d, d] one that shares its k out
      among devices.

  Returns:
    A tree of these leaves alone, each mapped to rotations in float32 or wider:
    the Linen collection `rotations`; {} if there are none.
  """
  mapping = spread(MAPS[name])
  found = jax.tree_util.tree_flatten_with_path(params)[0]
  leaves = [(path, leaf) for path, leaf in found if is_parameter(path)]
  mapped: dict[tuple[Any, ...], jax.Array] = {}
  for d in sorted({leaf.shape[-1] for _, leaf in leaves}):
    group = [(path, leaf) for path, leaf in leaves if leaf.shape[-1] == d]
    flat = [_at_least_float32(leaf).reshape((-1, d, d)) for _, leaf in group]
    stacked = mapping(jnp.concatenate(flat))
    at = 0
    for (path, leaf), part in zip(group, flat, strict=True):
      mapped[path] = stacked[at : at + len(part)].reshape(leaf.shape)
      at += len(part)
  tree: dict[str, Any] = {}
  for path, matrices in mapped.items():
    node = tree
    for entry in path[:-1]:
      node = node.setdefault(entry.key, {})
    node[path[-1].key] = matrices
  if bases is None:
    return tree
  return jax.tree.map(
    lambda base, q: jnp.matmul(base, q, precision=jax.lax.Precision.HIGHEST),
    dict(bases),
    tree,
  )
