"""CIFAR-100 as its authors ship it."""

import numpy as np
import pytest

from jaxformers.data.sets import cifar100
from tests.data.archives import write_folder, write_tar

ROW = 2 + 3_072  # Coarse label, fine label, image.


def files(per_label=None):
  rng = np.random.default_rng(0)
  content = {"cifar-100-binary/fine_label_names.txt": b"not read"}
  for split, count in (per_label or cifar100.PER_LABEL).items():
    fine = np.repeat(np.arange(100), count).astype(np.uint8)
    rows = rng.integers(0, 256, (len(fine), ROW)).astype(np.uint8)
    rows[:, 0], rows[:, 1] = 7, fine
    content[f"cifar-100-binary/{split}.bin"] = rows.tobytes()
  return content


@pytest.mark.slow
def test_cifar100_reads_fine_labels_and_colour_planes(tmp_path):
  content = files()
  splits = cifar100.read(write_folder(tmp_path / "x", content))
  assert {name: len(rows) for name, rows in splits.items()} == {
    "train": 50_000,
    "test": 10_000,
  }
  key, example = splits["test"][103]
  assert (key, example["id"]) == (103, "test_00103")
  assert example["label"] == cifar100.LABELS[1] == "aquarium_fish"
  stored = content["cifar-100-binary/test.bin"][103 * ROW + 2 :]
  assert example["image"][0, 1, 2] == stored[2 * 1_024 + 1]


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda c: c[:-5], r"test\.bin.*30,739,995 bytes"),
    (lambda c: c[:-ROW], "1 examples of 'apple'.*'train'.*500"),
    (lambda c: c[:1] + b"\xff" + c[2:], r"test\.bin.*labels beyond 99"),
  ],
)
@pytest.mark.slow
def test_cifar100_refuses_other_files(tmp_path, change, message):
  content = files({"train": 1, "test": 100})
  name = "cifar-100-binary/test.bin"
  content[name] = change(content[name])
  with pytest.raises(ValueError, match=message):
    cifar100.read(write_tar(tmp_path / "cifar-100-binary.tar.gz", content))


def test_cifar100_labels_are_100_sorted_names():
  assert len(cifar100.LABELS) == 100
  assert list(cifar100.LABELS) == sorted(set(cifar100.LABELS))


def test_cifar100_refuses_pickles_unread(tmp_path):
  files = {
    f"cifar-100-python/{name}": b"never read" for name in ("meta", "train")
  }
  with pytest.raises(
    ValueError, match="'cifar-100-python/train'.*cifar-100-binary.tar"
  ):
    cifar100.read(write_tar(tmp_path / "cifar-100-python.tar.gz", files))
