"""Reads the time series of the UEA and UCR archives from their `.ts` files.

A `.ts` file is text: comments, lines `@name value`, `@data`, and one line for
each series. A line has the channels, separated by ":", with numbers separated
by ",", and the class at its end. A missing number is "?".

Source: Bagnall et al. 2018, https://arxiv.org/abs/1811.00075; the format is
described at https://www.timeseriesclassification.com.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxformers.data.engine import archive as archives
from jaxformers.data.engine.encodings import hash_key
from jaxformers.data.engine.source import Encoding, Example, Keyed, Source
from jaxformers.foundations.errors import UserError

SPLITS = ("train", "test")
MAX_BYTES = 1 << 32
# Series of train and of test, where they are known: a file that was cut at the
# end of a line looks whole.
COUNTS = {
  "BasicMotions": (40, 40),
  "EigenWorms": (128, 131),
  "EthanolConcentration": (261, 263),
  "Heartbeat": (204, 205),
  "JapaneseVowels": (270, 370),
  "MotorImagery": (278, 100),
  "SelfRegulationSCP1": (268, 293),
  "SelfRegulationSCP2": (200, 180),
}


class Header(NamedTuple):
  """Header of a `.ts` file.

  Attributes:
    classes: names of the classes, in the order of the file.
    channels: number of channels; 0 if the file does not say.
    length: number of steps of every series; 0 for unequal lengths.
  """

  classes: tuple[str, ...]
  channels: int
  length: int


def parse(lines: Iterator[tuple[int, str]], name: str) -> Iterator[Any]:
  """Yields the header of a `.ts` file, then (series, class) of each series.

  Args:
    lines: numbers and lines of the file.
    name: name of the file, for messages.

  Yields:
    `Header`; then pairs of float32 [length, channels], with NaN at missing
    numbers, and the name of the class.

  Raises:
    UserError: for a file without classes, with time stamps, or with a line that
      differs from its header.
  """
  header = _header(lines, name)
  yield header
  channels, length = header.channels, header.length
  for number, line in lines:
    *parts, label = line.split(":")
    where = f"{name}, line {number}"
    if label.strip() not in header.classes:
      raise UserError(
        f"{where}: the class {label.strip()[:40]!r} is none of "
        f"{', '.join(header.classes)}. The file is damaged or cut: download it "
        "again."
      )
    series = [_numbers(part, where) for part in parts]
    lengths = {len(channel) for channel in series}
    # Without @dimensions, the first series gives the number of channels.
    channels = channels or len(series)
    if len(series) != channels or len(lengths) != 1:
      raise UserError(
        f"{where}: {len(series)} channels of {sorted(lengths)} steps, but all "
        f"series have {channels} channels of one length. The file is damaged "
        "or cut: download it again."
      )
    if length and lengths != {length}:
      raise UserError(
        f"{where}: {lengths.pop()} steps, but the file says that every series "
        f"has {length}. The file is damaged: download it again."
      )
    stacked = np.stack(series, 1)
    if np.isnan(stacked).all():
      raise UserError(f"{where}: the series has no number: remove the line.")
    yield stacked, label.strip()


def _header(lines: Iterator[tuple[int, str]], name: str) -> Header:
  """Reads the lines before `@data`."""
  fields: dict[str, list[str]] = {}
  for number, line in lines:
    key, *values = line.split()
    if key.lower() == "@data":
      break
    if not key.startswith("@"):
      raise UserError(
        f"{name}, line {number}: expected a line such as '@dimensions 6' "
        f"before @data, but found {line[:40]!r}. Give a .ts file."
      )
    fields[key[1:].lower()] = values
  else:
    raise UserError(f"{name} has no line @data: give a .ts file.")

  def is_true(field: str) -> bool:
    # Files write "true" or "True".
    return [value.lower() for value in fields.get(field, [])[:1]] == ["true"]

  if is_true("timestamps"):
    raise UserError(
      f"{name} has time stamps, which are not read: give a file without them."
    )
  if not is_true("classlabel") or not fields["classlabel"][1:]:
    raise UserError(
      f"{name} has no classes (@classLabel true ...): only classification is "
      "read. Its targets may be numbers."
    )

  def count(field: str) -> int:
    value = fields.get(field, ["0"])[0]
    return int(value) if value.isdigit() else 0

  channels = 1 if is_true("univariate") else count("dimensions")
  length = count("serieslength") if is_true("equallength") else 0
  return Header(tuple(fields["classlabel"][1:]), channels, length)


def _numbers(text: str, where: str) -> np.ndarray:
  """Returns the numbers of a channel, float32 [length]; NaN for "?"."""
  try:
    values = [
      np.nan if part.strip() == "?" else float(part) for part in text.split(",")
    ]
  except ValueError as error:
    raise UserError(
      f"{where}: {error}. The file is damaged, or is no .ts file."
    ) from None
  with np.errstate(over="ignore"):
    array = np.asarray(values, np.float32)
  if np.isinf(array).any():
    raise UserError(f"{where}: a number is infinite or too large for float32.")
  return array


def read(problem: str, path: Path) -> dict[str, list[Keyed]]:
  """Reads PROBLEM_TRAIN.ts and PROBLEM_TEST.ts in a folder or an archive.

  Args:
    problem: name of the data set, such as "BasicMotions".
    path: folder or tar that holds both files, at any depth.

  Returns:
    The examples by split: `values`, float32 [length channels], `channels`,
    uint16 [1], and `label`, the name of the class.

  Raises:
    UserError: for a missing or damaged file, and for another number of series
      than known.
  """
  files = {f"{problem}_{split.upper()}.ts": split for split in SPLITS}
  splits: dict[str, list[Keyed]] = {}
  seen: set[tuple[int, tuple[str, ...]]] = set()
  for name, content in archives.members(
    path,
    max_bytes=MAX_BYTES,
    wanted=lambda name: name.rpartition("/")[2] in files,
  ):
    split = files[name.rpartition("/")[2]]
    if split in splits:
      raise UserError(f"{path} holds two files {name.rpartition('/')[2]}.")
    # Comments may be in any encoding; numbers and classes are compared.
    rows = parse(_lines(content.decode("utf-8-sig", "replace")), name)
    header = next(rows)
    splits[split] = [
      (
        key,
        {
          "values": series.ravel(),
          "channels": np.array([series.shape[1]], np.uint16),
          "label": label.encode(),
        },
      )
      for key, (series, label) in enumerate(rows)
    ]
    channels = {int(row["channels"][0]) for _, row in splits[split]}
    seen |= {(count, tuple(sorted(header.classes))) for count in channels}
  missing = [name for name, split in files.items() if not splits.get(split)]
  if missing:
    raise UserError(
      f"{path} holds no series in {' and '.join(missing)}: unpack "
      f"{problem}.zip, and give its folder."
    )
  if len(seen) > 1:
    raise UserError(
      f"{path}: {problem}_TRAIN.ts and {problem}_TEST.ts differ in channels or "
      "classes: download them again."
    )
  train_classes, test_classes = (
    {row["label"] for _, row in splits[split]} for split in SPLITS
  )
  if new := test_classes - train_classes:
    raise UserError(
      f"{path}: train has no series of the class {min(new).decode()!r}, which "
      "test has: download the files again."
    )
  counts = tuple(len(splits[split]) for split in SPLITS)
  if counts != COUNTS.get(problem, counts):
    raise UserError(
      f"{path} holds {counts[0]} series of train and {counts[1]} of test, but "
      f"{problem} has {COUNTS[problem][0]} and {COUNTS[problem][1]}: download "
      "it again."
    )
  return {split: splits[split] for split in SPLITS}


def _lines(text: str) -> Iterator[tuple[int, str]]:
  """Yields the number and content of lines that are no comments."""
  for number, line in enumerate(text.splitlines(), 1):
    line = line.strip()
    if line and line[0] not in "#%":
      yield number, line


def source(problem: str) -> Source:
  """Returns the source of a data set of the archives.

  Args:
    problem: its name, such as "BasicMotions".

  Raises:
    UserError: for a name with other characters than letters, digits, "-", "_".
  """
  if not problem or not problem.replace("-", "").replace("_", "").isalnum():
    raise UserError(
      f"problem={problem!r} is no name of a data set: give one such as "
      "BasicMotions."
    )
  return Source(
    name="uea_" + problem.replace("-", "_").lower(),
    features={"values": np.float32, "channels": np.uint16, "label": bytes},
    read=lambda path: read(problem, path),
    archives=(problem, "Multivariate_ts", "Univariate_ts"),
    shuffled=False,
    homepage="https://www.timeseriesclassification.com",
    local_only=(
      "is not downloaded: unpack its .zip of "
      "https://www.timeseriesclassification.com"
    ),
  )


def _fit(examples: Iterator[Example]) -> tuple[Any, dict[str, Any]]:
  """Returns the encoding of series, and their classes and channels."""
  classes, channels = set(), 0
  for example in examples:
    classes.add(bytes(example["label"]).decode())
    channels = int(example["channels"][0])

  def encode(rows: Sequence[Example]) -> list[list[np.ndarray]]:
    return [[np.asarray(row["values"], np.float32)] for row in rows]

  return encode, {"classes": sorted(classes, key=_order), "channels": channels}


def _order(name: str) -> tuple[float, str]:
  """Returns the sort key of a class: numbers first, in their order."""
  try:
    return float(name), name
  except ValueError:
    return np.inf, name


def _key(example: Mapping[str, Any]) -> int:
  """Returns a hash of the numbers of a series."""
  values = np.ascontiguousarray(example["values"], np.float32)
  return hash_key(values.tobytes())


ENCODING = Encoding("series", _fit, _key, np.float32)
