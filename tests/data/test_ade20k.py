"""ADE20K as its authors ship it."""

import tarfile

import pytest

from jaxformers.data import ade20k
from tests.data import scenes


def test_images_and_annotations_go_together(tmp_path):
  folder = scenes.write(tmp_path / "ADEChallengeData2016")
  (folder / "sceneCategories.txt").write_text("not read")
  splits = ade20k.read(folder)
  assert {name: len(rows) for name, rows in splits.items()} == {
    "train": 12,
    "test": 3,
  }
  key, example = splits["train"][5]
  assert key == example["id"] == "ADE_training_00000005"
  assert example["image"].startswith(b"\xff\xd8")
  assert example["annotation"].startswith(b"\x89PNG")
  with tarfile.open(tmp_path / "ade.tar", "w") as tar:
    tar.add(folder, "ADEChallengeData2016")
  assert ade20k.read(tmp_path / "ade.tar") == splits


def test_what_is_not_whole(tmp_path):
  folder = scenes.write(tmp_path / "ADEChallengeData2016")
  (folder / "annotations/training/ADE_training_00000003.png").unlink()
  with pytest.raises(ValueError, match="the image of 'ADE_training_00000003'"):
    ade20k.read(folder)
  with pytest.raises(ValueError, match="0 training and 0 validation"):
    ade20k.read(folder / "images")
