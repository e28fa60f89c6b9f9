"""Arrays of a state on the host: how to fetch, compare and place them."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxformers.foundations.errors import UserError
from jaxformers.training.layout import put

Shapes = dict[str, list[int]]  # Shape of every leaf, by path.


def fetch_to_host(tree: Any) -> Any:
  """Returns every leaf as a NumPy array, gathered from all devices.

  All processes must call it together.
  """

  def fetch(leaf: Any) -> np.ndarray:
    # Gather an array whose parts lie on other hosts.
    is_array = isinstance(leaf, jax.Array)
    if is_array and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
      leaf = multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(leaf)

  return jax.tree.map(fetch, tree)


def checksums(tree: Any) -> dict[str, int]:
  """Returns the CRC-32 of every leaf, by path, since orbax stores none."""
  return {
    # NumPy's types declare arrays as buffers from Python 3.12 on.
    jax.tree_util.keystr(path): zlib.crc32(
      np.ascontiguousarray(leaf)  # type: ignore[arg-type]
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(fetch_to_host(tree))
  }


def place_like(array: np.ndarray, like: Any) -> jax.Array:
  """Places an array that every host holds, with the type of `like`."""
  return put(np.asarray(array, like.dtype), like.sharding)


def shapes_of(tree: Any) -> Shapes:
  """Returns the shape of every leaf, by path."""
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): list(leaf.shape)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def check_shapes(folder: Path, saved: Shapes, wanted: Shapes) -> None:
  """Raises UserError if shapes differ; names the first leaf that differs.

  Args:
    folder: folder of the checkpoint.
    saved: shapes in the checkpoint, by path; see `shapes_of`.
    wanted: shapes that the config requires, by path.
  """
  for name in sorted(wanted.keys() | saved.keys()):
    if wanted.get(name) != saved.get(name):
      before, now = (shapes.get(name, "absent") for shapes in (saved, wanted))
      raise UserError(
        f"The checkpoint {folder} belongs to another model: {name} is {before} "
        f"in it and {now} in this config. Use the config of that run, or "
        "another --workdir."
      )
