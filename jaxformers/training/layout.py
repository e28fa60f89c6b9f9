"""The mesh of devices, and the placement of batches and parameters on it.

A mesh has four axes:

- `data` and `fsdp` split the rows of a batch;
- `sequence` splits the tokens of its sequences;
- `fsdp` also splits parameters and the moments of the optimiser;
- `model` splits the experts of TransJect, with their orthogonal matrices, the
  heads of attention, and the hidden units of feed-forwards.

The compiler adds the communication between devices (GSPMD,
https://arxiv.org/abs/2105.04663), so a mesh changes only the order of sums, and
which weights the dropout of softmax attention drops.
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
from jax.tree_util import KeyPath

from jaxformers import orthogonal
from jaxformers.foundations import platforms
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.platforms import MODEL, SEQUENCE

DATA, FSDP = "data", "fsdp"
AXES = (DATA, FSDP, SEQUENCE, MODEL)
# Axis of heads or of hidden units, by the parameter and its number of axes.
_HEADS = ("query", "key", "value", "query_global", "key_global", "value_global")
INNER = {
  **{(f"{x}/kernel", 3): 1 for x in (*_HEADS, "gate")},
  **{(f"{x}/bias", 2): 0 for x in _HEADS},
  ("out/kernel", 3): 0,
  ("up/kernel", 2): 1,
  ("up/bias", 1): 0,
  ("down/kernel", 2): 0,
}


def sizes(spec: str, count: int) -> dict[str, int]:
  """Returns the size of every axis of a mesh.

  Args:
    spec: axes and their sizes, such as "data:4,model:2". An axis that is left
      out has size 1, and "" gives all devices to `data`.
    count: number of devices.

  Raises:
    UserError: for an unknown axis, or sizes whose product is not the number of
      devices.
  """
  # Read axes and sizes one by one.
  shape: dict[str, int] = {}
  for item in (spec or f"{DATA}:{count}").split(","):
    axis, _, size = item.partition(":")
    if axis not in AXES or not size.isdecimal() or int(size) < 1:
      raise UserError(
        f"config.mesh={spec!r}: {item!r} is not an axis and its size. Axes are "
        f"{', '.join(AXES)}; write data:{count}, for example."
      )
    if axis in shape:
      raise UserError(
        f"config.mesh={spec!r} names the axis {axis!r} twice: remove one."
      )
    shape[axis] = int(size)
  # The product of all sizes must be the number of devices.
  shape = dict.fromkeys(AXES, 1) | shape
  if math.prod(shape.values()) != count:
    raise UserError(
      f"config.mesh={spec!r} needs {math.prod(shape.values())} devices, but "
      f"there are {count}: choose sizes whose product is {count}, or leave "
      "the field empty."
    )
  return shape


def put(leaf: Any, sharding: jax.sharding.Sharding) -> jax.Array:
  """Places an array that every process holds in full."""
  array = np.asarray(leaf)
  return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


def token_axis(x: Any) -> int:
  """Returns the axis of the tokens, or of the rows of an image.

  It is 2 for pairs [b, 2, n], which are integers, and 1 for [b, n], for time
  series [b, n, c] and for images [b, height, width, c].
  """
  is_pair = x.ndim == 3 and not jnp.issubdtype(x.dtype, jnp.floating)
  return 2 if is_pair else 1


def placed_shapes(tree: Any, shardings: Any) -> Any:
  """Returns the shapes of arrays with their shardings, for compilers."""
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    tree,
    shardings,
  )


@dataclasses.dataclass(frozen=True)
class Layout:
  """A mesh of devices, with rules for the placement of arrays.

  Attributes:
    mesh: mesh of all devices, with the axes `AXES`.
  """

  mesh: Mesh

  @classmethod
  def of(cls, spec: str, devices: list[jax.Device]) -> Layout:
    """Returns the layout that `config.mesh` describes for some devices."""
    shape = sizes(spec, len(devices))
    grid = np.array(devices).reshape(*shape.values())
    return cls(Mesh(grid, AXES))

  @property
  def parts(self) -> int:
    """Number of parts that a batch is split into."""
    return self.mesh.shape[DATA] * self.mesh.shape[FSDP]

  def round_up(self, rows: int) -> int:
    """Returns the number of rows, rounded up to a multiple of `parts`."""
    return -(-rows // self.parts) * self.parts

  @property
  def splits_batches_alone(self) -> bool:
    """True if the mesh splits batches and nothing else."""
    return self.parts == self.mesh.shape[DATA] == self.mesh.size

  @functools.cached_property
  def share(self) -> tuple[int, int]:
    """Index of this process's share of a batch, and the number of shares.

    Processes that hold the same rows have the same share.

    Raises:
      UserError: if the axes split the devices of a process unevenly.
    """
    # Find the parts of a batch on the devices of this process.
    process = jax.process_index()
    grid = self.mesh.devices.reshape(self.parts, -1)
    owners = np.vectorize(lambda device: device.process_index)(grid)
    parts = np.flatnonzero((owners == process).any(1)).tolist()
    first, count = parts[0], len(parts)
    # A process must hold whole parts, or a part must span whole processes.
    each, local = grid.shape[1], grid.size // jax.process_count()
    is_whole = local % each == 0 or each % local == 0
    # Parts must be consecutive, and every process must hold equally many.
    is_consecutive = parts == list(range(first, first + count))
    is_even = self.parts % count == first % count == 0
    if not (is_whole and is_consecutive and is_even):
      raise UserError(
        f"The mesh {dict(self.mesh.shape)} cuts through the devices of process "
        f"{process}: choose {SEQUENCE!r} and {MODEL!r} so that their product "
        "divides its number of devices, or is a multiple of it."
      )
    return first // count, self.parts // count

  def place_batch(self, local: Any) -> Any:
    """Places this process's share of a batch [b, ...] on its devices."""
    shares = self.share[1]
    shapes = jax.tree.map(lambda x: (len(x) * shares, *x.shape[1:]), local)
    shardings = self.batch_sharding(local)
    return jax.make_array_from_process_local_data(shardings, local, shapes)

  def sharding(self, *axes: Any) -> NamedSharding:
    """Returns the sharding over axes of the mesh; replicated without axes."""
    return NamedSharding(self.mesh, PartitionSpec(*axes))

  def batch_sharding(self, batch: Any) -> Any:
    """Returns the sharding of the arrays of a batch.

    Args:
      batch: tree of arrays [b], [b, n], pairs [b, 2, n], time series [b, n, c],
        or images [b, height, width, c], whose height is split over `sequence`.
    """

    def split(x: Any) -> NamedSharding:
      # Split rows over `data` and `fsdp`, and tokens over `sequence`.
      axes: list[Any] = [(DATA, FSDP), *[None] * (x.ndim - 1)]
      place = token_axis(x)
      if x.ndim > 1 and self._splits(x.shape[place], SEQUENCE):
        axes[place] = SEQUENCE
      return self.sharding(*axes)

    return jax.tree.map(split, batch)

  def check_lengths(
    self, lengths: tuple[int, ...], image: tuple[int, ...] | None = None
  ) -> None:
    """Raises UserError for a number of tokens that does not split evenly.

    Args:
      lengths: numbers of tokens.
      image: shape of the images of a task, which are split by their rows.
    """
    size = self.mesh.shape[SEQUENCE]
    rest = "config.buckets, config.short_length, or the length of the task"
    for n in image[:1] if image else lengths:
      what = f"images of {n} rows" if image else f"sequences of {n} tokens"
      if n % size:
        raise UserError(
          f"config.mesh splits sequences over {size} devices, but {what} do "
          f"not split evenly: change the size of {SEQUENCE!r}, "
          f"{'or the size of the images' if image else rest}."
        )

  def state_sharding(self, tree: Any) -> Any:
    """Returns the sharding of every leaf of a state or of parameters."""
    return jax.tree_util.tree_map_with_path(
      lambda path, leaf: self.sharding(*self.spec(path, leaf.shape)), tree
    )

  def spec(self, path: KeyPath, shape: tuple[int, ...]) -> PartitionSpec:
    """Returns the mesh axis that splits each axis of an array.

    `model` splits the first axis of stacked orthogonal matrices
    [e, ..., d, d], and the axes in `INNER`: a feed-forward, or the heads of a
    layer, send one sum of tokens in each pass (Shoeybi et al. 2019, section 3,
    https://arxiv.org/abs/1909.08053). `fsdp` splits the longest remaining axis
    of arrays with two or more axes. An axis is not split if its length does not
    divide evenly.

    Args:
      path: path of the array, as in `jax.tree_util`.
      shape: shape of the array.
    """
    axes: list[str | None] = [None] * len(shape)
    name = jax.tree_util.keystr(path[-2:], simple=True, separator="/")
    place = INNER.get((name, len(shape)))
    if len(shape) > 2 and orthogonal.is_parameter(path):
      place = 0
    if place is not None and self._splits(shape[place], MODEL):
      axes[place] = MODEL
    # Split the longest remaining axis over `fsdp`.
    left = [
      k
      for k, axis in enumerate(axes)
      if axis is None and self._splits(shape[k], FSDP)
    ]
    if left and len(shape) > 1:
      axes[max(left, key=shape.__getitem__)] = FSDP
    return PartitionSpec(*axes)

  def _splits(self, length: int, axis: str) -> bool:
    size = self.mesh.shape[axis]
    return size > 1 and length % size == 0

  def place_state(self, state: Any) -> Any:
    """Places a state on the mesh; every process has a full copy of it."""
    return jax.tree.map(put, state, self.state_sharding(state))

  def replicated(self, array: jax.Array) -> jax.Array:
    """Returns an array that is replicated on the devices of all processes.

    Args:
      array: array with equal values in all processes, and a copy on each device
        of this process. Nothing is moved.
    """
    if array.sharding.device_set == {*self.mesh.devices.flat}:
      return array
    # Declare the copies of all processes to be one array.
    copies = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(
      array.shape, self.sharding(), copies
    )

  def gather(self, params: Any) -> Any:
    """Returns parameters without their split over `fsdp`, for use in a step.

    If the parameters stayed split, the compiler would reshard the tokens at
    every product instead.
    """
    if self.mesh.shape[FSDP] == 1:
      return params

    def replicate(path: KeyPath, leaf: jax.Array) -> jax.Array:
      spec = self.spec(path, leaf.shape)
      kept = [axis if axis == MODEL else None for axis in spec]
      return jax.lax.with_sharding_constraint(leaf, self.sharding(*kept))

    return jax.tree_util.tree_map_with_path(replicate, params)

  def rotations(
    self,
    params: Mapping[str, Any],
    orthogonal_map: str,
    in_turn: frozenset[str],
  ) -> dict[str, Any]:
    """Returns `orthogonal.rotations`, computed by all devices together.

    Each device along the axes `model` and `fsdp` computes a part of the
    matrices.

    Args:
      params: tree of parameters.
      orthogonal_map: name of the map, in `orthogonal.MAPS`.
      in_turn: names of parameters whose stacked matrices are applied one after
        the other. Every device gets all of these matrices. Stacks of other
        names, such as experts, are split over `model`.
    """
    parts = self.mesh.shape[MODEL] * self.mesh.shape[FSDP]
    if parts == 1:
      return orthogonal.rotations(params, orthogonal_map)

    # Compute a part of the stack on each device.
    def spread(function: Callable[[jax.Array], jax.Array]) -> Any:
      over = PartitionSpec((MODEL, FSDP))
      shared = jax.shard_map(
        function,
        mesh=self.mesh,
        in_specs=over,
        out_specs=over,
        check_vma=False,  # Kernels do not state over what they vary.
      )

      def map_all(a: jax.Array) -> jax.Array:
        # Pad the stack, so that all devices map equally many matrices.
        filled = jnp.pad(a, ((0, -len(a) % parts), (0, 0), (0, 0)))
        return shared(filled)[: len(a)]

      return map_all

    # Split the results over `model`, or replicate them.
    def constrain(path: KeyPath, q: jax.Array) -> jax.Array:
      name = jax.tree_util.keystr(path[-1:], simple=True)
      is_stacked = q.ndim > 2 and name not in in_turn
      axes = [MODEL] if is_stacked and self._splits(len(q), MODEL) else []
      return jax.lax.with_sharding_constraint(q, self.sharding(*axes))

    matrices = orthogonal.rotations(params, orthogonal_map, spread=spread)
    return jax.tree_util.tree_map_with_path(constrain, matrices)

  def traced(self, step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a step that JAX traces with this mesh, which the models read."""

    @functools.wraps(step)
    def run(*args: Any, **kwargs: Any) -> Any:
      if self.mesh.size == 1:
        return step(*args, **kwargs)
      with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
        return step(*args, **kwargs)

    return self.targeted(run)

  def targeted(self, step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a step that takes the forms that suit the devices of the mesh."""

    @functools.wraps(step)
    def run(*args: Any, **kwargs: Any) -> Any:
      with platforms.targeting(self.mesh.devices.flat[0]):
        return step(*args, **kwargs)

    return run
