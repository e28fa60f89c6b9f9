r"""Prepares the data of a task once, before its runs.

jaxformers prepare image --archive PATH/cifar-10-binary.tar.gz

The command downloads or generates the data, or reads them from an archive, and
checks them. tensorflow-datasets writes them as array_record files under
DATA_DIR/tfds. Tokens are also written as memory-mapped files under
DATA_DIR/packed. Data that are already prepared are not changed. If the command
was stopped, run it again to resume after the last complete step. If two
commands prepare the same data, one waits for the other.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxformers import tasks
from jaxformers.config.arguments import BOOLEANS
from jaxformers.data.generators import listops_text
from jaxformers.data.generators.pathfinder import Settings
from jaxformers.data.sets import pathfinder as pathfinder_files
from jaxformers.foundations import cli, paths
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import summarize
from jaxformers.tasks import TASKS, Task
from jaxformers.tasks.listops import WITHOUT_END
from jaxformers.tasks.splits import replace_all

EXPORTS = ("listops", "pathfinder", "pathx")


def _parser() -> argparse.ArgumentParser:
  """Builds the parser, with a subcommand for every task."""
  parser = cli.parser(__name__)
  subparsers = parser.add_subparsers(
    dest="task", metavar="TASK", required=True, help=", ".join(sorted(TASKS))
  )
  for name in sorted(TASKS):
    load = TASKS[name]
    about = inspect.getdoc(load)
    # Add a subcommand; its help is the docstring of the loader.
    subparser = subparsers.add_parser(
      name,
      description=about,
      help=summarize(load),
      formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # Add an option for every keyword argument of the loader. Options of
    # training, such as augmentation, have the default None and are left out.
    for option, parameter in inspect.signature(load).parameters.items():
      default = parameter.default
      if default is not None:
        subparser.add_argument(
          f"--{option}", type=_reader(default), default=default, metavar="VALUE"
        )
    if name in EXPORTS:
      subparser.add_argument(
        "--export",
        type=Path,
        metavar="FOLDER",
        help="folder for a copy of the generated examples in LRA's layout",
      )
  return parser


def _reader(default: Any) -> Callable[[str], Any]:
  """Returns the function that reads an option with such a default."""

  def read_flag(text: str) -> bool:
    if text.lower() not in BOOLEANS:
      raise argparse.ArgumentTypeError(f"{text!r}: give true or false")
    return BOOLEANS[text.lower()]

  def read_numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, filter(None, text.split(","))))

  if isinstance(default, bool):
    return read_flag
  return read_numbers if isinstance(default, tuple) else type(default)


def summary(task: Task) -> str:
  """Formats a description of a prepared task for the terminal."""
  # Describe the splits, the inputs and the origin of the data.
  rows = {"protocol": task.protocol}
  for name, split in task.splits.items():
    rows[f"{name} examples"] = f"{len(split):,}"
  rows["checkpoint chosen on"] = task.selection
  if task.image:
    rows["images"] = " x ".join(map(str, task.image))
  else:
    size = f"{task.vocab_size:,}" if task.vocab_size else "real numbers"
    rows |= {"vocabulary": size, "tokens at most": f"{task.max_len:,}"}
  rows["source"] = task.info["source"]
  # Counts and checksums show if the data are the authors' data.
  if "counts" in task.info:
    note = "" if task.info["authors_counts"] else "not "
    rows["counts"] = f"{note}the authors'"
  if "sha256" in task.info:
    notes = {True: "", None: " (the authors published none)"}
    is_authors = task.info["authors_checksum"]
    note = notes.get(is_authors, " (not the authors')")
    rows["SHA-256"] = task.info["sha256"] + note
  # Align the values in one column.
  width = max(map(len, rows))
  lines = [f"  {key:<{width}}  {value}" for key, value in rows.items()]
  return "\n".join([task.name, *lines])


def _export(task: Task, options: dict[str, Any], folder: Path) -> None:
  """Writes generated examples in LRA's layout.

  Args:
    task: prepared task.
    options: options of the task.
    folder: folder to write.

  Raises:
    UserError: if the examples were not generated, if the protocol has no
      closing brackets, or if the folder cannot be written.
  """
  if options["archive"]:
    raise UserError(
      "--export writes generated examples, but --archive reads existing ones: "
      "remove one of the two options."
    )
  if task.curriculum:
    raise UserError(
      "--export writes the files of Long Range Arena, which has no shorter "
      "snakes: remove --num_short and --short_paddles, or export them with a "
      "number as --difficulty."
    )
  if task.name == "listops" and task.protocol in WITHOUT_END:
    raise UserError(
      f"The protocol {task.protocol} has no closing brackets to export: choose "
      "another --protocol."
    )
  try:
    if task.name == "listops":
      # Undo the shift of ids by the protocol s4: LRA's files have no ids.
      plain = replace_all(task.splits, shift=0, end=0)
      listops_text.write_tsv(plain, folder)
    else:
      names = (field.name for field in dataclasses.fields(Settings))
      settings = Settings(**{name: options[name] for name in names})
      pathfinder_files.export(settings, folder)
  except OSError as error:
    raise UserError(
      f"The export to {folder} failed ({error.strerror or error}): free some "
      "space, or choose another --export. The incomplete export was removed."
    ) from None


@cli.command(
  make_parser=_parser,
  on_interrupt="it resumes after the last complete step.",
)
def main(task: str, export: Path | None = None, **options: Any) -> None:
  """Prepares a task, and prints a description of it."""
  # Hide the logs of tensorflow-datasets: progress bars show the same.
  logging.getLogger("absl").setLevel(logging.ERROR)
  prepared = tasks.get(task, **options)
  if export is not None:
    _export(prepared, options, paths.expand(export))
  print(summary(prepared))


if __name__ == "__main__":
  main()
