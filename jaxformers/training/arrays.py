"""Arrays of a state on the host: fetched, compared and placed again."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxformers.errors import UserError
from jaxformers.training.layout import put


def fetch_to_host(tree: Any) -> Any:
  """Returns every leaf as a NumPy array, wherever its parts lie.

  Called by all processes together.
  """

  def fetch(leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
      if not leaf.is_fully_replicated:
        leaf = _gather(leaf.sharding.mesh)(leaf)
      return np.asarray(leaf.addressable_data(0))
    return np.asarray(leaf)

  return jax.tree.map(fetch, tree)


@functools.cache
def _gather(mesh: jax.sharding.Mesh) -> Callable[[jax.Array], jax.Array]:
  """Returns a function that puts an array on every device.

  It is cached, so that it is compiled once per mesh and shape.
  """
  return jax.jit(lambda x: x, out_shardings=jax.NamedSharding(mesh, jax.P()))


def checksums(tree: Any) -> dict[str, int]:
  """Returns the CRC-32 of every leaf by path; orbax checks no bits itself."""
  leaves = jax.tree_util.tree_flatten_with_path(fetch_to_host(tree))[0]
  return {
    jax.tree_util.keystr(path): zlib.crc32(np.ascontiguousarray(leaf))
    for path, leaf in leaves
  }


def place_like(array: np.ndarray, like: Any) -> jax.Array:
  """Places an array that all hosts have as another array is placed."""
  return put(np.asarray(array, like.dtype), like.sharding)


def shapes_of(tree: Any) -> dict[str, list[int]]:
  """Returns the shape of every leaf, by path."""
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): list(leaf.shape)
    for path, leaf in leaves
  }


def check_shapes(
  folder: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]
) -> None:
  """Raises UserError if shapes differ, naming the first leaf.

  Args:
    folder: folder of the checkpoint.
    saved: shapes by path in the checkpoint; see `shapes_of`.
    wanted: shapes by path that the config gives.
  """
  for name in sorted(wanted.keys() | saved.keys()):
    if wanted.get(name) != saved.get(name):
      raise UserError(
        f"The checkpoint {folder} is of another model: {name} is "
        f"{saved.get(name, 'absent')} in it and "
        f"{wanted.get(name, 'absent')} in this config. Use the config of "
        "that run, or another --workdir."
      )
