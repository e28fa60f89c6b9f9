import dataclasses
import errno
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from jaxformers.data.engine import packed

ROWS = [np.array(r, np.uint8) for r in ([3, 1, 2], [5], [4, 4, 9, 1])]


def example(**fields):
  return packed.pack(ROWS, np.array([0, 1, 2]), **fields)


def test_batch_is_cut_padded_and_shifted():
  split = example()
  batch = split.batch(np.array([2, 1]), 3)
  assert batch["inputs"].tolist() == [[4, 4, 9], [5, 0, 0]]
  assert batch["inputs"].dtype == batch["targets"].dtype == np.int32
  assert batch["targets"].tolist() == [2, 1]
  shifted = example(shift=1)
  assert shifted.batch(np.array([1]), 3)["inputs"].tolist() == [[6, 0, 0]]
  assert shifted[0].tolist() == [4, 2, 3]


def test_batch_shifts_the_largest_byte_without_overflow():
  split = packed.pack([np.array([255], np.uint8)], np.array([0]), shift=1)
  assert split.batch(np.array([0]), 1)["inputs"].tolist() == [[256]]


def test_batch_closes_every_sequence_with_the_end_token():
  split = example(shift=2, end=1)
  batch = split.batch(np.array([2, 1]), 3)
  assert batch["inputs"].tolist() == [[6, 6, 1], [7, 1, 0]]
  assert split.lengths().tolist() == [4, 2, 5]


def test_batch_scales_real_numbers():
  batch = example(scale=(2.0, 4.0)).batch(np.array([0]), 3)
  assert batch["inputs"].dtype == np.float32
  assert batch["inputs"].tolist() == [[0.25, -0.25, 0.0]]


def test_pack_and_batch_pairs():
  pairs = packed.pack([*ROWS, ROWS[1]], np.array([0, 1]), num_inputs=2)
  assert len(pairs) == 2
  assert pairs.lengths().tolist() == [3, 4]
  batch = pairs.batch(np.array([1, 0]), 3)
  assert batch["inputs"].tolist() == [
    [[4, 4, 9], [5, 0, 0]],
    [[3, 1, 2], [5, 0, 0]],
  ]
  assert batch["targets"].tolist() == [1, 0]
  second = pairs.select(np.array([1]))
  assert [second[k].tolist() for k in range(2)] == [[4, 4, 9, 1], [5]]


def test_select_and_drop_keep_labels_and_keys():
  split = example()
  chosen = split.select(np.array([2, 0]))
  assert [chosen[i].tolist() for i in range(2)] == [[4, 4, 9, 1], [3, 1, 2]]
  assert chosen.labels.tolist() == chosen.keys.tolist() == [2, 0]
  assert chosen.tokens is split.tokens
  assert split.select(slice(1, 2))[0].tolist() == [5]
  less = packed.drop(split, 4)
  assert [less[i].tolist() for i in range(3)] == [[3, 1, 2], [5], [9, 1]]
  none = packed.drop(packed.drop(split, 5), 3)
  assert [none[i].tolist() for i in range(3)] == [[1, 2], [], [4, 4, 9, 1]]
  few = packed.drop(chosen, 4)
  assert [few[i].tolist() for i in range(2)] == [[9, 1], [3, 1, 2]]


def make(folder, rows=ROWS, dtype=np.uint8):
  packed.write(
    folder / "train", (([row], i, i + 7) for i, row in enumerate(rows)), dtype
  )
  return {"source": "here"}


def test_build_makes_once_and_maps_from_disk(tmp_path):
  calls = []

  def once(folder):
    calls.append(1)
    return make(folder)

  for _ in range(2):
    splits, info = packed.build_packed(tmp_path / "a" / "b", once)
  assert len(calls) == 1
  assert info == {"source": "here", "splits": {"train": 3}}
  split = splits["train"]
  assert isinstance(split.tokens, np.memmap)
  assert split[2].tolist() == [4, 4, 9, 1]
  assert split.keys.tolist() == [7, 8, 9]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_open_split_reads_what_was_written(tmp_path, dtype):
  rng = np.random.default_rng(0)
  rows = [rng.integers(0, 200, n).astype(dtype) for n in (0, 5, 1_000, 0)]
  make(tmp_path, rows, dtype)
  split = packed.open_split(tmp_path / "train")
  assert split.tokens.dtype == dtype
  for i, row in enumerate(rows):
    np.testing.assert_array_equal(split[i], row)


def test_write_stores_pairs_together(tmp_path):
  packed.write(tmp_path / "train", [(ROWS[:2], 1, 0), (ROWS[1:], 0, 1)])
  split = packed.open_split(tmp_path / "train")
  assert (len(split), split.num_inputs) == (2, 2)
  assert split[3].tolist() == [4, 4, 9, 1]


def test_build_leaves_no_files_after_a_failure(tmp_path):
  def fail(folder):
    make(folder)
    raise ValueError("truncated")

  with pytest.raises(ValueError, match="truncated"):
    packed.build_packed(tmp_path / "a", fail)
  assert [p for p in tmp_path.iterdir() if not p.name.endswith(".lock")] == []


def test_build_waits_for_another_process(tmp_path, capsys):
  calls = []

  def slowly(folder):
    time.sleep(0.5)
    calls.append(1)
    return make(folder)

  jobs = [
    threading.Thread(target=packed.build_packed, args=(tmp_path / "a", slowly))
    for _ in range(2)
  ]
  for job in jobs:
    job.start()
  for job in jobs:
    job.join()
  assert len(calls) == 1
  assert "prepares a" in capsys.readouterr().err


def test_build_in_an_unwritable_folder_names_data_dir(tmp_path):
  (tmp_path / "file").touch()
  with pytest.raises(ValueError, match="cannot be written .*--data_dir"):
    packed.build_packed(tmp_path / "file" / "a", make)


def test_select_keeps_given_keys():
  split = dataclasses.replace(example(), keys=np.array([5, 1, 3], np.uint64))
  assert split.select(np.array([1])).keys.tolist() == [1]


def test_digest_covers_every_token():
  rng = np.random.default_rng(0)
  rows = [rng.integers(0, 9, 50).astype(np.uint8) for _ in range(600)]
  labels = np.arange(600) % 3
  split = packed.pack(rows, labels)
  digest = split.digest()
  assert packed.pack(rows, labels).digest() == digest
  for k in range(0, 600, 7):
    rows[k][k % 50] ^= 1
    assert packed.pack(rows, labels).digest() != digest, k
    rows[k][k % 50] ^= 1
  labels[300] = 2 - labels[300] // 2
  assert packed.pack(rows, labels).digest() != digest


def test_digest_of_a_part_depends_on_its_examples():
  split = example()
  parts = [split, packed.drop(split, 4)]
  parts += [split.select(np.array(rows)) for rows in ([0, 1], [1, 0], [2])]
  parts += [dataclasses.replace(split, keys=np.array([5, 1, 3], np.uint64))]
  assert len({part.digest() for part in parts}) == len(parts)
  again = split.select(np.array([1, 0]))
  assert again.digest() == parts[3].digest()
  # How tokens are read is told by `reading`.
  assert dataclasses.replace(split, shift=1).digest() == split.digest()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_digest_is_equal_on_disk_and_in_memory(tmp_path, dtype):
  rows = [row.astype(dtype) for row in ROWS]
  splits, _ = packed.build_packed(
    tmp_path / "a", lambda f: make(f, rows, dtype)
  )
  keys = np.arange(7, 10, dtype=np.uint64)
  in_memory = dataclasses.replace(packed.pack(rows, np.arange(3)), keys=keys)
  assert splits["train"].content
  assert splits["train"].digest() == in_memory.digest()
  less = packed.drop(splits["train"], 4)
  assert (
    less.digest() == packed.drop(in_memory, 4).digest() != in_memory.digest()
  )
  part = splits["train"].select(slice(1, 3))
  assert part.digest() == in_memory.select(slice(1, 3)).digest()


def test_build_syncs_files_before_renaming(tmp_path, monkeypatch):
  events = []
  sync, rename = os.fsync, os.rename

  def on_sync(descriptor):
    events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
    sync(descriptor)

  def on_rename(old, new):
    events.append(("renamed", Path(new).name))
    rename(old, new)

  monkeypatch.setattr(os, "fsync", on_sync)
  monkeypatch.setattr(os, "rename", on_rename)
  packed.build_packed(tmp_path / "a", make)
  before = events[: events.index(("renamed", "a"))]
  files = ("tokens", "offsets", "labels", "keys")
  for name in (*(f"{f}.npy" for f in files), "train", "info.json"):
    assert name in before, name


@pytest.mark.parametrize(
  ("number", "reason"),
  [
    (errno.ENOSPC, "disk is full"),
    (errno.EDQUOT, "disk quota"),
    (errno.EFBIG, "file size limit"),
  ],
)
@pytest.mark.parametrize("kind", ["plain", "text", "cause", "later"])
def test_build_reports_a_full_disk_in_one_message(
  tmp_path, monkeypatch, number, reason, kind
):
  full = OSError(number, os.strerror(number))

  def fail(folder):
    make(folder)
    if kind == "plain":
      raise full
    if kind == "text":  # As array_record's writer has it.
      raise RuntimeError(f"write() failed: {os.strerror(number)}; at byte 9")
    if kind == "cause":
      raise ValueError("could not be had whole") from full
    return {}

  def fail_later(descriptor):
    raise full

  if kind == "later":
    monkeypatch.setattr(os, "fsync", fail_later)
  place = tmp_path / "a"
  with pytest.raises(ValueError, match=f"{place} .*{reason}.*--data_dir"):
    packed.build_packed(place, fail)
  assert [p.name for p in tmp_path.iterdir()] == [".a.lock"]


def test_stage_reports_a_full_disk_of_its_own_folder(tmp_path):
  def fail(folder):
    raise OSError(errno.ENOSPC, "No space left on device")

  def outer(folder):
    packed.stage(tmp_path / "tfds" / "a", fail)

  with pytest.raises(ValueError, match=f"{tmp_path}/tfds/a .*disk is full"):
    packed.stage(tmp_path / "packed" / "a", outer)
