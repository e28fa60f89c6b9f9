"""The device and the mesh for which a program is traced."""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

# Device of the programs that are traced; None for the process's own devices.
_TARGET: contextvars.ContextVar[Any] = contextvars.ContextVar(
  "target", default=None
)
# Mesh axes over which the rows of a batch are split, the tokens of a row, and
# the experts, heads and hidden units of a layer.
ROWS = ("data", "fsdp")
SEQUENCE = "sequence"
MODEL = "model"
# Names of backends, by the names of their devices.
_BACKENDS = {"cuda": "gpu", "rocm": "gpu"}


@contextlib.contextmanager
def _setting(
  variable: contextvars.ContextVar[Any], value: Any
) -> Iterator[None]:
  token = variable.set(value)
  try:
    yield
  finally:
    variable.reset(token)


def targeting(device: Any) -> AbstractContextManager[None]:
  """Makes code that is traced in this context choose its form for a device.

  Args:
    device: device of JAX, or a device of the description of a topology.
  """
  return _setting(_TARGET, device)


def target() -> Any:
  """Returns the device for which a program is traced."""
  import jax  # Commands that need no device import this package.

  device = _TARGET.get()
  return jax.devices()[0] if device is None else device


def backend() -> str:
  """Returns the backend for which a program is traced: cpu, gpu or tpu.

  `jax.default_backend` names the backend of the process, which may compile for
  another one.
  """
  import jax

  device = _TARGET.get()
  return jax.default_backend() if device is None else backend_of(device)


def backend_of(device: Any) -> str:
  """Returns the backend of a device: cpu, gpu or tpu."""
  return _BACKENDS.get(device.platform, device.platform)


# True while models are traced for any device: see `portable`.
_PORTABLE = contextvars.ContextVar("portable", default=False)


def portable() -> AbstractContextManager[None]:
  """Makes models traced in this context run on any device.

  Otherwise traces may contain code for the current device.
  """
  return _setting(_PORTABLE, True)


def is_portable() -> bool:
  """Returns True while models are traced for any device."""
  return _PORTABLE.get()


def on_tpu() -> bool:
  """Returns True if a program is traced for TPUs only, and may use kernels."""
  return backend() == "tpu" and not is_portable()


def has_kernels() -> bool:
  """Returns True if a program may use Pallas kernels: see `on_tpu`.

  Their compiler refuses integers of 64 bits, which `jax_enable_x64` makes of
  the numbers of loops.
  """
  import jax

  return on_tpu() and jax.dtypes.canonicalize_dtype(int).itemsize == 4


def ring_size(n: int) -> int:
  """Returns the number of places of a ring on which n tokens do not overlap.

  It is 2 n, and on a TPU a number for which Fourier transforms are fast.
  """
  return fast_size(2 * n - 1) if on_tpu() else 2 * n


def fast_size(least: int) -> int:
  """Returns a number of points for which Fourier transforms on a TPU are fast.

  It is the least number m 2^k that is at least `least`, with m at most 128 and
  k at least 5; `least` itself up to 128. The compiler writes transforms of most
  other numbers as products with all points: 2,000 points take ten times as long
  as 2,016 (libtpu 0.0.42).
  """
  if least <= 128:
    return least
  step = max(32, 1 << (-(-least // 128) - 1).bit_length())
  return -(-least // step) * step


def is_slow_size(n: int) -> bool:
  """Returns True on TPUs if Fourier transforms of n points are slow."""
  return on_tpu() and fast_size(n) != n


def by_device(
  function: Callable[..., Any],
  rows: Any,
  shared: Any = None,
  token_axis: int = 0,
  *,
  repeats: bool = False,
) -> Any:
  """Returns `function(rows, shared)`, with each device's rows on its own.

  XLA would gather the rows of all devices for a Fourier transform, would ask
  all devices before it takes a branch, and refuses to split a kernel. Without a
  mesh that splits rows, or tokens if `token_axis` is given, or `model` if
  `repeats`, this is a plain call, and also if rows do not divide.

  Args:
    function: function of trees of arrays, which returns a tree of arrays. It
      is called with the rows of one device, and their tokens on it. Along the
      first axis its results are joined, so a sum over rows is returned once for
      each device.
    rows: tree of arrays [b, ...].
    shared: tree of arrays that every device has.
    token_axis: axis of the tokens of `rows` and of the results, if the mesh
      splits them: see `splits_tokens`. 0 to leave the tokens together.
    repeats: True to compute the same on all devices of the axis `model`. The
      caller knows the gradient; JAX's would be summed over these devices. False
      to leave this axis to the compiler.
  """
  import jax
  from jax.sharding import PartitionSpec

  sizes, count = _free_axes(), row_parts()
  splits = token_axis > 0 and not keeps_tokens()
  # A model that is initialised with one example has no rows to split.
  is_whole = any(x.shape[0] % count for x in jax.tree.leaves(rows))
  repeats = repeats and _parts(MODEL) > 1
  if is_whole or not (count > 1 or splits or repeats):
    return function(rows, shared)
  names = [axis for axis in sizes if axis in ROWS or sizes[axis] == 1]
  # Axes of size 1 are named too: a sum over them fails on CPUs in bfloat16.
  spec: list[Any] = [tuple(names)]
  if splits:
    spec += [*[None] * (token_axis - 1), SEQUENCE]
    names.append(SEQUENCE)
  if repeats:
    names.append(MODEL)
  split = PartitionSpec(*spec)
  return jax.shard_map(
    function,
    in_specs=(split, PartitionSpec()),
    out_specs=split,
    axis_names={*names},
    check_vma=False,
  )(rows, shared)


def splits_tokens(rows: int, n: int) -> bool:
  """Returns True if `by_device` can split n tokens of each of some rows."""
  whole = n % _parts(SEQUENCE) == rows % row_parts() == 0
  return whole and not keeps_tokens()


def rows_of_device(rows: int) -> int:
  """Returns how many of the rows of a batch a device has, at least 1."""
  return max(1, rows // row_parts())


def heads_of_device(heads: int) -> int:
  """Returns how many heads a device has, which are split if they divide."""
  size = _parts(MODEL)
  return heads if heads % size else heads // size


def row_parts() -> int:
  """Returns into how many parts the mesh splits the rows of a batch."""
  return math.prod(map(_parts, ROWS))


def keeps_tokens() -> bool:
  """Returns True if the mesh does not split the tokens of a row."""
  return _parts(SEQUENCE) == 1


def splits_only_rows() -> bool:
  """Returns True if the mesh splits nothing but the rows of a batch."""
  return all(axis in ROWS or size == 1 for axis, size in _free_axes().items())


def _parts(axis: str) -> int:
  """Returns into how many parts a free axis of the mesh splits arrays."""
  return _free_axes().get(axis, 1)


def _free_axes() -> dict[str, int]:
  """Returns the axes of the mesh that no enclosing map, as pmap, splits."""
  import jax

  mesh = jax.sharding.get_abstract_mesh()
  return {
    k: size for k, size in mesh.shape.items() if k not in mesh.manual_axes
  }
