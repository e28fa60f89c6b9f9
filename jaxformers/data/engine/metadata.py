"""Opens directories of tensorflow-datasets without running code from them.

`tfds.builder_from_directory` imports every module that `features.json` names.
This module first checks that all these names are features of
tensorflow-datasets.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from jaxformers.foundations.errors import UserError

FILES = ("dataset_info.json", "features.json")
MAX_BYTES = 1 << 26  # A hundred thousand class names take 2 MB.
# Keys of the class of a feature, in the two spellings that protobuf accepts.
# tensorflow-datasets 4.0 to 4.3 write the key "type" next to "content".
CLASS_KEYS = ("pythonClassName", "python_class_name")
# Keys whose values are strings of nested JSON.
JSON_KEYS = ("json", "content")


def open_directory(folder: Path) -> tfds.core.DatasetBuilder:
  """Returns the builder of a directory whose features are a dictionary.

  Args:
    folder: folder of dataset_info.json.

  Raises:
    UserError: if a file is not JSON of the right types, or names a class that
      is not a feature of tensorflow-datasets.
  """
  # Refuse foreign classes before tensorflow-datasets can import them.
  for name in FILES:
    check(folder / name)
  # Read the metadata. Catch all errors: tensorflow-datasets and protobuf raise
  # errors of many classes for values of unexpected types.
  try:
    builder = tfds.builder_from_directory(folder)
    sizes = [split.num_examples for split in builder.info.splits.values()]
    is_complete = (
      bool(sizes)
      and builder.info.file_format is not None
      and isinstance(builder.info.features, tfds.features.FeaturesDict)
    )
  except Exception as error:
    reason = str(error).partition("\n")[0] or type(error).__name__
    raise _error(folder / " and ".join(FILES), reason) from None
  if not is_complete:
    raise _error(
      folder / " and ".join(FILES), "they name no splits, features or format"
    )
  return builder


def check(path: Path) -> None:
  """Refuses a file that would make tensorflow-datasets import foreign code.

  Raises:
    UserError: for broken JSON, or a class that is not a feature of
      tensorflow-datasets, at any depth.
  """
  try:
    # Refuse a file that is larger than any real one: it could fill the memory.
    is_small = path.stat().st_size <= MAX_BYTES
    content = json.loads(path.read_bytes()) if is_small else None
    names = _class_names(content) if isinstance(content, dict) else None
  except (ValueError, RecursionError, OSError) as error:  # Also not UTF-8.
    raise _error(path, str(error)) from None
  if names is None:
    raise _error(path, f"it holds no dictionary of at most {MAX_BYTES:,} bytes")
  # Compare the classes with the features of tensorflow-datasets.
  foreign = sorted(names - feature_classes())
  if foreign:
    raise _error(
      path,
      f"it names the class {foreign[0]!r}, which is not a feature "
      "of tensorflow-datasets and would be imported",
    )


def feature_classes() -> frozenset[str]:
  """Returns the stored names of all features of tensorflow-datasets."""
  base = tfds.features.FeatureConnector
  return frozenset(
    name
    for value in vars(tfds.features).values()
    if isinstance(value, type) and issubclass(value, base)
    for name in (
      f"{value.__module__}.{value.__name__}",
      *vars(value).get("ALIASES", ()),
    )
  )


def _class_names(node: Any) -> set[str]:
  """Returns all class names at any depth, including those in nested JSON."""
  if isinstance(node, list):
    return set().union(*map(_class_names, node))
  if not isinstance(node, dict):
    return set()
  keys = [*CLASS_KEYS, *(["type"] if "content" in node else [])]
  # Only strings are class names; a feature called "type" has a dictionary here.
  names = {node[key] for key in keys if isinstance(node.get(key), str)}
  # Descend into the values, and parse strings of nested JSON.
  for key, value in node.items():
    if key in JSON_KEYS and isinstance(value, str):
      try:
        value = json.loads(value)
      except ValueError:
        continue  # Plain text, which tensorflow-datasets refuses too.
    names |= _class_names(value)
  return names


def _error(path: Path, reason: str) -> UserError:
  """Returns the error for a file that cannot be used, with the remedy."""
  return UserError(
    f"{path} cannot be read ({reason}): give a directory that "
    "tensorflow-datasets has prepared, or prepare it again with "
    'file_format="array_record".'
  )
