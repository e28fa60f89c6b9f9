"""Tasks of a user's own examples, given in Python."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxformers.data.engine import digests, encodings
from jaxformers.data.engine.packed import Packed, pack
from jaxformers.data.images.splits import Images
from jaxformers.errors import UserError
from jaxformers.tasks import baselines
from jaxformers.tasks.inputs import TOKENIZERS
from jaxformers.tasks.splits import hold_out
from jaxformers.tasks.task import Task

NAME = "arrays"  # Name of the task in configs and results.
# Share of the training examples that are held out to choose the checkpoint.
HELD_OUT = 0.1
Examples = Any  # (inputs, labels), or pairs of an input and its label.


@dataclasses.dataclass(frozen=True)
class Numbers:
  """A split of sequences of real numbers, all of one length.

  Attributes:
    values: float32 [count, n].
    labels: int32 [count].
    keys: uint64 [count].
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
    """Returns how values become inputs, as plain JSON."""
    return {"first_id": 0, "end_id": 0, "scale": None}

  def select(self, indices: Any) -> Numbers:
    """Returns a split of some examples, in their order."""
    fields = ("values", "labels", "keys")
    return Numbers(*(getattr(self, name)[indices] for name in fields))

  def batch(
    self,
    indices: np.ndarray,
    max_len: int,
    key: tuple[int, int, int] | None = None,
  ) -> dict[str, np.ndarray]:
    """Returns a batch of examples: inputs [b, n] and targets [b].

    Args:
      indices: integers [b] within the split.
      max_len: greatest number of values of a row.
      key: ignored; numbers are not augmented.
    """
    del key
    inputs = self.values[indices][:, :max_len]
    return {"inputs": inputs, "targets": self.labels[indices]}


def from_arrays(
  train: Examples,
  validation: Examples = None,
  test: Examples = None,
  *,
  classes: Sequence[str] = (),
  vocab_size: int = 0,
  max_len: int = 0,
) -> Task:
  """Returns a classification task of examples that are in memory.

  Args:
    train: (inputs, labels), or any finite iterable of pairs of an input and
      its label. Inputs are texts, which are read as bytes; or sequences of ids
      from 1 on, of equal or unequal lengths, 0 is padding at their ends; or
      numbers float32 [count, n]; or images uint8 [count, height, width, 3].
      Labels are integers from 0 on, or names of classes.
    validation: examples that choose the checkpoint; None to hold out a tenth of
      `train`. Equal inputs are held out together.
    test: examples that are scored at the end; None for those of `validation`.
      The results say then that the test split chose the checkpoint.
    classes: names of the classes, in the order of their numbers; () to take
      them from the labels of `train`. Without names, predictions are numbers.
    vocab_size: number of ids; 0 for one more than the greatest.
    max_len: greatest number of tokens; 0 for the longest example.

  Raises:
    UserError: for inputs or labels of another kind.
  """
  parts = {"train": train, "validation": validation, "test": test}
  pairs = {
    name: _pairs(examples, name)
    for name, examples in parts.items()
    if examples is not None
  }
  classes = tuple(classes) or _classes(pairs["train"][1])
  count = len(classes) or 1 + int(np.max(pairs["train"][1]))
  labels = {
    name: _numbers(y, classes, count, name) for name, (_, y) in pairs.items()
  }
  kind, splits = _splits({n: x for n, (x, _) in pairs.items()}, labels)
  if validation is None:
    held = max(round(HELD_OUT * len(splits["train"])), 1)
    splits |= hold_out(splits["train"], held)
  has_test = test is not None
  splits = {**splits, "test": splits["test" if has_test else "validation"]}
  # Sizes of the inputs.
  longest = max(int(split.lengths().max()) for split in splits.values())
  first = splits["train"]
  vocabulary: tuple[str, ...] = ()
  if kind == "texts":
    vocabulary = encodings.BYTES
  elif kind == "ids":
    largest = (int(split.tokens.max(initial=0)) for split in splits.values())
    seen = 1 + max(largest)
    if 0 < vocab_size < seen:
      raise UserError(
        f"vocab_size={vocab_size}, but the inputs have ids up to {seen - 1}: "
        f"give at least {seen}."
      )
    vocabulary = ("<pad>", *(str(i) for i in range(1, vocab_size or seen)))
  image = first.shape if kind == "images" else ()
  return Task(
    name=NAME,
    protocol=_protocol(classes, count),
    splits=splits,
    selection="validation" if has_test else "test",
    num_classes=count,
    classes=classes,
    trivial=baselines.MAJORITY,
    info={"source": "examples given in Python"},
    vocabulary=vocabulary,
    max_len=0 if image else max_len or longest,
    tokenizer="bytes" if kind == "texts" else "",
    image=image,
  )


def _protocol(classes: tuple[str, ...], count: int) -> str:
  """Returns the name of a protocol, which tells other classes apart."""
  names = hashlib.sha256(json.dumps(classes).encode()).hexdigest()[:8]
  return f"own examples, {count} classes" + (f" {names}" if classes else "")


def _pairs(examples: Examples, name: str) -> tuple[Any, Any]:
  """Returns inputs and labels of examples in either form."""
  is_two = isinstance(examples, tuple) and len(examples) == 2
  if not is_two:
    pairs = list(examples) if isinstance(examples, Iterable) else []
    if not pairs or any(len(pair) != 2 for pair in pairs):
      raise UserError(
        f"{name} is {type(examples).__name__}: give (inputs, labels), or pairs "
        "of an input and its label."
      )
    examples = tuple(zip(*pairs, strict=True))
  inputs, labels = examples
  if len(inputs) != len(labels) or not len(inputs):
    raise UserError(
      f"{name} has {len(inputs)} inputs and {len(labels)} labels: give one "
      "label for every input, and at least one of both."
    )
  return inputs, labels


def _classes(labels: Sequence[Any]) -> tuple[str, ...]:
  """Returns the names of all classes in order; () for numbers."""
  return tuple(sorted({*labels})) if isinstance(labels[0], str) else ()


def _numbers(
  labels: Sequence[Any], classes: tuple[str, ...], count: int, name: str
) -> np.ndarray:
  """Returns labels as numbers of `count` classes, int32."""
  if isinstance(labels[0], str):
    table = {label: number for number, label in enumerate(classes)}
    if unknown := sorted({*labels} - table.keys()):
      raise UserError(
        f"{name} has the label {unknown[0]!r}, which is not one of the classes "
        f"{', '.join(classes)}: correct it, or name all classes."
      )
    return np.array([table[label] for label in labels], np.int32)
  numbers = np.asarray(labels)
  is_integer = np.issubdtype(numbers.dtype, np.integer) and numbers.ndim == 1
  if not is_integer or numbers.min() < 0 or numbers.max() >= count:
    raise UserError(
      f"{name} has labels {numbers.dtype} {list(numbers.shape)}: give integers "
      f"from 0 to {count - 1}, or names of classes."
    )
  return numbers.astype(np.int32)


def _splits(
  inputs: Mapping[str, Any], labels: Mapping[str, np.ndarray]
) -> tuple[str, dict[str, Any]]:
  """Returns the kind of the inputs, and the splits.

  Kinds are "texts", "ids", "numbers" and "images".
  """
  first = inputs["train"][0]
  if isinstance(first, str):
    tokenize = TOKENIZERS["bytes"](encodings.BYTES, "")
    # Empty texts have one token, so that every example has something to read.
    rows = {
      name: [tokenize(text or " ") for text in texts]
      for name, texts in inputs.items()
    }
    return "texts", {n: _packed(rows[n], labels[n]) for n in rows}
  if np.ndim(first) == 3:
    pixels = {name: np.stack(x) for name, x in inputs.items()}
    return "images", {n: _images(x, labels[n]) for n, x in pixels.items()}
  if np.issubdtype(np.asarray(first).dtype, np.floating):
    return "numbers", {n: _of_numbers(x, labels[n]) for n, x in inputs.items()}
  rows = {
    name: [np.trim_zeros(np.asarray(row), "b") for row in rows]
    for name, rows in inputs.items()
  }
  for name, sequences in rows.items():
    for row in sequences:
      is_ids = row.ndim == 1 and (not row.size or row.min() > 0)
      if not is_ids or not np.issubdtype(row.dtype, np.integer):
        raise UserError(
          f"{name} has an input {row.dtype} {list(row.shape)} that is no "
          "sequence of ids from 1 on, with 0 at its end alone: give such, "
          "texts, numbers float32 [count, n] (also for grey pixels), or images "
          "uint8 [count, height, width, 3]."
        )
  return "ids", {
    name: _packed([row.astype(np.int32) for row in sequences], labels[name])
    for name, sequences in rows.items()
  }


def _of_numbers(rows: Any, labels: np.ndarray) -> Numbers:
  """Returns a split of sequences of numbers; they have one length."""
  shapes = {np.shape(row) for row in rows}
  if len(shapes) > 1 or len(next(iter(shapes))) != 1:
    raise UserError(
      f"Inputs have the shapes {', '.join(map(str, sorted(shapes)))}: give "
      "numbers float32 [count, n], all of one length."
    )
  values = np.asarray(rows, np.float32)
  return Numbers(values, labels, _keys(values))


def _packed(rows: list[np.ndarray], labels: np.ndarray) -> Packed:
  return dataclasses.replace(pack(rows, labels), keys=_keys(rows))


def _keys(rows: Sequence[np.ndarray]) -> np.ndarray:
  """Returns hashes of inputs, by which they are held out, uint64 [count]."""
  digests_of_rows = (
    hashlib.blake2b(np.ascontiguousarray(row).tobytes(), digest_size=8)
    for row in rows
  )
  return np.array(
    [int.from_bytes(each.digest(), "big") for each in digests_of_rows],
    np.uint64,
  )


def _images(pixels: np.ndarray, labels: np.ndarray) -> Images:
  """Returns images of one size, normalised by ImageNet's statistics."""
  if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[-1] != 3:
    raise UserError(
      f"Images {pixels.dtype} {list(pixels.shape)}: give uint8 [count, height, "
      "width, 3]. Grey images are numbers float32 [count, height * width], or "
      "have their channel three times."
    )
  packed = _packed([image.ravel() for image in pixels], labels)
  return Images(packed, pixels.shape[1:])
