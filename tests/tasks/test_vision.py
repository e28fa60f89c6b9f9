"""Images in colour and their classes."""

import numpy as np
import pytest

from jaxformers import tasks


@pytest.fixture(scope="module")
def cifar10(archives, prepared):
  return tasks.get(
    "cifar10",
    data_dir=str(prepared),
    archive=str(archives / "cifar10_jpeg.tar.xz"),
    augment={"flip": True, "crop": "pad"},
  )


def test_cifar10_in_colour(cifar10):
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


def test_what_images_cannot_have():
  with pytest.raises(ValueError, match=r"protocol of cifar10 'lra'"):
    tasks.get("cifar10", protocol="lra")
