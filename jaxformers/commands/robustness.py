r"""Scores an image classifier on corrupted and on unusual images.

jaxformers robustness runs/cifar10
jaxformers robustness runs/cifar10/seed_0 runs/cifar10/seed_1
jaxformers robustness runs/imagenet \
    --imagenet_c PATH/imagenet-c --imagenet_a PATH/imagenet-a \
    --imagenet_r PATH/imagenet-r

Without a folder, the command corrupts the test images of the run and prints the
mean error. For ImageNet-C, it prints the mean corruption error (mCE) in
percent: the error of every corruption over five severities, divided by
AlexNet's error (Hendrycks and Dietterich 2019,
https://arxiv.org/abs/1903.12261). ImageNet-A and ImageNet-R (Hendrycks et al.
2021) have 200 classes, and only these classes are predicted. For several runs,
the command prints the scores of each run, and then the mean and the sample
standard deviation of all runs; JSON has the scores of each run. Scores of a
folder are saved with the name of the set in the run's `scores.json`, which
`jaxformers published` reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxformers.analysis.evaluation import robustness
from jaxformers.commands import states
from jaxformers.foundations import cli, ranges
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.tables import plus_minus, spread


def _lines(scores: dict[str, Any]) -> Iterator[str]:
  """Yields the lines of the printed table of one run."""
  for name, errors in scores.get("errors", {}).items():
    yield f"  {name:<18} " + " ".join(f"{error:7.2%}" for error in errors)
  for name, title in robustness.TITLES.items():
    if name in scores:
      yield f"  {title:<20} {scores[name]:7.2%}"
  if "mce" in scores:
    yield f"  {'mCE':<20} {scores['mce']:7.2f}"


def _average_lines(runs: Sequence[dict[str, Any]]) -> Iterator[str]:
  """Yields the lines with the mean and deviation of several runs."""
  yield f"mean and deviation of {len(runs)} runs"
  for name in (key for key in runs[0] if key != "errors"):
    # mCE is in percent already; the other scores are shares.
    scale, unit = (1, "") if name == "mce" else (100, " %")
    text = plus_minus(*spread([scale * scores[name] for scores in runs]))
    yield f"  {robustness.TITLES.get(name, 'mCE'):<20} {text}{unit}"


def _check_options(
  names: Sequence[str], count: int, batch_size: int, has_folder: bool
) -> None:
  """Raises UserError for numbers out of range and options without effect."""
  if (names or count) and has_folder:
    raise UserError(
      f"--corruptions={','.join(names)}, --count={count}: no effect on the "
      "folders of other sets: leave them out."
    )
  ranges.check(robustness.corrupted, {"count": count, "batch_size": batch_size})


@cli.command(
  cli.argument(
    "workdirs", nargs="+", metavar="WORKDIR", help="folder of a run"
  ),
  *states.STATE,
  *(
    cli.argument(
      f"--{k}", type=Path, metavar="FOLDER", help="folder of the set"
    )
    for k in robustness.COUNTS
  ),
  cli.option(
    "corruptions", "", "corruptions of the test images: snow,fog (default: all)"
  ),
  cli.option("count", 0, "number of test images to corrupt (default: all)"),
  cli.option("batch_size", 100, "number of images per batch"),
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
  # Load all runs before the first one is scored.
  state = states.take_state(folders)
  _check_options(names, count, batch_size, any(folders.values()))
  runs = {workdir: states.load(workdir, **state) for workdir in workdirs}
  for run in runs.values():
    _ = run.task  # Open the data: an error ends the command here.
  for workdir, run in runs.items():
    scores: dict[str, Any] = {}
    # Score the run on the folders that are given, and record the scores.
    for name, folder in folders.items():
      if folder and name == "imagenet_c":
        scores |= robustness.imagenet_c(run, folder, batch_size=batch_size)
        kept = {"mce": scores["mce"]}
        num_images = scores.pop("images")
      elif folder:
        scores[name] = robustness.unusual(
          run, folder, name, batch_size=batch_size
        )
        kept = {"accuracy": scores[name]}
        num_images = robustness.count_images(folder, name)
      # Record the score with the name of the set.
      if folder:
        states.record(
          run, workdir, state, "robustness", kept, num_images, set=name
        )
    # Without a folder, corrupt the test images of the run.
    if not scores:
      scores = robustness.corrupted(
        run, names, count=count, batch_size=batch_size
      )
    # Print each run as soon as it is scored.
    scored[workdir] = scores
    if not as_json:
      parts = [f"{run.model.config.name}", f"step {run.step}"]
      parts += filter(None, [states.describe(state)])
      print(f"{workdir}: {', '.join(parts)}")
      print("\n".join(_lines(scores)), flush=True)
  # Print the averages of several runs, or everything as JSON.
  if as_json or len(scored) > 1:
    cli.show(scored, _average_lines([*scored.values()]), as_json)


if __name__ == "__main__":
  main()
