import dataclasses

import numpy as np
import pytest

from jaxformers import tasks
from jaxformers.data.sets import cifar10

RNG = np.random.default_rng(0)


@pytest.fixture
def small(monkeypatch):
  """Forty images to train on and ten to test, in place of the archive."""

  def read(archive):
    return {
      split: [
        (
          i,
          {
            "id": f"{split}_{i:05d}",
            "image": RNG.integers(0, 256, (32, 32, 3)).astype(np.uint8),
            "label": cifar10.LABELS[i % 10],
          },
        )
        for i in range(count)
      ]
      for split, count in (("train", 40), ("test", 10))
    }

  source = dataclasses.replace(cifar10.SOURCE, read=read, archives=(), url="")
  monkeypatch.setattr(cifar10, "SOURCE", source)


@pytest.mark.parametrize("protocol", sorted(tasks.image.PROTOCOLS))
@pytest.mark.slow
def test_image_protocols_have_their_splits_and_ranges(
  small, tmp_path, protocol
):
  task = tasks.get("image", data_dir=str(tmp_path), protocol=protocol)
  sizes = {name: len(split) for name, split in task.splits.items()}
  assert sizes == {"train": 36, "validation": 4, "test": 10}
  batch = task.splits["test"].batch(np.arange(10), 1_024)["inputs"]
  assert batch.shape == (10, 1_024)
  low, high, size = {
    "jaxformers": (1, 256, 257),
    "lra": (0, 255, 256),
    "skyformer": (0, 255, 256),
    "paper": (0, 255, 256),
    "s4": (-122.6 / 61, 132.4 / 61, 0),
  }[protocol]
  assert low <= batch.min() < batch.max() <= high + 1e-6
  assert (batch.dtype == np.float32) == (size == 0)
  assert (task.vocab_size, task.num_classes, task.max_len) == (size, 10, 1_024)
  train, held = (task.splits[name].keys for name in ("train", "validation"))
  assert sorted([*train, *held]) == list(range(40))


def test_image_protocols_share_their_splits(small, tmp_path):
  first, second = (
    tasks.get("image", data_dir=str(tmp_path), protocol=p)
    for p in ("lra", "skyformer")
  )
  for name in first.splits:
    np.testing.assert_array_equal(
      first.splits[name].keys, second.splits[name].keys
    )


def test_image_task_refuses_an_unknown_protocol(tmp_path):
  with pytest.raises(ValueError, match="protocol.*'s5'.*jaxformers"):
    tasks.get("image", data_dir=str(tmp_path), protocol="s5")
