"""The compiled generator against what the original one does.

ORIGINAL was measured with the authors' code (github.com/drewlinsley/pathfinder
at ab9c130, SciPy's removed image functions put back), 400 images of each level
at 32 pixels, 60, 40 and 20 at 64, 128 and 256: mean and standard error of the
share of pixels that are not zero, grey histogram in 16 bins, distance of the
two discs, mean number of distractors.
"""

import numpy as np
import pytest

from jaxformers.data.generators import snakes
from jaxformers.data.generators.pathfinder import (
  GEOMETRIES,
  LEVELS,
  Settings,
)
from tests.marks import long_except

ORIGINAL = {
  (32, "hard"): dict(
    nonzero=(0.3407, 0.0019),
    grey=(20.20, 0.10),
    distance=(12.93, 0.26),
    distractors=(1.17, 0.047),
    histogram="842 12 12 8 8 12 9 12 18 21 17 11 7 6 3 4",
  ),
  (32, "intermediate"): dict(
    nonzero=(0.2688, 0.0019),
    grey=(15.63, 0.10),
    distance=(13.83, 0.24),
    distractors=(1.89, 0.054),
    histogram="880 10 9 7 5 9 5 11 13 13 11 9 5 6 3 4",
  ),
  (32, "easy"): dict(
    nonzero=(0.2255, 0.0018),
    grey=(12.95, 0.09),
    distance=(14.87, 0.19),
    distractors=(3.24, 0.078),
    histogram="902 9 7 6 4 6 4 10 9 9 9 8 4 6 3 4",
  ),
  (64, "hard"): dict(
    nonzero=(0.2706, 0.0034),
    grey=(13.83, 0.16),
    distance=(31.9, 1.3),
    distractors=(2.97, 0.13),
    histogram="878 8 8 14 23 9 7 7 8 10 11 8 3 0 0 7",
  ),
  (128, "hard"): dict(
    nonzero=(0.1361, 0.0011),
    grey=(7.895, 0.065),
    distance=(70.3, 3.6),
    distractors=(7.65, 0.09),
    histogram="940 5 6 7 5 2 3 1 0 3 6 5 4 3 7 3",
  ),
  (256, "hard"): dict(
    nonzero=(0.03852, 0.0002),
    grey=(2.946, 0.009),
    distance=(126.8, 4.2),
    distractors=(7.0, 0.05),
    histogram="982 2 1 1 2 0 1 0 0 1 1 1 2 1 1 5",
  ),
}
COUNTS = {32: 600, 64: 30, 128: 60, 256: 60}


@pytest.fixture(
  scope="module",
  params=long_except([(32, "hard")], sorted(ORIGINAL)),
  ids=str,
)
def drawn(request):
  size, difficulty = request.param
  settings = Settings(size, difficulty, seed=5)
  samples = [snakes.sample(settings, i) for i in range(COUNTS[size])]
  return size, difficulty, samples


def agree(values, mean, error):
  """Within four standard errors of the difference of the two means."""
  own_error = np.std(values) / np.sqrt(len(values))
  assert abs(np.mean(values) - mean) < 4 * np.hypot(own_error, error), (
    f"{np.mean(values):.4f} +- {own_error:.4f}, original {mean} +- {error}"
  )


@pytest.mark.slow
def test_sample_has_the_pixel_statistics_of_the_original(drawn):
  size, difficulty, samples = drawn
  want = ORIGINAL[size, difficulty]
  pixels = np.stack([drawing.pixels for drawing in samples])
  assert pixels.shape[1:] == (size, size)
  agree((pixels > 0).mean((1, 2)), *want["nonzero"])
  agree(pixels.mean((1, 2)), *want["grey"])
  agree([drawing.distractors for drawing in samples], *want["distractors"])
  discs = np.stack([drawing.discs() for drawing in samples])
  agree(np.hypot(*(discs[:, 0] - discs[:, 1]).T), *want["distance"])
  # Every image is stretched to the whole range, black stays black.
  assert (pixels.min((1, 2)) == 0).all()
  assert (pixels.max((1, 2)) == 255).all()


@pytest.mark.slow
def test_sample_has_the_grey_histogram_of_the_original(drawn):
  size, difficulty, samples = drawn
  pixels = np.stack([drawing.pixels for drawing in samples])
  shares = np.histogram(pixels, 16, (0, 256))[0] / pixels.size
  want = ORIGINAL[size, difficulty]["histogram"].split()
  np.testing.assert_allclose(shares, np.array(want, float) / 1e3, atol=0.008)


@pytest.mark.slow
def test_sample_labels_tails_and_contours_match_the_original(drawn):
  size, difficulty, samples = drawn
  geometry = GEOMETRIES[size]
  labels = np.array([drawing.label for drawing in samples])
  assert abs(labels.mean() - 0.5) < 4 * 0.5 / np.sqrt(len(labels))
  paths = np.stack([drawing.path for drawing in samples])
  assert paths.shape[1:] == (2, LEVELS[difficulty], 2)
  assert ((paths >= 0) & (paths < size)).all()
  tails = np.hypot(*(paths[:, 0, 0] - paths[:, 1, 0]).T)
  np.testing.assert_allclose(tails, geometry.seed_distance, atol=0.8)
  # Heads follow each other a paddle and its margins apart, give or take a turn.
  steps = np.linalg.norm(np.diff(paths[:, :, 1:], axis=2), axis=-1)
  margins = np.array([drawing.margin for drawing in samples])[:, None, None]
  apart = geometry.paddle_length + 2 * margins
  assert (steps < apart + 4).all()
  assert (steps > geometry.paddle_length - 1).all()
  assert set(np.unique(margins)) <= set(geometry.margins)


@pytest.mark.slow
def test_sample_discs_lie_on_one_snake_or_two_by_label(drawn):
  for drawing in drawn[2]:
    first, second = drawing.discs()
    tails, ends = drawing.path[:, 0].tolist(), drawing.path[:, -1].tolist()
    snake = tails.index(first.tolist())
    assert second.tolist() == ends[snake if drawing.label else 1 - snake]


@pytest.mark.slow
def test_sample_draws_discs_at_their_places(drawn):
  """A cross of five bright pixels at both; paddles are thinner."""
  cross = np.array([(0, 0), (0, 1), (1, 0), (0, -1), (-1, 0)])
  for drawing in drawn[2]:
    places = (drawing.discs()[:, None] + cross).clip(0, drawn[0] - 1)
    assert (drawing.pixels[places[..., 0], places[..., 1]] >= 150).all()


@pytest.mark.slow
def test_sample_is_a_function_of_seed_and_index():
  settings = Settings(num_images=30)
  again, other = snakes.sample(settings, 7), snakes.sample(settings, 8)
  np.testing.assert_array_equal(snakes.sample(settings, 7).pixels, again.pixels)
  assert not np.array_equal(again.pixels, other.pixels)
  seeded = snakes.sample(Settings(num_images=30, seed=1), 7)
  assert not np.array_equal(again.pixels, seeded.pixels)
  longer = snakes.sample(Settings(num_images=10**6), 7)
  np.testing.assert_array_equal(longer.pixels, again.pixels)


def test_sample_repeats_no_image():
  settings = Settings(difficulty="easy", num_images=3_000)
  images = {snakes.sample(settings, i).pixels.tobytes() for i in range(3_000)}
  assert len(images) == 3_000


def test_chunks_are_the_samples_for_any_number_of_threads(monkeypatch):
  monkeypatch.setattr(snakes, "CHUNK", 5)
  settings = Settings(num_images=12)
  generated = dict(snakes.chunks(settings, [0, 5, 10]))
  assert {start: len(labels) for start, (_, labels) in generated.items()} == {
    0: 5,
    5: 5,
    10: 2,
  }
  for start, (pixels, labels) in generated.items():
    for i in range(len(labels)):
      drawing = snakes.sample(settings, start + i)
      np.testing.assert_array_equal(pixels[i], drawing.pixels)
      assert labels[i] == drawing.label


@pytest.mark.slow
def test_sample_does_not_depend_on_the_hash_seed(prints_alike):
  code = (
    "import zlib; from jaxformers.data.generators import pathfinder, snakes;"
    "image = snakes.sample(pathfinder.Settings(), 3).pixels;"
    "print(zlib.crc32(image.tobytes()))"
  )
  prints_alike(code)
