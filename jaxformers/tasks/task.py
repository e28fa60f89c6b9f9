"""Record of a task: its splits, its sizes, and where its data come from."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import Registry
from jaxformers.tasks.inputs import Inputs

TASKS: Registry = Registry("task", is_open=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """Splits and sizes of a task under a named protocol.

  Attributes:
    name: name in `TASKS`.
    protocol: name of the protocol; scores compare within one protocol only.
    splits: `train`, `validation` and `test`: each a `Split`, such as `Packed`
      sequences, `Images`, `Scenes` or `Segments` of text.
    num_classes: number of classes; 0 for language models, and for values.
    trivial: baselines by name: functions of the task that return a score on
      test, in the metric of the objective; see `tasks.baselines`.
    info: where the data come from, as in `info.json`.
    selection: name of the split that selects the checkpoint: "validation", or
      "test" under the published protocols that select on it.
    vocabulary: meaning of each id; empty if tokens are real numbers. Id 0 is
      padding, which is never attended to.
    max_len: length that sequences are cut to; 0 for images.
    padded_len: number that the pool "padded_mean" divides by; 0 for max_len.
    num_inputs: number of sequences of an example: 2 for pairs.
    separator: id that ends the first of two parts of a sequence; 0 for
      sequences of one part.
    tokenizer: how texts become ids: a name in `inputs.TOKENIZERS`; "" if inputs
      are not text.
    tokenizer_json: tokenizer of word pieces or byte pairs in the format of
      `tokenizers`; "" for other tokens.
    objective: "classification", "language_model", "segmentation", "spans",
      "sentences", or one of pre-training: see `reconstruction`.
    image: (height, width, channels), or () for sequences.
    classes: names of the classes of a classification.
  """

  name: str
  protocol: str
  splits: Mapping[str, Any]
  num_classes: int
  trivial: Mapping[str, Callable[[Task], float]]
  info: Mapping[str, Any]
  selection: str = "validation"
  vocabulary: tuple[str, ...] = ()
  max_len: int = 0
  padded_len: int = 0
  num_inputs: int = 1
  separator: int = 0
  tokenizer: str = ""
  tokenizer_json: str = ""
  objective: str = "classification"
  image: tuple[int, ...] = ()
  classes: tuple[str, ...] = ()

  @property
  def vocab_size(self) -> int:
    """Number of ids; 0 if tokens are real numbers."""
    return len(self.vocabulary)

  def sizes(self) -> dict[str, Any]:
    """Returns the sizes that `models.build` takes from a task."""
    names = "vocab_size max_len padded_len num_classes num_inputs objective"
    sizes = {name: getattr(self, name) for name in (*names.split(), "image")}
    # Only sequences of two parts have a separator.
    return sizes | ({"separator": self.separator} if self.separator else {})

  @functools.cached_property
  def inputs(self) -> Inputs:
    """How a model of the task reads texts and arrays."""
    return Inputs(
      self.vocabulary,
      self.max_len,
      num_inputs=self.num_inputs,
      image=self.image,
      tokenizer=self.tokenizer,
      tokenizer_json=self.tokenizer_json,
      reading=self.splits["train"].reading(),
    )

  def encode(self, text: str, length: int = 0) -> np.ndarray:
    """Returns the ids of a text as a model reads it; see `Inputs.encode`.

    Raises:
      UserError: if the inputs of the task are not text, or if it cannot encode
        this text.
    """
    if not self.tokenizer:
      raise UserError(
        f"The inputs of {self.name} are not text: choose a task of texts."
      )
    return self.inputs.encode(text, length)

  def baselines(self) -> dict[str, float]:
    """Fits each trivial baseline on train, and returns its score on test."""
    return {name: rule(self) for name, rule in self.trivial.items()}

  def description(self) -> dict[str, Any]:
    """Returns what scores depend on, as plain JSON for the checkpoint."""
    # A digest stands for the vocabulary, which may have 270,000 words.
    train = self.splits["train"]
    words = json.dumps(self.vocabulary).encode()
    return {
      "task": self.name,
      "protocol": self.protocol,
      "selection": self.selection,
      "examples": {name: len(split) for name, split in self.splits.items()},
      "vocab_size": self.vocab_size,
      "vocabulary_sha256": hashlib.sha256(words).hexdigest(),
      "max_len": self.max_len,
      "padded_len": self.padded_len or self.max_len,
      "data": {name: split.digest() for name, split in self.splits.items()},
      **train.reading(),
    }
