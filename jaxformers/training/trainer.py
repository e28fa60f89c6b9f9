"""Training of a run: its optimiser, its compiled steps and its batches."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxformers import workdirs
from jaxformers.data.engine.loader import Loader, prefetch
from jaxformers.models import pretrained
from jaxformers.models.blocks.invertible import layers_of
from jaxformers.models.parallel import on_one_cpu
from jaxformers.training import compilers, disk, optim, processes, resume
from jaxformers.training.evaluate import make_evaluator
from jaxformers.training.run import Run
from jaxformers.training.state import TrainState
from jaxformers.training.steps import train_step

# Entries of the tokens x of a part, 2 MB: measured with `benchmarks.ours.train`
# at widths of 64 to 512, lengths of 128 to 1,024 and 8 to 32 rows on two cores.
CACHED = 2**19


class Trainer:
  """Trains a run.

  Attributes:
    run: run from `open_run`.
    task, model: task and model of the run.
    layout: devices, and where arrays lie on them.
    schedule: learning rate by step, from 0.
    parts: number of parts in which a step takes its batch.
    state: `TrainState`; that of step 0 until a checkpoint is restored.
    train_step: compiled (state, batch) -> (state, sums).
    evaluate: `Evaluator` of parameters on a split.
    order: function from a step to the indices of its examples.
    carried_seconds: wall time of processes that worked on the run before.
  """

  def __init__(self, run: Run) -> None:
    self._began = time.perf_counter()
    self.carried_seconds = 0.0
    self.run, self.task, self.model = run, run.task, run.model
    c = run.config
    # Devices, and lengths of sequences that they can share.
    self.layout = compilers.layout(c["mesh"])
    lengths = run.padded_lengths
    # Images are split over devices by their rows.
    image = run.task.sizes().get("image")
    self.layout.check_lengths(image[:1] if image else lengths)
    # State and compiled steps.
    self._tx, self.schedule = optim.build(
      c["optimizer"], c["schedule"], c["total_steps"]
    )
    self.state = self._initial_state()
    self.parts = c["accumulate"] or self._fastest_parts()
    step = functools.partial(
      train_step,
      model=run.model,
      tx=self._tx,
      smoothing=c["label_smoothing"],
      placement=self.layout,
      accumulate=self.parts,
      **{name: c[name] for name in ("seed", "ema_decay")},
    )
    self.train_step, self._place = compilers.compile_step(
      c["parallel"], step, self.layout, state=self.state, donate=True
    )
    self.evaluate = make_evaluator(run, self.layout)
    # Batches of this process.
    self._loader = Loader(run.task.splits["train"], lengths, *self.layout.share)
    self.order = self._loader.order(c["batch_size"], c["seed"])

  def _initial_state(self) -> TrainState:
    """Returns the state of step 0, with pre-trained weights if any."""
    state = self.run.initial_state(self._tx)
    folder = self.run.config["pretrained"]
    # A run that goes on needs no pre-trained weights: they may be gone.
    goes_on = resume.has_checkpoints(self.run.workdir)
    if not processes.broadcast_from_first(goes_on) and folder:
      params = pretrained.parameters(folder, state.params)
      average = state.average and jax.tree.map(jnp.copy, params)
      state = state.replace(params=params, average=average)
    return self.layout.place_state(state)

  def _fastest_parts(self) -> int:
    """Returns the number of parts in which a batch is fastest.

    On one CPU injective layers are fastest where their tokens stay in its
    cache. Other blocks gain nothing from parts, and accelerators lose.
    """
    size = self.run.config["batch_size"]
    is_injective = layers_of(self.model.stacks()["encoder"]) is not None
    if not is_injective or self.layout.mesh.size > 1 or not on_one_cpu():
      return 1
    # Divide the batch evenly, as close to such parts as can be.
    config = self.model.config
    entries = size * config.num_inputs * config.encoder_len * config.d_model
    divisors = [k for k in range(1, size + 1) if size % k == 0]
    return min(divisors, key=lambda k: abs(math.log(k * CACHED / entries)))

  def batches(self, start: int) -> Iterator[Any]:
    """Yields the batches of all steps from `start`, counted from 0.

    They are read and placed on devices ahead, while the device is at work.
    """
    seed = self.run.config["seed"]

    def make(step: int) -> Any:
      return self._place(self._loader.batch(self.order(step), (seed, step)))

    return prefetch(make, range(start, self.run.config["total_steps"]))

  def wall_seconds(self) -> float:
    """Returns the time of this process and of those before it.

    The latter count up to their last checkpoint.
    """
    return self.carried_seconds + time.perf_counter() - self._began


def begin(run: Run) -> None:
  """Writes the config and the vocabulary of a run to its workdir.

  Called when everything could be built, and nothing in the workdir is of
  another run.
  """
  if not processes.is_first():
    return
  workdir = run.workdir
  workdir.mkdir(parents=True, exist_ok=True)
  with disk.saving("config.json", workdir):
    workdirs.write(workdir, "config.json", run.config)
  with disk.saving("vocabulary.json", workdir):
    workdirs.write_vocabulary(workdir, run.task)
