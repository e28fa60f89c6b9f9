"""A class for every pixel."""

import pytest

from jaxformers import tasks
from tests.data import scenes


def load(tmp_path, **options):
  folder = tmp_path / "ADEChallengeData2016"
  if not folder.exists():
    scenes.write(folder)
  return tasks.get(
    "ade20k",
    data_dir=str(tmp_path / "data"),
    archive=str(folder),
    **({"window": 16, "num_train": 12, "num_test": 3} | options),
  )


def test_segmentation_task_reads_scenes_of_a_folder(tmp_path):
  task = load(tmp_path)
  counts = {name: len(split) for name, split in task.splits.items()}
  assert counts == {"train": 11, "validation": 1, "test": 3}
  assert task.splits["train"].augmented
  assert not task.splits["validation"].augmented
  sizes = task.sizes()
  assert (sizes["objective"], sizes["image"]) == ("segmentation", (16, 16, 3))
  assert sizes["num_classes"] == 150
  pixels, labels = task.splits["test"].scene(0)
  assert pixels.shape[:2] == labels.shape
  red = pixels[..., 0] > 128
  assert ((labels == 1) == red)[2:].mean() > 0.95
  paper = load(tmp_path, protocol="paper")
  assert paper.selection == "test"
  assert len(paper.splits["train"]) == 12


def test_segmentation_baseline_is_one_class_everywhere(tmp_path):
  score = load(tmp_path).baselines()["most frequent class"]
  assert 0.2 < score < 0.5  # Of two classes one, somewhat over half.


def test_segmentation_task_refuses_missing_archives_and_wrong_options(tmp_path):
  with pytest.raises(ValueError, match="scene_parse150.*zip"):
    tasks.get("ade20k", data_dir=str(tmp_path))
  with pytest.raises(ValueError, match="window=0"):
    load(tmp_path, window=0)
  with pytest.raises(ValueError, match=r"num_train=1\b"):
    load(tmp_path, num_train=1)
  counts = {"num_train": 20_210, "num_test": 2_000}
  with pytest.raises(ValueError, match="12 training.*3 validation"):
    load(tmp_path, **counts)


def test_segmentation_task_does_not_call_a_part_the_published_set(tmp_path):
  assert load(tmp_path).info["authors_checksum"] is None
  # Nor is one that an earlier version prepared under the name of the whole.
  for folder in ("tfds", "packed"):
    for part in (tmp_path / "data" / folder).glob("scene_parse150-12-3*"):
      part.rename(part.parent / part.name.replace("-12-3", ""))
  with pytest.raises(ValueError, match="'train': 12.*20210"):
    load(tmp_path, num_train=20_210, num_test=2_000)
