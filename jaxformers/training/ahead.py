"""Steps of a config, compiled for devices that this machine does not have."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformers import models, tasks
from jaxformers.config import RunConfig
from jaxformers.data.engine.loader import Loader, pad_lengths
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import call
from jaxformers.models.bounds import check_bound
from jaxformers.training import (
  compilers,
  executables,
  memory,
  optim,
  programs,
  run,
)
from jaxformers.training import state as states
from jaxformers.training.evaluate import Evaluator
from jaxformers.training.layout import FSDP, Layout, placed_shapes, token_axis
from jaxformers.training.topologies import Chip
from jaxformers.training.trainer import make_step, more_parts, sees_batch

# Objectives whose batches follow from the sizes of the task.
_PER_TOKEN = ("language_model", "token_classification")
_PLAIN = ("classification", *_PER_TOKEN)
# A GPU's library, and not XLA's own kernels, computes the products.
_BY_LIBRARY = {"compiler_options": {"xla_gpu_enable_triton_gemm": False}}


@dataclasses.dataclass(frozen=True)
class Report:
  """Plan of the compiler for one step, on each device.

  Attributes:
    step: "train" or "evaluation".
    parts: number of parts of the batch.
    devices: number of devices of the mesh.
    arguments, temporaries, total: memory in GiB: state and batch; temporary
      arrays; and all arrays at the same time.
    available: memory of a device in GiB.
    tflop, precise, library: operations of products with loops by their trips,
      the part of them at the highest precision, and the part that a GPU's
      library computes. See `programs.Counts` for what they leave out.
    gigabytes: bytes of the main memory that are read and written.
    compiler_ms: time from the compiler's estimate of cycles; 0 if it has none.
    compute_ms, memory_ms: time of the operations and of the bytes at the peaks
      of the device.
    binds: "compute" or "memory", the greater of these two; "latency" if
      the compiler's estimate is more than four times as great, as with many
      short operations or trips of a loop.
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
  precise: float
  library: float
  gigabytes: float
  compiler_ms: float
  compute_ms: float
  memory_ms: float
  binds: str
  loops: tuple[int, ...]
  collectives: tuple[programs.Collective, ...]
  seconds: float

  @property
  def static_ms(self) -> float:
    """The longest of the times of the compiler, the products and the bytes."""
    return max(self.compiler_ms, self.compute_ms, self.memory_ms)


def batch_shapes(sizes: Mapping[str, Any], rows: int) -> dict[str, Any]:
  """Returns the shapes of the longest batch of a task, from its sizes.

  Args:
    sizes: sizes of the task, as `models.build` takes them.
    rows: number of examples.

  Raises:
    UserError: for an objective whose batches have other arrays.
  """
  objective = sizes.get("objective", "classification")
  if objective not in _PLAIN:
    raise UserError(
      f"The batches of objective={objective!r} do not follow from --sizes: "
      "remove --sizes, so that the data are opened."
    )
  inputs: tuple[int, ...] = (rows, *sizes.get("image", ()))
  # Tokens are ids or numbers, and pixels are numbers.
  dtype = jnp.int32 if sizes.get("vocab_size") else jnp.float32
  if not sizes.get("image"):
    # Several sequences add an axis.
    number = sizes.get("num_inputs", 1)
    inputs = (rows, *(number,) * (number > 1), sizes["max_len"])
  # Some objectives have a target for every token.
  shape = inputs if objective in _PER_TOKEN else (rows,)
  if channels := sizes.get("channels", 0):
    inputs = (*inputs, channels)
  return {
    "inputs": jax.ShapeDtypeStruct(inputs, dtype),
    "targets": jax.ShapeDtypeStruct(shape, jnp.int32),
    "weights": jax.ShapeDtypeStruct(shape, jnp.float32),
  }


def open_batch(
  config: RunConfig, rows: int
) -> tuple[dict[str, Any], int, dict[str, Any]]:
  """Returns the sizes of a task, the greatest length, and a batch's shapes.

  Further test splits may be longer than the greatest length of a batch.
  """
  task = tasks.get(config.task.name, **config.task_options)
  sizes = task.sizes()
  split = task.splits["train"]
  batch = Loader(split, (task.max_len or 1,)).batch(np.zeros(rows, int), (0, 0))
  shapes = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in batch.items()}
  return sizes, task.max_len, shapes


def _compile(name: str, lowered: Any, chip: Chip) -> Any:
  """Returns a compiled step.

  Without a device, the compiler of GPUs chooses the tiles of a product by
  rules, and refuses a step if it finds none. Then the library of the GPU
  computes the products.

  Raises:
    TooLargeError: if the step does not fit.
    UserError: if the compiler refuses it for another reason.
  """
  refused: Exception | None = None
  # TPUs have no such library.
  for options in ({},) if chip.axes else ({}, _BY_LIBRARY):
    try:
      return memory.compile_step(lowered, **options)
    except jax.errors.JaxRuntimeError as error:
      refused = error
  reason = str(refused).splitlines()[0]
  raise UserError(
    f"The compiler refuses the {name} step: {reason:.300}. Some compilers need "
    "a length that is a multiple of 16."
  ) from refused


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
    if config.packing:
      raise UserError(
        "config.packing=True: the number of packed rows depends on the "
        "examples of a step. Compile with --config.packing=False, whose step "
        "has one example a row."
      )
    self.config, self.chip, self._sizes = config, chip, sizes
    self.layout = Layout.of(config.mesh, list(devices))
    compilers.check_split(config, self.layout)
    rows = config.batch_size
    if sizes is None:
      sizes, length, self.batch = open_batch(config, rows)
    else:
      length, self.batch = sizes["max_len"], batch_shapes(sizes, rows)
    self.lengths = pad_lengths(length, config.buckets, config.short_length)
    self.layout.check_lengths(self.lengths, sizes.get("image"))
    self.model = call(
      "config.model", models.build, {**vars(config.model), **sizes}
    )
    check_bound(self.model, config.margin_tokens)
    self.tx, _ = optim.build_optimizer(
      config.optimizer, config.schedule, config.total_steps, self.model.kinds
    )
    create = functools.partial(
      states.create, self.model, self.tx, averaged=config.ema_decay > 0
    )
    self.state = jax.eval_shape(create, config.seed)

  def train(self) -> Report:
    """Compiles the train step, in more and more parts until it fits.

    Raises:
      UserError: if it does not fit. The message says what it needs with
        parameters that are split over all devices, if it fits then.
    """
    c = self.config
    rows = c.batch_size // self.layout.parts
    # The user chooses the parts if examples of a batch see each other.
    is_chosen = c.accumulate > 0 or sees_batch(self.model)
    parts = c.accumulate or 1
    while True:
      try:
        return self._compile_train(parts)
      except memory.TooLargeError as error:
        if not is_chosen and (more := more_parts(rows, parts)):
          parts = more
          continue
        greater = "a greater --config.accumulate, " if is_chosen else ""
        raise UserError(
          f"A step {error} in {parts} part(s) of its batch, and a device has "
          f"{self.chip.gib:g} GiB. Set "
          f"--config.model.memory=recomputed, {greater}a smaller "
          "--config.batch_size, or a --config.mesh that splits the model over "
          f"devices.{self._try_split_parameters()}"
        ) from error

  def _try_split_parameters(self) -> str:
    """Returns what a step needs whose parameters are split, or ""."""
    devices = self.layout.mesh.devices.ravel().tolist()
    mesh = f"{FSDP}:{len(devices)}"
    is_split = self.layout.mesh.shape[FSDP] == len(devices)
    if is_split or self.config.parallel != "jit":
      return ""
    config = dataclasses.replace(self.config, mesh=mesh)
    try:
      report = Ahead(config, devices, self.chip, self._sizes).train()
    except UserError:
      return ""
    return (
      f" With --config.mesh={mesh} it needs {report.total:.2f} GiB in "
      f"{report.parts} part(s)."
    )

  def _compile_train(self, parts: int) -> Report:
    lowered = self._lower_train(parts, self.batch)
    report, self._program = self._report("train", parts, lowered)
    self.parts = parts
    return report

  def _lower_train(self, parts: int, batch: dict[str, Any]) -> Any:
    layout = self.layout
    step = make_step(self.config, self.model, self.tx, layout, parts)
    compiled, _ = compilers.compile_step(
      self.config.parallel, step, layout, state=self.state, donate=True
    )
    sharding = layout.state_sharding(self.state)
    return self._lower(compiled, self.state, sharding, batch)

  def _lower(self, compiled: Any, first: Any, sharding: Any, batch: Any) -> Any:
    """Returns compiled(first, batch), lowered for the devices.

    Args:
      compiled: train or evaluation step, from `compilers.compile_step`.
      first: shapes of its first argument.
      sharding: placement of the first argument, for jit.
      batch: shapes of a batch.
    """
    layout = self.layout
    if self.config.parallel == "jit":
      batch = placed_shapes(batch, layout.batch_sharding(batch))
      return compiled.lower(placed_shapes(first, sharding), batch)

    # pmap takes the rows of each device, [devices, rows, ...].
    def split(x: Any) -> Any:
      rows = x.shape[0] // layout.parts
      return jax.ShapeDtypeStruct((layout.parts, rows, *x.shape[1:]), x.dtype)

    return compiled.lower(first, jax.tree.map(split, batch))

  def save(self, path: str) -> None:
    """Writes the step of `train`, for every length of batches, to a file.

    `config.program` names the file for a run; see `executables`.
    """
    compiled = {executables.batch_key(self.batch): self._program}
    *shorter, longest = self.lengths
    for length in shorter:
      batch: dict[str, Any] = {}
      for name, x in self.batch.items():
        shape, axis = [*x.shape], token_axis(x)
        if x.ndim > 1 and shape[axis] == longest:
          shape[axis] = length
        batch[name] = jax.ShapeDtypeStruct(tuple(shape), x.dtype)
      lowered = self._lower_train(self.parts, batch)
      compiled[executables.batch_key(batch)] = _compile(
        "train", lowered, self.chip
      )
    facts = executables.describe(self.config, self.model, self.layout)
    executables.save(path, facts, self.parts, compiled)

  def evaluation(self) -> Report:
    """Compiles the evaluation step, for batches of `config.eval_batch_size`.

    Raises:
      UserError: if the step does not fit.
    """
    c, params = self.config, self.state.params
    evaluator = Evaluator(
      self.model, c.parallel, c.eval_batch_size, self.lengths, self.layout
    )
    # Take the placement that the evaluator's variables have.
    placed = placed_shapes(params, self.layout.state_sharding(params))
    placement = evaluator.prepare.lower(placed).compile().output_shardings
    variables = jax.eval_shape(evaluator.prepare, params)
    batch = {
      k: jax.ShapeDtypeStruct((evaluator.batch_size, *x.shape[1:]), x.dtype)
      for k, x in self.batch.items()
    }
    lowered = self._lower(evaluator.step, variables, placement, batch)
    try:
      return self._report("evaluation", 1, lowered)[0]
    except memory.TooLargeError as error:
      raise UserError(
        f"An evaluation {error}, and a device has {self.chip.gib:g} GiB: set a "
        "smaller --config.eval_batch_size."
      ) from error

  def _report(self, name: str, parts: int, lowered: Any) -> tuple[Report, Any]:
    """Compiles a lowered step, and reads the program.

    Raises:
      TooLargeError: if the step does not fit.
      UserError: if the compiler refuses it for another reason.
    """
    chip = self.chip
    began = time.perf_counter()
    program = _compile(name, lowered, chip)
    seconds = time.perf_counter() - began
    plan = program.memory_analysis()
    planned = memory.planned_bytes(program)
    total = planned / 2**30
    if total > chip.gib:
      raise memory.TooLargeError(planned)
    devices = self.layout.mesh.devices.ravel().tolist()
    counts = programs.count(program.as_text(), devices)
    dtype = self.config.model.dtype
    peak = chip.bfloat16 if dtype == "bfloat16" else chip.float32
    plain = (counts.flops - counts.precise) / peak
    compute_ms = (plain + counts.precise / chip.highest) / 1e9
    memory_ms = counts.bytes / chip.bandwidth / 1e6
    compiler_ms = counts.cycles / chip.clock / 1e6 if chip.clock else 0.0
    binds = "compute" if compute_ms > memory_ms else "memory"
    if compiler_ms > 4 * max(compute_ms, memory_ms):
      binds = "latency"
    report = Report(
      step=name,
      parts=parts,
      devices=len(devices),
      arguments=plan.argument_size_in_bytes / 2**30,
      temporaries=plan.temp_size_in_bytes / 2**30,
      total=total,
      available=chip.gib,
      tflop=counts.flops / 1e12,
      precise=counts.precise / 1e12,
      library=counts.library / 1e12,
      gigabytes=counts.bytes / 1e9,
      compiler_ms=compiler_ms,
      compute_ms=compute_ms,
      memory_ms=memory_ms,
      binds=binds,
      loops=counts.loops,
      collectives=counts.collectives,
      seconds=seconds,
    )
    return report, program
