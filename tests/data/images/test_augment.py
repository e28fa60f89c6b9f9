"""DeiT's augmentation."""

import numpy as np
import pytest
from PIL import Image

from jaxformers.data.images import augment
from jaxformers.data.images.augment import Augment


def picture(height=32, width=32, seed=0):
  rng = np.random.default_rng(seed)
  return Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))


def rng(seed=0):
  return np.random.default_rng(seed)


def array(image):
  return np.asarray(image).astype(int)


@pytest.mark.parametrize("name", sorted(augment.OPERATIONS))
def test_augment_operation_is_a_function_of_the_generator(name):
  apply = augment.OPERATIONS[name]
  first, again = (apply(picture(), 0.9, rng(4)) for _ in range(2))
  assert first.size == (32, 32)
  assert first.mode == "RGB"
  np.testing.assert_array_equal(array(first), array(again))
  dull = Image.fromarray((array(picture()) // 2 + 30).astype(np.uint8))
  assert np.abs(array(apply(dull, 0.9, rng(4))) - array(dull)).max() > 0


def test_augment_operations_change_pixels_as_documented():
  values = np.arange(256, dtype=np.uint8)
  row = Image.fromarray(np.stack([values] * 3, -1)[None])

  def done(name, share):
    return array(augment.OPERATIONS[name](row, share, rng()))[0, :, 0]

  np.testing.assert_array_equal(done("invert", 0.5), 255 - values)
  want = np.where(values < 128, values, 255 - values)
  np.testing.assert_array_equal(done("solarize", 0.5), want)
  np.testing.assert_array_equal(done("posterize", 0.5), values & 0xC0)
  np.testing.assert_array_equal(done("posterize", 1.0), 0 * values)
  want = np.where(values < 128, values.astype(int) + 110, values)
  np.testing.assert_array_equal(done("solarize_add", 1.0), want)
  moved = augment.OPERATIONS["translate_x"](picture(), 1.0, rng(1))
  shift = int(0.45 * 32)
  same = [
    np.abs(array(moved)[:, 16] - array(picture())[:, 16 + s]).mean()
    for s in (shift, -shift)
  ]
  assert min(same) < 40  # Between two columns, of random pixels 85 apart.


def test_randaugment_applies_each_of_two_operations_to_half():
  seen = [
    np.abs(
      array(augment.randaugment(picture(), 9.0, rng(s))) - array(picture())
    ).max()
    > 0
    for s in range(400)
  ]
  assert 0.66 < np.mean(seen) < 0.8  # 3/4, but for operations that do nothing.


def test_augment_image_crops_within_padding():
  wide = picture(40, 60)
  part = augment.image(wide, (16, 24), Augment(crop="resized"), rng())
  assert part.size == (24, 16)
  middle = augment.image(picture(), (32, 32), Augment(), rng())
  np.testing.assert_array_equal(array(middle), array(picture()))
  shifted = array(
    augment.image(picture(), (32, 32), Augment(crop="pad"), rng())
  )
  padded = np.pad(array(picture()), ((4, 4), (4, 4), (0, 0)))
  assert any(
    (padded[y : y + 32, x : x + 32] == shifted).all()
    for y in range(9)
    for x in range(9)
  )
  flips = [
    (
      array(augment.image(picture(), (32, 32), Augment(flip=True), rng(s)))
      == array(picture())[:, ::-1]
    ).all()
    for s in range(100)
  ]
  assert 35 < sum(flips) < 65


def test_fit_takes_seven_eighths_of_the_short_side():
  ramp = np.broadcast_to(
    np.arange(256, dtype=np.uint8)[None, :, None], (256, 256, 3)
  )
  fitted = array(augment.fit(Image.fromarray(ramp.copy()), (224, 224)))
  assert fitted.shape == (224, 224, 3)
  np.testing.assert_array_equal(fitted[100, :, 0], np.arange(16, 240))
  assert augment.fit(picture(300, 500), (224, 224)).size == (224, 224)


def test_random_part_covers_the_documented_areas():
  boxes = [augment._part(picture(100, 200), rng(s)) for s in range(300)]
  areas = [(x1 - x0) * (y1 - y0) / 20_000 for x0, y0, x1, y1 in boxes]
  ratios = [(x1 - x0) / (y1 - y0) for x0, y0, x1, y1 in boxes]
  assert 0.07 < min(areas) < 0.15
  assert max(areas) > 0.5
  assert min(ratios) > 0.73
  assert max(ratios) < 1.37
  assert all(
    0 <= x0 < x1 <= 200 and 0 <= y0 < y1 <= 100 for x0, y0, x1, y1 in boxes
  )


def test_erase_makes_a_box_of_noise():
  shares = []
  for seed in range(200):
    pixels = np.full((32, 32, 3), 9.0, np.float32)
    augment.erase(pixels, rng(seed))
    changed = (pixels != 9).all(-1)
    rows, columns = np.nonzero(changed)
    box = changed[
      rows.min() : rows.max() + 1, columns.min() : columns.max() + 1
    ]
    assert box.all()
    shares.append(changed.mean())
    assert abs(pixels[changed].mean()) < 1
  assert 0.01 < min(shares) < 0.05
  assert 0.28 < max(shares) < 0.36


@pytest.mark.parametrize("how", [Augment(mixup=0.8), Augment(cutmix=1.0)])
@pytest.mark.parametrize("count", [4, 5])
def test_mix_gives_images_the_shares_of_their_classes(how, count):
  images = np.zeros((count, 8, 8, 3), np.float32)
  images += np.arange(count, dtype=np.float32)[:, None, None, None]
  targets = np.arange(count, dtype=np.int32)
  seen = []
  for seed in range(20):
    mixed = augment.mix(images, targets, how, rng(seed))
    share = mixed["shares"][:, None]
    mean = mixed["inputs"].mean((1, 2))
    want = share * targets[:, None] + (1 - share) * mixed["others"][:, None]
    np.testing.assert_allclose(mean, np.repeat(want, 3, 1), atol=1e-5)
    assert mixed["others"][:4].tolist() == [1, 0, 3, 2]
    assert mixed["inputs"].dtype == np.float32
    seen.append(mixed["shares"][0])
  assert len(set(seen)) > 5


def test_mix_chooses_mixup_or_cutmix_for_half_of_the_batches():
  images = np.zeros((2, 8, 8, 3), np.float32)
  images[1] = 1
  how = Augment(mixup=0.8, cutmix=1.0)
  cut = [
    np.isin(
      augment.mix(images, np.arange(2), how, rng(s))["inputs"], (0, 1)
    ).all()
    for s in range(200)
  ]
  assert 70 < sum(cut) < 140


@pytest.mark.parametrize(
  ("field", "value"),
  [("crop", "corner"), ("erase", 1.5), ("mixup", -1.0), ("repeats", 0)],
)
def test_augment_refuses_values_out_of_range(field, value):
  with pytest.raises(ValueError, match=rf"augment.{field}={value!r}"):
    Augment(**{field: value})
  with pytest.raises(
    ValueError, match="augment.randaugment.*augment.color_jitter"
  ):
    Augment(randaugment=9.0, color_jitter=0.4)
