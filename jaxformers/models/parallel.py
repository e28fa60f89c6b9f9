"""The mesh that models are traced on, and products and sums that suit it."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

MODEL = "model"  # The axis over which experts lie.
PMAP = "data"  # The axis that pmap maps over.
SEQUENCE = "sequence"  # The axis over which tokens lie.


def _mesh() -> jax.sharding.AbstractMesh:
  return jax.sharding.get_abstract_mesh()


def experts_are_spread() -> bool:
  """Returns True if experts lie on several devices of the context's mesh."""
  return _mesh().shape.get(MODEL, 1) > 1


_PORTABLE = contextvars.ContextVar("portable", default=False)


@contextlib.contextmanager
def portable() -> Iterator[None]:
  """Lets models be traced for any device, not for the one at hand."""
  token = _PORTABLE.set(True)
  try:
    yield
  finally:
    _PORTABLE.reset(token)


def _runs_alone(backend: str) -> bool:
  """Returns True if programs are for one device at hand, of a backend."""
  is_alone = _mesh().size <= 1 and not _PORTABLE.get()
  return is_alone and jax.default_backend() == backend


def on_one_cpu() -> bool:
  """Returns True if programs run on a CPU that is not one of a mesh."""
  return _runs_alone("cpu")


def on_one_gpu(capability: float) -> bool:
  """Returns True if programs run on an Nvidia GPU that is not one of a mesh.

  Args:
    capability: compute capability that the GPU must have, such as 8.0.
  """
  if not _runs_alone("gpu"):
    return False
  # AMD's GPUs have names such as "gfx90a" in place of a number.
  found = getattr(jax.devices()[0], "compute_capability", "")
  return found.replace(".", "").isdigit() and float(found) >= capability


def each_sample(function: Callable[..., Any], *arrays: Any) -> Any:
  """Returns `function` of every sample, one after another on one CPU.

  Args:
    function: function of trees of arrays, without the axis of the samples.
    *arrays: trees of arrays [b, ...].
  """
  if not on_one_cpu():
    return jax.vmap(function)(*arrays)
  return jax.lax.map(lambda sample: function(*sample), arrays)


def _tokens_are_split() -> bool:
  """Returns True if the tokens of a sample lie on several devices."""
  return _mesh().shape.get(SEQUENCE, 1) > 1


def product(x: jax.Array, w: jax.Array, precision: Any = None) -> jax.Array:
  """Returns x [b, n, d] times w [d, ...] -> [b, n, ...], as one matrix."""
  return dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())), precision)


def dot_general(
  x: jax.Array, w: jax.Array, dimensions: Any, *options: Any, **named: Any
) -> jax.Array:
  """Returns `jax.lax.dot_general` of tokens and a kernel, as a matrix product.

  The tokens of all samples are the rows of one matrix: XLA on CPUs transposes
  the gradient of an array with two batch axes, and not that of a matrix. Tokens
  that are split over devices stay apart: they would change places. Linen's
  layers take this function as their `dot_general`.

  Args:
    x: tokens; its last axes are multiplied with the first axes of w.
    w: kernel.
    dimensions, *options, **named: arguments of `jax.lax.dot_general`.
  """
  (axes, _), (batch, _) = dimensions
  if batch or _tokens_are_split():
    return jax.lax.dot_general(x, w, dimensions, *options, **named)
  rows, columns = x.shape[: axes[0]], w.shape[len(axes) :]
  size = math.prod(w.shape[: len(axes)])
  # Elsewhere columns keep their axes, of which a mesh may split one.
  kept = (-1,) if on_one_cpu() else columns
  y = jax.lax.dot_general(
    x.reshape(-1, size),
    w.reshape(size, *kept),
    (((1,), (0,)), ((), ())),
    *options,
    **named,
  )
  return y.reshape(*rows, *columns)


def row_sums(x: jax.Array) -> jax.Array:
  """Returns the sums over the last axis, [..., d] -> [..., 1].

  On CPUs a product with ones: XLA sums short rows slowly.
  """
  if not on_one_cpu():
    return x.sum(-1, keepdims=True)
  ones = jnp.ones((x.shape[-1], 1), x.dtype)
  return (x.reshape(-1, x.shape[-1]) @ ones).reshape(*x.shape[:-1], 1)


def column_sums(x: jax.Array) -> jax.Array:
  """Returns the sums over all axes but the last, [..., d] -> [d].

  On CPUs a product with ones: XLA sums columns slowly.
  """
  if not on_one_cpu():
    return x.sum(range(x.ndim - 1))
  x = x.reshape(-1, x.shape[-1])
  return (jnp.ones((1, x.shape[0]), x.dtype) @ x)[0]


def sum_over_devices(tree: Any) -> Any:
  """Returns sums over the devices that pmap maps over; trees as they are else.

  Under jit over a mesh the sums of a program are over all devices already.
  """
  try:
    return jax.lax.psum(tree, PMAP)
  except NameError:  # There is no such axis.
    return tree


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def repeat(x: jax.Array, count: int) -> jax.Array:
  """Returns x `count` times, [...] -> [count, ...].

  The gradient sums the copies by `column_sums`.
  """
  return jnp.broadcast_to(x[None], (count, *x.shape))


repeat.defvjp(
  lambda x, count: (repeat(x, count), x.shape),
  lambda count, shape, g: (column_sums(g.reshape(count, -1)).reshape(shape),),
)


def whole_tokens(x: jax.Array) -> jax.Array:
  """Returns x [b, n, d] with the channels of a token on one device.

  Otherwise tokens between layers would be split as the columns of the matrix
  that made them, and gathered again for every expert.
  """
  if not experts_are_spread():
    return x
  free = PartitionSpec.UNCONSTRAINED
  sharding = NamedSharding(_mesh(), PartitionSpec(free, free, None))
  return jax.lax.with_sharding_constraint(x, sharding)
