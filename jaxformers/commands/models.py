r"""Lists the models, or compares their costs with the Transformer's.

jaxformers models
jaxformers models lru s5
jaxformers models --config lra/listops
jaxformers models --config lra/listops \
    --config.model.num_layers=4 --models transject,transformer
jaxformers models --published

The config sets the sizes of the models; with `:size=matched` TransJect has at
most as many parameters as the Transformer. Long Range Arena allows a model 10 %
more parameters than the Transformer; models with more are marked. The sizes of
the task are read from its data, or set by --sizes:

--sizes vocab_size=257,max_len=4000,num_classes=2
--sizes image=224x224x3,num_classes=1000
--sizes vocab_size=8000,max_len=256,objective=language_model

--config.FIELD=VALUE sets a field of every model of the table, but not of the
Transformer that they are compared with. --published prints table 3a of the
TransJect paper: its numbers of parameters next to ours.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxformers import config as configs
from jaxformers.analysis.tables import costs, speed
from jaxformers.foundations import cli
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import choose
from jaxformers.models import MODELS


def _check_names(names: list[str], models: str, *, published: bool) -> None:
  """Raises UserError for names in two places, or where they have no effect."""
  if names and (models or published):
    other = f"--models={models}" if models else "--published"
    raise UserError(f"{' '.join(names)} and {other}: give one of them.")


@cli.command(
  cli.argument("names", nargs="*", help="models to list (default: all)"),
  cli.option("config", "", "path.py:key=value,..."),
  cli.option("models", "", "names: a,b (default: all)"),
  cli.option("sizes", "", "sizes of the task, see above"),
  cli.switch(
    "--published", help="compare with table 3a of the TransJect paper"
  ),
  cli.JSON,
  takes_overrides=True,
)
def main(
  names: list[str],
  config: str,
  models: str,
  sizes: str,
  published: bool,
  as_json: bool,
  overrides: Sequence[str],
) -> None:
  """Prints the names of the models, or the cost of each under a config."""
  _check_names(names, models, published=published)
  names = names or cli.names(models) or sorted(MODELS)
  # Without a config: list the models, or print the published table.
  if not config:
    if models or sizes or as_json or overrides:
      raise UserError(
        "--models, --sizes, --json and --config.FIELD need a --config."
      )
    print(speed.counts_table() if published else costs.catalogue(names))
    return
  if published:
    raise UserError("--published sets all sizes itself: leave --config out.")
  if any(arg.startswith("--config.model.name") for arg in overrides):
    raise UserError(
      "--config.model.name would rename every row: give --models instead."
    )
  # Load the config first: it imports modules that may register models.
  configs.load_with(config, overrides)
  # Check the names, which the modules may have registered.
  for name in names:
    choose("model", name, MODELS)
  # Open the data only if no sizes are given.
  task_sizes = (
    costs.parse_sizes(sizes)
    if sizes
    else costs.open_task_sizes(config, overrides)
  )
  rows = costs.rows(config, names, task_sizes, overrides)
  # Print the costs of one example, with its length or its size.
  example = f"example of {task_sizes['max_len']:,} tokens"
  if task_sizes.get("image"):
    example = "image of {} x {} pixels".format(*task_sizes["image"])
  text = (
    f"One {example}: operations of a forward pass, in matrix products and in "
    "all other\narithmetic, and memory stored for the backward pass.\n"
  )
  cli.show(rows, (text, costs.cost_table(rows)), as_json)


if __name__ == "__main__":
  main()
