"""Lists small trained models that come with the package.

jaxformers zoo

`jaxformers.load("zoo:NAME")` opens a model. `launch/zoo.py` trains the models.
"""

from __future__ import annotations

from jaxformers.foundations import cli, workdirs
from jaxformers.foundations.tables import format_score, markdown_table
from jaxformers.training import zoo


@cli.command()
def main() -> None:
  """Prints a line for each model, with its score and its size."""
  rows = []
  for name, recipe in zoo.RECIPES.items():
    # Read the score of a model that is installed.
    score, parameters = "not in this installation", ""
    if zoo.find(name).is_dir():
      results = workdirs.read_results(zoo.find(name))
      metric = results["metric"]
      score = format_score(metric, results[metric])
      score = f"{results['task']}, {metric} {score}"
      parameters = f"{results['parameters']:,}"
    rows.append((f"{zoo.PREFIX}{name}", score, parameters, recipe.about))
  columns = ("jaxformers.load", "test score", "parameters", "what it is")
  print(markdown_table(columns, rows, right=(2,)))


if __name__ == "__main__":
  main()
