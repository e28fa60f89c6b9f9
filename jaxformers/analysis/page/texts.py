"""Text whose tokens are drawn one by one."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxformers import models
from jaxformers.foundations import paths
from jaxformers.foundations.errors import UserError
from jaxformers.models import pretrained
from jaxformers.tasks.inputs import Inputs, read_as_bert

TEXT = "This movie is terrible but it has some good effects."

UNKNOWN = ("<unk>", "[UNK]")

# Largest number of tokens that are drawn one by one: `TEXT` as bytes fits.
MOST_TOKENS = 64

_BYTE = re.compile("0x[0-9a-f]{2}")
# A word of a text is between spaces and ASCII punctuation.
_WORD = re.compile("[^\\s!-/:-@\\[-`{-~\ufffd]+")


class Example(NamedTuple):
  """Beginning of a text.

  Attributes:
    ids: ids of n tokens, int32 [n], without padding.
    names: readable token of each id. A letter that begins a word is shown with
      the rest of the word: "t(errible)".
    words: text that `name_tokens` looks up for each token: its name, or for
      bytes and characters the word that it begins ("" inside a word).
    quote: the text, and how much of it is shown.
  """

  ids: np.ndarray
  names: list[str]
  words: list[str]
  quote: str


@dataclasses.dataclass(frozen=True)
class PretrainedTask:
  """Texts of a pre-trained model that has no run, read as `example` needs.

  Attributes:
    name: name of the model's folder.
    inputs: reads texts.
    image: (), for texts.
  """

  name: str
  inputs: Inputs
  image: tuple[int, ...] = ()

  @property
  def vocabulary(self) -> tuple[str, ...]:
    """Meaning of each id."""
    return self.inputs.vocabulary

  @property
  def max_len(self) -> int:
    """Greatest number of tokens."""
    return self.inputs.max_len

  def encode(self, text: str, length: int = 0) -> np.ndarray:
    """Returns the ids of a text, see `Inputs.encode`."""
    return self.inputs.encode(text, length)


@dataclasses.dataclass(frozen=True)
class PretrainedRun:
  """A pre-trained model of texts, with what `example` needs of a run."""

  model: models.Model
  params: Any
  task: PretrainedTask

  def sample(self, count: int, length: int) -> np.ndarray:
    """Returns no examples, [0, n]: the model has no data."""
    return np.zeros((0, min(length, self.task.max_len)), np.int32)


def open_pretrained(folder: Path) -> PretrainedRun:
  """Returns the BERT of a folder of Hugging Face, with its vocabulary.

  Args:
    folder: folder with config.json, model.safetensors, and vocab.txt or
      tokenizer.json.

  Raises:
    UserError: for weights that cannot be read or are of images, and for a
      vocabulary that is missing or larger than the model's.
  """
  model, params = pretrained.load(folder)
  if model.config.image:
    raise UserError(
      f"{folder} reads images, and the figures of single tokens need texts: "
      "give a folder of BERT."
    )
  inputs = read_as_bert(paths.expand(folder), model.config.max_len)
  if len(inputs.vocabulary) > model.config.vocab_size:
    raise UserError(
      f"The vocabulary in {folder} has {len(inputs.vocabulary):,} pieces, and "
      f"the weights {model.config.vocab_size:,}: give that of the weights."
    )
  task = PretrainedTask(Path(folder).name, inputs)
  return PretrainedRun(model, params, task)


def example(run: Any, text: str, length: int) -> Example:
  """Returns the beginning of a text, or of the first test sample.

  Args:
    run: result of `inference.load_run`.
    text: text to read; "" for `TEXT`, or for the first test sample if the
      vocabulary of the task lacks its words.
    length: largest number of tokens; more than `MOST_TOKENS` are never read.

  Raises:
    UserError: for a task without tokens, or for a `text` with fewer than four
      tokens in the task's vocabulary.
  """
  task = run.task
  if task.image or not task.vocabulary:
    raise UserError(
      f"{task.name} has images or numbers as inputs, not tokens: give the run "
      "of a task with a vocabulary"
    )
  # A model reads no more than its positions.
  length = min(length, MOST_TOKENS, task.max_len)
  # Use a test sample if the vocabulary cannot encode the paper's sentence.
  try:
    ids = task.encode(text or TEXT, length)
    # The quotation also says how long the whole text is, beyond max_len too.
    total = len(task.encode(text or TEXT, sys.maxsize))
    num_known = sum(task.vocabulary[k] not in UNKNOWN for k in ids)
    if num_known < 4:
      raise UserError(
        f"{text or TEXT!r} has {num_known} tokens in the vocabulary of "
        f"{task.name}: give another with --text"
      )
  except UserError:
    drawn = [] if text else samples(run, 1, length)
    if not drawn:
      raise
    return drawn[0]
  return _read(task, ids, total, source="")


def samples(run: Any, count: int, length: int) -> list[Example]:
  """Returns the beginnings of test samples; of pairs their first sequences.

  Args:
    run: result of `inference.load_run`, of a task with tokens.
    count: number of samples.
    length: largest number of tokens; more than `MOST_TOKENS` are never read.
  """
  examples = []
  for sample in run.sample(count, run.task.max_len):
    ids = np.atleast_2d(sample)[0]
    total = int(np.count_nonzero(ids))
    ids = ids[ids > 0][: min(length, MOST_TOKENS)]
    # The sample is cut at max_len.
    source = " that the model reads"
    examples.append(_read(run.task, ids, total, source))
  return examples


def _read(task: Any, ids: np.ndarray, total: int, source: str) -> Example:
  """Returns the beginning of a text for people.

  Args:
    task: task with a vocabulary.
    ids: ids of the beginning.
    total: number of tokens of the whole text.
    source: end of the sentence on that number.
  """
  names = [task.vocabulary[k] for k in ids]
  part = "all" if len(ids) == total else f"the first {len(ids)} of"
  # Words and pieces are shown with spaces between them.
  if not spells_words(task.vocabulary):
    names = [readable(name) for name in names]
    quote = f"{' '.join(names)!r}, {part} {total} tokens{source}"
    return Example(ids, names, names, quote)
  # Letters are shown as a text; one that begins a word has its rest as well.
  text, words = spell(names)
  names = [
    f"{word[0]}({word[1:]})" if word[1:] else readable(name)
    for name, word in zip(names, words, strict=True)
  ]
  letters = "which are single letters; those named begin a word"
  quote = f"{text!r}, {part} {total} tokens{source}, {letters}"
  return Example(ids, names, words, quote)


def spells_words(vocabulary: Sequence[str]) -> bool:
  """Returns True for bytes or characters, with or without special tokens."""
  names = [name for name in vocabulary if not re.fullmatch("<.+>", name)]
  return all(len(name) == 1 or _BYTE.fullmatch(name) for name in names)


def spell(names: Sequence[str]) -> tuple[str, list[str]]:
  """Reads bytes or characters as a text.

  Args:
    names: n tokens of a vocabulary for which `spells_words` is true.

  Returns:
    The text, with U+FFFD for special tokens; and for each token the word that
    it begins, or "".
  """
  # One letter per token, so that positions in text and tokens agree.
  text = "".join(
    chr(int(name, 16))
    if _BYTE.fullmatch(name)
    else (name if len(name) == 1 else "\ufffd")
    for name in names
  )
  words = [""] * len(names)
  for match in _WORD.finditer(text):
    words[match.start()] = match[0]
  if any(map(_BYTE.fullmatch, names)):
    return _decode(text), list(map(_decode, words))
  return text, words


def _decode(text: str) -> str:
  """Decodes a text in which each letter stands for one UTF-8 byte."""
  # Special tokens, U+FFFD, are not bytes.
  parts = (part.encode("latin-1", "replace") for part in text.split("\ufffd"))
  return "\ufffd".join(part.decode(errors="replace") for part in parts)


def readable(name: str) -> str:
  """Returns a token for people: a byte as character, a piece without marks."""
  if _BYTE.fullmatch(name) and chr(int(name, 16)).isprintable():
    name = chr(int(name, 16))
  bare = name.removeprefix("\u0120").removeprefix("##").removesuffix("</w>")
  return {"\u010a": "newline", "": "space", " ": "space"}.get(bare, bare)


def name_tokens(names: Sequence[str], wanted: Sequence[str]) -> list[int]:
  """Returns the positions of the wanted tokens, or of the four longest words.

  Args:
    names: tokens, or for letters the words that they begin; "" is never named.
    wanted: tokens to name; () for the longest words.

  Raises:
    UserError: for a wanted token that is not among the names.
  """
  for name in wanted:
    if name not in names:
      listed = " ".join(filter(None, names))
      raise UserError(f"the token {name!r} is not among {listed}")
  if wanted:
    return sorted({names.index(name) for name in wanted})
  # Of equal words the first position counts.
  words = {
    name: k
    for k, name in reversed([*enumerate(names)])
    if re.fullmatch(r"\w+", name)
  }
  # With fewer than four words take any tokens, numbered to keep repeats.
  if len(words) < 4:
    words = {f"{name} {k}": k for k, name in enumerate(names) if name}
  return sorted(sorted(words.values(), key=lambda k: -len(names[k]))[:4])
