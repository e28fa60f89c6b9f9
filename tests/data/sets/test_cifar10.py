import io

import numpy as np
import pytest
from PIL import Image

from jaxformers.data.sets import cifar10
from tests.data.archives import write_folder, write_tar
from tests.data.pictures import EPS

RNG = np.random.default_rng(0)
LABELS = np.arange(10_000) % 10


@pytest.fixture(scope="module")
def pixels():
  """The six batches: uint8 [10000, 3072], red, green and blue planes."""
  return [
    RNG.integers(0, 256, (10_000, 3_072)).astype(np.uint8) for _ in range(6)
  ]


def binary(pixels):
  return {
    f"cifar-10-batches-bin/{name}.bin": np.hstack(
      [LABELS[:, None].astype(np.uint8), rows]
    ).tobytes()
    for name, rows in zip(cifar10.BATCHES, pixels, strict=True)
  }


@pytest.mark.slow
def test_cifar10_reads_the_published_binary_archive(tmp_path, pixels):
  splits = cifar10.read(write_folder(tmp_path / "bin", binary(pixels)))
  for split, count in (("train", 50_000), ("test", 10_000)):
    assert len(splits[split]) == count
    for i in (0, 9_999, count - 1):
      key, example = splits[split][i]
      assert key == i  # The stock builder's.
      assert example["id"] == f"{split}_{i:05d}"
      assert example["label"] == cifar10.LABELS[i % 10]
  image = splits["test"][7][1]["image"]
  assert image.shape == (32, 32, 3)
  assert image[0, 1, 2] == pixels[5][7][2 * 1_024 + 1]


@pytest.mark.parametrize("write", [write_folder, write_tar])
def test_cifar10_refuses_pickles_unread(tmp_path, write):
  files = {
    f"cifar-10-batches-py/{name}": b"never read" for name in cifar10.BATCHES
  }
  with pytest.raises(
    ValueError,
    match=r"'cifar-10-batches-py/data_batch_1'.*"
    r"https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar",
  ):
    cifar10.read(write(tmp_path / "cifar-10-python.tar.gz", files))


@pytest.mark.parametrize("content", [b"", b"x" * 100])
def test_cifar10_refuses_broken_batches(tmp_path, content):
  folder = write_folder(tmp_path / "x", {"data_batch_1.bin": content})
  with pytest.raises(ValueError, match=r"data_batch_1\.bin.*\d+ bytes"):
    cifar10.read(folder)


def picture(size=(32, 32), kind="PNG", colour=(10, 20, 30)):
  file = io.BytesIO()
  Image.new("RGB", size, colour).save(file, kind)
  return file.getvalue()


def test_cifar10_reads_class_folders(tmp_path, monkeypatch, no_program):
  monkeypatch.setattr(cifar10, "PER_LABEL", {"train": 2, "test": 1})
  files = {
    f"c/{split}/{label}/{i}.{kind}": picture(
      kind={"jpg": "JPEG"}.get(kind, kind)
    )
    for split, count in (("train", 2), ("test", 1))
    for label in cifar10.LABELS
    for i, kind in zip(range(count), ("jpg", "png"), strict=False)
  }
  splits = cifar10.read(write_tar(tmp_path / "a.tar.xz", files, mode="w:xz"))
  assert [example["id"] for _, example in splits["train"]] == [
    f"train_{i:05d}" for i in range(20)
  ]
  _, example = splits["train"][1]
  np.testing.assert_array_equal(example["image"][3, 4], [10, 20, 30])
  missing = dict(list(files.items())[1:])
  with pytest.raises(ValueError, match="1 examples.*'airplane'"):
    cifar10.read(write_tar(tmp_path / "b.tar.gz", missing))
  name = "c/train/airplane/0.jpg"
  for content, message in (
    (picture((33, 32)), "0.jpg.*33 x 32"),
    (b"no picture", "0.jpg.*JPEG.*PNG"),
    (EPS, "0.jpg.*JPEG.*PNG"),
    (picture()[:60], "0.jpg.*truncated"),
  ):
    path = write_tar(tmp_path / "c.tar.gz", {**files, name: content})
    with pytest.raises(ValueError, match=message):
      cifar10.read(path)
