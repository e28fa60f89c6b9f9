"""Images in colour and their classes."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from jaxformers import tasks
from jaxformers.commands import prepare
from jaxformers.data.engine import builder, source
from jaxformers.data.sets import cifar100
from jaxformers.tasks import vision
from jaxformers.training import summary
from tests.data.archives import write_folder


@pytest.fixture(scope="module")
def cifar10(archives, prepared):
  return tasks.get(
    "cifar10",
    data_dir=str(prepared),
    archive=str(archives / "cifar10_jpeg.tar.xz"),
    augment={"flip": True, "crop": "pad"},
  )


@pytest.mark.long
def test_cifar10_task_has_normalised_colour_images(cifar10):
  counts = {name: len(split) for name, split in cifar10.splits.items()}
  assert counts == {"train": 45_000, "validation": 5_000, "test": 10_000}
  assert (np.bincount(cifar10.splits["test"].labels) == 1_000).all()
  batch = cifar10.splits["validation"].batch(np.arange(2_000))
  assert batch["inputs"].shape == (2_000, 32, 32, 3)
  np.testing.assert_allclose(batch["inputs"].mean((0, 1, 2)), 0, atol=0.05)
  np.testing.assert_allclose(batch["inputs"].std((0, 1, 2)), 1, atol=0.05)
  assert cifar10.splits["train"].augment.flip
  assert not cifar10.splits["test"].augment.flip
  assert cifar10.sizes()["image"] == (32, 32, 3)


def test_cifar10_task_refuses_an_unknown_protocol():
  with pytest.raises(ValueError, match="protocol.*'lra'.*jaxformers"):
    tasks.get("cifar10", protocol="lra")


# Of a run, without its data.
RESULTS = {
  "task": "imagenet2012",
  "protocol": "paper",
  "seed": 0,
  "model": "transformer",
  "accuracy": 0.7,
  "baselines": {},
  "examples": 6,
  "best_step": 1,
  "selection": "test",
  "parameters": 1,
  "parameter_ratio": 1.0,
  "train_seconds": 1.0,
  "wall_seconds": 1.0,
}


def jpeg(value, size=(30, 20)):
  file = io.BytesIO()
  Image.new("RGB", size, (value, 90, 30)).save(file, "JPEG")
  return file.getvalue()


def test_imagenet_task_reads_class_folders(tmp_path, monkeypatch):
  files = {
    f"{split}/n{label:02}/{k}.JPEG": jpeg(20 * label)
    for split, count in (("train", 9), ("val", 2))
    for label in range(3)
    for k in range(count)
  }
  root = write_folder(tmp_path / "imagenet", files)
  options = {"data_dir": str(tmp_path), "archive": str(root), "size": 16}
  task = tasks.get("imagenet2012", augment={"erase": 1.0}, **options)
  counts = {name: len(split) for name, split in task.splits.items()}
  assert counts == {"train": 26, "validation": 1, "test": 6}
  assert task.classes == ("n00", "n01", "n02")
  assert task.sizes()["image"] == (16, 16, 3)
  assert task.splits["train"].augment.erase == 1
  assert task.baselines() == {"majority class": 1 / 3}
  batch = task.splits["test"].batch(np.arange(6))
  assert batch["targets"].tolist() == [0, 0, 1, 1, 2, 2]
  assert task.info["counts"] == {"train": 27, "validation": 6, "classes": 3}
  assert task.info["authors_counts"] is False
  assert task.info["authors_checksum"] is False
  assert json.loads(json.dumps(task.info)) == task.info
  sha256 = task.info["sha256"]
  assert sha256.startswith("listing-")
  assert "not the authors' counts" in summary.format_results(
    RESULTS | {"data": task.info}
  )
  assert "counts                not the authors'" in prepare.summary(task)
  paper = tasks.get("imagenet2012", protocol="paper", **options)
  assert paper.selection == "test"
  assert len(paper.splits["train"]) == 27
  # With the authors' counts nothing is said of a checksum, for none is known.
  monkeypatch.setattr(vision, "IMAGENET_COUNTS", task.info["counts"])
  authors = tasks.get("imagenet2012", **options).info
  assert authors["authors_counts"] is True
  assert not {"authors_checksum", "sha256"} & authors.keys()
  monkeypatch.undo()
  (root / "train" / "n01" / "8.JPEG").unlink()
  assert tasks.get("imagenet2012", **options).info["sha256"] != sha256


def test_imagenet_task_reads_prepared_tensorflow_datasets(tmp_path):
  def read(_):
    return {
      split: [
        (
          k,
          {
            "image": np.full((8, 9, 3), 50 * (k % 3), np.uint8),
            "label": f"n{k % 3:02}",
          },
        )
        for k in range(count)
      ]
      for split, count in (("train", 12), ("validation", 6))
    }

  origin = source.Source(
    name="imagenet2012",
    features={"image": (8, 9, 3), "label": ("n00", "n01", "n02")},
    read=read,
  )
  builder.prepare(origin, None, tmp_path, tmp_path)
  options = {
    "data_dir": str(tmp_path / "data"),
    "archive": str(tmp_path / "imagenet2012" / "1.0.0"),
    "size": 8,
  }
  for _ in range(2):
    task = tasks.get("imagenet2012", **options)
    assert len(task.splits["train"]) == 11
    batch = task.splits["test"].batch(np.arange(6))
    mean = batch["inputs"].mean((1, 2, 3))
    np.testing.assert_array_equal(
      np.argsort(mean, kind="stable"),
      np.argsort(batch["targets"], kind="stable"),
    )
  # Names and sizes of the files are part of the digest.
  digest = task.splits["test"].digest()
  archive = tmp_path / "imagenet2012" / "1.0.0"
  (archive / "imagenet2012-test.array_record-00000-of-00001").write_bytes(b"1")
  task = tasks.get("imagenet2012", **options)
  assert task.splits["test"].digest() != digest


def test_imagenet_refuses_missing_archives_and_wrong_augmentation(tmp_path):
  with pytest.raises(ValueError, match="imagenet2012.*image-net.org"):
    tasks.get("imagenet2012", data_dir=str(tmp_path))
  with pytest.raises(ValueError, match=f"{tmp_path}/train"):
    tasks.get("imagenet2012", data_dir=str(tmp_path), archive=str(tmp_path))
  with pytest.raises(ValueError, match=r"'flop'.*flip"):
    vision.augmented({"train": None}, {"flop": True})


def test_cifar100_task_has_100_classes(tmp_path, monkeypatch):
  few = {"train": 5, "test": 1}
  monkeypatch.setattr(cifar100, "PER_LABEL", few)
  rows = {
    split: np.zeros((100 * count, 2 + 3_072), np.uint8)
    for split, count in few.items()
  }
  for content in rows.values():
    content[:, 1] = np.arange(len(content)) % 100
  files = {
    f"x/{split}.bin": content.tobytes() for split, content in rows.items()
  }
  archive = write_folder(tmp_path / "cifar-100-binary", files)
  task = tasks.get(
    "cifar100", data_dir=str(tmp_path / "data"), archive=str(archive)
  )
  assert task.num_classes == len(task.classes) == 100
  assert len(task.splits["validation"]) == 50
