"""Splits of images."""

import dataclasses
import io

import numpy as np
import pytest
from PIL import Image

from jaxformers.data.engine import packed
from jaxformers.data.engine.loader import Loader
from jaxformers.data.images.augment import Augment
from jaxformers.data.images.splits import Images
from tests.data import pictures

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 6, 8, 3), np.uint8)
LABELS = np.arange(12) % 3
FULL = Augment(crop="pad", flip=True, randaugment=9.0, erase=0.25, mixup=0.8)


def stored(encoded):
  def one(pixels):
    if not encoded:
      return pixels.ravel()
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return np.frombuffer(file.getvalue(), np.uint8)

  return packed.pack([one(p) for p in PIXELS], LABELS)


def split(encoded=False, **fields):
  statistics = {"mean": (0.5, 0.4, 0.3), "deviation": (0.2, 0.3, 0.4)}
  return Images(stored(encoded), (6, 8, 3), encoded, **(statistics | fields))


@pytest.mark.parametrize("encoded", [False, True])
def test_batch_without_training_is_not_augmented(encoded):
  batch = split(encoded, augment=FULL).batch(np.array([3, 1]))
  want = (PIXELS[[3, 1]] / 255 - (0.5, 0.4, 0.3)) / (0.2, 0.3, 0.4)
  np.testing.assert_allclose(batch["inputs"], want, atol=1e-5)
  assert batch["inputs"].dtype == np.float32
  assert batch["targets"].tolist() == [0, 1]


@pytest.mark.parametrize("encoded", [False, True])
def test_augmented_batch_is_a_function_of_seed_step_and_row(encoded):
  train = split(encoded, augment=FULL)
  rows = np.arange(8)
  first, again, later = (
    train.batch(rows, 0, key) for key in ((1, 5, 0), (1, 5, 0), (1, 6, 0))
  )
  np.testing.assert_array_equal(first["inputs"], again["inputs"])
  assert (first["inputs"] != later["inputs"]).any()
  assert set(first) == {"inputs", "targets", "others", "shares"}
  plain = dataclasses.replace(train, augment=Augment())
  np.testing.assert_array_equal(
    plain.batch(rows, 0, (1, 5, 0))["inputs"], train.batch(rows)["inputs"]
  )


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_loader_rows_of_processes_join_to_the_batch_of_one(processes):
  train = split(augment=FULL)
  indices = Loader(train, (0,)).order(8, seed=0)(3)
  complete = Loader(train, (0,)).batch(indices, (0, 3))
  parts = [
    Loader(train, (0,), p, processes).batch(indices, (0, 3))
    for p in range(processes)
  ]
  for name, rows in complete.items():
    np.testing.assert_array_equal(
      np.concatenate([q[name] for q in parts]), rows
    )


def test_repeated_images_of_a_batch_differ():
  train = split(augment=Augment(flip=True, crop="pad", repeats=3))
  loader = Loader(train, (0,))
  order = loader.order(6, seed=0)
  indices = order(0)
  assert sorted(np.unique(indices, return_counts=True)[1]) == [3, 3]
  seen = np.concatenate([order(step) for step in range(6)])
  np.testing.assert_array_equal(np.bincount(seen, minlength=12), 3)
  inputs = loader.batch(indices, (0, 0))["inputs"]
  copies = inputs[indices == indices[0]]
  assert (copies[0] != copies[1]).any() or (copies[1] != copies[2]).any()


def test_mixing_rarely_pairs_views_of_one_image():
  pixels = packed.pack([np.zeros(3, np.uint8)] * 600, np.arange(600))
  how = Augment(mixup=0.8, repeats=3)
  train = Images(pixels, (1, 1, 3), augment=how)
  loader = Loader(train, (0,))
  order = loader.order(192, seed=0)
  same = []
  for step in range(10):
    batch = loader.batch(order(step), (0, step))
    same.append((batch["targets"] == batch["others"]).mean())
  assert np.mean(same) < 0.05  # 2 / 191 by chance.


def test_select_of_images_keeps_labels_and_changes_the_digest():
  part = split().select(np.array([7, 2]))
  assert len(part) == 2
  assert part.labels.tolist() == [1, 2]
  np.testing.assert_array_equal(part.pixels(np.array([0]))[0], PIXELS[7])
  assert part.digest() != split().digest()
  assert part.reading()["mean"] == [0.5, 0.4, 0.3]
  assert (part.lengths() == 0).all()


@pytest.mark.parametrize(
  ("file", "reason"),
  [
    (pictures.EPS, "JPEG.*PNG"),
    (pictures.picture("JPEG")[:-40], "truncated"),
    (b"", "JPEG.*PNG"),
  ],
)
def test_batch_names_a_damaged_image(tmp_path, no_program, file, reason):
  files = [pictures.picture(), b"", b"", file, pictures.picture("JPEG")]
  rows = (([np.frombuffer(f, np.uint8)], 0, k) for k, f in enumerate(files))
  packed.write(tmp_path / "train", rows)
  stored = packed.open_split(tmp_path / "train").select(np.array([4, 3]))
  train = Images(stored, (6, 8, 3), encoded=True, augment=Augment(flip=True))
  assert train.pixels(np.array([0])).shape == (1, 6, 8, 3)
  number = 3 if file else "[13]"
  message = f"{tmp_path / 'train'}.*file 1 of 1.*example {number}.*{reason}"
  with pytest.raises(ValueError, match=message):
    train.batch(np.array([0, 1]), 0, (0, 0, 0))
