"""Checkpoints by orbax: the latest two and the best, whole or not at all."""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxformers.training import processes
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


def _rank(metrics: Mapping[str, float]) -> tuple[float, float]:
  # Of equal scores the earliest is the best, as the training loop has it.
  return metrics["score"], -metrics["step"]


@dataclasses.dataclass
class _Pending:
  """A checkpoint that may not be on disk yet."""

  step: int
  on_host: Any
  meta: dict[str, Any]
  metrics: dict[str, Any] | None
  failed: bool = False

  @property
  def size(self) -> int:
    """Of the state, in bytes."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(self.on_host))


class Checkpoints:
  """The checkpoints of a run, under `workdir`/checkpoints.

  Saving goes on in the background; a process that is killed meanwhile leaves
  the checkpoint before. A store that is full or away for a while is waited for.
  Use as a context manager, which waits for the last.

  Attributes:
    about: what the numbers of the run depend on beside its config, plain JSON:
      kept in every checkpoint, and must be the same when one is restored.
    store: of the run.
  """

  def __init__(self, store: Store, about: Mapping[str, Any]) -> None:
    self.about = json.loads(json.dumps(about))
    self.folder = store.folder / "checkpoints"
    self.store = store
    self._pending: _Pending | None = None
    keep = ocp.checkpoint_managers
    policy = keep.AnyPreservationPolicy(
      [
        keep.LatestN(2),
        keep.BestN(
          get_metric_fn=_rank, n=1, keep_checkpoints_without_metrics=False
        ),
      ]
    )
    options = ocp.CheckpointManagerOptions(
      best_fn=_rank, preservation_policy=policy
    )
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
      score: of the selection split, higher is better; None if this step was
        not evaluated, and then it can be the latest but not the best.

    Raises:
      OSError: if the store was in trouble for too long.
      FloatingPointError: if a number is not finite; nothing is saved then.
    """
    state_on_host = fetched(state)
    step = int(state_on_host.step)
    for path, leaf in jax.tree_util.tree_flatten_with_path(state_on_host)[0]:
      if not np.isfinite(leaf).all():
        raise FloatingPointError(
          f"After step {step} {jax.tree_util.keystr(path)} is not finite, so "
          f"it was not saved. Whole checkpoints: {self.steps() or 'none'}."
        )
    metrics = None if score is None else {"score": score, "step": step}
    meta = {
      "about": self.about,
      "memo": dict(memo),
      "crc32": checksums(state_on_host),
    }
    self.wait()
    one = _Pending(step, state_on_host, meta, metrics)
    self.store.patiently(f"step {step}", lambda: self.store.probe(one.size))
    try:
      self._begin(one, state)
    except Exception as error:
      if jax.process_count() > 1 or not trouble(error):
        raise
      one.failed = True
    self._pending = one
    if one.failed:
      self.wait()

  def wait(self) -> None:
    """Returns when everything saved is on disk. Raises as `save` does."""
    if self._pending is None:
      return
    one, self._pending = self._pending, None
    if jax.process_count() > 1:
      # What fails in one of several ends all: they start again from before.
      self._finish(one)
    else:
      self.store.patiently(f"step {one.step}", lambda: self._finish(one))

  def _begin(self, one: _Pending, state: Any) -> None:
    self._manager.save(
      one.step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(one.meta)
      ),
      metrics=one.metrics,
      force=True,
    )

  def _finish(self, one: _Pending) -> None:
    """Waits for what was begun; if that has failed, begins it again."""
    if one.failed:
      self.store.probe(one.size)
      self._manager.reload()
      if one.step not in self._manager.all_steps():
        self._begin(one, one.on_host)
    one.failed = True
    self._manager.wait_until_finished()
    # orbax makes folders that are not there: what it saved may lie elsewhere.
    saved = self.store.is_there() and (self.folder / str(one.step)).is_dir()
    if not processes.agreed(saved):
      raise OSError(errno.EIO, f"{self.folder / str(one.step)} is not there")

  def restore_latest(self, like: Any) -> tuple[Any, dict[str, Any]] | None:
    """The newest state that is whole, and its memo; None if there is none yet.

    One that is damaged, or whose checksums differ, is passed over with a
    message, and renamed to `damaged-<step>` once an older one has been read.

    Raises:
      ValueError: if there are checkpoints and none is whole, or if they are of
        a model of other shapes.
      Exception: whatever else keeps one from being read: no memory, no
        permission, a store that does not answer. The checkpoints stay.
    """
    damaged = []
    for step in reversed(self.steps()):
      try:
        restored = self.restore(step, like)
      except _DamagedError as error:
        if processes.is_first():
          print(f"{error} Trying the one before.", file=sys.stderr)
        damaged.append(step)
        continue
      for other in damaged:  # Or a later save of this step would do nothing.
        self._set_aside(other)
      return restored
    if damaged:
      raise ValueError(
        f"All checkpoints in {self.folder} are damaged (steps {damaged}): "
        "restore them, or start anew with another --workdir."
      )
    return None

  def _set_aside(self, step: int) -> None:
    if processes.is_first():
      self.folder.joinpath(str(step)).rename(self.folder / f"damaged-{step}")
    processes.wait(f"set aside {step}")
    self._manager.reload()

  def best_step(self) -> int | None:
    """The step of the best checkpoint; None if none was evaluated."""
    self.wait()
    return self._manager.best_step()

  def restore_best(self, like: Any) -> tuple[int, Any, dict[str, Any]]:
    """The best step, and its state and memo. Arguments as for `restore`.

    Raises:
      ValueError: if no checkpoint was evaluated, and as `restore`.
    """
    best = self.best_step()
    if best is None:
      raise ValueError(
        f"There is no evaluated checkpoint in {self.folder}: train until the "
        "first evaluation (config.eval_steps)."
      )
    return best, *self.restore(best, like)

  def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
    """The state and memo of a step, placed as `like` is.

    Args:
      step: one of `steps()`.
      like: a `TrainState` of arrays, for structure, shapes and placement.

    Raises:
      ValueError: if it is of other shapes, of other data or another protocol,
        or damaged.
    """
    error, state, meta = None, None, {}
    try:
      state, meta = self._read(step, like)
    except _DamagedError as found:
      error = found
    if not processes.all_agree(error is None):
      raise error or _DamagedError(
        self.folder / str(step), "another process cannot read it"
      )
    _same_about(meta["about"], self.about)
    return jax.tree.map(_as, state, like), meta["memo"]

  def _read(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
    """All of a checkpoint, the state on this host; by no other's help."""
    folder = self.folder / str(step)
    abstract = jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), like
    )
    numpy = ocp.RestoreArgs(restore_type=np.ndarray)
    handler = ocp.PyTreeCheckpointHandler()
    found = _undamaged(folder, lambda: handler.metadata(folder / "state"))
    _same_shapes(abstract, found.tree)
    state = _undamaged(
      folder,
      lambda: handler.restore(
        folder / "state",
        args=ocp.args.PyTreeRestore(
          item=abstract, restore_args=jax.tree.map(lambda _: numpy, abstract)
        ),
      ),
    )
    meta = _undamaged(
      folder, lambda: ocp.JsonCheckpointHandler().restore(folder / "meta")
    )
    if checksums(state) != meta["crc32"]:
      raise _DamagedError(folder, "its checksums differ")
    return state, meta


class _DamagedError(ValueError):
  """A checkpoint of which something is missing or not what was written."""

  def __init__(self, folder: Path, reason: object) -> None:
    first = (str(reason).splitlines() or ["no reason given"])[0][:200]
    super().__init__(f"The checkpoint {folder} is damaged: {first}.")


def _undamaged(folder: Path, read: Callable[[], T]) -> T:
  """What is read; what a damaged checkpoint raises is a `_DamagedError`."""
  try:
    return read()
  except Exception as error:
    memory = ("RESOURCE_EXHAUSTED", "Out of memory")
    if isinstance(error, MemoryError) or trouble(error):
      raise
    if any(word in str(error) for word in memory):
      raise
    raise _DamagedError(folder, error) from error


def _as(here: np.ndarray, like: Any) -> jax.Array:
  """What is on all hosts, placed as another array is."""
  return put(np.asarray(here, like.dtype), like.sharding)


def _same_shapes(wanted: Any, found: Any) -> None:
  """Raises ValueError if two trees of shapes differ, naming the first leaf."""

  def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {
      "/".join(_entry(key) for key in path): tuple(leaf.shape)
      for path, leaf in leaves
    }

  here, there = shapes(wanted), shapes(found)
  for name in sorted(here.keys() | there.keys()):
    if here.get(name) != there.get(name):
      raise ValueError(
        f"The checkpoint is of another model: {name} is "
        f"{there.get(name, 'absent')} in it and {here.get(name, 'absent')} in "
        "this config. Use the config of that run, or another --workdir."
      )


def _same_about(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
  differing = [
    f"{key}: {saved.get(key)!r} -> {now.get(key)!r}"
    for key in sorted(saved.keys() | now.keys())
    if saved.get(key) != now.get(key)
  ]
  if differing:
    raise ValueError(
      "The checkpoint was trained on other data, or under another protocol:\n  "
      + "\n  ".join(differing)
      + "\nUse the data that it was trained on, or another --workdir."
    )


def _entry(key: Any) -> str:
  for attribute in ("key", "name", "idx"):
    if hasattr(key, attribute):
      return str(getattr(key, attribute))
  return str(key)
