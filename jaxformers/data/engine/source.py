"""A data set as its archive has it, and how its examples become tokens.

Both are plain records: `preparation` opens what they describe.
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
  """Examples of a split, by random access to prepared files."""

  def __len__(self) -> int:
    """Returns the number of examples."""
    ...

  def __getitem__(self, index: int, /) -> Example:
    """Returns an example."""
    ...

  def __getitems__(self, indices: Sequence[int], /) -> Sequence[Example]:
    """Returns several examples, which are read together."""
    ...


@dataclasses.dataclass(frozen=True)
class Source:
  """A data set: what an example holds, and how its archive is read.

  Attributes:
    name: name of the tensorflow-datasets builder.
    features: `bytes` for text, a tuple of class names for a label, (height,
      width, channels) for an image, `np.uint8` for ids.
    read: function from the archive (None where there is none) to the examples
      of every split, each with its key.
    settings: settings of generated data; they tell one version from another.
    tag: short text that stands for the settings in the folder's name; "" for
      their values.
    archives: names of files and folders that are looked for.
    url, sha256, size: address, checksum and bytes of the archive that the
      authors ship; "" where it cannot be downloaded.
    also: SHA-256 of other archives that the authors ship.
    homepage: web page of the authors.
    counts: examples of each split, where a stock builder has the same.
    finish: function that is called once everything is prepared and on disk.
    shuffled: True if examples are put into the order of their keys' hashes, as
      by the stock builders; False if they are in the order of their keys,
      which are then integers below 2^24.
    is_users: True if the data are the user's, so that no authors have an
      archive to compare with.
    least_bytes: number of bytes that the prepared examples need at least; 0 if
      that is not known before.
    local_only: reason why nothing is downloaded, and where the archive is.
  """

  name: str
  features: Mapping[str, Any]
  # A `Path`, or None: readers of archives and generators take one of the two.
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
    """Name of the prepared folder, which tells the settings."""
    values = [self.tag] if self.tag else map(str, self.settings.values())
    return "-".join([self.name, *values])

  @property
  def archive_options(self) -> str:
    """Options that give a command the path of the archive, for messages."""
    path = f"PATH/{self.archives[0]}"
    return f"--archive {path} (prepare) or --config.task.archive={path}"


@dataclasses.dataclass(frozen=True)
class Encoding:
  """Encoding of examples as tokens.

  Attributes:
    name: part of the folder's name; another encoding needs another.
    fit: function of all examples of the training split; returns a function
      from a list of examples to their rows of sequences, and what `info.json`
      remembers.
    key: function from an example to the number under 2^64 that identifies it.
    dtype: integer type of the tokens.
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
  """Gathers (split, key, example) by split, and checks counts and labels.

  Args:
    stream: examples of one archive.
    path: path of the archive, for the message.
    expected: number of examples of each label in a split, by split.
    labels: labels to count; None stands for the examples of all labels.
    advice: sentence for the message: what else the user can do.

  Raises:
    UserError: if a number of examples differs.
  """
  # Gather and count in one pass over the stream.
  splits: dict[str, list[Keyed]] = {name: [] for name in expected}
  counts: Counter[tuple[str, Any]] = Counter()
  for split, key, example in stream:
    splits[split].append((key, example))
    counts[split, example["label"]] += 1
    counts[split, None] += 1
  # Compare all counts only now: a truncated archive ends the stream early.
  for split, count in expected.items():
    for label in labels:
      check_count(path, split, counts[split, label], count, label, advice)
  return splits


def check_count(
  path: Path,
  split: str,
  found: int,
  expected: int,
  label: Any = None,
  advice: str = "",
) -> None:
  """Raises UserError if a split has another number of examples than expected.

  Args:
    path: path of the archive.
    split: name of the split.
    found, expected: numbers of examples.
    label: the label that they have; None for all.
    advice: sentence for the message: what else the user can do.
  """
  if found == expected:
    return
  what = "examples" if label is None else f"examples of {label!r}"
  raise UserError(
    f"{path} holds {found:,} {what} under {split!r} instead of {expected:,}: "
    "it is another archive, or truncated. Fetch it again; nothing was kept of "
    f"it. {advice}".rstrip()
  )
