"""Record of a task: its splits, its sizes, and the origin of its data."""

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
    protocol: name of the protocol; scores are comparable only within one
      protocol.
    splits: splits `train`, `validation` and `test`. Each is a `Split`, such as
      `Packed` sequences, `Series`, `Images`, `Scenes` or `Segments` of text.
    num_classes: number of classes; 0 for language models, sentence embeddings,
      spans, and pre-training whose targets are real numbers.
    trivial: baselines by name. Each is a function of the task that returns a
      score on test, in the metric of the objective; see `tasks.baselines`.
    info: description of the origin of the data, as in `info.json`.
    selection: name of the split that selects the checkpoint: "validation", or
      "test" under published protocols that select on the test split.
    vocabulary: meaning of each id; empty if tokens are real numbers. Id 0 is
      padding, which is masked in attention.
    max_len: length to which sequences are cut; 0 for images.
    padded_len: divisor of the pool "padded_mean"; 0 for max_len.
    num_inputs: number of sequences of an example; 2 for pairs.
    separator: id that ends the first of the two parts of a sequence; 0 for
      sequences of one part.
    tokenizer: name in `inputs.TOKENIZERS` of the function that turns texts into
      ids; "" if inputs are not text.
    tokenizer_json: tokenizer of word pieces or byte pairs in the format of
      `tokenizers`; "" for other tokens.
    objective: "classification", "token_classification", "language_model",
      "segmentation", "spans", "sentences", or an objective of pre-training; see
      `reconstruction`.
    causal: True if a token may see only itself and earlier tokens, so that the
      label of a token cannot be read from later ones.
    channels: number of channels of a step of a time series; 0 for other inputs.
    test_lengths: lengths of further test splits, whose scores are reported by
      length. The name of a split is "test", an underscore and its length.
    curriculum: names of further splits of easier examples, at most as long as
      the examples of `train`. The first `config.short_steps` steps read these
      splits one after the other, for equal numbers of steps, not `train`.
    image: (height, width, channels), or () for sequences.
    classes: names of the classes of a classification task.
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
  causal: bool = False
  channels: int = 0
  test_lengths: tuple[int, ...] = ()
  curriculum: tuple[str, ...] = ()
  image: tuple[int, ...] = ()
  classes: tuple[str, ...] = ()

  @property
  def vocab_size(self) -> int:
    """Number of ids; 0 if tokens are real numbers."""
    return len(self.vocabulary)

  @property
  def longest(self) -> int:
    """Greatest number of tokens in any split; 0 for images."""
    further = (self.splits[f"test_{n}"] for n in self.test_lengths)
    lengths = (int(split.lengths().max()) for split in further)
    return max([self.max_len, *lengths])

  def sizes(self) -> dict[str, Any]:
    """Returns the sizes of the task that `models.build` needs."""
    names = "vocab_size padded_len num_classes num_inputs objective"
    sizes = {name: getattr(self, name) for name in (*names.split(), "image")}
    sizes["max_len"] = self.longest
    # Add what only some tasks have.
    for name in ("separator", "causal", "channels"):
      if value := getattr(self, name):
        sizes[name] = value
    return sizes

  @functools.cached_property
  def inputs(self) -> Inputs:
    """Description of how a model of the task reads texts and arrays."""
    return Inputs(
      self.vocabulary,
      self.longest,
      num_inputs=self.num_inputs,
      image=self.image,
      tokenizer=self.tokenizer,
      tokenizer_json=self.tokenizer_json,
      reading=self.splits["train"].reading(),
      channels=self.channels,
    )

  def encode(self, text: str, length: int = 0) -> np.ndarray:
    """Returns the ids of a text as a model reads it; see `Inputs.encode`.

    Raises:
      UserError: if the inputs of the task are not text, or if this text cannot
        be encoded.
    """
    if not self.tokenizer:
      raise UserError(
        f"The inputs of {self.name} are not text: choose a task of texts."
      )
    return self.inputs.encode(text, length)

  def baselines(self) -> dict[str, float]:
    """Fits the trivial baselines on train; returns their scores on test."""
    return {name: rule(self) for name, rule in self.trivial.items()}

  def description(self) -> dict[str, Any]:
    """Returns the properties that scores depend on, as plain JSON."""
    # Store a digest of the vocabulary, which may have 270,000 words.
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
