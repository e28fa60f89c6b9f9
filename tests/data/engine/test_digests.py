"""Damaged data is refused, with the folder to remove."""

import json
import random
import shutil
from collections import Counter

import numpy as np
import pytest

from jaxformers.data.engine import digests, preparation, source
from tests.damages import KINDS, damage


def toy():
  rng = np.random.default_rng(0)

  def rows(count):
    return [
      (
        i,
        {
          "ids": rng.integers(0, 256, 40).astype(np.uint8),
          "label": "ab"[i % 2],
        },
      )
      for i in range(count)
    ]

  splits = {"train": rows(30), "test": rows(12)}
  return source.Source(
    name="toy",
    features={"ids": np.uint8, "label": ("a", "b")},
    read=lambda archive: splits,
    shuffled=False,
  )


ENCODE = source.Encoding(
  "plain",
  lambda train: (
    lambda examples: [[example["ids"]] for example in examples],
    {"vocabulary": [f"token {i}" for i in range(256)]},
  ),
  lambda example: int(example["ids"][0]),
)


def content(data_dir):
  """Returns what a task reads of the splits, in a form that compares."""
  splits, info = preparation.open_splits(toy(), ENCODE, data_dir=data_dir)
  return info, {
    name: (
      [split[k].tolist() for k in range(len(split.starts))],
      split.labels.tolist(),
      split.keys.tolist(),
      split.num_inputs,
      split.digest(),
    )
    for name, split in splits.items()
  }


def files_of(folder):
  return sorted(p for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize("stage", ["packed", "tfds"])
def test_open_splits_refuses_damaged_data(tmp_path, stage):
  intact = tmp_path / "intact"
  expected = content(intact)
  (original,) = (p for p in (intact / stage).iterdir() if p.is_dir())
  if stage == "tfds":  # Its files are read only to pack what is not packed.
    shutil.rmtree(intact / "packed")
  rng = random.Random(0)
  outcomes = Counter()
  for file in files_of(original):
    name = file.relative_to(intact)
    for kind in KINDS * 4:
      data_dir = tmp_path / "damaged"
      shutil.copytree(intact, data_dir)
      folder = data_dir / original.relative_to(intact)
      damage(data_dir / name, kind, files_of(folder), rng)
      try:
        assert content(data_dir) == expected, (name, kind)
        outcomes["same data"] += 1
      except ValueError as error:
        message = str(error)
        assert f"{folder} " in message, (name, kind)
        assert "\n" not in message
        outcomes["refused"] += 1
        # The remedy that is named helps.
        shutil.rmtree(folder)
        if outcomes["refused"] % 30 == 0:
          assert content(data_dir) == expected
      shutil.rmtree(data_dir)
  assert outcomes["refused"] > 9 * outcomes["same data"], outcomes


@pytest.mark.parametrize(
  "record",
  ["", "{", "[" * 9999, "[]", "null", '"text"', '{"digests": {}}', "\xff\xfe"],
)
@pytest.mark.parametrize("stage", ["packed", "tfds"])
def test_open_splits_refuses_a_broken_record(tmp_path, stage, record):
  content(tmp_path)
  (folder,) = (p for p in (tmp_path / stage).iterdir() if p.is_dir())
  (path,) = folder.glob("*.json")
  path.write_bytes(record.encode("latin-1"))
  if stage == "tfds":
    shutil.rmtree(tmp_path / "packed")
  with pytest.raises(ValueError, match=f"damaged.*{path}.*{folder} "):
    content(tmp_path)


@pytest.mark.parametrize(
  "change", [{"splits": {"train": 29, "test": 12}}, {"splits": 3}, {"more": 1}]
)
def test_open_splits_detects_a_changed_record(tmp_path, change):
  content(tmp_path)
  path = tmp_path / "packed" / "toy-plain" / "info.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | change))
  with pytest.raises(ValueError, match="info.json.*digest"):
    content(tmp_path)
  without = json.loads(path.read_text())
  del without["digest"]
  path.write_text(json.dumps(without))
  with pytest.raises(ValueError, match="info.json.*digest"):
    content(tmp_path)


def test_open_splits_names_a_dangling_link(tmp_path):
  folder = tmp_path / "packed" / "toy-plain"
  folder.parent.mkdir()
  folder.symlink_to(tmp_path / "scratch")
  with pytest.raises(ValueError, match=f"{folder} .*link.*scratch"):
    content(tmp_path)


def test_of_array_equals_of_file(tmp_path):
  for array in (
    np.arange(7, dtype=np.int64),
    np.zeros(0, np.uint8),
    np.arange(3 << 20, dtype=np.uint32)[::2],
  ):
    np.save(tmp_path / "a.npy", array)
    assert digests.of_array(array) == digests.of_file(tmp_path / "a.npy")


def test_of_parts_depends_on_types_shapes_and_order():
  narrow, wide = np.arange(4, dtype=np.int32), np.arange(4, dtype=np.int64)
  values = [
    digests.of_parts(*parts)
    for parts in (
      (narrow, wide),
      (wide, narrow),
      (narrow, wide, ""),
      (narrow, wide.reshape(2, 2)),
      ("a", "b"),
      ("ab",),
    )
  ]
  assert len(set(values)) == len(values)
