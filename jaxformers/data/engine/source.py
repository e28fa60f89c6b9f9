"""Records that describe a data set (`Source`) and its encoding (`Encoding`).

Both are plain records; `preparation` reads and prepares the data.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxformers.foundations.errors import UserError

Example = Mapping[str, Any]
Keyed = tuple[str | int, Example]
Encode = Callable[[Sequence[Example]], Iterable[Sequence[np.ndarray]]]


class Examples(Protocol):
  """Examples of a split with random access to prepared files."""

  def __len__(self) -> int:
    """Returns the number of examples."""
    ...

  def __getitem__(self, index: int, /) -> Example:
    """Returns one example."""
    ...

  def __getitems__(self, indices: Sequence[int], /) -> Sequence[Example]:
    """Returns several examples, which are read in one call."""
    ...


@dataclasses.dataclass(frozen=True)
class Source:
  """Description of a data set: its features, its archive and its reader.

  Attributes:
    name: name of the tensorflow-datasets builder.
    features: type of each feature: `bytes` for text, a tuple of class names for
      a label, (height, width, channels) for an image, `np.uint8` or `np.uint16`
      for ids, `np.float32` for real numbers.
    read: function from the path of the archive (None if there is no archive) to
      the examples of every split, each with its key.
    settings: settings of generated data, which identify a version of the data.
    tag: short text that replaces the settings in the name of the folder; "" to
      use the values of the settings.
    archives: names of files and folders to search for.
    url, sha256, size: address, checksum and number of bytes of the authors'
      archive; "" and 0 if it cannot be downloaded.
    also: SHA-256 of other archives that the authors ship.
    homepage: web page of the authors.
    counts: number of examples of each split; set only if a stock builder of
      tensorflow-datasets has the same data.
    finish: function that is called after all examples are prepared and on disk.
    shuffled: True to sort the examples by the hashes of their keys, as stock
      builders do; False to sort them by their keys, which must then be integers
      below 2^24.
    is_users: True for the user's own data, for which no checksum of authors
      exists.
    least_bytes: lower bound of the size of the prepared examples in bytes; 0 if
      it is unknown.
    local_only: reason why the archive cannot be downloaded, and where it is.
  """

  name: str
  features: Mapping[str, Any]
  # The argument is a `Path` for readers of archives, and None for generators.
  read: Callable[[Any], Mapping[str, Iterable[Keyed]]]
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  tag: str = ""
  archives: tuple[str, ...] = ()
  url: str = ""
  sha256: str = ""
  size: int = 0
  also: tuple[str, ...] = ()
  homepage: str = ""
  counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
  finish: Callable[[], None] = lambda: None
  shuffled: bool = True
  is_users: bool = False
  least_bytes: int = 0
  local_only: str = ""

  @property
  def key(self) -> str:
    """Name of the folder of prepared data: the name and the settings."""
    values = [self.tag] if self.tag else map(str, self.settings.values())
    return "-".join([self.name, *values])

  @property
  def archive_options(self) -> str:
    """Options that pass the path of the archive to a command, for messages."""
    path = f"PATH/{self.archives[0]}"
    return f"--archive {path} (prepare) or --config.task.archive={path}"


@dataclasses.dataclass(frozen=True)
class Encoding:
  """Encoding of examples as tokens.

  Attributes:
    name: part of the name of the packed folder; every encoding needs a
      different name.
    fit: function of all examples of the training split. It returns a function
      from a list of examples to their rows of sequences, and the fields that
      `info.json` keeps. The field `classes`, if any, lists the names of labels
      that are texts.
    key: function from an example to a number below 2^64 that identifies it.
    dtype: type of the tokens.
  """

  name: str
  fit: Callable[[Iterator[Example]], tuple[Encode, dict[str, Any]]]
  key: Callable[[Example], int]
  dtype: Any = np.uint8


def collect(
  stream: Iterable[tuple[str, str | int, Example]],
  path: Path,
  expected: Mapping[str, int],
  labels: Sequence[Any] = (None,),
  advice: str = "",
) -> dict[str, list[Keyed]]:
  """Groups (split, key, example) by split, and checks the number of each label.

  Args:
    stream: (split, key, example) of every example of an archive.
    path: path of the archive, for the message.
    expected: number of examples of each label in a split, by split.
    labels: labels to count; None counts the examples of all labels.
    advice: further advice for the message, one sentence.

  Raises:
    UserError: if a number of examples differs from the expected number.
  """
  # Group and count in one pass over the stream.
  splits: dict[str, list[Keyed]] = {name: [] for name in expected}
  counts: Counter[tuple[str, Any]] = Counter()
  for split, key, example in stream:
    splits[split].append((key, example))
    counts[split, example["label"]] += 1
    counts[split, None] += 1
  # Compare the counts at the end: a truncated archive ends the stream early.
  for split, count in expected.items():
    for label in labels:
      check_count(path, split, counts[split, label], count, label, advice)
  return splits


def check_count(
  path: Path,
  split: str,
  actual: int,
  expected: int,
  label: Any = None,
  advice: str = "",
) -> None:
  """Raises UserError if a split has another number of examples than expected.

  Args:
    path: path of the archive.
    split: name of the split.
    actual, expected: actual and expected number of examples.
    label: label of the counted examples; None for all labels.
    advice: further advice for the message, one sentence.
  """
  if actual == expected:
    return
  what = "examples" if label is None else f"examples of {label!r}"
  raise UserError(
    f"{path} holds {actual:,} {what} under {split!r} instead of {expected:,}: "
    "it is another archive, or truncated. Download it again; no part of "
    f"it was kept. {advice}".rstrip()
  )
