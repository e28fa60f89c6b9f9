r"""Scores a language model with sliding windows of a given stride.

jaxformers perplexity runs/wikitext --strides 1,256

With a stride of 1, every token is predicted from a full window of earlier
tokens, by one forward pass per token. This is the evaluation of NeuTRENO's
table 3. Only the tokens of the first window have a shorter context. With
windows that do not overlap, as in training, the first tokens of every window
are predicted from a short context. Each score is saved with its stride in the
run's `scores.json`, which `jaxformers published` reads.
"""

from __future__ import annotations

from typing import Any

from jaxformers.analysis.evaluation import perplexity
from jaxformers.commands import states
from jaxformers.foundations import cli


@cli.command(
  cli.WORKDIR,
  *states.STATE,
  cli.option(
    "strides",
    "",
    "strides of the windows: 1,256 (default: 1 and the length of a window)",
  ),
  states.SPLIT,
  cli.option(
    "tokens", 0, "number of tokens from the start of the split (default: all)"
  ),
  cli.option("batch_size", 32, "number of windows per batch"),
  cli.JSON,
)
def main(workdir: str, strides: str, as_json: bool, **options: Any) -> None:
  """Prints the perplexity of each stride."""
  chosen = cli.numbers("strides", strides)
  state = states.take_state(options)
  run = states.load(workdir, **state)
  # By default, compare the paper's stride of 1 with windows as in training.
  chosen = chosen or [1, run.task.max_len]
  rows = perplexity.measure_perplexity(run, chosen, **options)
  # Record the number of tokens if only a part of the split is scored.
  part = {"tokens": options["tokens"]} if options["tokens"] else {}
  for row in rows:
    states.record(
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
  # Print the scores, with the weights that were measured.
  label = states.describe(state)
  if label:
    rows = [{"state": label, **row} for row in rows]
  title = f"{run.model.config.name}, step {run.step}, {options['split']}"
  lines = [", ".join(filter(None, [title, label]))]
  lines += [
    f"  stride {row['stride']:>5}  perplexity {row['perplexity']:8.2f}  "
    f"loss {row['loss']:.4f}  {row['count']:,} tokens"
    for row in rows
  ]
  cli.show(rows, lines, as_json)


if __name__ == "__main__":
  main()
