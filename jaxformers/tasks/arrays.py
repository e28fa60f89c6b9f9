"""Classification tasks of a user's own examples, which are passed in Python.

An example has one class, or a class for each token.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import numbers as numbers_abc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxformers.data.engine import digests, encodings, series
from jaxformers.data.engine.packed import Packed, pack
from jaxformers.data.engine.split import Key, Split
from jaxformers.data.images.splits import Images
from jaxformers.foundations import ranges
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Count, Length
from jaxformers.foundations.registry import check_keywords
from jaxformers.tasks import baselines, rows, token_labels
from jaxformers.tasks.inputs import TOKENIZERS
from jaxformers.tasks.splits import hold_out
from jaxformers.tasks.task import Task
from jaxformers.tasks.token_labels import TokenLabels

NAME = "arrays"  # Name of the task in configs and results.
# Share of the training examples that are held out to choose the checkpoint.
HELD_OUT = 0.1
# Number of texts per example, by the kind of the inputs.
TEXTS = {"texts": 1, "pairs": 2}
MOST_IDS = 1 << 24  # A larger number is an identifier, not an id of a token.
MAX_CLASSES = 1 << 16  # A larger number is an identifier, not a class.
Examples = Any  # Inputs and labels in any form that `rows.read_columns` reads.


@dataclasses.dataclass(frozen=True)
class Numbers(Split):
  """Split of sequences of real numbers, all of the same length.

  Attributes:
    values: sequences, float32 [count, n].
    labels: classes, int32 [count].
    keys: identifiers of the examples, uint64 [count].
  """

  values: np.ndarray
  labels: np.ndarray
  keys: np.ndarray

  def __len__(self) -> int:
    return len(self.labels)

  def lengths(self) -> np.ndarray:
    """Returns the number of values of every example, int64 [count]."""
    return np.full(len(self), self.values.shape[1], np.int64)

  def digest(self) -> str:
    """Returns the digest of all values and labels."""
    content = digests.of_array(self.values)
    return digests.of_parts(content, self.labels, self.keys)

  def reading(self) -> dict[str, Any]:
    """Returns the settings that turn values into inputs, as plain JSON."""
    return {"first_id": 0, "end_id": 0, "scale": None}

  def select(self, indices: Any) -> Numbers:
    """Returns the split of the examples at `indices`, in this order."""
    fields = ("values", "labels", "keys")
    return Numbers(*(getattr(self, name)[indices] for name in fields))

  def batch(
    self,
    indices: np.ndarray,
    max_len: int,
    key: Key | None = None,
  ) -> dict[str, np.ndarray]:
    """Returns a batch of examples: inputs [b, n] and targets [b].

    Args:
      indices: numbers of the examples in the split, integers [b].
      max_len: largest number of values of a row; longer rows are cut.
      key: ignored, because numbers are not augmented.
    """
    del key
    inputs = self.values[indices][:, :max_len]
    return {"inputs": inputs, "targets": self.labels[indices]}


@check_keywords
def from_arrays(
  train: Examples,
  validation: Examples = None,
  test: Examples = None,
  *,
  classes: Sequence[str] = (),
  vocab_size: Count = 0,
  max_len: Length = 0,
) -> Task:
  """Returns a classification task of examples in memory or in a file.

  Inputs are one of these kinds:

  - texts, which are read as bytes;
  - pairs of texts, for a model of pairs;
  - sequences of ids from 1 on, of equal or different lengths, with 0 as padding
    at the end;
  - numbers, float32 [count, n];
  - time series of several channels, float32 [n, channels] each, of equal or
    different lengths, with NaN for missing numbers;
  - images, uint8 [count, height, width, 3].

  Labels are integers from 0 on, or names of classes. For a label per token,
  give a sequence of labels for each sequence of ids or numbers; None or a
  negative number marks a token without a label.

  Args:
    train: (inputs, labels); or a finite iterable of pairs of an input and its
      label; or a table or rows with columns such as text and label; or the path
      of a .csv or .tsv file. See `rows`.
    validation: examples that choose the checkpoint; None to hold out a tenth of
      `train`. Equal inputs are held out together.
    test: examples that are scored at the end; None to use `validation`. The
      results then state that the test split chose the checkpoint.
    classes: names of the classes, in the order of their numbers; () to take the
      names from the labels of `train`. Without names, predictions are numbers.
    vocab_size: number of ids; 0 for the largest id plus one.
    max_len: largest number of tokens; 0 for the length of the longest example.
      Training cuts longer examples; `predict` cuts texts only.

  Raises:
    UserError: for inputs or labels of another kind.
  """
  # Read inputs and labels of every split.
  ranges.check(from_arrays, {"vocab_size": vocab_size, "max_len": max_len})
  parts = {"train": train, "validation": validation, "test": test}
  columns = {
    name: rows.read_columns(examples, name)
    for name, examples in parts.items()
    if examples is not None
  }
  # Turn labels into numbers, and inputs into splits.
  inputs = {name: each.inputs for name, each in columns.items()}
  per_token = _has_token_labels(columns["train"])
  if per_token:
    kind, splits, classes, count = _label_tokens(inputs, columns, classes)
  else:
    labels, classes, count = _read_labels(columns, classes)
    kind, splits = _splits(inputs, labels)
  if vocab_size and kind != "ids":
    raise UserError(
      f"vocab_size={vocab_size} is a number of ids, and the inputs are {kind}: "
      "leave it out."
    )
  if max_len and kind == "images":
    raise UserError(
      f"max_len={max_len} cuts sequences, and the inputs are images: leave it "
      "out."
    )
  vocabulary = _vocabulary(kind, splits, vocab_size)
  splits = _complete(splits)
  # Compute the sizes of the inputs.
  longest = max(int(split.lengths().max()) for split in splits.values())
  image = splits["train"].shape if kind == "images" else ()
  most = max_len or longest
  if kind == "numbers":  # All have the same length: there is no padding.
    most = min(most, longest)
  if kind == "series":
    for name, split in splits.items():
      series.require_numbers(getattr(split, "inputs", split), name, most)
  return Task(
    name=NAME,
    protocol=_protocol(classes, count),
    splits=splits,
    selection="validation" if test is not None else "test",
    num_classes=count,
    classes=classes,
    trivial=token_labels.RULES if per_token else baselines.MAJORITY,
    objective=token_labels.OBJECTIVE if per_token else "classification",
    info={"source": "examples given in Python"},
    vocabulary=vocabulary,
    max_len=0 if image else most,
    channels=series.count_channels(splits["train"]),
    num_inputs=TEXTS.get(kind, 1),
    tokenizer="bytes" if kind in TEXTS else "",
    image=image,
  )


def _complete(splits: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the splits with the missing validation and test splits added.

  Validation is held out of train; test is equal to validation.
  """
  complete = {**splits}
  if "validation" not in splits:
    held = max(round(HELD_OUT * len(splits["train"])), 1)
    complete |= hold_out(splits["train"], held)
  complete.setdefault("test", complete["validation"])
  return complete


def _read_labels(
  columns: Mapping[str, rows.Columns], classes: Sequence[str]
) -> tuple[dict[str, Any], tuple[str, ...], int]:
  """Returns the labels of each split as numbers, the classes, and their number.

  Args:
    columns: inputs and labels by split.
    classes: names of the classes; () to take them from the labels of "train".
  """
  # Take the classes from the argument, from the table, or from the labels.
  labelled = columns["train"]
  names = tuple(classes) or labelled.classes or _classes(labelled.labels)
  count = len(names) or 1 + _greatest(labelled.labels)
  for name, each in columns.items():
    if not classes and each.classes and each.classes != names:
      raise UserError(
        f"{name} has the classes {', '.join(each.classes)}, and train has "
        f"{', '.join(names) or 'numbers'}: give both the same classes in the "
        "same order."
      )
  # If the labels of train are names, integers of another file are names, too.
  are_names = bool(names) and not classes and not labelled.classes
  # Turn the labels of every split into numbers.
  labels = {
    name: _numbers(
      _as_names(each.labels) if are_names else each.labels, names, count, name
    )
    for name, each in columns.items()
  }
  if not classes:
    _refuse_swapped(labelled)
  return labels, names, count


def _as_names(labels: Sequence[Any]) -> list[Any]:
  """Returns labels with their integers as text."""
  return [str(label) if _is_integer(label) else label for label in labels]


def _is_integer(label: Any) -> bool:
  """Returns True for an integer, and False for a truth value."""
  is_flag = isinstance(label, bool | np.bool_)
  return isinstance(label, numbers_abc.Integral) and not is_flag


def _label_tokens(
  inputs: Mapping[str, Any],
  columns: Mapping[str, rows.Columns],
  classes: Sequence[str],
) -> tuple[str, dict[str, Any], tuple[str, ...], int]:
  """Returns the kind of the inputs, the splits, the classes, and their number.

  Args:
    inputs: sequences of ids or numbers, by split.
    columns: inputs and labels by split; each label is a sequence of labels.
    classes: names of the classes; () to take them from the labels of "train".

  Raises:
    UserError: for labels that are not one for each token.
  """
  labels = {name: _label_rows(each, name) for name, each in columns.items()}
  # Take the classes from the labels of all tokens of train.
  every = itertools.chain.from_iterable(labels["train"])
  flat = [label for label in every if not _is_none(label)]
  if not flat:
    raise UserError("train has no label at any token: give at least one.")
  names = tuple(classes) or columns["train"].classes or _classes(flat)
  count = len(names) or 1 + _greatest(flat)
  unlabelled = {n: np.zeros(len(each), np.int32) for n, each in labels.items()}
  kind, splits = _splits(inputs, unlabelled)
  if kind not in ("ids", "numbers", "series"):
    raise UserError(
      f"train has a sequence of labels for each of its {kind}: give sequences "
      "of ids or numbers, which have one label per token."
    )

  def label(name: str, split: Any) -> TokenLabels:
    # Ids have lost the padding at their end, and so do their labels.
    listed = zip(labels[name], split.lengths(), strict=True)
    stored = [
      _stored(row[:length], names, count, f"{name}[{k}]")
      for k, (row, length) in enumerate(listed)
    ]
    return TokenLabels(split, pack(stored, unlabelled[name]))

  labelled = {name: label(name, split) for name, split in splits.items()}
  return kind, labelled, names, count


def _has_token_labels(train: rows.Columns) -> bool:
  """Returns True if each label is a sequence, as each input is.

  Raises:
    UserError: for labels that are arrays, but whose inputs are no sequences.
  """
  if not np.ndim(_as_array(train.labels[0])):
    return False
  shape = np.shape(_as_array(train.inputs[0]))
  if len(shape) not in (1, 2) or isinstance(train.inputs[0][0], str):
    raise UserError(
      f"train has the label {rows.show(train.labels[0])} at 0, which is no "
      "single class: flatten the labels, or give sequences of ids or numbers "
      "with one label per token."
    )
  return True


def _is_none(label: Any) -> bool:
  """Returns True for the label of a token without a class."""
  is_number = isinstance(label, numbers_abc.Real)
  return label is None or (is_number and label < 0)


def _label_rows(columns: rows.Columns, name: str) -> list[list[Any]]:
  """Returns the labels of the tokens of each sequence.

  Raises:
    UserError: for a sequence with more or fewer labels than tokens.
  """
  listed = []
  pairs = zip(columns.inputs, columns.labels, strict=True)
  for k, (tokens, labels) in enumerate(pairs):
    is_row = isinstance(labels, list | tuple | np.ndarray)
    row = list(labels) if is_row else []
    if isinstance(tokens, str) or len(row) != len(tokens) or not is_row:
      single = f"the label {rows.show(labels)}"
      shown = f"{len(row)} labels" if is_row else single
      raise UserError(
        f"{name} has {shown} for the input {rows.show(tokens)} at {k}: give "
        "one label for each id or number, and None where there is none."
      )
    listed.append(row)
  return listed


def _stored(
  row: list[Any], names: tuple[str, ...], count: int, name: str
) -> np.ndarray:
  """Returns the classes of tokens plus one, and 0 where there is none."""
  is_labelled = np.array([not _is_none(label) for label in row])
  # Give tokens without a class any class, so that messages name the token.
  filler: Any = names[0] if names else 0
  filled = [filler if _is_none(label) else label for label in row]
  numbers = 1 + _numbers(filled, names, count, name)
  return np.where(is_labelled, numbers, token_labels.NO_LABEL)


def _vocabulary(
  kind: str, splits: Mapping[str, Any], vocab_size: int
) -> tuple[str, ...]:
  """Returns the meanings of ids; () for numbers and images.

  Args:
    kind: kind of the inputs.
    splits: packed inputs by split.
    vocab_size: number of ids; 0 for the largest id plus one.

  Raises:
    UserError: for an id of `vocab_size` or more.
  """
  # Texts are bytes; numbers and images have no ids.
  if kind in TEXTS:
    return encodings.BYTES
  if kind != "ids":
    return ()
  # Name every id by its number.
  packed = (getattr(split, "inputs", split) for split in splits.values())
  largest = (int(split.tokens.max(initial=0)) for split in packed)
  seen = 1 + max(largest)
  if 0 < vocab_size < seen:
    raise UserError(
      f"vocab_size={vocab_size}, but the inputs have ids up to {seen - 1}: "
      f"give at least {seen}."
    )
  return ("<pad>", *(str(i) for i in range(1, vocab_size or seen)))


def _protocol(classes: tuple[str, ...], count: int) -> str:
  """Returns the name of the protocol, with a digest of the names of classes."""
  names = hashlib.sha256(json.dumps(classes).encode()).hexdigest()[:8]
  return f"own examples, {count} classes" + (f" {names}" if classes else "")


def _refuse_swapped(train: rows.Columns) -> None:
  """Refuses labels that look like inputs, because the two may be swapped.

  Raises:
    UserError: if there are more than two different labels, and either no label
      occurs twice, or the different labels outnumber both the different inputs
      and half of the examples.
  """
  # Count different labels and inputs; only scalars can be swapped with labels.
  labels = {repr(label) for label in train.labels}
  is_scalar = np.ndim(train.inputs[0]) == 0
  inputs = {repr(each) for each in train.inputs} if is_scalar else labels
  count = len(train.labels)
  is_swapped = len(inputs) < len(labels) and 2 * len(labels) > count
  if len(labels) > 2 and (is_swapped or len(labels) == count):
    raise UserError(
      f"train has {len(labels):,} different labels for {count:,} examples, "
      f"such as {rows.show(train.labels[0])}: give (inputs, labels) in this "
      "order. If the labels are right, name all of them by classes=."
    )


def _classes(labels: Sequence[Any]) -> tuple[str, ...]:
  """Returns the sorted names of all classes; () for labels that are numbers."""
  if not isinstance(labels[0], str):
    return ()
  return tuple(sorted({label for label in labels if isinstance(label, str)}))


def _greatest(labels: Any) -> int:
  """Returns the largest integer label, at most `MAX_CLASSES` - 1, or else 0."""
  integers = (y for y in labels if isinstance(y, numbers_abc.Integral))
  return min(int(max(integers, default=0)), MAX_CLASSES - 1)


def _numbers(
  labels: Sequence[Any], classes: tuple[str, ...], count: int, name: str
) -> np.ndarray:
  """Returns labels as class numbers below `count`, int32 [n].

  Raises:
    UserError: for a label that is neither the number nor the name of a class.
  """
  has_names = any(isinstance(label, str) for label in labels)
  table = {label: number for number, label in enumerate(classes)}
  # Say in the message which numbers are allowed: "0 on", or "0 to 9".
  greatest = "on"
  if classes or name != "train":
    greatest = f"to {count - 1}"
  # Check numbers that are not finite first: the message should show them.
  order = np.arange(len(labels))
  if isinstance(labels, np.ndarray) and labels.dtype.kind == "f":
    order = np.argsort(np.isfinite(labels), kind="stable")
  # Require a known name, or an integer in range.
  for k in order.tolist():
    label = labels[k]
    if has_names and isinstance(label, str):
      if label in table and label:
        continue
      raise UserError(
        f"{name} has the label {label!r} at {k}, which is not one of the "
        f"classes {', '.join(classes)}: correct it, or name all classes."
      )
    if has_names or not _is_integer(label) or not 0 <= label < count:
      raise UserError(
        f"{name} has labels {_as_array(label).dtype}, such as "
        f"{rows.show(label)} at {k}: give integers from 0 {greatest}, or names "
        "of classes, to all examples."
      )
  return np.array(
    [table[label] if has_names else label for label in labels], np.int32
  )


def _splits(
  inputs: Mapping[str, Any], labels: Mapping[str, np.ndarray]
) -> tuple[str, dict[str, Any]]:
  """Returns the kind of the inputs, and the splits.

  The kinds are "texts", "pairs", "ids", "numbers", "series" and "images". The
  first input of train determines the kind of all inputs.
  """
  # Texts, and pairs of texts.
  first = inputs["train"][0]
  is_pair = isinstance(first, tuple | list) and len(first) == 2
  if isinstance(first, str) or (is_pair and isinstance(first[0], str)):
    count = 2 if is_pair else 1
    kind = next(name for name, parts in TEXTS.items() if parts == count)
    texts = {name: _texts(x, name, count) for name, x in inputs.items()}
    return kind, {n: _packed(x, labels[n], count) for n, x in texts.items()}
  arrays = {name: _arrays(x, name) for name, x in inputs.items()}
  # Images have three axes.
  example = arrays["train"][0]
  if example.ndim == 3:
    _require_one_shape(arrays, "images uint8 [count, height, width, 3]")
    pixels = {name: np.stack(x) for name, x in arrays.items()}
    return "images", {n: _images(x, labels[n]) for n, x in pixels.items()}
  if example.ndim == 2 and example.dtype.kind == "f":
    checked = {
      name: _series(x, name, example.shape[1]) for name, x in arrays.items()
    }
    return "series", {
      n: series.from_arrays(x, labels[n], _keys(map(_bytes, x)))
      for n, x in checked.items()
    }
  # Sequences of real numbers become `Numbers`; integers are ids.
  if example.dtype.kind == "f":
    _require_one_shape(arrays, "numbers float32 [count, n]")
    numbers = {name: _floats(x, name) for name, x in arrays.items()}
    return "numbers", {
      n: Numbers(x, labels[n], _keys(map(_bytes, x)))
      for n, x in numbers.items()
    }
  ids = {name: _ids(x, name) for name, x in arrays.items()}
  return "ids", {n: _packed(x, labels[n]) for n, x in ids.items()}


def _texts(inputs: Sequence[Any], name: str, count: int) -> list[np.ndarray]:
  """Returns the ids of all texts; the two texts of a pair are adjacent.

  Args:
    inputs: texts, or pairs of texts.
    name: name of the split, for messages.
    count: number of texts per input.
  """
  tokenize = TOKENIZERS["bytes"](encodings.BYTES, "")
  ids = []
  for k, each in enumerate(inputs):
    texts = [each] if count == 1 else each
    is_row = isinstance(texts, tuple | list) and len(texts) == count
    if not is_row or not all(isinstance(text, str) for text in texts):
      what = "a text" if count == 1 else "a pair of texts"
      raise UserError(
        f"{name} has the input {rows.show(each)} at {k}, which is not {what} "
        "like the first one: correct it, or remove the example."
      )
    # Encode an empty text as one space: every example needs a token.
    ids += [tokenize(text or " ") for text in texts]
  return ids


def _arrays(inputs: Sequence[Any], name: str) -> list[np.ndarray]:
  """Returns inputs as arrays of numbers.

  Raises:
    UserError: for an input that is not an array of numbers, or that is empty.
  """
  arrays = []
  for k, each in enumerate(inputs):
    array = _as_array(each)
    is_read = array.ndim and array.size and array.dtype.kind in "iuf"
    if not is_read:
      problem = "has no tokens" if np.shape(array) == (0,) else "is not read"
      raise UserError(
        f"{name} has the input {rows.show(each)} at {k}, which {problem}: give "
        "texts, sequences of ids from 1 on, numbers float32 [count, n], time "
        "series float32 [n, channels], or images uint8 [count, height, width, "
        "3]."
      )
    arrays.append(array)
  return arrays


def _as_array(value: Any) -> np.ndarray:
  """Returns a value as an array; an array of objects if it is ragged."""
  try:
    return np.asarray(value)
  except (TypeError, ValueError):
    return np.zeros((), object)


def _require_one_shape(
  arrays: Mapping[str, list[np.ndarray]], expected: str
) -> None:
  """Raises UserError if the inputs of all splits differ in shape."""
  shapes = {row.shape for split in arrays.values() for row in split}
  if len(shapes) > 1 or ("float" in expected and len(min(shapes)) != 1):
    raise UserError(
      f"Inputs have the shapes {', '.join(map(str, sorted(shapes)))}: give "
      f"{expected}, all of one length or size."
    )


def _floats(arrays: list[np.ndarray], name: str) -> np.ndarray:
  """Returns sequences of finite numbers, float32 [count, n]."""
  values = np.asarray(arrays, np.float32)
  if not np.isfinite(values).all():
    k = int((~np.isfinite(values)).any(1).argmax())
    raise UserError(
      f"{name} has an input with numbers that are not finite at {k}: correct "
      "it, or remove the example."
    )
  return values


def _series(
  arrays: list[np.ndarray], name: str, channels: int
) -> list[np.ndarray]:
  """Returns time series, float32 [length, channels] each.

  Raises:
    UserError: for an array of another shape or type, an infinite number, or a
      series without any number.
  """
  for k, array in enumerate(arrays):
    is_series = array.ndim == 2 and array.dtype.kind == "f"
    if not is_series or array.shape[1] != channels:
      raise UserError(
        f"{name} has an input {array.dtype} {list(array.shape)} at {k}: give "
        f"every time series as numbers float32 [n, {channels}], like the first "
        "one of train."
      )
    if series.has_no_numbers(array):
      raise UserError(
        f"{name} has an input without numbers, or with infinite ones, at {k}: "
        "correct it, or remove the example. NaN stands for a missing number."
      )
  return [array.astype(np.float32) for array in arrays]


def _ids(arrays: list[np.ndarray], name: str) -> list[np.ndarray]:
  """Returns sequences of ids without their padding, int32 [n] each.

  Raises:
    UserError: for an array that is not a sequence of ids from 1 on.
  """
  sequences = []
  for k, row in enumerate(arrays):
    # Remove the padding at the end, and check the ids.
    ids = np.trim_zeros(row, "b") if row.ndim == 1 else row
    is_ids = row.ndim == 1 and row.dtype.kind in "iu"
    if not is_ids or not ids.size or ids.min() <= 0:
      problem = "has no tokens" if is_ids and not ids.size else "is no sequence"
      raise UserError(
        f"{name} has an input {row.dtype} {list(row.shape)} at {k} that "
        f"{problem} of ids from 1 on, with 0 only at its end: give sequences "
        "of ids, texts, numbers float32 [count, n] (also for grey pixels), or "
        "images uint8 [count, height, width, 3]."
      )
    if ids.max() >= MOST_IDS:
      raise UserError(
        f"{name} has the id {ids.max()} at {k}: number the tokens from 1 on, "
        f"below {MOST_IDS:,}, since each id has a row in the embedding."
      )
    sequences.append(ids.astype(np.int32))
  return sequences


def _packed(
  sequences: list[np.ndarray], labels: np.ndarray, num_inputs: int = 1
) -> Packed:
  """Packs sequences; the key of an example is a hash of its sequences."""
  packed = pack(sequences, labels, num_inputs=num_inputs)
  parts = [sequences[k::num_inputs] for k in range(num_inputs)]
  joined = (b"\0".join(map(_bytes, row)) for row in zip(*parts, strict=True))
  return dataclasses.replace(packed, keys=_keys(joined))


def _bytes(row: np.ndarray) -> bytes:
  return np.ascontiguousarray(row).tobytes()


def _keys(contents: Iterable[bytes]) -> np.ndarray:
  """Returns hashes of inputs, the keys of the examples, uint64 [count]."""
  return np.array(
    [encodings.hash_key(content) for content in contents], np.uint64
  )


def _images(pixels: np.ndarray, labels: np.ndarray) -> Images:
  """Returns images of one size, normalised by ImageNet's statistics."""
  if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[-1] != 3:
    raise UserError(
      f"Images {pixels.dtype} {list(pixels.shape)}: give uint8 [count, height, "
      "width, 3]. Give grey images as numbers float32 [count, height * width], "
      "or repeat their channel three times."
    )
  packed = _packed([image.ravel() for image in pixels], labels)
  return Images(packed, pixels.shape[1:])
