"""Training of a run: its optimiser, its compiled steps and its batches."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxformers.config import RunConfig
from jaxformers.data.engine import packing
from jaxformers.data.engine.loader import Loader, fitting, prefetch
from jaxformers.data.engine.packing import Packing
from jaxformers.data.engine.split import Split
from jaxformers.foundations import workdirs
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.platforms import SEQUENCE
from jaxformers.models.model import Model, has_statistics, packed_names
from jaxformers.models.parallel import on_one_cpu
from jaxformers.training import (
  compilers,
  disk,
  executables,
  memory,
  origin,
  processes,
  resume,
)
from jaxformers.training.evaluate import make_evaluator
from jaxformers.training.executables import batch_key
from jaxformers.training.layout import Layout
from jaxformers.training.losses import LOSSES
from jaxformers.training.run import Run
from jaxformers.training.state import TrainState
from jaxformers.training.steps import Margin, nearest_divisor, train_step

# Entries of the tokens x [b, n, d] of a part, 2 MB in float32, for one or two
# cores; more cores have more cache. Measured with `benchmarks.ours.train` at
# widths of 64 to 512, lengths of 128 to 2,048 and 8 to 32 rows.
CACHED = 2**19
PLANNED = 32  # Steps among which `plan` looks for the one with most rows.
# Objectives whose examples can be packed.
PACKED = ("classification", "language_model")


class Trainer:
  """Trains a run.

  Attributes:
    run: run from `open_run`.
    task, model: task and model of the run.
    packing: rows that hold several examples; None for one example a row.
    layout: devices, and where arrays lie on them.
    parts: number of parts that a step splits its longest batch into.
    state: `TrainState`, at step 0 until a checkpoint is restored.
    evaluate: `Evaluator` of parameters on a split.
    order: function from a step to the indices of its examples in the training
      split. After a curriculum, steps are counted from its end.
    carried_seconds: wall time of the earlier processes of the run.
    origin: record of the pretrained weights that the run begins with; None if
      it begins without any, or resumes.
  """

  def __init__(self, run: Run, began: float | None = None) -> None:
    """Builds everything that training needs.

    Args:
      run: run that is trained.
      began: value of `time.perf_counter` at the start of the process, from
        which the wall time is counted; None to count from now.
    """
    self._began = time.perf_counter() if began is None else began
    self.carried_seconds = 0.0
    self.origin: dict[str, Any] | None = None
    self.run, self.task, self.model = run, run.task, run.model
    c = run.config
    # Devices, and the lengths of sequences that they share.
    self.layout = run.layout
    lengths = run.padded_lengths
    self.layout.check_lengths(lengths, run.task.sizes().get("image"))
    # State and compiled steps.
    self.state = self._initial_state()
    # Parts for speed are fewer for shorter batches; parts for memory, and parts
    # that the user sets, are not.
    self.parts, self._longest_length = c.accumulate, 0
    if not c.accumulate:
      self.parts, self._longest_length = self._fastest_parts()
    train = run.task.splits["train"]
    self.packing = self._pack(train) if c.packing else None
    self._step, self._place = self._compile()
    self._programs: dict[Any, Any] = {}  # Compiled ahead, by shapes of a batch.
    self.evaluate = make_evaluator(run)
    # Batches of this process.
    share = self.layout.share
    # A loss that compares examples needs random ones.
    is_sorted = not LOSSES[self.model.objective].sees_batch
    read = functools.partial(Loader, is_sorted=is_sorted)
    self._loader = read(train, lengths, *share, self.packing)
    names = run.task.curriculum
    short = (0, 0) if names else (c.short_steps, c.short_length)
    self.order = self._loader.order(c.batch_size, c.seed, *short)
    # Easier examples, which the first steps read instead.
    easier = [
      read(run.task.splits[name], lengths, *share, self.packing)
      for name in names
    ]
    self._easier = [(each, each.order(c.batch_size, c.seed)) for each in easier]

  def _make_step(self) -> functools.partial[Any]:
    """Returns the training step with all of its static arguments."""
    run = self.run
    sizes = self.packing.sizes if self.packing else (0, 0)
    return make_step(
      run.config,
      self.model,
      run.tx,
      self.layout,
      self.parts,
      sizes,
      self._longest_length,
    )

  def _pack(self, train: Split) -> Packing:
    """Returns the packing of the training split.

    Raises:
      UserError: for a model or a mesh that cannot read packed rows.
    """
    config, objective = self.model.config, self.model.objective
    is_single = config.num_inputs == 1 and not config.image
    if objective not in PACKED or not is_single:
      raise UserError(
        f"config.packing=True packs single sequences of the objectives "
        f"{', '.join(PACKED)}; this task has {objective!r} with "
        f"{config.num_inputs} input(s): remove it."
      )
    if not self.model.reads_packed():
      able = ", ".join(packed_names())
      raise UserError(
        f"config.packing=True: the model {config.name!r} reads every example "
        f"in a separate row, which would be slower. Choose {able}, without "
        "coupled or mixer.feat_scale, or remove config.packing."
      )
    if self.layout.mesh.shape[SEQUENCE] > 1:
      raise UserError(
        f"config.packing=True cannot split rows over {SEQUENCE!r}: remove one "
        "of the two."
      )
    lengths = train.lengths()
    if np.sort(lengths)[:2].sum() > self.task.max_len:
      raise UserError(
        f"config.packing=True: no two examples of this task fit into a row of "
        f"{self.task.max_len} tokens. Remove it."
      )
    # Rows are split over devices and parts.
    unit = self.layout.parts * self.parts
    size = self.run.config.batch_size
    return packing.plan(lengths, self.task.max_len, size, unit)

  def _compile(self) -> tuple[Any, Any]:
    """Returns the compiled step, and the function that places its batches."""
    return compilers.compile_step(
      self.run.config.parallel,
      self._make_step(),
      self.layout,
      state=self.state,
      donate=True,
    )

  def train_step(self, state: TrainState, batch: Any) -> Any:
    """Returns the state after one step, and its sums; donates the state."""
    return self._programs.get(batch_key(batch), self._step)(state, batch)

  def plan(self) -> int:
    """Compiles the step for the longest batch, which must fit the device.

    With `config.accumulate=0` the batch is split into as many parts as it needs
    to fit. The batch is not split if its examples see each other, in a
    BatchNorm or in the loss.

    Returns:
      Memory of the step on one device, in bytes; 0 if it is unknown, as under
      pmap.

    Raises:
      UserError: if the step does not fit; the message names the number of parts
        that would fit, or other remedies.
    """
    if self.run.config.parallel != "jit":
      return 0
    # Compile the step for the longest batch, and read its planned memory.
    batch = self._place(self._loader.batch(self._longest(), (0, 0)))
    if self.run.config.program:
      self._load_programs(batch)
    # Only a process's own devices tell their memory, and all must agree.
    device = self.layout.mesh.local_devices[0]
    available = processes.least(memory.device_bytes(device))
    needed, program = self._planned(batch, available)
    # Split the batch into more parts until the step fits.
    if program is None:
      asked, first = self.parts, needed
      rows = self.run.config.batch_size // self.layout.parts
      # Packed rows are made for the present number of parts.
      while (
        program is None
        and self.packing is None
        and (more := more_parts(rows, self.parts))
      ):
        self.parts, self._longest_length = more, 0
        self._programs.clear()
        self._step, _ = self._compile()
        needed, program = self._planned(batch, available)
      # BatchNorm and some losses would see only one part: the user must agree.
      is_chosen = self.run.config.accumulate or sees_batch(self.model)
      if program is None or is_chosen:
        fits = program is not None
        raise UserError(self._too_large(first, asked, needed, available, fits))
    self._programs[batch_key(batch)] = program
    return int(needed)

  def _load_programs(self, batch: Any) -> None:
    """Loads the compiled steps of `config.program`, if they fit this run.

    Raises:
      UserError: if the file is missing or of another kind.
    """
    c = self.run.config
    facts = executables.describe(c, self.model, self.layout)
    reason = ""
    try:
      parts, programs = executables.load(
        c.program, facts, self._step, self.state, batch
      )
      if c.accumulate not in (0, parts):
        reason = f"its number of parts is {parts}"
    except executables.UnfitError as error:
      reason = str(error)
    # All processes must run the same program.
    if processes.all_true(not reason):
      # The file has equal parts for all lengths.
      self.parts, self._longest_length, self._programs = parts, 0, programs
      self._step, _ = self._compile()  # For other shapes of batches.
      return
    reason = reason or "another process cannot use it"
    print(f"config.program={c.program!r} is not used: {reason}. Compiling.")

  def _planned(self, batch: Any, available: int) -> tuple[float, Any]:
    """Returns the bytes of the step, and its program; None if it is too large.

    Args:
      batch: a batch, on its devices.
      available: bytes of memory of a device; 0 if unknown.
    """
    processes.restart_stall_timer()
    program = self._programs.get(batch_key(batch))
    try:
      if program is None:
        program = memory.compile_step(self._step.lower(self.state, batch))
      needed: float = memory.planned_bytes(program)
      fits = not 0 < available < needed
    except memory.TooLargeError as error:
      needed, fits = error.needed, False
    return needed, program if processes.all_true(fits) else None

  def _longest(self) -> np.ndarray:
    """Returns the indices of a batch whose first example is the longest.

    With packing it is the batch with most rows of the first `PLANNED` steps.
    """
    split, size = self.task.splits["train"], self.run.config.batch_size
    if self.packing:
      lengths, deal = split.lengths(), self.packing.deal
      first = 0 if self._easier else self.run.config.short_steps
      batches = (self.order(first + step) for step in range(PLANNED))
      return max(batches, key=lambda batch: len(deal(lengths[batch])))
    indices = np.arange(size) % len(split)
    indices[0] = np.argmax(split.lengths())
    return indices

  def _too_large(
    self, needed: float, asked: int, least: float, available: int, fits: bool
  ) -> str:
    """Returns the error message for a step that does not fit its device.

    Args:
      needed: bytes that the step needs in `asked` parts.
      asked: number of parts that the config asks for.
      least: bytes that the step needs in `self.parts` parts.
      available: bytes of memory of the device; 0 if unknown.
      fits: True if the step in `self.parts` parts fits.
    """
    has = memory.in_gib(available) if available else "less"
    text = (
      f"A step needs {memory.in_gib(needed)} in {asked} part(s) of its batch, "
      f"and a device has {has}: "
    )
    needs = memory.in_gib(least)
    if fits:
      return f"{text}set --config.accumulate={self.parts}, which needs {needs}."
    return (
      f"{text}{self.parts} parts still need {needs}. Set "
      "--config.model.memory=recomputed, a smaller --config.batch_size, or a "
      "--config.mesh that splits the model over devices."
    )

  def _initial_state(self) -> TrainState:
    """Returns the state of step 0, with pretrained weights if there are any."""
    state = self.run.initial_state()
    config = self.run.config
    # A resumed run needs no pretrained weights, which may be gone.
    goes_on = resume.has_checkpoints(self.run.workdir)
    if not processes.broadcast_from_first(goes_on) and config.pretrained:
      # Take over the weights, which must be the same in all processes.
      params, self.origin = origin.begin_with(
        config.pretrained, state.params, config.model.as_dict(), self.task
      )
      processes.require_same(
        {"sha256 of config.pretrained": self.origin["sha256"]}
      )
      average = state.average and jax.tree.map(jnp.copy, params)
      # An optimiser may keep the parameters that it starts from.
      assert self.run.tx is not None  # The run is to be trained.
      opt_state = jax.jit(self.run.tx.init)(params)
      state = dataclasses.replace(
        state, params=params, average=average, opt_state=opt_state
      )
    return self.layout.place_state(state)

  def _fastest_parts(self) -> tuple[int, int]:
    """Returns the number of parts for which the longest step is fastest.

    And the length of this step, or 0 if all steps have the same parts.

    One CPU is fastest if the tokens of a part fit its cache. Accelerators, and
    several CPU devices, gain nothing from parts.
    """
    if self.layout.mesh.size > 1 or not on_one_cpu():
      return 1, 0
    # Packed rows, BatchNorm and some losses depend on the parts.
    run, config = self.run, self.model.config
    if sees_batch(self.model) or run.config.packing:
      return 1, 0
    # A part has at least two rows, because scans compute rows in parallel.
    size = run.config.batch_size
    rows = size * config.num_inputs
    most = max(rows // 2, 1)
    # Choose the parts closest to `CACHED` entries.
    longest, lengths = 0, run.padded_lengths
    if len(lengths) > 1:
      longest = fitting(int(self.task.splits["train"].lengths().max()), lengths)
    entries = rows * (longest or config.encoder_len) * config.d_model
    wanted = entries / (CACHED * max((os.cpu_count() or 1) / 2, 1))
    return nearest_divisor(size, wanted, most), longest

  def batches(self, start: int) -> Generator[Any, None, None]:
    """Yields the batches of all steps from `start`, counted from 0.

    Batches are read and placed on devices ahead, while the device computes.
    """
    c = self.run.config

    def make(step: int) -> Any:
      loader, order, first = self._loader, self.order, 0
      if self._easier:
        # The splits of the curriculum have equal numbers of steps.
        count = len(self._easier)
        split = min(step * count // c.short_steps, count)
        first = -(-split * c.short_steps // count)
        if split < count:
          loader, order = self._easier[split]
      return self._place(loader.batch(order(step - first), (c.seed, step)))

    return prefetch(make, range(start, c.total_steps))

  def wall_seconds(self) -> float:
    """Returns the wall time of this process and of earlier ones.

    Earlier processes count up to their last checkpoint.
    """
    return self.carried_seconds + time.perf_counter() - self._began


def make_step(
  config: RunConfig,
  model: Model,
  tx: optax.GradientTransformation,
  layout: Layout,
  parts: int,
  sizes: tuple[int, int] = (0, 0),
  longest: int = 0,
) -> functools.partial[Any]:
  """Returns the training step of a config with all of its static arguments.

  Args:
    config: config of the run.
    model: model from `models.build`.
    tx: optimiser.
    layout: devices, and the placement of arrays on them.
    parts: number of parts that the step splits its batch into.
    sizes: sizes of packed rows; see `train_step`.
    longest: length of the batches with this number of parts; see `train_step`.
  """
  return functools.partial(
    train_step,
    model=model,
    tx=tx,
    smoothing=config.label_smoothing,
    margin=Margin(
      config.margin_tokens, config.margin_weight, config.margin_loss
    ),
    placement=layout,
    accumulate=parts,
    longest=longest,
    sizes=sizes,
    seed=config.seed,
    ema_decay=config.ema_decay,
  )


def sees_batch(model: Model) -> bool:
  """Returns True if examples see each other, in a BatchNorm or in the loss."""
  return has_statistics(model) or LOSSES[model.objective].sees_batch


def more_parts(rows: int, parts: int) -> int:
  """Returns the next number of parts, at least double; 0 if none divides.

  Args:
    rows: number of examples of a batch on one device.
    parts: present number of parts.
  """
  greater = range(2 * parts, rows + 1)
  return next((more for more in greater if rows % more == 0), 0)


def _has_config(workdir: Path) -> bool:
  """Returns True if a workdir has a config that can be read."""
  try:
    workdirs.read_config(workdir)
  except UserError:
    return False
  return True


def begin(
  run: Run,
  record: dict[str, Any] | None = None,
  *,
  keeps_config: bool = False,
) -> None:
  """Writes the config and the vocabulary of a run to its workdir.

  It must be called after everything has been built, and after the workdir has
  been checked for other runs.

  Args:
    run: run that begins or resumes.
    record: record of the pretrained weights of the run, if it has any.
    keeps_config: True to keep a config that is there, as of a longer run.
  """
  if not processes.is_first():
    return
  workdir = run.workdir
  workdir.mkdir(parents=True, exist_ok=True)
  if not (keeps_config and _has_config(workdir)):
    with disk.saving("config.json", workdir):
      workdirs.write(workdir, "config.json", run.config.as_dict())
  with disk.saving("vocabulary.json", workdir):
    workdirs.write_vocabulary(workdir, run.task)
  if record:
    with disk.saving(origin.RECORD, workdir):
      workdirs.write(workdir, origin.RECORD, record)
