"""Checkpoints by orbax: the latest two and the best, complete or absent."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import flax.traverse_util
import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxformers.config import RunConfig
from jaxformers.foundations import workdirs
from jaxformers.foundations.errors import DivergedError, UserError
from jaxformers.training import arrays, disk, processes, resume
from jaxformers.training.state import TrainState


@dataclasses.dataclass
class _Best:
  """Preservation policy of orbax that keeps the best checkpoint.

  orbax's own policy reads the scores from files without checksums.

  Attributes:
    step: step of the best checkpoint; None before the first evaluation.
    score: score of that step, higher is better; None before the first
      evaluation.
  """

  step: int | None = None
  score: float | None = None

  def update(self, step: int | None, score: float | None) -> None:
    """Records a step if it is better; of equal scores the earliest wins."""
    if score is not None and (self.score is None or score > self.score):
      self.step, self.score = step, score

  def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
    """Returns True for the best of the checkpoints; orbax calls it."""
    del context
    return [info.step == self.step for info in checkpoints]


class Restored(NamedTuple):
  """The best checkpoint that is intact.

  Attributes:
    step: step after which it was saved.
    score: score on the selection split, higher is better.
    state: `TrainState` of the checkpoint.
    loop_state: content of its `LoopState`, plain JSON.
    lost: step of a damaged checkpoint that was or may have been better; None if
      there is none.
  """

  step: int
  score: float
  state: Any
  loop_state: dict[str, Any]
  lost: int | None = None


class Checkpoints:
  """The checkpoints of a run, under `workdir`/checkpoints.

  Saving runs in the background. If the process is killed meanwhile, the
  previous checkpoint remains. Use it as a context manager, which waits for the
  last save.

  Attributes:
    workdir: workdir of the run.
    description: description of the task as plain JSON; see `Task.description`.
      Every checkpoint holds it, and a restore requires the same one.
    config: config of the run. Every checkpoint holds it too, and a restore
      requires a config under which the run can resume.
  """

  def __init__(
    self, workdir: Path, description: dict[str, Any], config: RunConfig
  ) -> None:
    self.workdir, self.folder = workdir, workdir / "checkpoints"
    self.description, self.config = description, config
    self._saving: int | None = None  # Step that may not be on disk yet.
    self._best = _Best()
    # orbax keeps a checkpoint if any policy keeps it.
    keep = ocp.checkpoint_managers
    policy = keep.AnyPreservationPolicy([keep.LatestN(2), self._best])
    options = ocp.CheckpointManagerOptions(preservation_policy=policy)
    self._manager = ocp.CheckpointManager(self.folder, options=options)

  def __enter__(self) -> Checkpoints:
    return self

  def __exit__(self, kind: type | None, *_: object) -> None:
    if kind is None:
      self.wait()
    is_regular = kind is None or issubclass(kind, SystemExit)
    if not is_regular and jax.process_count() > 1:
      return  # Closing would wait for other processes, which may have died.
    # An error under way says more than an error of closing.
    errors = () if is_regular else (Exception,)
    with contextlib.suppress(*errors):
      self._manager.close()

  def steps(self) -> list[int]:
    """Returns the steps with a complete checkpoint, ascending.

    Waits for a save under way, and raises the errors of `wait`.
    """
    self.wait()
    return sorted(self._manager.all_steps())

  def save(
    self, state: Any, loop_state: Mapping[str, Any], score: float | None = None
  ) -> None:
    """Saves a state together with the state of the loop.

    Args:
      state: a `TrainState`.
      loop_state: content of a `LoopState`, plain JSON.
      score: score on the selection split, higher is better; None if this step
        was not evaluated, in which case it cannot be the best.

    Raises:
      OSError: if the disk is full or absent.
      DivergedError: if a value is not finite; nothing is saved.
    """
    # Refuse a state that is not finite before anything is written.
    state_on_host = arrays.fetch_to_host(state)
    step = int(state_on_host.step)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state_on_host):
      if not np.isfinite(leaf).all():
        raise DivergedError(
          f"After step {step} {jax.tree_util.keystr(path)} is not finite, so "
          f"it was not saved. Complete checkpoints: {self.steps() or 'none'}."
        )
    # Only one save runs at a time: wait for the previous one.
    self.wait()
    self._best.update(step, score)
    # Save everything besides the arrays under one digest.
    content = {
      "step": step,
      "about": self.description,
      "config": self.config.as_dict(),
      "memo": dict(loop_state),
      "score": score,
      "best_step": self._best.step,
      "best_score": self._best.score,
      "shapes": arrays.shapes_of(state_on_host),
      "crc32": arrays.checksums(state_on_host),
    }
    meta = workdirs.with_digest(content)
    # orbax copies the arrays and writes them in the background.
    args = ocp.args.Composite(
      state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta)
    )
    # All processes must still see the workdir of the run.
    with disk.saving(f"Step {step}", self.workdir):
      if not processes.all_true(disk.holds_run(self.workdir)):
        raise OSError(errno.EIO, f"{self.workdir}/config.json is not there")
      self._manager.save(step, args=args, force=True)
    self._saving = step

  def wait(self) -> None:
    """Waits until everything saved is on disk; raises as `save` does."""
    if self._saving is None:
      return
    step, self._saving = self._saving, None
    with disk.saving(f"Step {step}", self.workdir):
      self._manager.wait_until_finished()
      # orbax creates missing folders: it may have saved on another disk.
      folder = self.folder / str(step)
      is_saved = disk.holds_run(self.workdir) and folder.is_dir()
      # Ask only the first process: other hosts may see a folder later.
      if not processes.broadcast_from_first(is_saved):
        raise OSError(errno.EIO, f"{folder} is not there")

  def restore_latest(self, like: Any) -> tuple[Any, dict[str, Any]] | None:
    """Returns the newest state that is intact; None if there is none yet.

    A damaged checkpoint is skipped with a warning, and renamed to
    `damaged-<step>` once an older checkpoint has been read.

    Args:
      like: see `restore`.

    Returns:
      The state and the content of its `LoopState`.

    Raises:
      UserError: if there are checkpoints but none is intact, or if they belong
        to another config, to other data, or to a model of other shapes.
      Exception: for any other error of reading, such as too little memory, no
        permission, or a disk that does not answer. The checkpoints stay.
    """
    # Try the checkpoints from the newest to the oldest.
    restored, damaged = self._restore_first(
      reversed(self.steps()), like, "Trying the one before."
    )
    if restored is None:
      if damaged:
        raise self._none_whole(damaged)
      return None
    # Set damaged ones aside, or a later save of their step would do nothing.
    for step in damaged:
      self._set_aside(step)
    # Later saves compare with the best step so far.
    _, state, meta = restored
    self._best.update(meta["best_step"], meta["best_score"])
    return state, meta["memo"]

  def _restore_first(
    self, steps: Iterable[int], like: Any, advice: str
  ) -> tuple[tuple[int, Any, dict[str, Any]] | None, list[int]]:
    """Restores the first of several checkpoints that is intact.

    Args:
      steps: steps of the checkpoints, in the order in which to try them.
      like: see `restore`.
      advice: sentence that follows the warning about a damaged checkpoint.

    Returns:
      The step, state and meta of the checkpoint, or None if none is intact; and
      the damaged steps that were tried before it.
    """
    damaged: list[int] = []
    for step in steps:
      try:
        return (step, *self.restore(step, like)), damaged
      except _DamagedError as error:
        processes.warn(f"{error} {advice}")
        damaged.append(step)
    return None, damaged

  def _none_whole(self, damaged: list[int]) -> UserError:
    return UserError(
      f"All checkpoints in {self.folder} are damaged (steps {damaged}): "
      "restore them, or start again with another --workdir."
    )

  def _set_aside(self, step: int) -> None:
    """Renames a damaged checkpoint to the first free name."""
    if processes.is_first():
      suffixes = itertools.chain([""], (f"-{n}" for n in itertools.count(2)))
      paths = (self.folder / f"damaged-{step}{suffix}" for suffix in suffixes)
      free = next(path for path in paths if not path.exists())
      self.folder.joinpath(str(step)).rename(free)
    processes.wait_for_all(f"set aside {step}")
    self._manager.reload()

  def restore_best(self, like: Any) -> Restored:
    """Returns the best state that is intact, and what was saved with it.

    If the best checkpoint is damaged, the next best is taken, with a warning.

    Args:
      like: see `restore`.

    Raises:
      UserError: if no checkpoint was evaluated, if no evaluated checkpoint is
        intact, or for a reason of `restore`.
    """
    # Warn of damaged checkpoints whose score is unknown.
    scores, unknown = self._rank()
    for step in unknown:
      processes.warn(
        f"The checkpoint {self.folder / str(step)} is damaged, and its score "
        "is not known: it may have been the best."
      )
    # Restore the best checkpoint that is intact.
    restored, damaged = self._restore_first(
      scores, like, "It was the best; trying the next best that is left."
    )
    damaged = unknown + damaged
    if restored is not None:
      step, state, meta = restored
      lost = damaged[0] if damaged else None
      return Restored(step, scores[step], state, meta["memo"], lost)
    # No evaluated checkpoint is intact: say what to do.
    others = sorted({*self.steps()} - {*damaged})
    if damaged and others:
      raise UserError(
        f"No evaluated checkpoint in {self.folder} is intact (damaged: steps "
        f"{damaged}): run the training command again, which continues from "
        f"step {others[-1]}."
      )
    if damaged:
      raise self._none_whole(damaged)
    raise UserError(
      f"There is no evaluated checkpoint in {self.folder}: train until the "
      "first evaluation (config.eval_steps)."
    )

  def describe(self) -> tuple[dict[str, Any], arrays.Shapes]:
    """Returns the description of the data, and the shapes of the state.

    Both come from the latest checkpoint that can be read.

    Raises:
      UserError: if there is no checkpoint, or no intact one.
    """
    damaged = []
    for step in reversed(self.steps()):
      try:
        meta = self._read_meta(step)
      except _DamagedError:
        damaged.append(step)
        continue
      return meta["about"], meta["shapes"]
    if damaged:
      raise self._none_whole(damaged)
    raise UserError(
      f"There is no checkpoint in {self.folder}: train until the first "
      "evaluation (config.eval_steps)."
    )

  def _rank(self) -> tuple[dict[int, float], list[int]]:
    """Returns the scores of evaluated steps, and steps of unknown score.

    Each checkpoint holds its score and the best score so far, and the results
    hold the best score. A step therefore has a rank even if its folder is gone
    or cannot be read.

    Returns:
      Scores by step, the best first; and damaged steps of unknown score.
    """
    scores: dict[int, float] = {}
    unknown: list[int] = []
    for step in self.steps():
      try:
        meta = self._read_meta(step)
      except _DamagedError:
        unknown.append(step)
        continue
      unknown = []  # A later checkpoint knows the best of all before it.
      scores |= {meta["best_step"]: meta["best_score"], step: meta["score"]}
    # The best checkpoint may be missing from the disk.
    if (self.workdir / "results.json").exists():
      results = workdirs.read_results(self.workdir)
      scores.setdefault(results["best_step"], results["selection_score"])
    unknown = [step for step in unknown if step not in scores]
    # Leave out steps without evaluation. Of equal scores the earliest is best.
    evaluated = {k: v for k, v in scores.items() if v is not None}
    steps = sorted(evaluated, key=lambda step: (-evaluated[step], step))
    return {step: evaluated[step] for step in steps}, unknown

  def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
    """Restores the state of a step, and all else that its checkpoint holds.

    Args:
      step: one of `steps()`.
      like: `TrainState` of arrays, or of their shapes and shardings; the
        restored state gets their placement. Without `opt_state`, the state of
        the optimiser is neither read nor checked.

    Returns:
      The state; and a dictionary with its `score`, and the content of its
      `LoopState` under `memo`.

    Raises:
      UserError: if the checkpoint is damaged, or belongs to a model of other
        shapes, to another config, to other data or to another protocol.
    """
    damage = None
    try:
      state, meta = self._read(step, like)
    except _DamagedError as error:
      damage = error
    # If one process cannot read a checkpoint, all of them skip it.
    if not processes.all_true(damage is None):
      reason = "another process cannot read it"
      raise damage or _DamagedError(self.folder / str(step), reason)
    return jax.tree.map(arrays.place_like, state, like), meta

  def _read(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
    """Reads and checks a checkpoint on this host, without other processes.

    Returns:
      The state as NumPy arrays, and the meta.
    """
    folder = self.folder / str(step)
    # Check that the checkpoint belongs to this run.
    meta = self._read_meta(step)
    resume.check_checkpoint(folder, meta, self.config)
    resume.check_description(folder, meta["about"], self.description)
    # Check that it belongs to this model, without what is not read.
    shapes, crc32 = meta["shapes"], meta["crc32"]
    if like.opt_state is None:
      shapes = _without(shapes, "opt_state/")
      crc32 = _without(crc32, ".opt_state")
    arrays.check_shapes(folder, shapes, arrays.shapes_of(like))
    # Read the fields that `like` has; on disk a state is a dictionary.
    fields = {k: v for k, v in vars(like).items() if v is not None}
    as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
    kinds = jax.tree.map(lambda _: as_numpy, fields)
    args = ocp.args.PyTreeRestore(fields, kinds, partial_restore=True)
    with _reading(folder):
      handler = ocp.PyTreeCheckpointHandler()
      state = like.replace(**handler.restore(folder / "state", args=args))
      # Compare the checksums of all arrays.
      if arrays.checksums(state) != crc32:
        raise ValueError("its checksums differ")
    return state, meta

  def _read_meta(self, step: int) -> dict[str, Any]:
    """Returns the content of a checkpoint besides its state."""
    folder = self.folder / str(step)
    with _reading(folder):
      meta = ocp.JsonCheckpointHandler().restore(folder / "meta")
    # Any of these can be the result of damage.
    if not isinstance(meta, dict):
      raise _DamagedError(folder, "meta holds no JSON object")
    if meta.pop("digest", None) != workdirs.digest(meta):
      raise _DamagedError(folder, "the digest of meta does not match")
    if meta["step"] != step:
      raise _DamagedError(folder, f"it was saved at step {meta['step']}")
    return meta


def read_best(
  workdir: Path, config: RunConfig
) -> tuple[Restored, dict[str, Any]]:
  """Returns the best state of a run without its optimiser, and its data.

  Neither the model nor the data are needed: shapes come from the checkpoint.

  Args:
    workdir: absolute path of the folder of the run.
    config: config of the run.

  Returns:
    The result of `Checkpoints.restore_best`, on the first device; and the
    description of the task.

  Raises:
    UserError: see `Checkpoints.restore_best`.
  """
  place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  with Checkpoints(workdir, {}, config) as checkpoints:
    checkpoints.description, shapes = checkpoints.describe()
    # Make a template of the state from the saved shapes.
    flat = {
      path: jax.ShapeDtypeStruct(shape, np.float32, sharding=place)
      for path, shape in _without(shapes, "opt_state/").items()
    }
    like = flax.traverse_util.unflatten_dict(flat, sep="/")
    like["step"] = jax.ShapeDtypeStruct((), np.int32, sharding=place)
    best = checkpoints.restore_best(TrainState(opt_state=None, **like))
    return best, checkpoints.description


class _DamagedError(UserError):
  """A checkpoint that is incomplete, or not what was written."""

  def __init__(self, folder: Path, reason: object) -> None:
    first_line = (str(reason).splitlines() or ["no reason given"])[0][:200]
    super().__init__(f"The checkpoint {folder} is damaged: {first_line}.")


@contextlib.contextmanager
def _reading(folder: Path) -> Iterator[None]:
  """Runs a block that reads a checkpoint; raises `_DamagedError` for damage."""
  try:
    yield
  except Exception as error:
    # Too little memory and an absent disk are no damage: they may be temporary.
    if isinstance(error, MemoryError) or disk.error_number(error):
      raise
    if any(s in str(error) for s in ("RESOURCE_EXHAUSTED", "Out of memory")):
      raise
    raise _DamagedError(folder, error) from error


def _without(content: Mapping[str, Any], prefix: str) -> dict[str, Any]:
  return {k: v for k, v in content.items() if not k.startswith(prefix)}
