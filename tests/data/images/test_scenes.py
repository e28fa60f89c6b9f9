"""Windows of scenes."""

import colorsys
import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from jaxformers.data.engine import packed
from jaxformers.data.images import scenes as s
from tests.data import pictures
from tests.data.scenes import encoded

RNG = np.random.default_rng(0)
SIZES = [(24, 40), (30, 18), (16, 16)]


@pytest.fixture(scope="module")
def split():
  files = []
  for height, width in SIZES:
    labels = np.zeros((height, width), np.uint8)
    labels[: height // 2] = 1
    labels[height // 2 :, 2:] = 3
    labels[-1] = 200  # Of no class that is known.
    pixels = np.repeat(labels[..., None] * 40, 3, -1)
    files += [encoded(pixels, "PNG"), encoded(labels, "PNG")]
  rows = [np.frombuffer(file, np.uint8) for file in files]
  stored = packed.pack(rows, np.zeros(len(SIZES)), num_inputs=2)
  return s.Scenes(stored, (16, 16, 3), 5)


def test_scene_returns_unchanged_pixels_and_labels(split):
  pixels, labels = split.scene(1)
  assert pixels.shape == (30, 18, 3)
  assert labels.shape == (30, 18)
  assert set(np.unique(labels)) == {-1, 0, 2}
  assert (labels[-1] == -1).all()
  assert (labels[20, :2] == -1).all()


def test_batch_takes_the_middle_of_a_scene(split):
  batch = split.batch(np.array([0, 1, 2]))
  assert batch["inputs"].shape == (3, 16, 16, 3)
  assert batch["inputs"].dtype == np.float32
  assert batch["targets"].shape == (3, 16, 16)
  pixels, labels = split.scene(2)  # Of a window's size: nothing is changed.
  np.testing.assert_array_equal(batch["targets"][2], labels)
  np.testing.assert_allclose(batch["inputs"][2], split.normalised(pixels))


def test_training_windows_are_a_function_of_seed_step_and_row(split):
  train = dataclasses.replace(split, augmented=True)
  rows = np.array([0, 1, 2, 0])
  first, again = (train.batch(rows, 0, (1, 5, 0)) for _ in range(2))
  for name in first:
    np.testing.assert_array_equal(first[name], again[name])
  later = train.batch(rows, 0, (1, 6, 0))
  assert (first["inputs"] != later["inputs"]).any()
  half = train.batch(rows[2:], 0, (1, 5, 2))
  np.testing.assert_array_equal(half["inputs"], first["inputs"][2:])
  plain = split.batch(rows, 0, (1, 5, 0))
  np.testing.assert_array_equal(plain["inputs"], split.batch(rows)["inputs"])


def test_augmented_batch_keeps_labels_at_their_pixels(split):
  train = dataclasses.replace(split, augmented=True)
  for step in range(30):
    batch = train.batch(np.array([0, 1]), 0, (0, step, 0))
    value = batch["inputs"][..., 0]
    for row, labels in zip(value, batch["targets"], strict=True):
      if (labels == 0).any() and (labels == 2).any():
        # Brighter by far, whatever the colours: 40 and 120 of 255.
        assert np.median(row[labels == 2]) > np.median(row[labels == 0])


def test_batch_pads_a_small_scene_with_label_minus_1(split):
  train = dataclasses.replace(split, augmented=True, shape=(16, 48, 3))
  batch = train.batch(np.array([2] * 8), 0, (0, 0, 0))
  empty = (batch["inputs"] == 0).all(-1)
  assert empty.any()
  assert (batch["targets"][empty] == -1).all()


def test_training_windows_avoid_a_single_class():
  labels = np.ones((16, 64), np.uint8)
  labels[:, 52:58] = 2
  pixels = np.zeros((16, 64, 3), np.uint8)
  rows = [np.frombuffer(encoded(x, "PNG"), np.uint8) for x in (pixels, labels)]
  stored = packed.pack(rows, np.zeros(1), num_inputs=2)
  wide = s.Scenes(stored, (16, 16, 3), 5, augmented=True)
  seen = [
    (wide.batch(np.array([0]), 0, (0, step, 0))["targets"] == 1).any()
    for step in range(200)
  ]
  assert np.mean(seen) > 0.6  # A fifth of the places would show it.


@pytest.mark.parametrize(
  ("annotation", "reason"),
  [
    (pictures.picture(mode="L")[:-20], "truncated"),
    (pictures.picture(mode="P"), r"mode P\b.*\bL\b"),
    (pictures.picture(mode="L", size=(32, 20)), "32 x 20"),
    (pictures.EPS, "no PNG"),
  ],
)
def test_scene_refuses_annotations_that_do_not_fit(
  tmp_path, no_program, annotation, reason
):
  """They are named by the folder of the split and the number there."""
  good = pictures.picture(mode="L")
  files = [pictures.picture("JPEG"), good] * 2
  files += [pictures.picture("JPEG"), annotation]
  rows = [np.frombuffer(file, np.uint8) for file in files]
  folder = tmp_path / "packed" / "toy" / "train"
  folder.parent.mkdir(parents=True)
  packed.write(folder, ((rows[k : k + 2], 0, k) for k in (0, 2, 4)))
  stored = packed.open_split(folder).select(np.array([2, 0]))
  source = s.Scenes(stored, (16, 16, 3), 5)
  assert source.scene(1)[0].shape == (24, 32, 3)
  message = f"{folder}.*file 2 of 2.*example 2.*{reason}.*{folder.parent} "
  with pytest.raises(ValueError, match=message):
    source.batch(np.array([1, 0]))


def test_a_smaller_scene_skips_pixels():
  """Two pixels next to the middle count, and not all four."""
  row = np.tile([0, 255, 255, 0], 4)
  pixels = np.repeat(np.tile(row, (16, 1))[..., None], 3, -1)
  picture = Image.fromarray(pixels.astype(np.uint8))
  assert (np.asarray(s.resized(picture, (4, 16))) == 255).all()
  # A greater one interpolates, as Pillow does.
  np.testing.assert_allclose(
    np.asarray(s.resized(picture, (24, 16)), int),
    np.asarray(picture.resize((24, 16), s.BILINEAR), int),
    atol=1,
  )


def test_colours_change_as_far_as_published():
  """Contrast scales a grey, and the hue turns by up to 36 degrees."""
  pixels = np.zeros((1, 2, 3), np.uint8)
  pixels[0, 0], pixels[0, 1] = 100, (200, 0, 0)
  greys, hues = [], []
  for seed in range(300):
    rng = np.random.default_rng(seed)
    changed = s._coloured(Image.fromarray(pixels), rng)
    (grey, red) = np.asarray(changed)[0].astype(int)
    greys.append(grey.mean())
    hues.append(colorsys.rgb_to_hsv(*(red / 255))[0] * 360)
  # (100 + 32) x 1.5 and (100 - 32) x 0.5.
  assert 180 < max(greys) <= 198 and 34 <= min(greys) < 50
  turned = [(hue + 180) % 360 - 180 for hue in hues]
  assert -40 < min(turned) < -30 and 30 < max(turned) < 40


def test_short_side_keeps_the_aspect_ratio():
  assert s.short_side((100, 50), 25) == (50, 25)
  assert s.short_side((1_000, 10), 100) == (400, 4)
  assert Image.new("RGB", s.short_side((3, 7), 2.2)).size == (2, 5)


@given(st.integers(1, 200), st.integers(1, 50), st.data())
def test_windows_cover_every_pixel(length, window, data):
  stride = data.draw(st.integers(1, window))
  starts = s.windows(length, window, stride)
  seen = np.zeros(max(length, window), int)
  for start in starts:
    seen[start : start + window] += 1
  assert (seen[:length] > 0).all()
  assert starts[-1] + window == max(length, window)
  assert all(b - a <= stride for a, b in itertools.pairwise(starts))
