"""Texts for the figures of single tokens, and readable names of tokens."""

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

# Largest number of tokens that are drawn one by one. `TEXT` as bytes fits.
MOST_TOKENS = 64

_BYTE = re.compile("0x[0-9a-f]{2}")
# A word is a run of letters without white space or ASCII punctuation.
_WORD = re.compile("[^\\s!-/:-@\\[-`{-~\ufffd]+")


class Example(NamedTuple):
  """Beginning of a text.

  Attributes:
    ids: ids of n tokens, int32 [n], without padding.
    names: readable name of each token. A letter that begins a word is shown
      with the rest of the word, as in "t(errible)".
    words: strings that `name_tokens` searches, one for each token. A string is
      the name of the token; for bytes and characters it is the word that
      begins at the token, or "" inside a word.
    quote: quotation of the text, with the number of tokens that are shown.
  """

  ids: np.ndarray
  names: list[str]
  words: list[str]
  quote: str


@dataclasses.dataclass(frozen=True)
class PretrainedTask:
  """Task of a pre-trained model without a run, as `example` needs it.

  Attributes:
    name: name of the model's folder.
    inputs: reader of texts.
    image: (), because the inputs are texts.
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
    """Largest number of tokens of an input."""
    return self.inputs.max_len

  def encode(self, text: str, length: int = 0) -> np.ndarray:
    """Returns the ids of a text; see `Inputs.encode`."""
    return self.inputs.encode(text, length)


@dataclasses.dataclass(frozen=True)
class PretrainedRun:
  """Pre-trained model of texts, with the parts of a run that `example` needs.

  Attributes:
    model, params: model and its parameters.
    task: task of the model.
  """

  model: models.Model
  params: Any
  task: PretrainedTask

  def sample(self, count: int, length: int) -> np.ndarray:
    """Returns an empty array [0, n], because the model has no data."""
    return np.zeros((0, min(length, self.task.max_len)), np.int32)


def open_pretrained(folder: Path) -> PretrainedRun:
  """Returns a BERT from a folder in Hugging Face's format, with vocabulary.

  Args:
    folder: folder with config.json, model.safetensors, and vocab.txt or
      tokenizer.json.

  Raises:
    UserError: if the weights cannot be read or belong to a model of images, or
      if the vocabulary is missing or larger than the model's vocabulary.
  """
  model, params = pretrained.load(folder)
  if model.config.image:
    raise UserError(
      f"The model in {folder} reads images, but the figures of single tokens "
      "need texts. Give the folder of a BERT."
    )
  inputs = read_as_bert(paths.expand(folder), model.config.max_len)
  if len(inputs.vocabulary) > model.config.vocab_size:
    raise UserError(
      f"The vocabulary in {folder} has {len(inputs.vocabulary):,} pieces, and "
      f"the weights {model.config.vocab_size:,}. Give the vocabulary that "
      "belongs to the weights."
    )
  task = PretrainedTask(Path(folder).name, inputs)
  return PretrainedRun(model, params, task)


def example(run: Any, text: str, length: int) -> Example:
  """Returns the beginning of a text, or of the first test sample.

  Args:
    run: result of `inference.load_run`.
    text: text to read; "" for `TEXT`. If the vocabulary of the task lacks the
      words of `TEXT`, the first test sample is read instead.
    length: largest number of tokens, cut to `MOST_TOKENS`.

  Raises:
    UserError: if the task has no tokens, or if fewer than four tokens of `text`
      are in the task's vocabulary.
  """
  task = run.task
  if task.image or not task.vocabulary:
    raise UserError(
      f"the inputs of {task.name} are images or numbers, not tokens: give the "
      "run of a task with a vocabulary"
    )
  # Cut the length to the positions of the model.
  length = min(length, MOST_TOKENS, task.max_len)
  # Use a test sample if the vocabulary cannot encode the paper's sentence.
  try:
    ids = task.encode(text or TEXT, length)
    # Count all tokens of the text for the quotation, also beyond max_len.
    total = len(task.encode(text or TEXT, sys.maxsize))
    num_known = sum(task.vocabulary[k] not in UNKNOWN for k in ids)
    if num_known < 4:
      raise UserError(
        f"{text or TEXT!r} has {num_known} tokens in the vocabulary of "
        f"{task.name}, but needs 4: give another text with --text"
      )
  except UserError:
    drawn = [] if text else samples(run, 1, length)
    if not drawn:
      raise
    return drawn[0]
  return _read(task, ids, total, source="")


def samples(run: Any, count: int, length: int) -> list[Example]:
  """Returns the beginnings of test samples.

  A sample that is a pair is represented by its first sequence.

  Args:
    run: result of `inference.load_run` for a task with tokens.
    count: number of samples.
    length: largest number of tokens, cut to `MOST_TOKENS`.
  """
  examples = []
  for sample in run.sample(count, run.task.max_len):
    ids = np.atleast_2d(sample)[0]
    total = int(np.count_nonzero(ids))
    ids = ids[ids > 0][: min(length, MOST_TOKENS)]
    # The number of tokens is known only up to max_len: qualify it.
    source = " that the model reads"
    examples.append(_read(run.task, ids, total, source))
  return examples


def _read(task: Any, ids: np.ndarray, total: int, source: str) -> Example:
  """Returns an `Example` with readable names.

  Args:
    task: task with a vocabulary.
    ids: ids of the beginning of the text.
    total: number of tokens of the whole text.
    source: words that follow this number in the quotation.
  """
  names = [task.vocabulary[k] for k in ids]
  part = "all" if len(ids) == total else f"the first {len(ids)} of"
  # Show words and pieces separated by spaces.
  if not spells_words(task.vocabulary):
    names = [readable(name) for name in names]
    quote = f"{' '.join(names)!r}, {part} {total} tokens{source}"
    return Example(ids, names, names, quote)
  # Show letters as a text. Name the first letter of a word with the word.
  text, words = spell(names)
  names = [
    f"{word[0]}({word[1:]})" if word[1:] else readable(name)
    for name, word in zip(names, words, strict=True)
  ]
  letters = "which are single letters; those named begin a word"
  quote = f"{text!r}, {part} {total} tokens{source}, {letters}"
  return Example(ids, names, words, quote)


def spells_words(vocabulary: Sequence[str]) -> bool:
  """Returns True for a vocabulary of bytes or characters.

  Special tokens such as "<pad>" are ignored.
  """
  names = [name for name in vocabulary if not re.fullmatch("<.+>", name)]
  return all(len(name) == 1 or _BYTE.fullmatch(name) for name in names)


def spell(names: Sequence[str]) -> tuple[str, list[str]]:
  """Returns the text that bytes or characters spell, and its words.

  Args:
    names: n tokens of a vocabulary for which `spells_words` is true.

  Returns:
    The text, with U+FFFD for special tokens, and for each token the word that
    begins there, or "".
  """
  # Map each token to one letter, so that positions in text and tokens agree.
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
  """Returns the UTF-8 text of a string whose letters stand for bytes."""
  # Split at special tokens (U+FFFD), which are not bytes.
  parts = (part.encode("latin-1", "replace") for part in text.split("\ufffd"))
  return "\ufffd".join(part.decode(errors="replace") for part in parts)


def readable(name: str) -> str:
  """Returns a readable token: a byte as character, a piece without marks."""
  if _BYTE.fullmatch(name) and chr(int(name, 16)).isprintable():
    name = chr(int(name, 16))
  bare = name.removeprefix("\u0120").removeprefix("##").removesuffix("</w>")
  return {"\u010a": "newline", "": "space", " ": "space"}.get(bare, bare)


def name_tokens(names: Sequence[str], wanted: Sequence[str]) -> list[int]:
  """Returns the positions of the wanted tokens, or of the four longest words.

  Args:
    names: `words` of an `Example`; "" is never named.
    wanted: tokens or words to name; () for the longest words.

  Raises:
    UserError: for a wanted token that is not among the names.
  """
  for name in wanted:
    if name not in names:
      listed = " ".join(filter(None, names))
      raise UserError(f"the token {name!r} is not among the tokens {listed}")
  if wanted:
    return sorted({names.index(name) for name in wanted})
  # Keep the first position of a repeated word.
  words = {
    name: k
    for k, name in reversed([*enumerate(names)])
    if re.fullmatch(r"\w+", name)
  }
  # If there are fewer than four words, use all tokens. Number their keys to
  # keep repeated tokens.
  if len(words) < 4:
    words = {f"{name} {k}": k for k, name in enumerate(names) if name}
  return sorted(sorted(words.values(), key=lambda k: -len(names[k]))[:4])
