"""Reads tables of a user's examples as inputs and labels.

A table is an object with named columns (of pandas, polars, pyarrow or Hugging
Face's `datasets`), a mapping of columns, a list of rows that are mappings, or a
file of comma or tab separated values. This module imports no library of tables.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxformers.data.engine import files
from jaxformers.foundations import paths
from jaxformers.foundations.errors import UserError

# Lower-case names of columns. If a table has several of them, the first name in
# these lists counts.
LABELS = ("label", "labels", "target", "class", "category", "sentiment", "y")
INPUTS = ("text", "input_ids", "image", "img", "sentence", "review")
PAIRS = (
  ("text1", "text2"),
  ("text_a", "text_b"),
  ("sentence1", "sentence2"),
  ("premise", "hypothesis"),
  ("question1", "question2"),
  ("question", "sentence"),
  ("question", "passage"),
)
NUMBERINGS = ("", "id", "idx", "index", "unnamed: 0")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
FORMS = (
  "(inputs, labels), pairs of an input and its label, a table or rows with "
  "columns such as text and label, or the path of a .csv or .tsv file"
)


class Columns(NamedTuple):
  """Inputs and labels of examples.

  Attributes:
    inputs: list, or array of numbers; a pair is a tuple of two texts.
    labels: list, or array of numbers.
    classes: names of the classes; () if the table has no names.
  """

  inputs: Any
  labels: Any
  classes: tuple[str, ...] = ()


def read_columns(examples: Any, name: str) -> Columns:
  """Returns the inputs and the labels of examples in any form.

  Args:
    examples: (inputs, labels); pairs of an input and its label; or a table.
    name: name of the examples, for messages.

  Raises:
    UserError: for examples of another form, or without known columns.
  """
  # Read a file, or a table with named columns.
  if isinstance(examples, str | os.PathLike):
    chosen = _choose(read_file(paths.expand(examples)), name)
    return chosen._replace(labels=_as_integers(chosen.labels))
  if (names := column_names(examples)) is not None:
    return _read_table(examples, names, name)
  # Read (inputs, labels), but not a tuple of two rows with fields.
  is_couple = isinstance(examples, tuple) and len(examples) == 2
  if is_couple and any(_fields(part) is None for part in examples):
    inputs, labels = examples
    return _checked(inputs, labels, name)
  # Read rows with fields.
  is_text = isinstance(examples, bytes) or not isinstance(examples, Iterable)
  rows = [] if is_text else list(examples)
  if rows and all(_fields(row) is not None for row in rows):
    records = [row for row in map(_fields, rows) if row is not None]
    return _choose(_transpose(records, name), name)
  # Read pairs of an input and its label.
  others = (k for k, row in enumerate(rows) if not _is_pair(row))
  k = next(others, None)
  if not rows or k is not None:
    place = "" if k is None else f" with the row {show(rows[k])} at {k}"
    raise UserError(
      f"{name} is {type(examples).__name__}{place}: give {FORMS}."
    )
  inputs, labels = zip(*rows, strict=True)
  return _checked(inputs, labels, name)


def values(column: Any, what: str) -> Any:
  """Returns a column as an array if it holds numbers, or else as a list.

  Args:
    column: finite iterable, except a text, a mapping or a set. The index of a
      Series is ignored.
    what: name of the column, for messages.

  Raises:
    UserError: for a value that is not a column, with the remedy.
  """
  # Refuse texts, tables, sets and values that are not iterable.
  if isinstance(column, str | bytes):
    raise UserError(f"{what}={show(column)} is one text: give a list of texts.")
  if (names := column_names(column)) is not None:
    numeric = hasattr(column, "to_numpy") and _is_numeric(column.to_numpy())
    if isinstance(column, Mapping) or not numeric:
      raise UserError(
        f"{what} is {type(column).__name__} with the columns "
        f"{', '.join(map(repr, names))}: give the list of one column."
      )
  if isinstance(column, Set) or not isinstance(column, Iterable):
    raise UserError(
      f"{what} is {type(column).__name__}: give a list, which has an order."
    )
  # Take the values of a Series: its items are looked up by index.
  if hasattr(column, "to_numpy"):
    column = column.to_numpy()
  elif hasattr(column, "__array__"):
    column = np.asarray(column)
  if isinstance(column, np.ndarray):
    return column if _is_numeric(column) else np.atleast_1d(column).tolist()
  return list(column)


def _is_numeric(array: Any) -> bool:
  return getattr(array, "ndim", 0) > 0 and array.dtype.kind in "biufc"


def show(value: Any) -> str:
  """Returns a value for a message, cut to 60 characters."""
  text = repr(value)
  return text if len(text) <= 60 else f"{text[:60]}..."


def _checked(inputs: Any, labels: Any, name: str) -> Columns:
  """Returns two columns of equal length.

  Raises:
    UserError: for columns of different lengths, or without rows.
  """
  inputs, labels = (
    values(column, f"{what} of {name}")
    for what, column in (("inputs", inputs), ("labels", labels))
  )
  if len(inputs) != len(labels) or not len(inputs):
    raise UserError(
      f"{name} has {len(inputs)} inputs and {len(labels)} labels: give one "
      "label for every input, and at least one of both."
    )
  return Columns(inputs, labels)


def _is_pair(row: Any) -> bool:
  return isinstance(row, tuple | list | np.ndarray) and len(row) == 2


def _fields(row: Any) -> Mapping[str, Any] | None:
  """Returns a row with fields as a mapping; None for a row without fields."""
  if hasattr(row, "_asdict"):
    return row._asdict()  # A named tuple, such as DataFrame.itertuples yields.
  return row if isinstance(row, Mapping) else None


def _transpose(
  rows: Sequence[Mapping[str, Any]], name: str
) -> dict[str, list[Any]]:
  """Returns rows as columns; requires the same fields in all rows."""
  for k, row in enumerate(rows):
    if row.keys() != rows[0].keys():
      raise UserError(
        f"{name} has the columns {', '.join(map(repr, rows[0]))} in row 0, and "
        f"{', '.join(map(repr, row))} in row {k}: give all rows the same "
        "columns."
      )
  return {key: [row[key] for row in rows] for key in rows[0]}


def column_names(table: Any) -> list[Any] | None:
  """Returns the names of a table's columns, or None for other values."""
  if isinstance(table, Mapping):
    return list(table)
  names = getattr(table, "column_names", None)
  if names is None and hasattr(table, "to_numpy"):
    names = getattr(table, "columns", None)
  # Require a length: a stream of `datasets` has names, but no columns.
  return (
    list(names) if names is not None and hasattr(table, "__len__") else None
  )


def _read_table(table: Any, names: list[Any], name: str) -> Columns:
  """Returns the inputs, the labels and the class names of a table."""
  # Refuse two columns with one name, and a mapping of tables.
  columns = {key: table[key] for key in names}
  parts = [k for k, part in columns.items() if column_names(part) is not None]
  if len(columns) < len(names):
    raise UserError(
      f"{name} has the columns {', '.join(map(repr, names))}, some of them "
      "twice: give each column its own name."
    )
  if parts:
    raise UserError(
      f"{name} is {type(table).__name__} of the tables "
      f"{', '.join(map(repr, parts))}: give one of them, such as "
      f"{name}=data[{parts[0]!r}]."
    )
  # Read the class names of `datasets`, whose labels are numbers.
  chosen = _choose(columns, name)
  features = getattr(table, "features", None)
  feature = features.get(_label(names)) if features is not None else None
  classes = tuple(getattr(feature, "names", None) or ())
  return chosen._replace(classes=classes)


def _choose(table: Mapping[Any, Any], name: str) -> Columns:
  """Chooses the columns of inputs and labels by their names."""
  # Find the label, and all columns that are neither labels nor row numbers.
  by_name = {str(key).strip().lower(): key for key in table}
  label = _label(table)
  others = [
    key for key in by_name if by_name[key] != label and key not in NUMBERINGS
  ]
  # Choose one column of inputs, or two columns of a pair.
  chosen: Sequence[tuple[str, ...]]
  pair = next((pair for pair in PAIRS if {*pair} <= {*others}), ())
  # A column of a pair is no separate text.
  chosen = [(k,) for k in INPUTS if k in others and k not in pair][:1]
  chosen = chosen or ([pair] if pair else [])
  # If there is only one other column, it may have any name.
  chosen = chosen or [(key,) for key in others if len(others) == 1]
  if label is None or not chosen:
    raise UserError(
      f"{name} has the columns {', '.join(map(repr, table))}: name the inputs "
      f"{INPUTS[0]} (or {PAIRS[0][0]} and {PAIRS[0][1]} for pairs) and the "
      "labels label, or give (inputs, labels)."
    )
  # Read the columns, and join the columns of a pair.
  columns = [
    values(table[by_name[key]], f"column {by_name[key]!r} of {name}")
    for key in chosen[0]
  ]
  is_pair = len(columns) == 2
  inputs = list(zip(*columns, strict=True)) if is_pair else columns[0]
  return _checked(inputs, table[label], name)


def _label(names: Iterable[Any]) -> Any:
  """Returns the name of the column of labels, or None if there is none."""
  by_name = {str(key).strip().lower(): key for key in names}
  return next((by_name[key] for key in LABELS if key in by_name), None)


def read_file(path: Path) -> dict[str, list[str]]:
  """Returns the columns of a .csv or .tsv file, whose first row names them.

  Raises:
    UserError: for a file that is missing, neither .csv nor .tsv, neither UTF-8
      nor UTF-16, or whose rows have more or fewer fields than the first row.
  """
  # Choose the delimiter by the ending of the name, and read the text.
  delimiter = DELIMITERS.get(path.suffix.lower())
  if delimiter is None or not path.is_file():
    problem = "is no file" if delimiter else "is neither .csv nor .tsv"
    raise UserError(f"{path} {problem}: give {FORMS}.")
  text = files.decode_text(path.read_bytes(), str(path))
  # Raise the global limit of field sizes in `csv` while the file is read.
  limit = csv.field_size_limit(max(len(text), 1))
  try:
    reader = csv.reader(
      io.StringIO(text, newline=""), delimiter=delimiter, strict=True
    )
    # The first row names the columns.
    names = next(reader, [])
    columns: dict[str, list[Any]] = {name: [] for name in names}
    if len(columns) < len(names) or not names:
      raise UserError(
        f"{path} has the columns {', '.join(map(repr, names))}: give every "
        "column a name in the first row."
      )
    # Append every row that is not empty to the columns.
    for row in filter(None, reader):
      if len(row) != len(names):
        raise csv.Error(f"{len(row)} fields, and {len(names)} in the first row")
      for column, field in zip(columns.values(), row, strict=True):
        column.append(field)
  except csv.Error as error:
    raise UserError(
      f"{path}, line {reader.line_num}: {error}. Separate the fields by "
      f"{delimiter!r}, and quote those that contain it, a quote or a line end."
    ) from None
  finally:
    csv.field_size_limit(limit)
  return columns


def _as_integers(labels: list[str]) -> list[Any]:
  """Returns labels as integers if all are digits; otherwise unchanged."""
  is_number = all(re.fullmatch("0|[1-9][0-9]{0,8}", label) for label in labels)
  return [*map(int, labels)] if is_number else labels
