r"""Scores a segmentation model on whole scenes, with sliding windows.

jaxformers segmentation runs/ade20k
jaxformers segmentation runs/ade20k \
    --scales 0.5,0.75,1,1.25,1.5,1.75 --flip

The second command is the multi-scale evaluation of Segmenter and of NeuTRENO's
table 2. A scene that is smaller than a window at a scale is enlarged to the
side of the window, as in Segmenter's code. The scores of the classes are
interpolated to the size of each scene and compared with the labels there. The
result is saved in the run's `scores.json` with stride, scales and mirror
images. `jaxformers published` reads the file.
"""

from __future__ import annotations

from typing import Any

from jaxformers.analysis.evaluation import segmentation
from jaxformers.commands import states
from jaxformers.foundations import cli


@cli.command(
  cli.WORKDIR,
  *states.STATE,
  cli.option("scales", "1", "scales of a scene, relative to the config's size"),
  cli.switch("--flip", help="also score mirror images"),
  cli.option("stride", 0, "pixels between windows (default: a window less 32)"),
  states.SPLIT,
  cli.option("count", 0, "number of scenes (default: all)"),
  cli.option("batch_size", 8, "number of windows per batch"),
  cli.JSON,
)
def main(workdir: str, scales: str, as_json: bool, **options: Any) -> None:
  """Prints the mean IoU and the pixel accuracy of a run."""
  # Load the model, and score it on the split.
  sizes = cli.numbers("scales", scales, float)
  state = states.take_state(options)
  run = states.load(workdir, **state)
  row = segmentation.evaluate_segmenter(run, sizes, **options)
  split = options["split"]
  # Record the number of scenes if only a part of the split is scored.
  part = {"count": options["count"]} if options["count"] else {}
  states.record(
    run,
    workdir,
    state,
    "segmentation",
    {name: row[name] for name in ("mean_iou", "accuracy")},
    row["count"],
    split=split,
    stride=options["stride"]
    or segmentation.default_stride(run.task.splits[split]),
    scales=sizes,
    flip=options["flip"],
    **part,
  )
  # Print the scores, with the weights that were measured.
  label = states.describe(state)
  if label:
    row = {"state": label, **row}
  title = f"{run.model.config.name}, step {run.step}, {split}"
  mirrored = "with mirror images" if options["flip"] else ""
  parts = [title, f"scales {scales}", mirrored, label]
  lines = (
    ", ".join(filter(None, parts)),
    f"  mean IoU {row['mean_iou']:.2%}  pixel accuracy {row['accuracy']:.2%}  "
    f"{row['count']:,} scenes",
  )
  cli.show(row, lines, as_json)


if __name__ == "__main__":
  main()
