"""The mesh of devices, and where batches and parameters lie on it.

A mesh has four axes. A batch is split over `data` and `fsdp`, and the tokens of
its sequences over `sequence`; parameters and what the optimiser keeps of them
are split over `fsdp`; and over `model` lie the experts of TransJect with the
orthogonal matrices that they are made of, or the columns of other matrices. The
compiler adds what has to be exchanged (GSPMD,
https://arxiv.org/abs/2105.04663), so numbers do not depend on the mesh but for
the order of sums.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxformers import orthogonal
from jaxformers.errors import UserError
from jaxformers.models.parallel import MODEL, SEQUENCE

DATA, FSDP = "data", "fsdp"
AXES = (DATA, FSDP, SEQUENCE, MODEL)


def sizes(spec: str, count: int) -> dict[str, int]:
  """Returns the size of every axis from "data:4,model:2"; "": all for data.

  Args:
    spec: axes and their sizes; those that are left out have size 1.
    count: number of devices.

  Raises:
    UserError: for an axis that there is not, or sizes whose product is not the
      number of devices.
  """
  # Read axes and sizes one by one.
  shape: dict[str, int] = {}
  if not spec:
    return dict.fromkeys(AXES, 1) | {DATA: count}
  for item in spec.split(","):
    axis, _, size = item.partition(":")
    if axis not in AXES or not size.isdecimal() or int(size) < 1:
      raise UserError(
        f"config.mesh={spec!r}: {item!r} is not an axis and its size. Axes are "
        f"{', '.join(AXES)}; write data:{count}, for example."
      )
    if axis in shape:
      raise UserError(
        f"config.mesh={spec!r} names the axis {axis!r} twice: leave one out."
      )
    shape[axis] = int(size)
  shape = dict.fromkeys(AXES, 1) | shape
  if math.prod(shape.values()) != count:
    raise UserError(
      f"config.mesh={spec!r} needs {math.prod(shape.values())} devices, and "
      f"there are {count}: choose sizes whose product is {count}, or leave the "
      "field empty."
    )
  return shape


def _on(process: int, device: jax.Device) -> bool:
  return device.process_index == process


def put(leaf: Any, sharding: jax.sharding.Sharding) -> jax.Array:
  """Places an array that all processes have."""
  array = np.asarray(leaf)
  return jax.make_array_from_callback(
    array.shape, sharding, lambda index: array[index]
  )


@dataclasses.dataclass(frozen=True)
class Layout:
  """A mesh of devices with the rules of what lies where.

  Attributes:
    mesh: mesh of all devices, with the axes `AXES`.
  """

  mesh: Mesh

  @classmethod
  def of(cls, spec: str, devices: list[jax.Device]) -> Layout:
    """Returns the layout of a config's `mesh` over some devices."""
    shape = sizes(spec, len(devices))
    grid = np.array(devices).reshape(*shape.values())
    return cls(Mesh(grid, AXES))

  @property
  def parts(self) -> int:
    """Number of parts that a batch is split into."""
    return self.mesh.shape[DATA] * self.mesh.shape[FSDP]

  @property
  def simple(self) -> bool:
    """True if batches alone are split."""
    return self.parts == self.mesh.shape[DATA] == self.mesh.size

  @functools.cached_property
  def share(self) -> tuple[int, int]:
    """Index of the part of a batch that this process reads, and their number.

    Raises:
      UserError: if the axes cut through the devices of a process.
    """
    # Find the parts of a batch that have a row on this process.
    process = jax.process_index()
    grid = self.mesh.devices.reshape(self.parts, -1)
    parts = [
      k for k, row in enumerate(grid) if any(_on(process, d) for d in row)
    ]
    first, count = parts[0], len(parts)
    # Parts must be consecutive, and all processes must have as many.
    is_run = parts == list(range(first, first + count))
    if self.parts % count or first % count or not is_run or self._cuts():
      raise UserError(
        f"The mesh {dict(self.mesh.shape)} cuts through the devices of process "
        f"{process}: choose {SEQUENCE!r} and {MODEL!r} so that their product "
        "divides its devices, or is a multiple of them."
      )
    return first // count, self.parts // count

  def _cuts(self) -> bool:
    """Returns True if a process would have a fraction of a share."""
    each = self.mesh.size // self.parts  # Devices that share rows.
    devices = self.mesh.size // jax.process_count()
    return bool(devices % each and each % devices)

  def batch(self, local: Any) -> Any:
    """Places this process's share of a batch [b, ...] on its devices."""
    if jax.process_count() == 1:
      return jax.device_put(local, self.tokens(local))
    number, shares = self.share

    def assemble(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
      first = number * len(x)  # Index of the first row of this process.

      def part(index: tuple[slice, ...]) -> np.ndarray:
        start, stop, _ = index[0].indices(len(x) * shares)
        return x[(slice(start - first, stop - first), *index[1:])]

      shape = (len(x) * shares, *x.shape[1:])
      return jax.make_array_from_callback(shape, sharding, part)

    return jax.tree.map(assemble, local, self.tokens(local))

  def whole(self) -> NamedSharding:
    """Returns the sharding of what every device has."""
    return NamedSharding(self.mesh, PartitionSpec())

  def tokens(self, batch: Any) -> Any:
    """Returns the sharding of the arrays of a batch.

    Args:
      batch: tree of arrays [b], [b, n], pairs [b, 2, n], or images
        [b, height, width, c], whose rows are split over `sequence`.
    """

    def sharding(x: Any) -> NamedSharding:
      axes: list[Any] = [(DATA, FSDP), *[None] * (x.ndim - 1)]
      place = 2 if x.ndim == 3 else 1
      if x.ndim > 1 and self._splits(x.shape[place], SEQUENCE):
        axes[place] = SEQUENCE
      return NamedSharding(self.mesh, PartitionSpec(*axes))

    return jax.tree.map(sharding, batch)

  def check_lengths(self, lengths: tuple[int, ...]) -> None:
    """Raises UserError for numbers of tokens that cannot be split evenly."""
    size = self.mesh.shape[SEQUENCE]
    odd = [n for n in lengths if n % size]
    if odd:
      raise UserError(
        f"config.mesh splits sequences over {size} devices, and batches of "
        f"{odd[0]} tokens do not split evenly: choose another size of "
        f"{SEQUENCE!r}, or another config.buckets or length of the task."
      )

  def state(self, tree: Any) -> Any:
    """Returns the sharding of every leaf of a state or of parameters."""
    return jax.tree_util.tree_map_with_path(
      lambda path, leaf: NamedSharding(self.mesh, self.spec(path, leaf.shape)),
      tree,
    )

  def spec(
    self, path: tuple[Any, ...], shape: tuple[int, ...]
  ) -> PartitionSpec:
    """Returns which axes of an array lie over which axes of the mesh.

    `model` splits the first axis of stacked orthogonal matrices [e, ..., d, d]
    and the last of other arrays of two axes and more; `fsdp` then the longest
    axis that is left. An axis that does not divide evenly is not split, nor is
    a vector or a scalar.

    Args:
      path: path of the array, as in `jax.tree_util`.
      shape: shape of the array.
    """
    if len(shape) < 2:
      return PartitionSpec()
    axes: list[str | None] = [None] * len(shape)
    # Split one axis over `model`: the experts, or else the columns.
    stacked = orthogonal.is_parameter(path)
    place = 0 if stacked else len(shape) - 1
    if (not stacked or len(shape) > 2) and self._splits(shape[place], MODEL):
      axes[place] = MODEL
    # Split the longest axis that is left over `fsdp`.
    for place in sorted(range(len(shape)), key=lambda k: -shape[k]):
      if axes[place] is None and self._splits(shape[place], FSDP):
        axes[place] = FSDP
        break
    return PartitionSpec(*axes)

  def _splits(self, length: int, axis: str) -> bool:
    size = self.mesh.shape[axis]
    return size > 1 and length % size == 0

  def place(self, state: Any) -> Any:
    """Puts every leaf of a state that all processes have where it belongs."""
    return jax.tree.map(put, state, self.state(state))

  def gather(self, params: Any) -> Any:
    """Returns parameters as a step reads them: not split over `fsdp`.

    Otherwise the compiler reshards the tokens at every product, to match the
    parameters.
    """
    if self.mesh.shape[FSDP] == 1:
      return params

    def replicate(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
      axes = [
        axis if axis == MODEL else None for axis in self.spec(path, leaf.shape)
      ]
      sharding = NamedSharding(self.mesh, PartitionSpec(*axes))
      return jax.lax.with_sharding_constraint(leaf, sharding)

    return jax.tree_util.tree_map_with_path(replicate, params)

  def rotations(
    self, params: Mapping[str, Any], mapping: str, in_turn: frozenset[str]
  ) -> dict[str, Any]:
    """Returns `orthogonal.rotations`, computed by all devices together.

    Each device of the axes `model` and `fsdp` maps a part of the matrices.

    Args:
      params: a tree of parameters.
      mapping: name of the orthogonal map.
      in_turn: names of parameters whose stacked matrices are applied one after
        the other, and are on every device; others, such as experts, are split
        over `model`.
    """
    parts = self.mesh.shape[MODEL] * self.mesh.shape[FSDP]
    if parts == 1:
      return orthogonal.rotations(params, mapping)

    def spread(function: Callable[[jax.Array], jax.Array]) -> Any:
      over = PartitionSpec((MODEL, FSDP))
      shared = jax.shard_map(
        function, mesh=self.mesh, in_specs=over, out_specs=over
      )

      def mapped(a: jax.Array) -> jax.Array:
        # Every device maps as many matrices; the last may map zeros.
        filled = jnp.pad(a, ((0, -len(a) % parts), (0, 0), (0, 0)))
        return shared(filled)[: len(a)]

      return mapped

    def sharding(path: tuple[Any, ...], q: jax.Array) -> NamedSharding:
      name = jax.tree_util.keystr(path[-1:], simple=True)
      is_stacked = q.ndim > 2 and name not in in_turn
      if is_stacked and self._splits(q.shape[0], MODEL):
        return NamedSharding(self.mesh, PartitionSpec(MODEL))
      return self.whole()

    matrices = orthogonal.rotations(params, mapping, spread=spread)
    return jax.lax.with_sharding_constraint(
      matrices, jax.tree_util.tree_map_with_path(sharding, matrices)
    )

  def traced(self, step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function whose models can ask for the mesh when traced."""
    if self.simple:
      return step

    @functools.wraps(step)
    def run(*args: Any, **kwargs: Any) -> Any:
      with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
        return step(*args, **kwargs)

    return run
