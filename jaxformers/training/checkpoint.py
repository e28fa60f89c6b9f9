"""Checkpoints by orbax: the latest two and the best, whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxformers.training import processes


def fetched(tree: Any) -> Any:
  """All of every leaf on this host, wherever its parts lie.

  Called by all processes together.
  """

  def fetch(leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
      if not leaf.is_fully_replicated:
        mesh = leaf.sharding.mesh
        whole = jax.NamedSharding(mesh, jax.P())
        leaf = jax.jit(lambda x: x, out_shardings=whole)(leaf)
      return np.asarray(leaf.addressable_data(0))
    return np.asarray(leaf)

  return jax.tree.map(fetch, tree)


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


class Checkpoints:
  """The checkpoints of a run, under `workdir`/checkpoints.

  Saving goes on in the background; a process that is killed meanwhile leaves
  the checkpoint before. Use as a context manager, which waits for the last.

  Attributes:
    about: what the numbers of the run depend on beside its config, plain JSON:
      kept in every checkpoint, and must be the same when one is restored.
  """

  def __init__(self, workdir: Path, about: Mapping[str, Any]) -> None:
    self.about = json.loads(json.dumps(about))
    self.folder = workdir / "checkpoints"
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
    with _disk_errors(self.folder):
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
    self._manager.close()

  def steps(self) -> list[int]:
    """The steps of which there is a whole checkpoint, ascending."""
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
      OSError: if the disk is full, saying what was kept.
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
    with _disk_errors(self.folder):
      self._manager.wait_until_finished()
      self._manager.save(
        step,
        args=ocp.args.Composite(
          state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta)
        ),
        metrics=metrics,
        force=True,
      )

  def wait(self) -> None:
    """Returns when everything saved is on disk. Raises as `save` does."""
    with _disk_errors(self.folder):
      self._manager.wait_until_finished()

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
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    with _damage(self.folder, step):
      found = self._manager.item_metadata(step)["state"]
    if found is not None:
      _same_shapes(abstract, found.tree if hasattr(found, "tree") else found)
    with _damage(self.folder, step):
      restored = self._manager.restore(
        step,
        args=ocp.args.Composite(
          state=ocp.args.StandardRestore(abstract),
          meta=ocp.args.JsonRestore(),
        ),
      )
    state, meta = restored["state"], restored["meta"]
    if checksums(state) != meta["crc32"]:
      raise _DamagedError(self.folder, step, "its checksums differ")
    _same_about(meta["about"], self.about)
    return state, meta["memo"]


class _DamagedError(ValueError):
  """A checkpoint of which something is missing or not what was written."""

  def __init__(self, folder: Path, step: int, reason: object) -> None:
    first = (str(reason).splitlines() or ["no reason given"])[0][:200]
    path = folder / str(step)
    super().__init__(f"The checkpoint {path} is damaged: {first}.")


# What the machine or the store may answer for a while, and a checkpoint never.
_PASSING = (
  "RESOURCE_EXHAUSTED",
  "Out of memory",
  "UNAVAILABLE",
  "DEADLINE_EXCEEDED",
  "PERMISSION_DENIED",
  "Permission denied",
  "Input/output error",
  "Stale file handle",
)


@contextlib.contextmanager
def _damage(folder: Path, step: int) -> Iterator[None]:
  """Turns what orbax raises on a damaged checkpoint into `_DamagedError`."""
  try:
    yield
  except Exception as error:
    passing = isinstance(error, MemoryError | PermissionError)
    if passing or any(word in str(error) for word in _PASSING):
      raise
    raise _DamagedError(folder, step, error) from error


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


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
  """Turns what orbax raises on a full disk into one clear OSError."""
  try:
    yield
  except Exception as error:
    full = getattr(error, "errno", None) == errno.ENOSPC
    if full or "No space left" in str(error):
      raise OSError(
        errno.ENOSPC,
        f"The disk of {folder} is full: this checkpoint was not saved, those "
        "before it are untouched",
      ) from error
    raise
