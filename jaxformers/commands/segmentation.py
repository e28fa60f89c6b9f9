r"""Scores a segmenter on whole scenes, by windows that slide over them.

python -m jaxformers segmentation runs/ade20k
python -m jaxformers segmentation runs/ade20k \
    --scales 0.5,0.75,1,1.25,1.5,1.75 --flip

The second is the multi-scale evaluation of Segmenter and of NeuTRENO's table 2.
A scene that is smaller than a window at some scale is enlarged to the window's
side, as in Segmenter's code. Scores are interpolated to every scene's size
and compared there. The score is kept in the run's `scores.json`, with window,
stride, scales and mirror images, for `python -m jaxformers published`.
"""

from __future__ import annotations

from typing import Any

from jaxformers.analysis.evaluation import segmentation
from jaxformers.commands import states
from jaxformers.foundations import cli


@cli.command(
  cli.WORKDIR,
  *states.STATE,
  cli.option("scales", "1", "sizes of a scene, relative to the config's"),
  cli.switch("--flip", help="add mirror images"),
  cli.option("stride", 0, "pixels between windows (default: a window less 32)"),
  states.SPLIT,
  cli.option("count", 0, "number of scenes (default: all)"),
  cli.option("batch_size", 8, "windows at a time"),
  cli.JSON,
)
def main(workdir: str, scales: str, as_json: bool, **options: Any) -> None:
  """Prints mean IoU and pixel accuracy."""
  sizes = cli.numbers("scales", scales, float)
  state = states.take_state(options)
  run = states.load(workdir, **state)
  row = segmentation.evaluate_segmenter(run, sizes, **options)
  split = options["split"]
  # Part of the scenes is scored in another way than all of them.
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
  # Say which state was measured, in JSON as well.
  label = states.describe(state)
  if label:
    row = {"state": label, **row}
  title = f"{run.model.config.name}, step {run.step}, {split}"
  mirrored = "mirrored, too" if options["flip"] else ""
  parts = [title, f"scales {scales}", mirrored, label]
  lines = (
    ", ".join(filter(None, parts)),
    f"  mean IoU {row['mean_iou']:.2%}  pixel accuracy {row['accuracy']:.2%}  "
    f"{row['count']:,} scenes",
  )
  cli.show(row, lines, as_json)


if __name__ == "__main__":
  main()
