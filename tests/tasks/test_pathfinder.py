import numpy as np
import pytest

from jaxformers import tasks
from jaxformers.data.generators import snakes
from jaxformers.data.generators.pathfinder import Settings
from jaxformers.data.sets import pathfinder as pathfinder_files
from jaxformers.foundations.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return str(tmp_path_factory.mktemp("pathfinder"))


def load(folder, name="pathfinder", **options):
  options = {"difficulty": "easy", "num_images": 30} | options
  return tasks.get(name, data_dir=folder, **options)


@pytest.mark.parametrize("protocol", sorted(tasks.pathfinder.PROTOCOLS))
def test_pathfinder_protocols_have_their_splits(folder, protocol):
  task = load(folder, protocol=protocol)
  sizes = {name: len(split) for name, split in task.splits.items()}
  assert sizes == {"train": 24, "validation": 3, "test": 3}
  keys = np.concatenate([split.keys for split in task.splits.values()])
  assert sorted(keys) == list(range(30))
  train = task.splits["train"]
  drawing = snakes.sample(
    Settings(difficulty="easy", num_images=30), int(train.keys[4])
  )
  pixels = drawing.pixels.ravel()
  want = {
    "jaxformers": pixels.astype(int) + 1,
    "lra": pixels,
    "skyformer": pixels,
    "paper": pixels,
    "s4": pixels / np.float32(255),
  }[protocol]
  batch = train.batch(np.array([4]), 1_024)
  np.testing.assert_allclose(batch["inputs"][0], want, rtol=1e-6)
  assert batch["targets"] == [drawing.label]


def test_pathfinder_splits_are_slices_or_pytorchs_permutation(folder):
  assert load(folder).splits["test"].keys.tolist() == [27, 28, 29]
  s4 = load(folder, protocol="s4").splits["train"].keys
  assert s4.tolist() != sorted(s4)


def test_pathfinder_curriculum_has_shorter_snakes(folder):
  level = {"difficulty": "7"}
  plain = load(folder, **level)
  task = load(folder, num_short=12, short_paddles="3 6", **level)
  assert task.curriculum == ("train_3", "train_6") and not plain.curriculum
  for name, split in plain.splits.items():
    assert task.splits[name].digest() == split.digest()
  for name, difficulty, paddles in (
    ("train_3", "3", 3),
    ("train_6", "easy", 6),
  ):
    batch = task.splits[name].batch(np.arange(12), 1_024)
    settings = Settings(difficulty=difficulty, num_images=12)
    drawn = [snakes.sample(settings, k) for k in range(12)]
    assert drawn[0].path.shape == (2, paddles, 2)
    pixels = np.stack([each.pixels.ravel() for each in drawn])
    np.testing.assert_array_equal(batch["inputs"], pixels.astype(int) + 1)
    assert batch["targets"].tolist() == [each.label for each in drawn]


@pytest.mark.parametrize(
  ("num_short", "paddles"),
  [
    (12, ""),
    (0, "3"),
    (9, "3"),
    (12, "3 6"),
    (12, "3 3"),
    (12, "1"),
    (12, "a"),
  ],
)
def test_pathfinder_refuses_a_wrong_curriculum(folder, num_short, paddles):
  with pytest.raises(UserError, match=f"short_paddles='{paddles}'"):
    load(folder, num_short=num_short, short_paddles=paddles)


@pytest.mark.slow
def test_pathx_is_pathfinder_in_128_pixels(tmp_path):
  task = load(str(tmp_path), "pathx", num_images=10)
  assert (task.name, task.max_len) == ("pathx", 16_384)
  assert task.info["settings"]["num_images"] == 10


def test_pathfinder_task_reads_the_files_of_lra(tmp_path):
  settings = Settings(difficulty="easy", num_images=10)
  pathfinder_files.export(settings, tmp_path)
  task = load(
    str(tmp_path / "data"),
    archive=str(tmp_path / "pathfinder32"),
    num_images=10,
  )
  assert task.info["source"] == "pathfinder32"
  with pytest.raises(ValueError, match="seed=3.*generated"):
    load(str(tmp_path), archive=str(tmp_path), seed=3)
  with pytest.raises(ValueError, match="10 examples.*'easy'.*11"):
    load(
      str(tmp_path / "other"),
      archive=str(tmp_path / "pathfinder32"),
      num_images=11,
    )
