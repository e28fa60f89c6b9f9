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
    "distances between windows: 1,256 (default: 1 and a window's length)",
  ),
  states.SPLIT,
  cli.option(
    "tokens", 0, "number of tokens from the start of the split (default: all)"
  ),
  cli.option("batch_size", 32, "windows at a time"),
  cli.JSON,
)
def main(workdir: str, strides: str, as_json: bool, **options: Any) -> None:
  """Prints a line for each stride."""
  chosen = cli.numbers("strides", strides)
  state = states.take_state(options)
  run = states.load(workdir, **state)
  # Compare the paper's stride of 1 with windows as in training.
  chosen = chosen or [1, run.task.max_len]
  rows = perplexity.measure_perplexity(run, chosen, **options)
  # A part of the split is scored in another way than all of it.
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
  # Say which state was measured, in JSON as well.
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
