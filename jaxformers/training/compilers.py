"""Two ways to compile the same pure steps: jit over a mesh, or pmap."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxformers.config import RunConfig
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import Registry
from jaxformers.training.layout import DATA, Layout

Step = Callable[..., Any]

COMPILERS: Registry = Registry("parallel mode")


def check_batch(name: str, size: int, parts: int, over: str) -> None:
  """Raises UserError if a batch does not split into equal parts.

  Args:
    name: name of the config field with the batch size.
    size: number of examples in a batch.
    parts: number of equal parts.
    over: noun phrase for the message, such as "4 device(s)".
  """
  if size < 1 or size % parts:
    below = size // parts * parts
    nearest = f"{below} or {below + parts}" if below else f"{parts}"
    raise UserError(
      f"{name}={size} does not split evenly over {over}: choose a multiple "
      f"of {parts}, such as {nearest}."
    )


def check_split(config: RunConfig, layout: Layout) -> None:
  """Raises UserError if a config's batch does not split over its devices."""
  parts = config.accumulate or 1
  over = f"{layout.parts} device(s) in {parts} part(s) each"
  check_batch("batch_size", config.batch_size, layout.parts * parts, over)


def devices() -> list[jax.Device]:
  """Returns the devices of a run, which are all visible devices."""
  return jax.devices()


def layout(spec: str = "") -> Layout:
  """Returns the layout of all devices that `config.mesh` describes."""
  return Layout.of(spec, devices())


@COMPILERS.register("jit")
def compile_jit(
  step: Step, layout: Layout, *, state: Any = None, donate: bool = False
) -> tuple[Step, Callable[[Any], Any]]:
  """Compiles step(state, batch) with jit over the mesh of a layout.

  Args:
    step: training or evaluation step. Its keyword `axis_name` stays None,
      because the compiler adds the sums over devices.
    layout: placement of the state and the batch.
    state: example of the state of a training step, which returns the next state
      and sums. None for an evaluation step, which returns only sums and takes
      variables with the placement that they have.
    donate: True to reuse the memory of the first argument for the result.

  Returns:
    The compiled step, and a function that places a host batch for it.
  """
  # The state keeps its placement, and sums are copied to every device.
  everywhere = layout.sharding()
  placed = None if state is None else layout.state_sharding(state)
  compiled = jax.jit(
    layout.traced(step),
    in_shardings=(placed, None),  # A batch keeps its placement.
    out_shardings=everywhere if state is None else (placed, everywhere),
    donate_argnums=(0,) if donate else (),
  )
  return compiled, layout.place_batch


@COMPILERS.register("pmap")
def compile_pmap(
  step: Step, layout: Layout, *, state: Any = None, donate: bool = False
) -> tuple[Step, Callable[[Any], Any]]:
  """Compiles step(state, batch) with pmap; the state stays unreplicated.

  Arguments and results are the same as for `compile_jit`, so both modes share
  checkpoints. Every process maps over its own devices, and sums run over the
  devices of all processes. Nothing is donated, because pmap copies the state to
  the devices.

  Raises:
    UserError: if the layout splits more than batches.
  """
  del state, donate
  if not layout.splits_batches_alone:
    raise UserError(
      'config.parallel="pmap" splits only batches, over all devices: leave '
      'config.mesh empty, or choose parallel="jit".'
    )
  # Send the state to every device, and take back one copy of the result.
  mapped = jax.pmap(
    functools.partial(layout.targeted(step), axis_name=DATA),
    axis_name=DATA,
    devices=layout.mesh.devices.ravel().tolist(),
    in_axes=(None, 0),
    out_axes=None,
  )
  # pmap works on arrays of one process; a state spans all processes.
  local = jax.sharding.Mesh(layout.mesh.local_mesh.devices.ravel(), (DATA,))
  rows = jax.NamedSharding(local, jax.P(DATA))

  def compiled(state: Any, batch: Any) -> Any:
    return jax.tree.map(layout.replicated, mapped(state, batch))

  # Like jit's, the step can be compiled for shapes: batches as `place` returns.
  compiled.lower = mapped.lower  # type: ignore[attr-defined]

  def place(batch: Any) -> Any:
    # Add a first axis of devices, over which pmap maps: [devices, rows, ...].
    shape = (local.size, -1)
    split = jax.tree.map(lambda x: x.reshape((*shape, *x.shape[1:])), batch)
    return jax.device_put(split, rows)

  return compiled, place


def compile_step(
  mode: str, step: Step, layout: Layout, **options: Any
) -> tuple[Step, Callable[[Any], Any]]:
  """Compiles a step by the mode "jit" or "pmap"; see `compile_jit`."""
  return COMPILERS[mode](step, layout, **options)
