"""Matrix products and sums that suit the mesh on which a model is traced."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxformers.foundations import platforms

PMAP = "data"  # Axis that pmap maps over.


def _mesh() -> jax.sharding.AbstractMesh:
  return jax.sharding.get_abstract_mesh()


def experts_are_spread() -> bool:
  """Returns True if the current mesh splits experts over several devices."""
  return _mesh().shape.get(platforms.MODEL, 1) > 1


def _runs_on(backend: str) -> bool:
  """Returns True if programs run on devices of a backend only."""
  return platforms.backend() == backend and not platforms.is_portable()


def on_one_cpu() -> bool:
  """Returns True if programs run on a single CPU, without a mesh."""
  return _runs_on("cpu") and _mesh().size <= 1


def on_gpus(capability: float) -> bool:
  """Returns True if programs run on Nvidia GPUs, whose mesh splits only rows.

  Args:
    capability: least compute capability of the GPUs, such as 8.0.
  """
  if not _runs_on("gpu") or not platforms.splits_only_rows():
    return False
  # AMD GPUs have a name such as "gfx90a" instead of a number.
  version = getattr(platforms.target(), "compute_capability", "")
  return version.replace(".", "").isdigit() and float(version) >= capability


def each_sample(function: Callable[..., Any], *arrays: Any) -> Any:
  """Applies `function` to every sample: in a loop on one CPU, else by vmap.

  Args:
    function: function of trees of arrays, without the axis of the samples.
    *arrays: trees of arrays [b, ...].
  """
  if not on_one_cpu():
    return jax.vmap(function)(*arrays)
  return jax.lax.map(lambda sample: function(*sample), arrays)


def for_samples(z: jax.Array, count: int) -> jax.Array:
  """Returns complex z [...] for the product with `count` samples.

  The gradient is summed in its real and in its imaginary part. Several devices
  would send a complex sum apart from the other gradients.

  Returns:
    Complex [count, ...], or [1, ...] on one CPU.
  """
  if on_one_cpu():
    return z[None]
  parts = (z.real[None], z.imag[None])
  return jax.lax.complex(
    *(jnp.broadcast_to(part, (count, *z.shape)) for part in parts)
  )


def product(x: jax.Array, w: jax.Array, precision: Any = None) -> jax.Array:
  """Returns x [b, n, d] times w [d, ...] -> [b, n, ...]: see `dot_general`."""
  return dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())), precision)


def dot_general(
  x: jax.Array, w: jax.Array, dimensions: Any, *options: Any, **named: Any
) -> jax.Array:
  """Returns `jax.lax.dot_general` of tokens and a kernel, as a matrix product.

  The tokens of all samples become the rows of one matrix. XLA on CPUs
  transposes the gradient of an array with two batch axes, but not the gradient
  of a matrix. If the mesh splits tokens over devices, the axes are kept:
  merging them would move tokens between devices. Layers of Linen accept this
  function as their `dot_general`.

  Args:
    x: tokens. The last axes of x are multiplied with the first axes of w.
    w: kernel.
    dimensions, *options, **named: arguments of `jax.lax.dot_general`.
  """
  (axes, _), (batch, _) = dimensions
  if batch or not platforms.keeps_tokens():
    return jax.lax.dot_general(x, w, dimensions, *options, **named)
  # Merge the axes: x to [rows, size], w to [size, columns].
  rows, columns = x.shape[: axes[0]], w.shape[len(axes) :]
  size = math.prod(w.shape[: len(axes)])
  # Merge the columns only on one CPU: a mesh may split one of their axes.
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

  On a CPU, the sum is a product with ones, because XLA sums short rows slowly.
  """
  if not on_one_cpu():
    return x.sum(-1, keepdims=True)
  ones = jnp.ones((x.shape[-1], 1), x.dtype)
  return (x.reshape(-1, x.shape[-1]) @ ones).reshape(*x.shape[:-1], 1)


def column_sums(x: jax.Array) -> jax.Array:
  """Returns the sums over all axes but the last, [..., d] -> [d].

  On a CPU, the sum is a product with ones, because XLA sums columns slowly.
  """
  if not on_one_cpu():
    return x.sum(range(x.ndim - 1))
  x = x.reshape(-1, x.shape[-1])
  return (jnp.ones((1, x.shape[0]), x.dtype) @ x)[0]


def sum_over_devices(tree: Any) -> Any:
  """Returns sums over the devices that pmap maps over.

  Outside pmap, returns the tree unchanged. Under jit over a mesh, sums in a
  program are already sums over all devices.
  """
  try:
    return jax.lax.psum(tree, PMAP)
  except NameError:  # There is no axis of pmap.
    return tree


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def repeat(x: jax.Array, count: int) -> jax.Array:
  """Returns `count` copies of x, [...] -> [count, ...].

  The gradient is the sum over the copies, by `column_sums`.
  """
  return jnp.broadcast_to(x[None], (count, *x.shape))


repeat.defvjp(
  lambda x, count: (repeat(x, count), x.shape),
  lambda count, shape, g: (column_sums(g.reshape(count, -1)).reshape(shape),),
)
