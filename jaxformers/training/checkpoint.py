"""Checkpoints by orbax: the latest two and the best, whole or not at all."""

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
  """A policy of orbax that keeps the best checkpoint.

  The policy of orbax itself reads scores from files without checksums.

  Attributes:
    step: step of the best; None before the first evaluation.
    score: score of that step, higher is better; None likewise.
  """

  step: int | None = None
  score: float | None = None

  def update(self, step: int | None, score: float | None) -> None:
    """Takes a step if it is better; of equal scores the earliest is best."""
    if score is not None and (self.score is None or score > self.score):
      self.step, self.score = step, score

  def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
    """Returns True for the best of the checkpoints. Called by orbax."""
    del context
    return [info.step == self.step for info in checkpoints]


class Restored(NamedTuple):
  """The best checkpoint that is whole.

  Attributes:
    step: step after which it was saved.
    score: score on the selection split, higher is better.
    state: a `TrainState`.
    loop_state: content of a `LoopState`, plain JSON.
    lost: step of a checkpoint that was or may have been better and is damaged;
      None if there is none.
  """

  step: int
  score: float
  state: Any
  loop_state: dict[str, Any]
  lost: int | None = None


class Checkpoints:
  """The checkpoints of a run, under `workdir`/checkpoints.

  Saving goes on in the background; a process that is killed meanwhile leaves
  the checkpoint before. Use as a context manager, which waits for the last.

  Attributes:
    workdir: workdir of the run.
    description: description of the task, plain JSON; see `Task.description`. It
      is part of every checkpoint, and must be the same when one is restored.
    config: config of the run. It is part of every checkpoint as well, and
      must be one under which that run can go on.
  """

  def __init__(
    self, workdir: Path, description: dict[str, Any], config: RunConfig
  ) -> None:
    self.workdir, self.folder = workdir, workdir / "checkpoints"
    self.description, self.config = description, config
    self._saving: int | None = None  # Step that may not be on disk yet.
    self._best = _Best()
    # orbax keeps what any of the policies keeps.
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
      return  # It would wait for others, which may be what has died.
    # An error that is under way says more than what closing raises after it.
    errors = () if is_regular else (Exception,)
    with contextlib.suppress(*errors):
      self._manager.close()

  def steps(self) -> list[int]:
    """Returns the steps of which there is a whole checkpoint, ascending.

    Waits for one that is being saved, and raises as `wait` does.
    """
    self.wait()
    return sorted(self._manager.all_steps())

  def save(
    self, state: Any, loop_state: Mapping[str, Any], score: float | None = None
  ) -> None:
    """Saves a state and what else the run remembers.

    Args:
      state: a `TrainState`.
      loop_state: content of a `LoopState`, plain JSON.
      score: score on the selection split, higher is better; None if this step
        was not evaluated, and then it can be the latest but not the best.

    Raises:
      OSError: if the disk is full or absent.
      DivergedError: if a number is not finite; nothing is saved then.
    """
    # Refuse a state that is not finite, before anything is written.
    state_on_host = arrays.fetch_to_host(state)
    step = int(state_on_host.step)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state_on_host):
      if not np.isfinite(leaf).all():
        raise DivergedError(
          f"After step {step} {jax.tree_util.keystr(path)} is not finite, so "
          f"it was not saved. Whole checkpoints: {self.steps() or 'none'}."
        )
    # One save at a time: the last one has to be on disk.
    self.wait()
    self._best.update(step, score)
    # All that is not an array, under one digest.
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
    with disk.saving(f"Step {step}", self.workdir):
      if not processes.all_true(disk.holds_run(self.workdir)):
        raise OSError(errno.EIO, f"{self.workdir}/config.json is not there")
      self._manager.save(step, args=args, force=True)
    self._saving = step

  def wait(self) -> None:
    """Returns when everything saved is on disk. Raises as `save` does."""
    if self._saving is None:
      return
    step, self._saving = self._saving, None
    with disk.saving(f"Step {step}", self.workdir):
      self._manager.wait_until_finished()
      # orbax makes missing folders: it may have saved on another disk.
      folder = self.folder / str(step)
      is_saved = disk.holds_run(self.workdir) and folder.is_dir()
      # The first process alone is asked: other hosts may see a folder later.
      if not processes.broadcast_from_first(is_saved):
        raise OSError(errno.EIO, f"{folder} is not there")

  def restore_latest(self, like: Any) -> tuple[Any, dict[str, Any]] | None:
    """Returns the newest state that is whole; None if there is none yet.

    One that is damaged, or whose checksums differ, is passed over with a
    message, and renamed to `damaged-<step>` once an older one has been read.

    Args:
      like: as in `restore`.

    Returns:
      The state and the content of its `LoopState`.

    Raises:
      UserError: if there are checkpoints and none is whole, or if they are of
        another config, of other data, or of a model of other shapes.
      Exception: whatever else keeps one from being read: no memory, no
        permission, a disk that does not answer. The checkpoints stay.
    """
    restored, damaged = self._restore_first(
      reversed(self.steps()), like, "Trying the one before."
    )
    if restored is None:
      if damaged:
        raise self._none_whole(damaged)
      return None
    for step in damaged:  # Or a later save of this step would do nothing.
      self._set_aside(step)
    # Later saves keep the best of the steps before.
    _, state, meta = restored
    self._best.update(meta["best_step"], meta["best_score"])
    return state, meta["memo"]

  def _restore_first(
    self, steps: Iterable[int], like: Any, advice: str
  ) -> tuple[tuple[int, Any, dict[str, Any]] | None, list[int]]:
    """Restores the first of several checkpoints that is whole.

    Args:
      steps: steps of the checkpoints.
      like: as in `restore`.
      advice: sentence that follows the message about a damaged one.

    Returns:
      Its step, state and meta, or None if none is whole; and the steps before
      it, which are damaged.
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
      "restore them, or start anew with another --workdir."
    )

  def _set_aside(self, step: int) -> None:
    """Renames a damaged checkpoint to the first name that is free."""
    if processes.is_first():
      suffixes = itertools.chain([""], (f"-{n}" for n in itertools.count(2)))
      paths = (self.folder / f"damaged-{step}{suffix}" for suffix in suffixes)
      free = next(path for path in paths if not path.exists())
      self.folder.joinpath(str(step)).rename(free)
    processes.wait_for_all(f"set aside {step}")
    self._manager.reload()

  def restore_best(self, like: Any) -> Restored:
    """Returns the best state that is whole, and what was saved with it.

    If the best is damaged, the best of the others is taken, with a message.

    Args:
      like: as in `restore`.

    Raises:
      UserError: if no checkpoint was evaluated, or none that was is whole, and
        as `restore`.
    """
    # Name damaged checkpoints whose rank is not known.
    scores, unknown = self._rank()
    for step in unknown:
      processes.warn(
        f"The checkpoint {self.folder / str(step)} is damaged, and its score "
        "is not known: it may have been the best."
      )
    # Take the best that is whole.
    restored, damaged = self._restore_first(
      scores, like, "It was the best; trying the next best that is left."
    )
    damaged = unknown + damaged
    if restored is not None:
      step, state, meta = restored
      lost = damaged[0] if damaged else None
      return Restored(step, scores[step], state, meta["memo"], lost)
    # None is: say what to do.
    others = sorted({*self.steps()} - {*damaged})
    if damaged and others:
      raise UserError(
        f"No evaluated checkpoint in {self.folder} is whole (damaged: steps "
        f"{damaged}): run the training command again, which goes on from step "
        f"{others[-1]}."
      )
    if damaged:
      raise self._none_whole(damaged)
    raise UserError(
      f"There is no evaluated checkpoint in {self.folder}: train until the "
      "first evaluation (config.eval_steps)."
    )

  def describe(self) -> tuple[dict[str, Any], arrays.Shapes]:
    """Returns the description of the data, and the shapes of the state.

    Both are those of the latest checkpoint that says them.

    Raises:
      UserError: if there is no checkpoint, or none that is whole.
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

    Each checkpoint has its score, and that of the best before it; the results
    have that of the best. So a step has a rank also if its folder is gone or
    cannot be read.

    Returns:
      Scores by step, the best first; and damaged steps without a score.
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
    # The best may be gone from the disk altogether.
    if (self.workdir / "results.json").exists():
      results = workdirs.read_results(self.workdir)
      scores.setdefault(results["best_step"], results["selection_score"])
    unknown = [step for step in unknown if step not in scores]
    # Leave out what was not evaluated. Of equal scores the earliest is best.
    evaluated = {k: v for k, v in scores.items() if v is not None}
    steps = sorted(evaluated, key=lambda step: (-evaluated[step], step))
    return {step: evaluated[step] for step in steps}, unknown

  def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the state of a step, and all else that its checkpoint holds.

    Args:
      step: one of `steps()`.
      like: a `TrainState` of arrays, or of their shapes and shardings: the
        state is placed as they are. Without `opt_state`, the optimiser's state
        is neither read nor checked.

    Returns:
      The state; and a dictionary with its `score`, and the content of its
      `LoopState` under `memo`.

    Raises:
      UserError: if it is of other shapes, of another config, of other data or
        another protocol, or damaged.
    """
    damage = None
    try:
      state, meta = self._read(step, like)
    except _DamagedError as error:
      damage = error
    # All processes pass over a checkpoint that one of them cannot read.
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
    # Check that it is of this run.
    meta = self._read_meta(step)
    resume.check_checkpoint(folder, meta, self.config)
    resume.check_description(folder, meta["about"], self.description)
    # Check that it is of this model, and leave out what is not read.
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
      # Compare bits.
      if arrays.checksums(state) != crc32:
        raise ValueError("its checksums differ")
    return state, meta

  def _read_meta(self, step: int) -> dict[str, Any]:
    """Returns the content of a checkpoint besides its state."""
    folder = self.folder / str(step)
    with _reading(folder):
      meta = ocp.JsonCheckpointHandler().restore(folder / "meta")
    # Any of these may be what damage has left.
    if not isinstance(meta, dict):
      raise _DamagedError(folder, "meta holds no JSON object")
    if meta.pop("digest", None) != workdirs.digest(meta):
      raise _DamagedError(folder, "the digest of meta is not of its content")
    if meta["step"] != step:
      raise _DamagedError(folder, f"it was saved at step {meta['step']}")
    return meta


def read_best(
  workdir: Path, config: RunConfig
) -> tuple[Restored, dict[str, Any]]:
  """Returns the best state of a run without its optimiser, and its data.

  Neither its model nor its data are needed: shapes are those that are saved.

  Args:
    workdir: absolute path of the folder of the run.
    config: config of the run.

  Returns:
    As `Checkpoints.restore_best`, on the first device; and the description of
    the task.

  Raises:
    UserError: as `Checkpoints.restore_best`.
  """
  place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  with Checkpoints(workdir, {}, config) as checkpoints:
    checkpoints.description, shapes = checkpoints.describe()
    flat = {
      path: jax.ShapeDtypeStruct(shape, np.float32, sharding=place)
      for path, shape in _without(shapes, "opt_state/").items()
    }
    like = flax.traverse_util.unflatten_dict(flat, sep="/")
    like["step"] = jax.ShapeDtypeStruct((), np.int32, sharding=place)
    best = checkpoints.restore_best(TrainState(opt_state=None, **like))
    return best, checkpoints.description


class _DamagedError(UserError):
  """A checkpoint of which something is missing or not what was written."""

  def __init__(self, folder: Path, reason: object) -> None:
    first_line = (str(reason).splitlines() or ["no reason given"])[0][:200]
    super().__init__(f"The checkpoint {folder} is damaged: {first_line}.")


@contextlib.contextmanager
def _reading(folder: Path) -> Iterator[None]:
  """Runs a block that reads; damage raises `_DamagedError`."""
  try:
    yield
  except Exception as error:
    # Too little memory and an absent disk are not damage: they may pass.
    if isinstance(error, MemoryError) or disk.error_number(error):
      raise
    if any(s in str(error) for s in ("RESOURCE_EXHAUSTED", "Out of memory")):
      raise
    raise _DamagedError(folder, error) from error


def _without(content: Mapping[str, Any], prefix: str) -> dict[str, Any]:
  return {k: v for k, v in content.items() if not k.startswith(prefix)}
