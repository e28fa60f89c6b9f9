"""Errors of an image classifier on corrupted and on unusual images.

Source: ImageNet-C, Hendrycks and Dietterich 2019,
https://arxiv.org/abs/1903.12261; ImageNet-A and -R, Hendrycks et al. 2021.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxformers.data.engine import files
from jaxformers.data.images import stores
from jaxformers.data.images.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from jaxformers.data.images.splits import Images
from jaxformers.foundations import ranges
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Count, PositiveCount
from jaxformers.foundations.registry import choose
from jaxformers.inference import TrainedModel

# Error of AlexNet on each corruption, averaged over the severities (Hendrycks
# and Dietterich 2019).
ALEXNET = {
  "gaussian_noise": 0.886428,
  "shot_noise": 0.894468,
  "impulse_noise": 0.922640,
  "defocus_blur": 0.819880,
  "glass_blur": 0.826268,
  "motion_blur": 0.785948,
  "zoom_blur": 0.798360,
  "snow": 0.866816,
  "frost": 0.826572,
  "fog": 0.819324,
  "brightness": 0.564592,
  "contrast": 0.853204,
  "elastic_transform": 0.646056,
  "pixelate": 0.717840,
  "jpeg_compression": 0.606500,
}
# Published number of images of each set; for ImageNet-C, of each severity.
COUNTS = {"imagenet_c": 50_000, "imagenet_a": 7_500, "imagenet_r": 30_000}
TITLES = {
  "clean": "error, clean",
  "mean": "error, corrupted",
  "imagenet_a": "accuracy, ImageNet-A",
  "imagenet_r": "accuracy, ImageNet-R",
}
Logits = Callable[[np.ndarray], np.ndarray]


def error(
  logits: Logits,
  images: Images,
  *,
  corruption: tuple[str, int] | None = None,
  classes: np.ndarray | None = None,
  batch_size: int,
) -> float:
  """Returns the share of images that are classified wrongly.

  Args:
    logits: function from normalised images [k, h, w, c] to [k, classes].
    images: images to classify.
    corruption: name and severity of a corruption to apply, or None.
    classes: classes to choose from; None for all.
    batch_size: number of images of a batch.
  """
  wrong = 0
  for start in range(0, len(images), batch_size):
    places = np.arange(start, min(start + batch_size, len(images)))
    pixels = images.pixels(places)
    # Seed the noise by the index of the image, independent of the batches.
    if corruption:
      numbered = zip(pixels, places.tolist(), strict=True)
      pixels = np.stack([corrupt(x, *corruption, k) for x, k in numbered])
    scores = logits(images.normalised(pixels))
    # Predict the class with the largest logit among the chosen classes.
    choices = np.arange(scores.shape[-1]) if classes is None else classes
    predicted = choices[scores[:, choices].argmax(-1)]
    wrong += int((predicted != images.labels[places]).sum())
  return wrong / len(images)


def corrupted(
  run: TrainedModel,
  names: Sequence[str] = (),
  *,
  count: Count = 0,
  batch_size: PositiveCount = 100,
) -> dict[str, Any]:
  """Returns errors on the run's test images, corrupted by this package.

  Args:
    run: trained classifier of images.
    names: names in `corruptions.CORRUPTIONS`; () for all.
    count: number of images, from the start of the test split; 0 for all.
    batch_size: number of images of a batch.

  Returns:
    `clean`: error without corruption. `errors`: for each corruption, the errors
    at severities 1 to 5. `mean`: mean of all `errors`.

  Raises:
    UserError: for an unknown corruption, or a number out of range.
  """
  ranges.check(corrupted, {"count": count, "batch_size": batch_size})
  for name in names:
    choose("corruption", name, CORRUPTIONS)
  images = _test_images(run)
  images = images.select(np.arange(min(count or len(images), len(images))))
  # Share one compiled model between all corruptions.
  score = functools.partial(
    error, run.apply(batch_size), images, batch_size=batch_size
  )
  clean = score()
  errors = {
    name: [score(corruption=(name, level)) for level in SEVERITIES]
    for name in tqdm(names or list(CORRUPTIONS), disable=None)
  }
  mean = float(np.mean(list(errors.values())))
  return {"clean": clean, "errors": errors, "mean": mean}


def imagenet_c(
  run: TrainedModel, folder: Path, *, batch_size: int = 100
) -> dict[str, Any]:
  """Returns the errors on ImageNet-C, and the mCE in percent.

  Args:
    run: trained classifier of ImageNet.
    folder: folder with CORRUPTION/SEVERITY/CLASS/*.JPEG for all fifteen
      corruptions. The corruptions may be grouped in noise/, blur/, weather/ and
      digital/, as in the published archives.
    batch_size: number of images of a batch.

  Returns:
    `errors`: for each corruption, the errors at severities 1 to 5. `mce`: mean
    corruption error. `images`: number of images of each severity.

  Raises:
    UserError: if corruptions or severities are missing, or have different
      numbers of images. The message lists them.
  """
  folders = _corruptions(folder)
  images = count_images(folder, "imagenet_c")
  logits = run.apply(batch_size)

  def score(name: str, level: int) -> float:
    images = _open_folder(run, folders[name] / str(level), "imagenet_c")
    return error(logits, images, batch_size=batch_size)

  errors = {
    name: [score(name, level) for level in SEVERITIES]
    for name in tqdm(ALEXNET, disable=None)
  }
  return {"errors": errors, "mce": mce(errors), "images": images}


def _corruptions(folder: Path) -> dict[str, Path]:
  """Returns the folders of ImageNet-C's corruptions, by their names.

  They are in the folder, or in its groups.

  Raises:
    UserError: if corruptions or severities are missing.
  """
  paths = [*folder.glob("*"), *folder.glob("*/*")]
  folders = {
    path.name: path
    for path in paths
    if path.name in ALEXNET
    and not files.is_junk(path.relative_to(folder).as_posix())
  }
  # List all missing folders before anything is scored.
  missing = [
    f"{name}/{level}"
    for name, level in itertools.product(ALEXNET, SEVERITIES)
    if name not in folders or not (folders[name] / str(level)).is_dir()
  ]
  if missing:
    listed = ", ".join(missing[:5]) + (" ..." if len(missing) > 5 else "")
    raise UserError(
      f"{folder} lacks {listed}: mCE averages fifteen corruptions at five "
      "severities. Unpack all of them."
    )
  return folders


def mce(errors: dict[str, list[float]]) -> float:
  """Returns the mean corruption error (mCE) in percent; AlexNet has 100.

  For each corruption, the mean error over the severities is divided by
  AlexNet's. mCE is the mean of these ratios.

  Args:
    errors: errors at all severities, for each of the fifteen corruptions.
  """
  shares = [np.mean(errors[name]) / ALEXNET[name] for name in ALEXNET]
  return 100 * float(np.mean(shares))


def unusual(
  run: TrainedModel, folder: Path, name: str, *, batch_size: int = 100
) -> float:
  """Returns the accuracy on ImageNet-A or -R, among the classes of the set.

  Args:
    run: trained classifier of ImageNet.
    folder: folder with CLASS/*.jpg.
    name: "imagenet_a" or "imagenet_r", for the expected number of images.
    batch_size: number of images of a batch.
  """
  images = _open_folder(run, folder, name)
  # Predict only among the classes of the set, 200 of ImageNet's 1,000.
  classes = np.unique(images.labels)
  logits = run.apply(batch_size)
  return 1 - error(logits, images, classes=classes, batch_size=batch_size)


def count_images(folder: Path, name: str) -> int:
  """Returns the number of images of a set; for ImageNet-C, of each severity.

  Args:
    folder: folder of the set.
    name: name of the set in `COUNTS`.

  Raises:
    UserError: if severities of ImageNet-C have different numbers of images.
  """
  places = {"": folder}
  if name == "imagenet_c":
    places = {
      f"{name}/{level}": path / str(level)
      for name, path in _corruptions(folder).items()
      for level in SEVERITIES
    }
  counts = {
    place: sum(
      name.lower().endswith(stores.ENDINGS) for name, _ in files.walk(path)
    )
    for place, path in places.items()
  }
  least, greatest = (f(counts, key=counts.__getitem__) for f in (min, max))
  if counts[least] < counts[greatest]:
    raise UserError(
      f"{folder}: {least} has {counts[least]:,} images, and {greatest} has "
      f"{counts[greatest]:,}. Unpack all of them."
    )
  return counts[least]


def _test_images(run: TrainedModel) -> Images:
  """Returns the images of the test split; raises UserError for other data."""
  images = run.task.splits["test"]
  if not isinstance(images, Images):
    raise UserError(
      f"The task {run.task.name!r} does not classify images: give the run of a "
      "classifier of images."
    )
  return images


def _open_folder(run: TrainedModel, folder: Path, name: str) -> Images:
  """Returns the images of a folder, with the preprocessing of the run.

  Prints a warning on stderr if the number of images differs from the published
  set `name`.
  """
  if not folder.is_dir():
    raise UserError(f"There is no folder {folder}. Give the folder of {name}.")
  store = stores.open_folder(folder, run.task.classes)
  # Published scores are means over all images of the set.
  if len(store) != COUNTS[name]:
    print(
      f"{folder} holds {len(store):,} images instead of the {COUNTS[name]:,} "
      f"of {name}: the score cannot be compared with published scores.",
      file=sys.stderr,
    )
  # Replace the images, and keep the run's preprocessing.
  return dataclasses.replace(_test_images(run), packed=store, encoded=True)
