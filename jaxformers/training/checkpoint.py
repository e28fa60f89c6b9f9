"""Checkpoints by orbax: the latest two and the best, whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import itertools
import json
import math
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxformers import workdirs
from jaxformers.errors import DivergedError, UserError
from jaxformers.training import processes, resume
from jaxformers.training.layout import put
from jaxformers.training.store import Store, trouble

T = TypeVar("T")


def fetched(tree: Any) -> Any:
  """All of every leaf on this host, wherever its parts lie.

  Called by all processes together.
  """

  def fetch(leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
      if not leaf.is_fully_replicated:
        leaf = _gathering(leaf.sharding.mesh)(leaf)
      return np.asarray(leaf.addressable_data(0))
    return np.asarray(leaf)

  return jax.tree.map(fetch, tree)


@functools.cache
def _gathering(mesh: jax.sharding.Mesh) -> Callable[[jax.Array], jax.Array]:
  """Puts an array on every device; one function, so compiled once a shape."""
  return jax.jit(lambda x: x, out_shardings=jax.NamedSharding(mesh, jax.P()))


def checksums(tree: Any) -> dict[str, int]:
  """The CRC-32 of every leaf, by path. orbax itself notices no flipped bit."""
  leaves = jax.tree_util.tree_flatten_with_path(fetched(tree))[0]
  return {
    jax.tree_util.keystr(path): zlib.crc32(np.ascontiguousarray(leaf))
    for path, leaf in leaves
  }


class _Best:
  """A policy of orbax that keeps the best checkpoint.

  orbax has one of its own, which reads scores from files without checksums.

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
    """Returns True for the best of some checkpoints. Called by orbax."""
    del context
    return [info.step == self.step for info in checkpoints]


@dataclasses.dataclass(frozen=True)
class Restored:
  """The best checkpoint that is whole.

  Attributes:
    step: step after which it was saved.
    score: score on the selection split, higher is better.
    state: a `TrainState`.
    memo: plain JSON.
    lost: step of a better one that is damaged; None if there is none.
  """

  step: int
  score: float
  state: Any
  memo: dict[str, Any]
  lost: int | None = None


@dataclasses.dataclass
class _Pending:
  """A checkpoint that may not be on disk yet."""

  step: int
  on_host: Any
  meta: dict[str, Any]
  failed: bool = False

  @property
  def size(self) -> int:
    """Bytes of the state."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(self.on_host))


class Checkpoints:
  """The checkpoints of a run, under `workdir`/checkpoints.

  Saving goes on in the background; a process that is killed meanwhile leaves
  the checkpoint before. A store that is full or away for a while is waited for.
  Use as a context manager, which waits for the last.

  Attributes:
    about: what the numbers of the run depend on beside its config, plain JSON:
      kept in every checkpoint, and must be the same when one is restored.
    config: plain config of the run; kept likewise, and must be one that goes
      on.
    store: store of the run.
  """

  def __init__(
    self, store: Store, about: Mapping[str, Any], config: Mapping[str, Any]
  ) -> None:
    self.about = json.loads(json.dumps(about))
    self.config = json.loads(json.dumps(config))
    self.folder = store.folder / "checkpoints"
    self.store = store
    self._pending: _Pending | None = None
    self._best = _Best()
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
    ended = kind is None or issubclass(kind, SystemExit)
    if not ended and jax.process_count() > 1:
      return  # It would wait for others, which may be what has died.
    # An error that is under way says more than what closing raises after it.
    with contextlib.nullcontext() if ended else contextlib.suppress(Exception):
      self._manager.close()

  def steps(self) -> list[int]:
    """The steps of which there is a whole checkpoint, ascending.

    Waits for one that is being saved, and raises as `wait` does.
    """
    self.wait()
    return sorted(self._manager.all_steps())

  def save(
    self, state: Any, memo: Mapping[str, Any], score: float | None = None
  ) -> None:
    """Saves a state and what else the run remembers.

    Args:
      state: a `TrainState`.
      memo: plain JSON.
      score: score on the selection split, higher is better; None if this step
        was not evaluated, and then it can be the latest but not the best.

    Raises:
      OSError: if the store was in trouble for too long.
      FloatingPointError: if a number is not finite; nothing is saved then.
    """
    state_on_host = fetched(state)
    step = int(state_on_host.step)
    for path, leaf in jax.tree_util.tree_flatten_with_path(state_on_host)[0]:
      if not np.isfinite(leaf).all():
        raise DivergedError(
          f"After step {step} {jax.tree_util.keystr(path)} is not finite, so "
          f"it was not saved. Whole checkpoints: {self.steps() or 'none'}."
        )
    self.wait()
    self._best.update(step, score)
    meta = {
      "step": step,
      "about": self.about,
      "config": self.config,
      "memo": dict(memo),
      "score": score,
      "best_step": self._best.step,
      "best_score": None if self._best.step is None else self._best.score,
      "shapes": _shapes(state_on_host),
      "crc32": checksums(state_on_host),
    }
    meta = json.loads(json.dumps(meta))
    meta["digest"] = workdirs.digest(meta)
    pending = _Pending(step, state_on_host, meta)
    self.store.patiently(f"step {step}", lambda: self.store.probe(pending.size))
    try:
      self._begin(pending, state)
    except Exception as error:
      if jax.process_count() > 1 or not trouble(error):
        raise
      pending.failed = True
    self._pending = pending
    if pending.failed:
      self.wait()

  def wait(self) -> None:
    """Returns when everything saved is on disk. Raises as `save` does."""
    if self._pending is None:
      return
    pending, self._pending = self._pending, None
    if jax.process_count() > 1:
      # What fails in one of several ends all: they start again from before.
      self._finish(pending)
    else:
      self.store.patiently(
        f"step {pending.step}", lambda: self._finish(pending)
      )

  def _begin(self, pending: _Pending, state: Any) -> None:
    self._manager.save(
      pending.step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(pending.meta)
      ),
      force=True,
    )

  def _finish(self, pending: _Pending) -> None:
    """Waits for what was begun; if that has failed, begins it again."""
    if pending.failed:
      self.store.probe(pending.size)
      self._manager.reload()
      if pending.step not in self._manager.all_steps():
        self._begin(pending, pending.on_host)
    pending.failed = True
    self._manager.wait_until_finished()
    # orbax makes folders that are not there: what it saved may lie elsewhere.
    saved = self.store.is_there() and (self.folder / str(pending.step)).is_dir()
    if not processes.agreed(saved):
      raise OSError(
        errno.EIO, f"{self.folder / str(pending.step)} is not there"
      )

  def restore_latest(self, like: Any) -> tuple[Any, dict[str, Any]] | None:
    """The newest state that is whole, and its memo; None if there is none yet.

    One that is damaged, or whose checksums differ, is passed over with a
    message, and renamed to `damaged-<step>` once an older one has been read.

    Raises:
      UserError: if there are checkpoints and none is whole, or if they are of
        another config, of other data, or of a model of other shapes.
      Exception: whatever else keeps one from being read: no memory, no
        permission, a store that does not answer. The checkpoints stay.
    """
    damaged = []
    for step in reversed(self.steps()):
      try:
        state, meta = self._restore(step, like)
      except _DamagedError as error:
        _tell(f"{error} Trying the one before.")
        damaged.append(step)
        continue
      for other in damaged:  # Or a later save of this step would do nothing.
        self._set_aside(other)
      self._best.update(meta["best_step"], meta["best_score"])
      return state, meta["memo"]
    if damaged:
      raise self._none_whole(damaged)
    return None

  def _none_whole(self, damaged: list[int]) -> ValueError:
    return ValueError(
      f"All checkpoints in {self.folder} are damaged (steps {damaged}): "
      "restore them, or start anew with another --workdir."
    )

  def _set_aside(self, step: int) -> None:
    if processes.is_first():
      names = (f"damaged-{step}{suffix}" for suffix in _suffixes())
      free = next(n for n in names if not (self.folder / n).exists())
      self.folder.joinpath(str(step)).rename(self.folder / free)
    processes.wait(f"set aside {step}")
    self._manager.reload()

  def best_step(self) -> int | None:
    """The step of the best checkpoint; None if none was evaluated."""
    return next(iter(self._ranked()[0]), (None, 0.0))[0]

  def restore_best(self, like: Any) -> Restored:
    """The best state that is whole, and what was saved with it.

    If the best is damaged, the best of the others is taken, with a message.

    Args:
      like: see `restore`.

    Raises:
      UserError: if no checkpoint was evaluated, or none that was is whole, and
        as `restore`.
    """
    ranked, damaged = self._ranked()
    for step in damaged:
      _tell(
        f"The checkpoint {self.folder / str(step)} is damaged, and its score "
        "is not known: it may have been the best."
      )
    for step, score in ranked:
      try:
        state, meta = self._restore(step, like)
      except _DamagedError as error:
        _tell(f"{error} It was the best; trying the next best that is left.")
        damaged.append(step)
        continue
      lost = damaged[0] if damaged else None
      return Restored(step, score, state, meta["memo"], lost)
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
    """Returns what was evaluated, and what may have been.

    Each checkpoint knows its own score, and that of the best before it; results
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
      unknown = []  # This one knows of all before it.
      if meta["best_step"] is not None:
        scores[meta["best_step"]] = meta["best_score"]
      if meta["score"] is not None:
        scores[step] = meta["score"]
    workdir = self.store.folder
    if (workdir / "results.json").exists():
      results = workdirs.read_results(workdir)
      scores.setdefault(results["best_step"], results["selection_score"])
    unknown = [step for step in unknown if step not in scores]
    ranked = sorted(scores.items(), key=lambda item: (-item[1], item[0]))
    return ranked, unknown

  def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
    """The state and memo of a step, placed as `like` is.

    Args:
      step: one of `steps()`.
      like: a `TrainState` of arrays, for structure, shapes and placement.

    Raises:
      UserError: if it is of other shapes, of another config, of other data or
        another protocol, or damaged.
    """
    state, meta = self._restore(step, like)
    return state, meta["memo"]

  def _restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
    """The state of a step, placed as `like` is, and all that is beside it."""
    error, state, meta = None, None, {}
    try:
      state, meta = self._read(step, like)
    except _DamagedError as found:
      error = found
    if not processes.all_agree(error is None):
      raise error or _DamagedError(
        self.folder / str(step), "another process cannot read it"
      )
    return jax.tree.map(_as, state, like), meta

  def _read(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
    """All of a checkpoint, the state on this host; by no other's help."""
    folder = self.folder / str(step)
    meta = self._read_meta(step)
    resume.check_checkpoint(folder, meta, self.config)
    resume.check_description(folder, meta["about"], self.about)
    _same_shapes(folder, meta["shapes"], _shapes(like))
    abstract = jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), like
    )
    numpy = ocp.RestoreArgs(restore_type=np.ndarray)
    handler = ocp.PyTreeCheckpointHandler()
    state = _undamaged(
      folder,
      lambda: handler.restore(
        folder / "state",
        args=ocp.args.PyTreeRestore(
          item=abstract, restore_args=jax.tree.map(lambda _: numpy, abstract)
        ),
      ),
    )
    if _undamaged(folder, lambda: checksums(state)) != meta["crc32"]:
      raise _DamagedError(folder, "its checksums differ")
    return state, meta

  def _read_meta(self, step: int) -> dict[str, Any]:
    """Returns all that a checkpoint holds beside its state."""
    folder = self.folder / str(step)
    meta = _undamaged(
      folder, lambda: ocp.JsonCheckpointHandler().restore(folder / "meta")
    )
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


class _DamagedError(ValueError):
  """A checkpoint of which something is missing or not what was written."""

  def __init__(self, folder: Path, reason: object) -> None:
    first = (str(reason).splitlines() or ["no reason given"])[0][:200]
    super().__init__(f"The checkpoint {folder} is damaged: {first}.")


def _undamaged(folder: Path, read: Callable[[], T]) -> T:
  """Reads, and raises `_DamagedError` for whatever damage causes."""
  try:
    return read()
  except Exception as error:
    memory = ("RESOURCE_EXHAUSTED", "Out of memory")
    if isinstance(error, MemoryError) or trouble(error):
      raise
    if any(word in str(error) for word in memory):
      raise
    raise _DamagedError(folder, error) from error


def _as(array: np.ndarray, like: Any) -> jax.Array:
  """Places an array that all hosts have as another array is placed."""
  return put(np.asarray(array, like.dtype), like.sharding)


def _shapes(tree: Any) -> dict[str, list[int]]:
  """The shape of every leaf, by path."""
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {
    "/".join(_entry(key) for key in path): list(leaf.shape)
    for path, leaf in leaves
  }


def _same_shapes(
  folder: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]
) -> None:
  """Raises UserError if shapes differ, naming the first leaf."""
  for name in sorted(wanted.keys() | saved.keys()):
    if wanted.get(name) != saved.get(name):
      raise UserError(
        f"The checkpoint {folder} is of another model: {name} is "
        f"{saved.get(name, 'absent')} in it and "
        f"{wanted.get(name, 'absent')} in this config. Use the config of "
        "that run, or another --workdir."
      )


def _suffixes() -> Iterator[str]:
  """Yields "", "-2", "-3" and so on."""
  yield ""
  yield from (f"-{number}" for number in itertools.count(2))


def _tell(message: str) -> None:
  if processes.is_first():
    print(message, file=sys.stderr)


def _entry(key: Any) -> str:
  for attribute in ("key", "name", "idx"):
    if hasattr(key, attribute):
      return str(getattr(key, attribute))
  return str(key)
