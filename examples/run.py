"""Runs notebooks from their first cell, and saves their outputs.

python examples/run.py examples/6_your_own_data.ipynb
python examples/run.py examples/3_over_smoothing.ipynb --set archive=PATH

`--set NAME=VALUE` replaces a value of the parameter cell for this run, without
changing the notebook. The script needs `pip install nbclient ipykernel`.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def has_tag(cell: Any, tag: str) -> bool:
  """Returns True if a cell has a tag."""
  return tag in cell["metadata"].get("tags", ())


def run(path: Path, values: dict[str, str]) -> None:
  """Runs a notebook, and saves its outputs in it.

  The working directory is the parent of the notebook's folder.

  Args:
    path: path of the notebook.
    values: values by name, which replace values of the parameter cell.
  """
  import nbclient
  import nbformat

  # Set the values in a copy, and skip the installation.
  notebook = nbformat.read(path, as_version=4)
  changed = copy.deepcopy(notebook)
  for cell in changed.cells:
    if has_tag(cell, "parameters"):
      cell.source += "".join(f"\n{k} = {v!r}" for k, v in values.items())
    if has_tag(cell, "install"):
      cell.source = ""
  # Run the copy.
  client = nbclient.NotebookClient(changed, timeout=1_200)
  client.execute(cwd=str(path.parents[1]))
  # Save the outputs without progress bars, and keep the original source.
  for cell, done in zip(notebook.cells, changed.cells, strict=True):
    if cell.cell_type == "code" and not has_tag(cell, "install"):
      cell.outputs = [
        output for output in done.outputs if output.get("name") != "stderr"
      ]
      # Remove the execution counts, as nbstripout does.
      for output in cell.outputs:
        if "execution_count" in output:
          output.execution_count = None
  nbformat.write(notebook, path)


def main(argv: Sequence[str] | None = None) -> None:
  """Runs the notebooks that the command line names."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("notebooks", nargs="+", type=Path)
  parser.add_argument("--set", action="append", default=[], dest="values")
  args = parser.parse_args(argv)
  pairs = (item.partition("=") for item in args.values)
  values = {name: value for name, _, value in pairs}
  for path in args.notebooks:
    run(path.absolute(), values)


if __name__ == "__main__":
  main()
