r"""How a classifier of images stands corruptions and unusual images.

python -m jaxformers robustness runs/cifar10
python -m jaxformers robustness runs/imagenet \
    --imagenet_c PATH/imagenet-c --imagenet_a PATH/imagenet-a \
    --imagenet_r PATH/imagenet-r

Without a folder the run's own test images are corrupted here, and the mean
error is printed; on ImageNet-C the mean corruption error (mCE): of every
corruption the error over five severities, divided by AlexNet's, in percent
(Hendrycks and Dietterich 2019, https://arxiv.org/abs/1903.12261). ImageNet-A
and -R (Hendrycks et al. 2021) have 200 classes, and only these are chosen from.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxformers import trained
from jaxformers.data.images import corruptions, stores
from jaxformers.data.images.splits import Images
from jaxformers.errors import UserError

# Their table of AlexNet's errors, the mean over the severities.
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
# Images that their authors ship; of ImageNet-C in each severity.
COUNTS = {"imagenet_c": 50_000, "imagenet_a": 7_500, "imagenet_r": 30_000}
Logits = Callable[[np.ndarray], np.ndarray]


def error(
  logits: Logits,
  images: Images,
  *,
  change: Callable[[np.ndarray, int], np.ndarray] | None = None,
  classes: np.ndarray | None = None,
  batch_size: int,
) -> float:
  """The share of images whose class is not the one of the greatest logit.

  Args:
    logits: of normalised images [k, h, w, c] -> [k, classes].
    images: all of them count.
    change: of the pixels of image k, before it is normalised.
    classes: which alone are chosen from; None for all.
    batch_size: images at a time.
  """
  wrong = 0
  for start in range(0, len(images), batch_size):
    places = np.arange(start, min(start + batch_size, len(images)))
    pixels = images.pixels(places)
    if change is not None:
      both = zip(pixels, places.tolist(), strict=True)
      pixels = np.stack([change(one, k) for one, k in both])
    found = logits(images.normalised(pixels))
    if classes is not None:
      found = found[:, classes]
      chosen = classes[found.argmax(-1)]
    else:
      chosen = found.argmax(-1)
    wrong += int((chosen != images.labels[places]).sum())
  return wrong / len(images)


def corrupted(
  run: trained.Trained,
  names: Sequence[str] = (),
  *,
  count: int = 0,
  batch_size: int = 100,
) -> dict[str, Any]:
  """Errors on the run's own test images, corrupted.

  Args:
    run: of a classifier of images.
    names: in `corruptions.CORRUPTIONS`; () for all.
    count: how many images from the start of the test split; 0 for all.
    batch_size: images at a time.

  Returns:
    `clean`, an error; `errors`, for each corruption those of the severities 1
    to 5; and `mean` of all of them.
  """
  images = _test_images(run)
  images = images.select(np.arange(min(count or len(images), len(images))))
  logits = run.apply(batch_size)
  clean = error(logits, images, batch_size=batch_size)
  errors: dict[str, list[float]] = {}
  for name in tqdm(names or list(corruptions.CORRUPTIONS), disable=None):
    errors[name] = [
      error(
        logits,
        images,
        change=lambda x, k, name=name, level=level: corruptions.corrupt(
          x, name, level, k
        ),
        batch_size=batch_size,
      )
      for level in corruptions.SEVERITIES
    ]
  mean = float(np.mean(list(errors.values())))
  return {"clean": clean, "errors": errors, "mean": mean}


def imagenet_c(
  run: trained.Trained, folder: Path, *, batch_size: int = 100
) -> dict[str, Any]:
  """Errors on ImageNet-C, and mCE in percent.

  Args:
    run: of a classifier of ImageNet.
    folder: with CORRUPTION/SEVERITY/CLASS/*.JPEG, all fifteen of them, or in
      noise/, blur/, weather/ and digital/ as its authors pack them.
    batch_size: images at a time.

  Returns:
    `errors`, for each corruption those of the severities 1 to 5, and `mce`.

  Raises:
    UserError: for a folder that lacks any, naming them.
  """
  found = {
    path.name: path
    for path in [*folder.glob("*"), *folder.glob("*/*")]
    if path.name in ALEXNET
  }
  missing = [
    f"{name}/{level}"
    for name in ALEXNET
    for level in corruptions.SEVERITIES
    if name not in found or not (found[name] / str(level)).is_dir()
  ]
  if missing:
    raise UserError(
      f"{folder} lacks {', '.join(missing[:5])}"
      f"{' ...' if len(missing) > 5 else ''}: mCE is over fifteen corruptions "
      "in five severities."
    )
  logits = run.apply(batch_size)
  errors = {
    name: [
      error(
        logits,
        _folder(run, found[name] / str(level), "imagenet_c"),
        batch_size=batch_size,
      )
      for level in corruptions.SEVERITIES
    ]
    for name in tqdm(ALEXNET, disable=None)
  }
  return {"errors": errors, "mce": mce(errors)}


def mce(errors: dict[str, list[float]]) -> float:
  """Mean corruption error in percent, AlexNet having 100.

  Args:
    errors: of each of the fifteen corruptions, those of the severities.
  """
  return 100 * float(
    np.mean([np.mean(errors[name]) / ALEXNET[name] for name in ALEXNET])
  )


def unusual(
  run: trained.Trained, folder: Path, name: str, *, batch_size: int = 100
) -> float:
  """The accuracy on a folder CLASS/*.jpg, among the classes it has.

  Args:
    run: a classifier of ImageNet.
    folder: above the folders of classes.
    name: "imagenet_a" or "imagenet_r", which tells how many images there are.
    batch_size: images at a time.
  """
  images = _folder(run, folder, name)
  classes = np.unique(images.labels)
  return 1 - error(
    run.apply(batch_size), images, classes=classes, batch_size=batch_size
  )


def _test_images(run: trained.Trained) -> Images:
  images = run.task.splits["test"]
  if not isinstance(images, Images):
    raise UserError(
      f"The task {run.task.name!r} has no images of classes: give the run of "
      "such a task."
    )
  return images


def _folder(run: trained.Trained, folder: Path, name: str) -> Images:
  """The images of a folder, read as the run reads its own.

  Another number of images than that of the set `name` is told on stderr.
  """
  if not folder.is_dir():
    raise UserError(f"There is no folder {folder}.")
  store = stores.open_folder(folder, run.task.classes)
  if len(store) != COUNTS[name]:
    print(
      f"{folder} holds {len(store):,} images instead of the {COUNTS[name]:,} "
      f"of {name}: its score compares with no published one.",
      file=sys.stderr,
    )
  return dataclasses.replace(_test_images(run), packed=store, encoded=True)


def _rows(found: dict[str, Any]) -> Iterator[str]:
  for name, row in found.get("errors", {}).items():
    yield f"  {name:<18} " + " ".join(f"{e:7.2%}" for e in row)
  titles = {
    "clean": "error, clean",
    "mean": "error, corrupted",
    "imagenet_a": "accuracy, ImageNet-A",
    "imagenet_r": "accuracy, ImageNet-R",
  }
  for name, title in titles.items():
    if name in found:
      yield f"  {title:<20} {found[name]:7.2%}"
  if "mce" in found:
    yield f"  {'mCE':<20} {found['mce']:7.2f}"


def main(argv: list[str] | None = None) -> None:
  """Prints a table."""
  parser = argparse.ArgumentParser(
    prog="python -m jaxformers robustness",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("workdir", help="of a trained classifier of images")
  for name in ("imagenet_c", "imagenet_a", "imagenet_r"):
    parser.add_argument(f"--{name}", type=Path, metavar="FOLDER")
  parser.add_argument(
    "--corruptions", default="", help="a,b,... of those applied; default: all"
  )
  parser.add_argument("--count", type=int, default=0, help="default: all")
  parser.add_argument("--batch_size", type=int, default=100)
  parser.add_argument("--json", action="store_true", help="as JSON")
  args = parser.parse_args(argv)
  size = args.batch_size
  try:
    run = trained.load(args.workdir)
    found: dict[str, Any] = {}
    if args.imagenet_c:
      found |= imagenet_c(run, args.imagenet_c, batch_size=size)
    for name in ("imagenet_a", "imagenet_r"):
      if getattr(args, name):
        found[name] = unusual(run, getattr(args, name), name, batch_size=size)
    if not found:
      names = [name for name in args.corruptions.split(",") if name]
      found = corrupted(run, names, count=args.count, batch_size=size)
  except ValueError as error_:
    sys.exit(f"error: {error_}")
  if args.json:
    print(json.dumps(found, indent=2))
    return
  print(f"{run.config['model']['name']}, step {run.step}")
  print("\n".join(_rows(found)))


if __name__ == "__main__":
  main()
