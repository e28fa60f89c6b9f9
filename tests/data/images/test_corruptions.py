"""Corruptions in five severities."""

import numpy as np
import pytest

from jaxformers.data.images import corruptions as c

ROWS = np.linspace(0, 255, 32)[:, None, None]
RAMP = np.clip(ROWS + np.array([0, 20, -30]), 0, 255).astype(np.uint8)
RAMP = np.ascontiguousarray(np.broadcast_to(RAMP, (32, 32, 3)))
BOXES = RAMP.copy()
BOXES[8:20, 4:28] = (200, 60, 30)


@pytest.mark.parametrize("name", sorted(c.CORRUPTIONS))
def test_corrupt_is_a_function_of_image_severity_and_seed(name):
  for severity in c.SEVERITIES:
    corrupted = c.corrupt(BOXES, name, severity, seed=3)
    assert corrupted.dtype == np.uint8
    assert corrupted.shape == BOXES.shape
    np.testing.assert_array_equal(
      corrupted, c.corrupt(BOXES, name, severity, 3)
    )
    assert (corrupted != BOXES).any()
  random = {"defocus_blur", "zoom_blur", "brightness", "contrast"}
  random |= {"pixelate", "jpeg_compression"}
  other = c.corrupt(BOXES, name, 5, seed=4)
  assert (other == corrupted).all() == (name in random)


@pytest.mark.parametrize(
  "name", sorted({*c.CORRUPTIONS} - {"elastic_transform", "glass_blur"})
)
def test_corrupt_changes_more_with_the_severity(name):
  """(Theirs of the two left out do not: their strengths trade off.)"""
  far = [
    np.mean(
      [
        np.abs(c.corrupt(BOXES, name, level, s).astype(int) - BOXES).mean()
        for s in range(8)
      ]
    )
    for level in (1, 5)
  ]
  assert far[1] > 1.2 * far[0]


def test_corrupt_noise_and_contrast_have_known_strength():
  grey = np.full((32, 32, 3), 128, np.uint8)
  noise = c.corrupt(grey, "gaussian_noise", 3).astype(float) / 255
  assert noise.std() == pytest.approx(0.08, rel=0.1)
  shot = c.corrupt(grey, "shot_noise", 5).astype(float) / 255
  assert shot.std() == pytest.approx((0.5 / 50) ** 0.5, rel=0.1)
  salt = c.corrupt(grey, "impulse_noise", 5)
  assert np.isin(salt, (0, 255)).mean() == pytest.approx(0.07, abs=0.02)
  assert c.corrupt(grey, "brightness", 2)[0, 0, 0] in (153, 154)
  less = c.corrupt(BOXES, "contrast", 3).astype(float)
  want = 0.4 * np.ptp(BOXES.astype(float), axis=(0, 1))
  np.testing.assert_allclose(np.ptp(less, axis=(0, 1)), want, atol=2)
  for name in ("defocus_blur", "zoom_blur", "glass_blur", "motion_blur"):
    flat = c.corrupt(grey, name, 5)
    np.testing.assert_allclose(flat, grey, atol=1)


def test_plasma_is_rougher_with_less_decay():
  rng = np.random.default_rng
  rough, smooth = (
    np.abs(np.diff(c.plasma(64, decay, rng(0)))).mean() for decay in (1.5, 4)
  )
  assert rough > 2 * smooth
  cloud = c.plasma(64, 2.0, rng(1))
  assert (cloud.min(), cloud.max()) == (0, 1)


def test_corrupt_refuses_an_unknown_corruption():
  with pytest.raises(ValueError, match=r"'rain'.*snow"):
    c.corrupt(BOXES, "rain", 1)
  with pytest.raises(ValueError, match="severity=6"):
    c.corrupt(BOXES, "snow", 6)
