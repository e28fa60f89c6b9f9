"""Language modelling: predict the next word, byte pair or byte of a text."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxformers.data.engine import encodings
from jaxformers.data.engine.preparation import open_splits
from jaxformers.data.engine.segments import Segments, stream
from jaxformers.data.engine.source import Encoding
from jaxformers.data.sets import text_files
from jaxformers.foundations import paths, ranges
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Count, Length
from jaxformers.foundations.registry import check_keywords, choose
from jaxformers.tasks.arrays import NAME
from jaxformers.tasks.task import TASKS, Task

TOKENS = ("words", "byte_pairs", "bytes")


@TASKS.register("language")
def load_language(
  *,
  data_dir: str = "",
  protocol: str = "jaxformers",
  archive: str = "",
  tokens: str = "byte_pairs",
  vocab_size: Count = 8_000,
  vocabulary: str = "",
  max_len: Length = 256,
  stride: Count = 0,
  eval_windows: Count = 0,
) -> Task:
  """Opens a folder or archive of texts; see `data.sets.text_files`.

  Args:
    data_dir: folder of prepared data; see `data_folder`.
    protocol: "jaxformers".
    archive: path of a folder, a tar or a text file; or the directory of a set
      of texts that tensorflow-datasets has prepared in array_record.
    tokens: "words" between white space, with <eos> at the end of every line;
      "byte_pairs" that are trained on the training split; or "bytes".
    vocab_size: largest number of words (0 for all), or number of byte pairs
      that are trained; ignored for bytes, and with a vocabulary.
    vocabulary: path of a tokenizer.json of byte pairs, such as GPT-2's, or of
      its folder; "" trains byte pairs.
    max_len: number of tokens of a window.
    stride: number of tokens between the starts of two windows of the test
      split; 0 for max_len. Windows of the other splits are adjacent.
    eval_windows: number of evenly spaced windows of validation and of test; 0
      for all. Use it if evaluating all windows takes too long.
  """
  choose("protocol of language", protocol, ("jaxformers",))
  if max_len < 1:
    raise UserError(f"max_len={max_len}: choose at least 1 token per window.")
  # Encode the user's texts with a vocabulary that is fitted to train.
  origin = text_files.source(_existing(archive))
  encoding = _encoding(tokens, vocab_size, vocabulary)
  packed, info = open_splits(origin, encoding, data_dir, archive)
  streams = {name: stream(split) for name, split in packed.items()}
  names = {"name": "language", "protocol": protocol}
  return _make_task(streams, info, tokens, max_len, stride, eval_windows, names)


@check_keywords
def from_texts(
  train: Sequence[str],
  validation: Sequence[str] | None = None,
  test: Sequence[str] | None = None,
  *,
  tokens: str = "byte_pairs",
  vocab_size: Count = 8_000,
  vocabulary: str = "",
  max_len: Length = 256,
  stride: Count = 0,
  eval_windows: Count = 0,
) -> Task:
  """Returns the task of predicting the next token of texts in memory.

  Args:
    train: training texts, to which the vocabulary is fitted.
    validation: texts that choose the checkpoint; None to hold out a tenth of
      `train`, by hashes. Equal texts are held out together.
    test: texts that are scored at the end; None to use `validation`.
    tokens, vocab_size, vocabulary, max_len, stride, eval_windows: see
      `load_language`.

  Raises:
    UserError: if the texts are not a list of strings, or too few to hold out a
      tenth; for an option out of its range.
  """
  # Check the options.
  sizes = {"vocab_size": vocab_size, "max_len": max_len}
  windows = {"stride": stride, "eval_windows": eval_windows}
  ranges.check(from_texts, sizes | windows)
  # Check the texts, and hold out a tenth if there are no validation texts.
  parts = {"train": train, "validation": validation, "test": test}
  texts = {
    name: _checked_texts(name, part)
    for name, part in parts.items()
    if part is not None
  }
  if validation is None:
    texts["train"], texts["validation"] = _hold_out(texts["train"])
  has_test = test is not None
  # Fit the vocabulary to the training texts, and encode all texts.
  examples = {
    name: [{"text": text.encode()} for text in part]
    for name, part in texts.items()
  }
  encoding = _encoding(tokens, vocab_size, vocabulary)
  encode, info = encoding.fit(iter(examples["train"]))
  streams = {
    name: np.concatenate([row for (row,) in encode(part)])
    for name, part in examples.items()
  }
  streams["test"] = streams["test" if has_test else "validation"]
  info = {"source": "texts given in Python", **info}
  names = {"name": NAME, "protocol": f"own texts, {tokens}"}
  names["selection"] = "validation" if has_test else "test"
  return _make_task(streams, info, tokens, max_len, stride, eval_windows, names)


def _checked_texts(name: str, texts: Any) -> list[str]:
  """Returns the texts that are not empty as a list.

  Raises:
    UserError: for an element that is not a string, or if no text remains.
  """
  texts = [texts] if isinstance(texts, str) else list(texts)
  for text in texts:
    if not isinstance(text, str):
      raise UserError(
        f"{name} has {text!r:.60} of type {type(text).__name__}: give a list "
        "of texts to a language model; it has no labels."
      )
  if not any(texts):
    raise UserError(f"{name} has no text: give at least one.")
  return [encodings.well_formed(text) for text in texts if text]


def _hold_out(texts: list[str]) -> tuple[list[str], list[str]]:
  """Divides texts into training texts and a tenth for validation, by hashes."""
  # Hold out the texts with the smallest hashes.
  hashes = [
    hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts
  ]
  distinct = sorted({*hashes})
  held = {*distinct[: len(distinct) // 10]}
  if not held:
    raise UserError(
      f"train has {len(distinct)} different texts, of which a tenth is less "
      "than one: give validation=, or at least ten different texts, such as "
      "paragraphs."
    )
  parts: tuple[list[str], list[str]] = ([], [])
  for text, key in zip(texts, hashes, strict=True):
    parts[key in held].append(text)
  return parts


def _make_task(
  streams: Mapping[str, np.ndarray],
  info: dict[str, Any],
  tokens: str,
  max_len: int,
  stride: int,
  eval_windows: int,
  names: Mapping[str, Any],
) -> Task:
  """Returns the task of predicting the next token of the streams.

  Args:
    streams: tokens of every split, end to end.
    info: origin of the texts, and the fitted vocabulary or tokenizer.
    tokens, max_len, stride, eval_windows: see `load_language`.
    names: name, protocol and selection of the task.
  """
  if max_len < 1:
    raise UserError(f"max_len={max_len}: choose at least 1 token per window.")
  # Take the fitted vocabulary out of `info`.
  tokenizer = info.pop("tokenizer", "")
  vocabulary = _vocabulary(tokens, tokenizer, info)
  shift = int(tokens == "bytes")

  def windows(name: str) -> Segments:
    # Only windows of the test split may overlap.
    step = stride if name == "test" and stride else max_len
    most = 0 if name == "train" else eval_windows
    return Segments(streams[name], max_len, step, shift, most)

  # Cut every split into windows.
  return Task(
    **names,
    splits={name: windows(name) for name in streams},
    vocabulary=vocabulary,
    max_len=max_len,
    num_classes=0,
    trivial={"unigram": unigram, "bigram": bigram},
    info=info,
    tokenizer=tokens,
    tokenizer_json=tokenizer,
    objective="language_model",
  )


def _existing(archive: str) -> Path:
  """Returns the path of the user's texts; raises UserError if it is missing."""
  if not archive:
    raise UserError(
      "A language model needs a text: pass the path of a folder or an archive "
      f"of {', '.join(text_files.ENDINGS)} files with --archive (prepare) or "
      "--config.task.archive."
    )
  path = paths.expand(archive)
  if not path.exists():
    raise UserError(
      f"There is no {path}: give the path of a folder, a tar or a text file."
    )
  return path


def _encoding(tokens: str, vocab_size: int, vocabulary: str = "") -> Encoding:
  """Returns the encoding of texts as words, byte pairs or bytes.

  Raises:
    UserError: for other tokens, or for a vocabulary of byte pairs with other
      tokens.
  """
  choose("tokens", tokens, TOKENS)
  if vocabulary and tokens != "byte_pairs":
    raise UserError(
      f"vocabulary={vocabulary!r} is a vocabulary of byte pairs, but "
      f'tokens={tokens!r}: set tokens="byte_pairs".'
    )
  if tokens == "words":
    return encodings.words("text", size=vocab_size)
  if tokens == "byte_pairs":
    return encodings.byte_pairs("text", size=vocab_size, vocabulary=vocabulary)
  return encodings.of_bytes("text")


def _vocabulary(
  tokens: str, tokenizer: str, info: dict[str, Any]
) -> tuple[str, ...]:
  """Returns the meaning of every id; removes a vocabulary from `info`."""
  if tokens == "words":
    return tuple(info.pop("vocabulary"))
  if tokens == "byte_pairs":
    return encodings.pieces(tokenizer)
  return encodings.BYTES


def unigram(task: Task) -> float:
  """Returns the perplexity of test under the token frequencies of train.

  p(w) = (c(w) + 1) / sum over v of (c(v) + 1), with the counts c of train.
  """
  # Add one to every count; id 0 is padding and is never predicted.
  train, test = (_ids(task, name) for name in ("train", "test"))
  counts = np.bincount(train, minlength=task.vocab_size)[1:] + 1.0
  log_p = np.log(counts / counts.sum())
  return math.exp(-log_p[test[task.splits["test"].predicted()] - 1].mean())


def bigram(task: Task) -> float:
  """Returns the perplexity of test under pairs of tokens of train.

  p(w | v) = (c(v, w) + t(v) p(w)) / (c(v) + t(v)), with the counts c of train,
  the probability p(w) of `unigram`, and the number t(v) of different tokens
  that follow v (Witten and Bell 1991).
  """
  train, test = (_ids(task, name) for name in ("train", "test"))
  # Count tokens and pairs of adjacent tokens in train.
  size = task.vocab_size
  counts = np.bincount(train, minlength=size)[1:] + 1.0
  alone = counts / counts.sum()
  pairs, seen = np.unique(
    train[:-1].astype(np.int64) * size + train[1:], return_counts=True
  )
  # c(v): number of tokens after v; t(v): number of different ones.
  follow = np.bincount(pairs // size, weights=seen, minlength=size)
  kinds = np.bincount(pairs // size, minlength=size)
  # Look up c(v, w) for the pairs of test, 0 if a pair is not in train.
  places = task.splits["test"].predicted()
  before, after = test[places - 1].astype(np.int64), test[places]
  wanted = before * size + after
  place = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
  joint = np.where(pairs[place] == wanted, seen[place], 0)
  # Interpolate; use p(w) after a token that does not occur in train.
  total = follow[before] + kinds[before]
  share = joint + kinds[before] * alone[after - 1]
  p = np.where(total > 0, share / np.maximum(total, 1), alone[after - 1])
  return math.exp(-np.log(p).mean())


def _ids(task: Task, name: str) -> np.ndarray:
  """Returns the ids of the stream of a split, int32 [total]."""
  split = task.splits[name]
  return np.asarray(split.tokens).astype(np.int32) + split.shift
