"""Trains the models that come with the package again.

python launch/zoo.py --workdir runs/zoo --archives PATH

A model whose run in the workdir has ended is not trained again. `--names
pairs-isometric,listops-s5` trains only some. The files are written into
`jaxformers/models_to_try`, which `jaxformers zoo` lists.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jaxformers as jf
from jaxformers.foundations import cli
from jaxformers.foundations.errors import UserError
from jaxformers.sweep import commands
from jaxformers.training import zoo


def public(results: Mapping[str, Any]) -> dict[str, Any]:
  """Returns results without the paths of data on the machine of the run."""
  results = copy.deepcopy(dict(results))
  config = results["config"]
  config["data_dir"] = ""
  # Keep only the names of files.
  for name in ("archive", "vocabulary"):
    if config["task"].get(name):
      config["task"][name] = Path(config["task"][name]).name
  return results


def keep(workdir: Path, name: str) -> Path:
  """Writes the trained model of a run into the zoo; returns its folder.

  Raises:
    UserError: if the files of the model are too large for the package.
  """
  model = jf.load(workdir)
  model = dataclasses.replace(model, results=public(model.results))
  # Refuse a model that would make the package large.
  with tempfile.TemporaryDirectory() as staged:
    files = model.save(Path(staged, name)).iterdir()
    size = sum(path.stat().st_size for path in files)
  if size > zoo.MOST_BYTES:
    raise UserError(
      f"The model of {workdir} has {size:,} bytes, more than "
      f"{zoo.MOST_BYTES:,}: train a smaller one."
    )
  return model.save(zoo.find(name))


def main(argv: Sequence[str] | None = None) -> None:
  """Trains the models one after the other; the first error ends it."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--workdir", type=Path, required=True)
  parser.add_argument("--archives", default="PATH", help="folder of archives")
  parser.add_argument("--names", default="", help="models (default: all)")
  args = parser.parse_args(argv)
  try:
    for name in cli.names(args.names) or zoo.RECIPES:
      # Train the model, unless its run has ended, and write it into the zoo.
      zoo.find(name)
      workdir = args.workdir / name
      arguments = zoo.RECIPES[name].command(str(workdir), args.archives)
      command = [sys.executable, "-m", "jaxformers.main", *arguments]
      if commands.call(command):
        sys.exit(f"error: the run of {name} failed.")
      print(f"{name} is in {keep(workdir, name)}.")
  except UserError as error:
    sys.exit(f"error: {error}")


if __name__ == "__main__":
  main()
