r"""Scores a language model by windows that move by a few tokens.

python -m jaxformers perplexity runs/wikitext --strides 1,256

With a stride of 1 every token is predicted from a whole window of earlier
tokens, by one forward pass for each token. This is the evaluation of NeuTRENO's
table 3. Only the tokens of the first window have fewer tokens before them. With
windows side by side, as in training, the first tokens of every window are
predicted from few earlier tokens. Each score is kept in the run's
`scores.json`, with its stride, for `python -m jaxformers published`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jaxformers import trained
from jaxformers.commands import cli
from jaxformers.data.engine.segments import Segments
from jaxformers.foundations.errors import UserError
from jaxformers.training.evaluate import Evaluator
from jaxformers.training.progress import Progress


def measure_perplexity(
  run: trained.Trained,
  strides: Sequence[int],
  *,
  split: str = "test",
  tokens: int = 0,
  batch_size: int = 32,
) -> list[dict[str, Any]]:
  """Returns `stride`, `perplexity`, `loss` and `count` for each stride.

  Args:
    run: trained language model.
    strides: tokens from one window to the next, 1 to the length of a window.
    split: name of the task's split.
    tokens: number of tokens scored, from the start of the split; 0 for all.
    batch_size: windows at a time.

  Raises:
    UserError: for a model of another kind, or strides out of range.
  """
  source = run.task.splits[split]
  if not isinstance(source, Segments):
    raise UserError(
      f"The task {run.task.name!r} has no text to predict: give the run of a "
      "language model."
    )
  # The first token has nothing before it, and is not scored.
  scored = source.tokens[: tokens + 1] if tokens else source.tokens
  source = dataclasses.replace(source, tokens=scored, most=0)
  # Check all strides, by making their windows, before the first is scored.
  windows = [dataclasses.replace(source, stride=stride) for stride in strides]
  # One evaluator for all strides compiles once.
  evaluate = Evaluator(run.model, "jit", batch_size, (source.length,))
  rows = []
  for stride, segments in zip(strides, windows, strict=True):
    with Progress(len(segments), 0, f"stride {stride}") as progress:
      update = functools.partial(progress.update, batch_size=1)
      scores = evaluate(run.params, segments, update)
    rows.append({"stride": stride, **scores})
  return rows


@cli.command(
  cli.WORKDIR,
  *trained.STATE,
  cli.option(
    "strides",
    "",
    "distances between windows: 1,256 (default: 1 and a window's length)",
  ),
  trained.SPLIT,
  cli.option(
    "tokens", 0, "number of tokens from the start of the split (default: all)"
  ),
  cli.option("batch_size", 32, "windows at a time"),
  cli.JSON,
)
def main(workdir: str, strides: str, as_json: bool, **options: Any) -> None:
  """Prints a line for each stride."""
  chosen = cli.numbers("strides", strides)
  state = trained.take_state(options)
  run = trained.load(workdir, **state)
  # Compare the paper's stride of 1 with windows as in training.
  chosen = chosen or [1, run.task.max_len]
  rows = measure_perplexity(run, chosen, **options)
  # A part of the split is scored in another way than all of it.
  part = {"tokens": options["tokens"]} if options["tokens"] else {}
  for row in rows:
    trained.record(
      run,
      workdir,
      state,
      "perplexity",
      {name: row[name] for name in ("perplexity", "loss")},
      row["count"],
      split=options["split"],
      stride=row["stride"],
      **part,
    )
  # Say which state was measured, in JSON as well.
  label = trained.describe(state)
  if label:
    rows = [{"state": label, **row} for row in rows]
  title = f"{run.config.model.name}, step {run.step}, {options['split']}"
  lines = [", ".join(filter(None, [title, label]))]
  lines += [
    f"  stride {row['stride']:>5}  perplexity {row['perplexity']:8.2f}  "
    f"loss {row['loss']:.4f}  {row['count']:,} tokens"
    for row in rows
  ]
  cli.show(rows, lines, as_json)


if __name__ == "__main__":
  main()
