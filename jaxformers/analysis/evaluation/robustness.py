r"""Scores a classifier of images on corrupted and on unusual images.

python -m jaxformers robustness runs/cifar10
python -m jaxformers robustness runs/cifar10/seed_0 runs/cifar10/seed_1
python -m jaxformers robustness runs/imagenet \
    --imagenet_c PATH/imagenet-c --imagenet_a PATH/imagenet-a \
    --imagenet_r PATH/imagenet-r

Without a folder the run's test images are corrupted here, and the mean error is
printed. On ImageNet-C the mean corruption error (mCE) is printed: the error of
every corruption over five severities, divided by AlexNet's, in percent
(Hendrycks and Dietterich 2019, https://arxiv.org/abs/1903.12261). ImageNet-A
and -R (Hendrycks et al. 2021) have 200 classes, and only these are predicted.
Of several runs each is printed, then mean and sample deviation of all; JSON has
the scores of each run. Scores of a folder are kept in the run's `scores.json`,
with their set, for `python -m jaxformers published`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxformers import trained
from jaxformers.commands import cli
from jaxformers.data.engine import files
from jaxformers.data.images import stores
from jaxformers.data.images.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from jaxformers.data.images.splits import Images
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.tables import plus_minus, spread

# AlexNet's error of each corruption, the mean over the severities
# (Hendrycks and Dietterich 2019).
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
# Number of images of each set as published; of ImageNet-C per severity.
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
  """Returns the share of images whose greatest logit is of another class.

  Args:
    logits: function from normalised images [k, h, w, c] to [k, classes].
    images: images to classify.
    corruption: name and severity of a corruption of the images, or None.
    classes: classes to choose from; None for all.
    batch_size: images at a time.
  """
  wrong = 0
  for start in range(0, len(images), batch_size):
    places = np.arange(start, min(start + batch_size, len(images)))
    pixels = images.pixels(places)
    # An image's index seeds its noise, so the batch size does not matter.
    if corruption:
      numbered = zip(pixels, places.tolist(), strict=True)
      pixels = np.stack([corrupt(x, *corruption, k) for x, k in numbered])
    scores = logits(images.normalised(pixels))
    # Predict among all classes, or among those of the set alone.
    choices = np.arange(scores.shape[-1]) if classes is None else classes
    predicted = choices[scores[:, choices].argmax(-1)]
    wrong += int((predicted != images.labels[places]).sum())
  return wrong / len(images)


def corrupted(
  run: trained.Trained,
  names: Sequence[str] = (),
  *,
  count: int = 0,
  batch_size: int = 100,
) -> dict[str, Any]:
  """Returns errors on the run's test images, corrupted here.

  Args:
    run: trained classifier of images.
    names: names in `corruptions.CORRUPTIONS`; () for all.
    count: number of images from the start of the test split; 0 for all.
    batch_size: images at a time.

  Returns:
    `clean`, the error without corruption; `errors`, for each corruption those
    of the severities 1 to 5; and their `mean`.
  """
  images = _test_images(run)
  images = images.select(np.arange(min(count or len(images), len(images))))
  # All corruptions share one compiled model.
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
  run: trained.Trained, folder: Path, *, batch_size: int = 100
) -> dict[str, Any]:
  """Returns errors on ImageNet-C, and mCE in percent.

  Args:
    run: trained classifier of ImageNet.
    folder: folder of CORRUPTION/SEVERITY/CLASS/*.JPEG, all fifteen corruptions,
      or in noise/, blur/, weather/ and digital/ as its authors pack them.
    batch_size: images at a time.

  Returns:
    `errors`, for each corruption those of the severities 1 to 5, and `mce`.

  Raises:
    UserError: if corruptions or severities are missing; lists them.
  """
  # Corruptions lie in the folder, or in its groups.
  paths = [*folder.glob("*"), *folder.glob("*/*")]
  folders = {
    path.name: path
    for path in paths
    if path.name in ALEXNET
    and not files.is_junk(path.relative_to(folder).as_posix())
  }
  # List everything that is missing before scoring.
  missing = [
    f"{name}/{level}"
    for name, level in itertools.product(ALEXNET, SEVERITIES)
    if name not in folders or not (folders[name] / str(level)).is_dir()
  ]
  if missing:
    listed = ", ".join(missing[:5]) + (" ..." if len(missing) > 5 else "")
    raise UserError(
      f"{folder} lacks {listed}: mCE averages fifteen corruptions in five "
      "severities, so unpack all of them."
    )
  logits = run.apply(batch_size)

  def score(name: str, level: int) -> float:
    images = _open_folder(run, folders[name] / str(level), "imagenet_c")
    return error(logits, images, batch_size=batch_size)

  errors = {
    name: [score(name, level) for level in SEVERITIES]
    for name in tqdm(ALEXNET, disable=None)
  }
  return {"errors": errors, "mce": mce(errors)}


def mce(errors: dict[str, list[float]]) -> float:
  """Returns the mean corruption error in percent; AlexNet has 100.

  Args:
    errors: errors of the severities, for each of the fifteen corruptions.
  """
  shares = [np.mean(errors[name]) / ALEXNET[name] for name in ALEXNET]
  return 100 * float(np.mean(shares))


def unusual(
  run: trained.Trained, folder: Path, name: str, *, batch_size: int = 100
) -> float:
  """Returns the accuracy on a folder CLASS/*.jpg, among the classes it has.

  Args:
    run: trained classifier of ImageNet.
    folder: folder that holds the folders of classes.
    name: "imagenet_a" or "imagenet_r", for the expected number of images.
    batch_size: images at a time.
  """
  images = _open_folder(run, folder, name)
  # ImageNet-A and -R have 200 of the 1,000 classes.
  classes = np.unique(images.labels)
  logits = run.apply(batch_size)
  return 1 - error(logits, images, classes=classes, batch_size=batch_size)


def count_images(folder: Path, name: str) -> int:
  """Returns the number of images of a set; of ImageNet-C per severity.

  Args:
    folder: folder of the set.
    name: name of the set, in `COUNTS`.
  """
  names = (name.lower() for name, _ in files.walk(folder))
  count = sum(name.endswith(stores.ENDINGS) for name in names)
  # Severities of every corruption; round a part down.
  return count // (
    len(ALEXNET) * len(SEVERITIES) if name == "imagenet_c" else 1
  )


def _test_images(run: trained.Trained) -> Images:
  images = run.task.splits["test"]
  if not isinstance(images, Images):
    raise UserError(
      f"The task {run.task.name!r} does not classify images: give the run of a "
      "classifier of images."
    )
  return images


def _open_folder(run: trained.Trained, folder: Path, name: str) -> Images:
  """Returns the images of a folder, to be read as the run reads its images.

  Warns on stderr if the folder has another number of images than the published
  set `name`.
  """
  if not folder.is_dir():
    raise UserError(f"There is no folder {folder}: give that of {name}.")
  store = stores.open_folder(folder, run.task.classes)
  # Published scores are of all images.
  if len(store) != COUNTS[name]:
    print(
      f"{folder} holds {len(store):,} images instead of the {COUNTS[name]:,} "
      f"of {name}: its score cannot be compared with published ones.",
      file=sys.stderr,
    )
  # Keep the run's preprocessing, and replace the images alone.
  return dataclasses.replace(_test_images(run), packed=store, encoded=True)


def _lines(scores: dict[str, Any]) -> Iterator[str]:
  """Yields the lines of the printed table of a run."""
  for name, errors in scores.get("errors", {}).items():
    yield f"  {name:<18} " + " ".join(f"{error:7.2%}" for error in errors)
  for name, title in TITLES.items():
    if name in scores:
      yield f"  {title:<20} {scores[name]:7.2%}"
  if "mce" in scores:
    yield f"  {'mCE':<20} {scores['mce']:7.2f}"


def _average_lines(runs: Sequence[dict[str, Any]]) -> Iterator[str]:
  """Yields the lines of the printed table of several runs."""
  yield f"mean and deviation of {len(runs)} runs"
  for name in (key for key in runs[0] if key != "errors"):
    # mCE is in percent, and the others are shares.
    scale, unit = (1, "") if name == "mce" else (100, " %")
    text = plus_minus(*spread([scale * scores[name] for scores in runs]))
    yield f"  {TITLES.get(name, 'mCE'):<20} {text}{unit}"


@cli.command(
  cli.argument(
    "workdirs", nargs="+", metavar="WORKDIR", help="folder of a run"
  ),
  *trained.STATE,
  *(
    cli.argument(f"--{k}", type=Path, metavar="FOLDER", help="folder of a set")
    for k in COUNTS
  ),
  cli.option(
    "corruptions", "", "corruptions of the test images: snow,fog (default: all)"
  ),
  cli.option("count", 0, "number of test images to corrupt (default: all)"),
  cli.option("batch_size", 100, "images at a time"),
  cli.JSON,
)
def main(
  workdirs: Sequence[str],
  corruptions: str,
  count: int,
  batch_size: int,
  as_json: bool,
  **folders: Any,
) -> None:
  """Prints scores of the given folders, or errors on corrupted test images."""
  names = cli.names(corruptions)
  scored = {}
  # Load all runs before the first is scored.
  state = trained.take_state(folders)
  runs = {workdir: trained.load(workdir, **state) for workdir in workdirs}
  for workdir, run in runs.items():
    scores: dict[str, Any] = {}
    for name, folder in folders.items():
      if folder and name == "imagenet_c":
        scores |= imagenet_c(run, folder, batch_size=batch_size)
        kept = {"mce": scores["mce"]}
      elif folder:
        scores[name] = unusual(run, folder, name, batch_size=batch_size)
        kept = {"accuracy": scores[name]}
      if folder:
        num_images = count_images(folder, name)
        trained.record(
          run, workdir, state, "robustness", kept, num_images, set=name
        )
    # Without a folder, corrupt the run's own test images.
    if not scores:
      scores = corrupted(run, names, count=count, batch_size=batch_size)
    # Print each run as soon as it is scored.
    scored[workdir] = scores
    if not as_json:
      parts = [f"{run.config.model.name}", f"step {run.step}"]
      parts += filter(None, [trained.describe(state)])
      print(f"{workdir}: {', '.join(parts)}")
      print("\n".join(_lines(scores)), flush=True)
  if as_json or len(scored) > 1:
    cli.show(scored, _average_lines([*scored.values()]), as_json)


if __name__ == "__main__":
  main()
