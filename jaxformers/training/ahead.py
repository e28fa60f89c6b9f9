"""Steps of a config, compiled for devices that this machine does not have."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformers import models, tasks
from jaxformers.config import RunConfig
from jaxformers.data.engine.loader import Loader
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import call
from jaxformers.models import make_variables
from jaxformers.models.model import has_statistics
from jaxformers.training import compilers, memory, optim, programs, run
from jaxformers.training import state as states
from jaxformers.training.layout import Layout, placed_shapes
from jaxformers.training.losses import LOSSES
from jaxformers.training.steps import Margin, eval_step, train_step
from jaxformers.training.topologies import Chip

# Objectives whose batches follow from the sizes of the task.
_PLAIN = ("classification", "language_model")


@dataclasses.dataclass(frozen=True)
class Report:
  """What the compiler plans for one step, on each device.

  Attributes:
    step: "train" or "evaluation".
    parts: number of parts of the batch.
    devices: number of devices of the mesh.
    arguments, temporaries, total: memory in GiB: state and batch; temporary
      arrays; and all arrays at the same time.
    available: memory of a device in GiB.
    tflop, gigabytes: operations in products, and bytes of the main memory that
      are read and written, with loops by their trips.
    compiler_ms: time from the compiler's estimate of cycles; 0 if it has none.
      The estimate leaves out FFTs and the time to communicate.
    compute_ms, memory_ms: time of the operations and of the bytes at the peaks
      of the device.
    binds: "compute" or "memory", the greater of these two; "loops" if the
      compiler's estimate is more than four times as great.
    loops: numbers of trips of the loops.
    collectives: communication between devices.
    seconds: time to compile.
  """

  step: str
  parts: int
  devices: int
  arguments: float
  temporaries: float
  total: float
  available: float
  tflop: float
  gigabytes: float
  compiler_ms: float
  compute_ms: float
  memory_ms: float
  binds: str
  loops: tuple[int, ...]
  collectives: tuple[programs.Collective, ...]
  seconds: float


def batch_shapes(
  config: RunConfig, sizes: Mapping[str, Any], rows: int
) -> dict[str, Any]:
  """Returns the shapes of the longest batch of a task, from its sizes.

  Args:
    config: config of the run.
    sizes: sizes of the task, as `models.build` takes them.
    rows: number of examples.

  Raises:
    UserError: for an objective whose batches have arrays of their own.
  """
  objective = sizes.get("objective", "classification")
  if objective not in _PLAIN:
    raise UserError(
      f"The batches of objective={objective!r} do not follow from --sizes: "
      "remove --sizes, so that the data are opened."
    )
  inputs: tuple[int, ...] = (rows, *sizes.get("image", ()))
  dtype = jnp.uint8
  if not sizes.get("image"):
    # Tokens are ids or numbers; several sequences have an axis of their own.
    dtype = jnp.int32 if sizes["vocab_size"] else jnp.float32
    number = sizes.get("num_inputs", 1)
    inputs = (rows, *(number,) * (number > 1), sizes["max_len"])
  # A language model has a target for every token.
  shape = inputs if objective == "language_model" else (rows,)
  return {
    "inputs": jax.ShapeDtypeStruct(inputs, dtype),
    "targets": jax.ShapeDtypeStruct(shape, jnp.int32),
    "weights": jax.ShapeDtypeStruct(shape, jnp.float32),
  }


def open_batch(
  config: RunConfig, rows: int
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns the sizes of a task and the shapes of its batch, from its data."""
  task = tasks.get(config.task.name, **config.task_options)
  sizes = task.sizes()
  split = task.splits["train"]
  lengths = (sizes.get("max_len") or 1,)
  batch = Loader(split, lengths).batch(np.zeros(rows, int), (0, 0))
  shapes = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in batch.items()}
  return sizes, shapes


class Ahead:
  """Compiles the steps of a config for the devices of a topology."""

  def __init__(
    self,
    config: RunConfig,
    devices: Sequence[Any],
    chip: Chip,
    sizes: Mapping[str, Any] | None = None,
  ) -> None:
    """Builds the model and the shapes of its state; draws no parameters.

    Args:
      config: config of the run.
      devices: devices of the topology.
      chip: peaks of one device.
      sizes: sizes of the task; None to open its data.

    Raises:
      UserError: if the batch does not split over the devices, or for a config
        that cannot be trained.
    """
    run.check_fields(config)
    self.config, self.chip = config, chip
    self.layout = Layout.of(config.mesh, list(devices))
    over = f"{self.layout.parts} device(s)"
    rows, parts = config.batch_size, self.layout.parts
    compilers.check_batch("batch_size", rows, parts, over)
    if sizes is None:
      sizes, self.batch = open_batch(config, rows)
    else:
      self.batch = batch_shapes(config, sizes, rows)
    self.model = call(
      "config.model", models.build, {**vars(config.model), **sizes}
    )
    self.tx, _ = optim.build_optimizer(
      config.optimizer, config.schedule, config.total_steps, self.model.kinds
    )
    create = functools.partial(
      states.create, self.model, self.tx, averaged=config.ema_decay > 0
    )
    self.state = jax.eval_shape(create, config.seed)

  def train(self) -> Report:
    """Compiles the train step, in as many parts as fit the memory.

    Raises:
      UserError: if no number of parts fits.
    """
    c = self.config
    rows = c.batch_size // self.layout.parts
    sees_batch = LOSSES[self.model.objective].sees_batch
    is_whole = sees_batch or has_statistics(self.model)
    choices = [k for k in range(1, rows + 1) if rows % k == 0]
    if c.accumulate or is_whole:
      choices = [c.accumulate or 1]
    # Double the parts until the step fits.
    parts, report = 0, None
    while more := [k for k in choices if k >= max(2 * parts, 1)]:
      parts = more[0]
      report = self._compile_train(parts)
      if report.total <= report.available:
        return report
    assert report is not None
    raise UserError(
      f"A step needs {report.total:.1f} GiB in {parts} part(s) of its batch, "
      f"and a device has {report.available:g} GiB. Set "
      "--config.model.memory=recomputed, a smaller --config.batch_size, or a "
      "--config.mesh that splits the model over devices."
    )

  def _compile_train(self, parts: int) -> Report:
    c = self.config
    step = functools.partial(
      train_step,
      model=self.model,
      tx=self.tx,
      smoothing=c.label_smoothing,
      margin=Margin(c.margin_tokens, c.margin_weight),
      placement=self.layout,
      accumulate=parts,
      seed=c.seed,
      ema_decay=c.ema_decay,
    )
    compiled, _ = compilers.compile_jit(
      step, self.layout, state=self.state, donate=True
    )
    return self._report("train", parts, compiled, self.state)

  def evaluation(self) -> Report:
    """Compiles the evaluation step, for batches of the training's size."""
    prepare = functools.partial(
      make_variables, self.model, placement=self.layout
    )
    variables = jax.eval_shape(prepare, self.state.params)
    step = functools.partial(eval_step, model=self.model)
    compiled, _ = compilers.compile_jit(step, self.layout)
    return self._report("evaluation", 1, compiled, variables)

  def _report(
    self, name: str, parts: int, compiled: Callable[..., Any], first: Any
  ) -> Report:
    """Compiles a step for shapes, and reads the program."""
    layout, chip = self.layout, self.chip
    placed = placed_shapes(first, layout.state_sharding(first))
    batch = placed_shapes(self.batch, layout.batch_sharding(self.batch))
    began = time.perf_counter()
    program = compiled.lower(placed, batch).compile()  # type: ignore[attr-defined]
    seconds = time.perf_counter() - began
    # Read memory, work and communication.
    plan = program.memory_analysis()
    devices = layout.mesh.devices.ravel().tolist()
    counts = programs.count(program, devices)
    compute_ms = counts.flops / chip.tflops / 1e9
    memory_ms = counts.bytes / chip.bandwidth / 1e6
    compiler_ms = counts.cycles / chip.clock / 1e6
    binds = "compute" if compute_ms > memory_ms else "memory"
    if compiler_ms > 4 * max(compute_ms, memory_ms):
      binds = "loops"
    return Report(
      step=name,
      parts=parts,
      devices=len(devices),
      arguments=plan.argument_size_in_bytes / 2**30,
      temporaries=plan.temp_size_in_bytes / 2**30,
      total=memory.planned_bytes(program) / 2**30,
      available=chip.gib,
      tflop=counts.flops / 1e12,
      gigabytes=counts.bytes / 1e9,
      compiler_ms=compiler_ms,
      compute_ms=compute_ms,
      memory_ms=memory_ms,
      binds=binds,
      loops=counts.loops,
      collectives=counts.collectives,
      seconds=seconds,
    )
