r"""Lists the configs that come with the package, or describes one.

jaxformers configs
jaxformers configs lra/text

--config accepts a name as well as a path: --config lra/text:size=tiny.
"""

from __future__ import annotations

import ast
from pathlib import Path

from jaxformers import config as configs
from jaxformers.foundations import cli
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.tables import markdown_table


def document(path: Path) -> str:
  """Returns the docstring of a config file without running the file."""
  return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


@cli.command(
  cli.argument(
    "name", nargs="?", default="", help="config to describe, such as lra/text"
  ),
)
def main(name: str) -> None:
  """Prints a line for each config, or the docstring of one config."""
  if name:
    path = configs.find_file(name.partition(":")[0])
    try:
      print(document(path))
    except (SyntaxError, UnicodeDecodeError) as error:
      raise UserError(f"{path} is no Python file: {error}.") from None
    return
  rows = [
    (config, document(path).splitlines()[0])
    for config, path in configs.packaged_names().items()
  ]
  print(markdown_table(("--config", "what it is"), rows))


if __name__ == "__main__":
  main()
