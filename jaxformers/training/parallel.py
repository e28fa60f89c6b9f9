"""Two ways to compile the same pure steps: jit over a mesh, or pmap."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxformers.registry import Registry, choose

COMPILERS: Registry = Registry("parallel mode")
AXIS = "data"


def check_batch(name: str, size: int, parts: int, what: str) -> None:
  """Raises ValueError if a batch does not split into equal parts."""
  if size < 1 or size % parts:
    below = size // parts * parts
    nearest = f"{below} or {below + parts}" if below else f"{parts}"
    raise ValueError(
      f"{name}={size} does not split evenly over {what}: choose a multiple "
      f"of {parts}, such as {nearest}."
    )


def place_state(state: Any) -> Any:
  """Puts every leaf of a state on all devices, whole."""
  return jax.device_put(state, NamedSharding(_mesh(), PartitionSpec()))


def devices() -> list[jax.Device]:
  """The devices that a batch is split over: all there are."""
  return jax.devices()


def _mesh() -> Mesh:
  return Mesh(np.array(devices()), (AXIS,))


@COMPILERS.register("jit")
def compile_jit(
  step: Callable[..., Any], *, donate: bool
) -> tuple[Callable[..., Any], Callable[[Any], Any]]:
  """Compiles step(state, batch) by jit, the batch split over all devices.

  Args:
    step: takes `axis_name` as keyword; None here, the compiler adds the sums.
    donate: whether the first argument's memory is given to the result.

  Returns:
    The compiled step, and a function that places a host batch for it.
  """
  mesh = _mesh()
  whole = NamedSharding(mesh, PartitionSpec())
  rows = NamedSharding(mesh, PartitionSpec(AXIS))
  compiled = jax.jit(
    step,
    in_shardings=(whole, rows),
    out_shardings=whole,
    donate_argnums=(0,) if donate else (),
  )
  return compiled, functools.partial(jax.device_put, device=rows)


@COMPILERS.register("pmap")
def compile_pmap(
  step: Callable[..., Any], *, donate: bool
) -> tuple[Callable[..., Any], Callable[[Any], Any]]:
  """Compiles step(state, batch) by pmap; the state stays unreplicated.

  Arguments and results are those of `compile_jit`, so checkpoints are the same
  in both modes. Nothing is donated: pmap copies the state to the devices.
  """
  del donate
  compiled = jax.pmap(
    functools.partial(step, axis_name=AXIS),
    axis_name=AXIS,
    devices=devices(),
    in_axes=(None, 0),
    out_axes=None,
  )
  rows = NamedSharding(_mesh(), PartitionSpec(AXIS))

  def place(batch: Any) -> Any:
    split = jax.tree.map(
      lambda x: x.reshape((len(devices()), -1, *x.shape[1:])), batch
    )
    return jax.device_put(split, rows)

  return compiled, place


def compile_step(
  mode: str, step: Callable[..., Any], *, donate: bool = False
) -> tuple[Callable[..., Any], Callable[[Any], Any]]:
  """Compiles by "jit" or "pmap"; see `compile_jit`."""
  return COMPILERS[choose("parallel mode", mode, COMPILERS)](
    step, donate=donate
  )
