"""Checkpoints by orbax: the latest two and the best, whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxformers import workdirs
from jaxformers.errors import DivergedError, UserError
from jaxformers.training import disk, processes, resume
from jaxformers.training.arrays import (
  check_shapes,
  checksums,
  fetch_to_host,
  place_like,
  shapes_of,
)

T = TypeVar("T")


class _Best:
  """A policy of orbax that keeps the best checkpoint.

  The policy of orbax itself reads scores from files without checksums.

  Attributes:
    step: step of the best; None before the first evaluation.
    score: its score, higher is better.
  """

  def __init__(self) -> None:
    self.step: int | None = None
    self.score = -math.inf

  def update(self, step: int, score: float | None) -> None:
    """Takes a step if it is better; of equal scores the earliest is best."""
    if score is not None and (self.step is None or score > self.score):
      self.step, self.score = step, score

  def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
    """Returns True for the best of the checkpoints. Called by orbax."""
    del context
    return [info.step == self.step for info in checkpoints]


@dataclasses.dataclass(frozen=True)
class Restored:
  """The best checkpoint that is whole.

  Attributes:
    step: step after which it was saved.
    score: score on the selection split, higher is better.
    state: a `TrainState`.
    loop_state: content of a `LoopState`, plain JSON.
    lost: step of a better one that is damaged; None if there is none.
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
    description: what the numbers of the run depend on beside its config, plain
      JSON: kept in every checkpoint, and must be the same when one is restored.
    config: plain config of the run; kept likewise, and must be one under which
      the run can go on.
  """

  def __init__(
    self,
    workdir: Path,
    description: Mapping[str, Any],
    config: Mapping[str, Any],
  ) -> None:
    self.workdir = workdir
    self.folder = workdir / "checkpoints"
    self.description = json.loads(json.dumps(description))
    self.config = json.loads(json.dumps(config))
    self._saving: int | None = None  # Step that may not be on disk yet.
    self._best = _Best()
    # orbax keeps what any of the policies keeps.
    keep = ocp.checkpoint_managers
    policy = keep.AnyPreservationPolicy([keep.LatestN(2), self._best])
    options = ocp.CheckpointManagerOptions(preservation_policy=policy)
    self._manager = ocp.CheckpointManager(
      self.folder,
      options=options,
      item_handlers={
        "state": ocp.StandardCheckpointHandler(),
        "meta": ocp.JsonCheckpointHandler(),
      },
    )

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
    state_on_host = fetch_to_host(state)
    step = int(state_on_host.step)
    self._check_finite(step, state_on_host)
    # One save at a time: the last one has to be on disk.
    self.wait()
    self._best.update(step, score)
    # All that is not an array, under one digest.
    meta = {
      "step": step,
      "about": self.description,
      "config": self.config,
      "memo": dict(loop_state),
      "score": score,
      "best_step": self._best.step,
      "best_score": None if self._best.step is None else self._best.score,
      "shapes": shapes_of(state_on_host),
      "crc32": checksums(state_on_host),
    }
    meta = json.loads(json.dumps(meta))
    meta["digest"] = workdirs.digest(meta)
    # orbax copies the arrays and writes them in the background.
    with disk.saving(f"Step {step}", self.workdir):
      if not processes.all_true(disk.holds_run(self.workdir)):
        raise OSError(errno.EIO, f"{self.workdir}/config.json is not there")
      self._manager.save(
        step,
        args=ocp.args.Composite(
          state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta)
        ),
        force=True,
      )
    self._saving = step

  def _check_finite(self, step: int, state: Any) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
      if not np.isfinite(leaf).all():
        raise DivergedError(
          f"After step {step} {jax.tree_util.keystr(path)} is not finite, so "
          f"it was not saved. Whole checkpoints: {self.steps() or 'none'}."
        )

  def wait(self) -> None:
    """Returns when everything saved is on disk. Raises as `save` does."""
    if self._saving is None:
      return
    step, self._saving = self._saving, None
    with disk.saving(f"Step {step}", self.workdir):
      self._manager.wait_until_finished()
      # orbax makes folders that are not there: what it saved may lie elsewhere.
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
    # Try the newest first.
    damaged = []
    for step in reversed(self.steps()):
      try:
        state, meta = self._restore(step, like)
      except _DamagedError as error:
        processes.warn(f"{error} Trying the one before.")
        damaged.append(step)
        continue
      for other in damaged:  # Or a later save of this step would do nothing.
        self._set_aside(other)
      # Later saves keep the best of the steps before.
      self._best.update(meta["best_step"], meta["best_score"])
      return state, meta["memo"]
    if damaged:
      raise self._none_whole(damaged)
    return None

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

  def best_step(self) -> int | None:
    """Returns the step of the best checkpoint; None if none was evaluated."""
    return next(iter(self._ranked()[0]), (None, 0.0))[0]

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
    ranked, damaged = self._ranked()
    for step in damaged:
      processes.warn(
        f"The checkpoint {self.folder / str(step)} is damaged, and its score "
        "is not known: it may have been the best."
      )
    # Take the best that is whole.
    for step, score in ranked:
      try:
        state, meta = self._restore(step, like)
      except _DamagedError as error:
        processes.warn(
          f"{error} It was the best; trying the next best that is left."
        )
        damaged.append(step)
        continue
      lost = damaged[0] if damaged else None
      return Restored(step, score, state, meta["memo"], lost)
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

  def _ranked(self) -> tuple[list[tuple[int, float]], list[int]]:
    """Returns evaluated steps, and steps that may have been evaluated.

    Each checkpoint knows its score, and that of the best before it; results
    know the best. It is ranked also if its folder is gone or cannot be read.

    Returns:
      (step, score), the best first; and the steps whose score is not known.
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
      if meta["best_step"] is not None:
        scores[meta["best_step"]] = meta["best_score"]
      if meta["score"] is not None:
        scores[step] = meta["score"]
    # The best may be gone from the disk altogether.
    if (self.workdir / "results.json").exists():
      results = workdirs.read_results(self.workdir)
      scores.setdefault(results["best_step"], results["selection_score"])
    unknown = [step for step in unknown if step not in scores]
    # Of equal scores the earliest is best.
    ranked = sorted(scores.items(), key=lambda item: (-item[1], item[0]))
    return ranked, unknown

  def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the state of a step and the content of its `LoopState`.

    Args:
      step: one of `steps()`.
      like: a `TrainState` of arrays, or of their shapes and shardings: the
        state is placed as they are. Without `opt_state`, the optimiser's state
        is neither read nor checked.

    Raises:
      UserError: if it is of other shapes, of another config, of other data or
        another protocol, or damaged.
    """
    state, meta = self._restore(step, like)
    return state, meta["memo"]

  def _restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the state of a step, placed as `like` is, and its meta."""
    damage, state, meta = None, None, {}
    try:
      state, meta = self._read(step, like)
    except _DamagedError as error:
      damage = error
    # What one process cannot read, all pass over.
    if not processes.all_true(damage is None):
      raise damage or _DamagedError(
        self.folder / str(step), "another process cannot read it"
      )
    return jax.tree.map(place_like, state, like), meta

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
    check_shapes(folder, shapes, shapes_of(like))
    # Read the fields that `like` has; on disk a state is a dictionary.
    fields = {
      field.name: getattr(like, field.name)
      for field in dataclasses.fields(like)
    }
    abstract = jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
      {name: value for name, value in fields.items() if value is not None},
    )
    numpy = ocp.RestoreArgs(restore_type=np.ndarray)
    args = ocp.args.PyTreeRestore(
      item=abstract,
      restore_args=jax.tree.map(lambda _: numpy, abstract),
      partial_restore=True,
    )
    handler = ocp.PyTreeCheckpointHandler()
    restored = _read_undamaged(
      folder, lambda: handler.restore(folder / "state", args=args)
    )
    state = like.replace(**restored)
    # Compare bits.
    if _read_undamaged(folder, lambda: checksums(state)) != crc32:
      raise _DamagedError(folder, "its checksums differ")
    return state, meta

  def _read_meta(self, step: int) -> dict[str, Any]:
    """Returns all that a checkpoint holds beside its state."""
    folder = self.folder / str(step)
    meta = _read_undamaged(
      folder, lambda: ocp.JsonCheckpointHandler().restore(folder / "meta")
    )
    # Any of these may be what damage has left.
    if not isinstance(meta, dict):
      raise _DamagedError(folder, "meta holds no JSON object")
    if "crc32" in meta and "digest" not in meta:
      raise UserError(
        f"The checkpoint {folder} was saved by an older version of jaxformers, "
        "without its config: score it with that version, or start anew with "
        "another --workdir."
      )
    if meta.pop("digest", None) != workdirs.digest(meta):
      raise _DamagedError(folder, "the digest of meta is not of its content")
    if meta["step"] != step:
      raise _DamagedError(folder, f"it was saved at step {meta['step']}")
    return meta


class _DamagedError(UserError):
  """A checkpoint of which something is missing or not what was written."""

  def __init__(self, folder: Path, reason: object) -> None:
    first_line = (str(reason).splitlines() or ["no reason given"])[0][:200]
    super().__init__(f"The checkpoint {folder} is damaged: {first_line}.")


def _read_undamaged(folder: Path, read: Callable[[], T]) -> T:
  """Reads, and raises `_DamagedError` for whatever damage causes."""
  try:
    return read()
  except Exception as error:
    # Too little memory and an absent disk are no damage: they may pass.
    if isinstance(error, MemoryError) or disk.error_number(error):
      raise
    if any(s in str(error) for s in ("RESOURCE_EXHAUSTED", "Out of memory")):
      raise
    raise _DamagedError(folder, error) from error


def _without(content: Mapping[str, T], prefix: str) -> dict[str, T]:
  return {k: v for k, v in content.items() if not k.startswith(prefix)}
