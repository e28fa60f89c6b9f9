r"""Speed of the generators and the loader, and scores of trivial baselines.

python -m benchmarks.data --archives PATH --out data.json

The command prints Markdown tables. The generators are compared with recorded
times of the original generators. The loader is compared with plain NumPy
indexing (interleaved calls, medians of several rounds); its memory is measured
before and after many batches. With --archives, a table has the time to prepare
each archive, and the scores of trivial baselines on it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.timing import Call, interleaved, median, status_bytes, timed
from jaxformers import tasks
from jaxformers.data.engine import packed
from jaxformers.data.engine.loader import Loader
from jaxformers.data.generators import listops, pathfinder, snakes
from jaxformers.foundations import cli
from jaxformers.foundations.tables import markdown_table
from jaxformers.training import provenance

# Recorded seconds of the original generators on one core: for an image with a
# side of 32 pixels, and for 100,000 expressions.
PATHFINDER_ORIGINAL = 0.40
LISTOPS_ORIGINAL = 7 * 60
Row = dict[str, Any]  # Row of a table: its figures by column.
Rows = Iterable[Row]
ROUNDS = 7
NUM_READ = 300  # Batches that are read in a round.
# File and options of each archive, by task.
ARCHIVES: dict[str, tuple[str, Row]] = {
  "text": ("aclImdb_v1.tar.gz", {}),
  "image": ("cifar10_jpeg.tar.xz", {}),
  "retrieval": (
    "retrieval_pairs.tar.xz",
    {"num_train": 8_000, "num_validation": 1_000, "num_test": 1_000},
  ),
  "imdb": ("aclImdb_v1.tar.gz", {}),
  "ag_news": ("ag_news", {"protocol": "test_only", "vocab_size": 8_000}),
}


def pathfinder_speed() -> Rows:
  """Yields the time per image on one core, by resolution and difficulty."""
  kinds = itertools.product(pathfinder.GEOMETRIES, pathfinder.LEVELS)
  for pixels, difficulty in kinds:
    settings = pathfinder.Settings(pixels, difficulty)
    # Compile the generator, and draw the sprites that all images share.
    snakes.sample(settings, 0)
    for margin in pathfinder.GEOMETRIES[pixels].margins:
      snakes.sprites(pixels, margin)
    # Time fewer of the larger images, which take longer.
    count = 300 if pixels == 32 else 40
    began = time.perf_counter()
    for index in range(count):
      snakes.sample(settings, index)
    spent = (time.perf_counter() - began) / count
    row = {"pixels": pixels, "difficulty": difficulty}
    row["ms per image"] = 1e3 * spent
    if (pixels, difficulty) == (32, "hard"):
      row["times the original"] = PATHFINDER_ORIGINAL / spent
    yield row


def listops_speed() -> Rows:
  """Yields the time to generate LRA's 100,000 expressions on all cores."""
  _, spent = timed(listops.generate, listops.Settings())
  yield {
    "expressions": 100_000,
    "cores": os.cpu_count(),
    "s": spent,
    "times the original": LISTOPS_ORIGINAL / spent,
  }


def resident_memory() -> float:
  """Returns the resident MiB of this process, without memory-mapped files.

  On systems without /proc, the result is the peak with memory-mapped files.
  """
  # Without the file of Linux, return the peak. Its unit is one byte on macOS,
  # and 1 KiB on other systems.
  if not Path("/proc/self/status").exists():
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
  return status_bytes("RssAnon") / 2**20


def loader_speed(batches: int) -> list[Row]:
  """Times batches of 32 x 4096 from the loader, and from a NumPy matrix.

  Args:
    batches: number of batches between the two measurements of memory.
  """
  rng = np.random.default_rng(0)
  count, length, size = 25_000, 4_096, 32
  lengths = rng.integers(1_000, 4_097, count)
  with tempfile.TemporaryDirectory() as folder:
    # Write a split of rows of 1,000 to 4,096 bytes.
    texts = (
      ([rng.integers(0, 256, n).astype(np.uint8)], 0, i)
      for i, n in enumerate(lengths)
    )
    packed.write(Path(folder) / "train", texts)
    split = packed.open_split(Path(folder) / "train")
    # Time the loader and the matrix in turns.
    loader = Loader(split, (length,))
    order = loader.order(size, seed=0)
    matrix = rng.integers(0, 256, (count, length)).astype(np.uint8)
    readers = {
      "loader": lambda step: loader.batch(order(step)),
      "NumPy, a matrix": lambda step: matrix[order(step)].astype(np.int32),
    }
    calls = {name: read_ahead(read) for name, read in readers.items()}
    seconds = interleaved(calls, ROUNDS)
    rows = [
      {"what": name, "batches/s": NUM_READ / median(seconds, name)}
      for name in readers
    ]
    # Measure if memory grows with the number of batches.
    before = resident_memory()
    for step in range(batches):
      loader.batch(order(step))
    after = resident_memory()
  title = f"MiB after 0 and {batches:,} batches"
  rows[0][title] = f"{before:.0f}, {after:.0f}"
  return rows


def read_ahead(read: Callable[[int], Any]) -> Call:
  """Returns a call that reads the batches of the next `NUM_READ` steps."""
  steps = itertools.count()

  def call() -> None:
    for step in itertools.islice(steps, NUM_READ):
      read(step)

  return call


def archive_figures(archives: Path) -> Rows:
  """Yields the time to prepare each archive, and its trivial baselines."""
  with tempfile.TemporaryDirectory() as folder:
    for name, (file, options) in ARCHIVES.items():
      # Skip archives that are not in the folder.
      if not (archives / file).exists():
        continue
      # Prepare the archive, and score the trivial baselines.
      options = {"data_dir": folder, "archive": str(archives / file)} | options
      task, spent = timed(lambda name=name, o=options: tasks.get(name, **o))
      scores = [f"{key} {s:.2%}" for key, s in task.baselines().items()]
      yield {
        "task": name,
        "protocol": task.protocol,
        "prepared in s": spent,
        "trivial": ", ".join(scores),
      }


def table(rows: list[Row]) -> str:
  """Formats rows as Markdown, with a column for each key.

  Floats have three significant digits.
  """
  columns = list(dict.fromkeys(key for row in rows for key in row))

  def cell(value: Any) -> str:
    return f"{value:,.3g}" if isinstance(value, float) else str(value)

  lines = [[cell(row.get(key, "")) for key in columns] for row in rows]
  return markdown_table(columns, lines)


OUT = cli.argument("--out", default="", help="write the tables to this JSON")


def save(results: dict[str, Any], path: str | Path | None) -> None:
  """Writes results as JSON, with hardware and versions.

  Args:
    results: rows of each table, by its title.
    path: path of the file; nothing is written if it is empty.
  """
  versions = provenance.versions()
  # PyTorch is an extra, and may be absent.
  with contextlib.suppress(metadata.PackageNotFoundError):
    versions["torch"] = metadata.version("torch")
  results = results | {"hardware": provenance.hardware(), "versions": versions}
  if path:
    Path(path).write_text(json.dumps(results, indent=2))


def report(tables: Iterable[tuple[str, Rows]], out: str) -> None:
  """Prints each table once it is complete, and writes every row as JSON.

  Args:
    tables: title and rows of each table. Rows may be a generator, which runs
      the measurements just before its table is printed.
    out: path of the JSON file; "" to write no file.
  """
  results = {}
  for title, rows in tables:
    results[title] = []
    for row in rows:
      results[title].append(row)
      # Save now, so that the row is kept if a later row fails.
      save(results, out)
    print(f"\n{title}\n\n{table(results[title])}", flush=True)


@cli.command(
  cli.argument("--archives", type=Path, help="folder of archives"),
  cli.argument(
    "--batches",
    default=100_000,
    help="batches to read between the two measurements of memory",
  ),
  OUT,
)
def main(archives: Path | None, batches: int, out: str) -> None:
  """Prints the tables, and writes them as JSON if --out is set."""
  sections = {
    "Pathfinder, one core": pathfinder_speed,
    "ListOps": listops_speed,
    "Loader, 32 x 4096": lambda: loader_speed(batches),
  }
  if archives:
    sections["Archives"] = lambda: archive_figures(archives)
  report(((title, measure()) for title, measure in sections.items()), out)


if __name__ == "__main__":
  main()
