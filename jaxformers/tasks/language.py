"""Language models: predict the next word, piece or byte of a text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from jaxformers import paths
from jaxformers.data.engine import encodings
from jaxformers.data.engine.preparation import open_splits
from jaxformers.data.engine.segments import Segments, stream
from jaxformers.data.engine.source import Encoding
from jaxformers.data.sets import text_files
from jaxformers.errors import UserError
from jaxformers.registry import choose
from jaxformers.tasks.task import TASKS, Task

TOKENS = ("words", "byte_pairs", "bytes")


@TASKS.register("language")
def load_language(
  *,
  data_dir: str = "",
  protocol: str = "jaxformers",
  archive: str = "",
  tokens: str = "byte_pairs",
  vocab_size: int = 8_000,
  max_len: int = 256,
  stride: int = 0,
  eval_windows: int = 0,
) -> Task:
  """Opens a folder or archive of texts; see `data.sets.text_files`.

  Args:
    data_dir: folder of prepared data; see `data_folder`.
    protocol: "jaxformers".
    archive: path of a folder, a tar or a text file; or the directory of a set
      of texts that tensorflow-datasets has prepared in array_record.
    tokens: "words" between white space, with <eos> at every line's end;
      "byte_pairs" trained on the training split; or "bytes".
    vocab_size: largest number of words, 0 for all; or number of byte pairs;
      ignored for bytes.
    max_len: number of tokens of a window.
    stride: tokens between the starts of two windows of the test split; 0 for
      max_len. Windows of the other splits stand side by side.
    eval_windows: number of windows of validation and of test, evenly spaced; 0
      for all. For models that train for less time than all would take.
  """
  choose("protocol of language", protocol, ("jaxformers",))
  choose("tokens", tokens, TOKENS)
  if max_len < 1:
    raise UserError(f"max_len={max_len}: choose at least 1 token per window.")
  # Encode the user's texts, and read the vocabulary that was fitted to them.
  origin = text_files.source(_existing(archive))
  encoding = _encoding(tokens, vocab_size)
  packed, info = open_splits(origin, encoding, data_dir, archive)
  tokenizer = info.pop("tokenizer", "")
  vocabulary = _vocabulary(tokens, tokenizer, info)
  shift = int(tokens == "bytes")

  def windows(name: str) -> Segments:
    # Only the test split may have overlapping windows; training never has.
    step = stride if name == "test" and stride else max_len
    most = 0 if name == "train" else eval_windows
    return Segments(stream(packed[name]), max_len, step, shift, most)

  # Cut every split into windows.
  splits = {name: windows(name) for name in packed}
  return Task(
    name="language",
    protocol=protocol,
    splits=splits,
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
  """Returns the path of the user's text; UserError if there is none."""
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


def _encoding(tokens: str, vocab_size: int) -> Encoding:
  if tokens == "words":
    return encodings.words("text", size=vocab_size)
  if tokens == "byte_pairs":
    return encodings.byte_pairs("text", size=vocab_size)
  return encodings.of_bytes("text")


def _vocabulary(
  tokens: str, tokenizer: str, info: dict[str, Any]
) -> tuple[str, ...]:
  """Returns the meaning of every id; it is taken out of `info`."""
  if tokens == "words":
    return tuple(info.pop("vocabulary"))
  if tokens == "byte_pairs":
    return encodings.pieces(tokenizer)
  return encodings.BYTES


def unigram(task: Task) -> float:
  """Returns the perplexity of the training split's frequencies plus one."""
  # Add one to every count; id 0 is padding and is never predicted.
  train, test = (_ids(task, name) for name in ("train", "test"))
  counts = np.bincount(train, minlength=task.vocab_size)[1:] + 1.0
  log_p = np.log(counts / counts.sum())
  return math.exp(-log_p[test[task.splits["test"].predicted()] - 1].mean())


def bigram(task: Task) -> float:
  """Returns the perplexity of pairs of tokens, interpolated with `unigram`.

  p(w | v) = (c(v, w) + t(v) p(w)) / (c(v) + t(v)), t(v) the number of different
  tokens that follow v (Witten and Bell 1991).
  """
  train, test = (_ids(task, name) for name in ("train", "test"))
  # Count tokens and pairs of neighbours in train.
  size = task.vocab_size
  counts = np.bincount(train, minlength=size)[1:] + 1.0
  alone = counts / counts.sum()
  pairs, seen = np.unique(
    train[:-1].astype(np.int64) * size + train[1:], return_counts=True
  )
  follow = np.bincount(pairs // size, weights=seen, minlength=size)
  kinds = np.bincount(pairs // size, minlength=size)
  # Look up the pairs of test; a pair that is not in train counts 0.
  places = task.splits["test"].predicted()
  before, after = test[places - 1].astype(np.int64), test[places]
  wanted = before * size + after
  place = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
  joint = np.where(pairs[place] == wanted, seen[place], 0)
  # Interpolate; after a token that never occurs in train, unigrams remain.
  total = follow[before] + kinds[before]
  share = joint + kinds[before] * alone[after - 1]
  p = np.where(total > 0, share / np.maximum(total, 1), alone[after - 1])
  return math.exp(-np.log(p).mean())


def _ids(task: Task, name: str) -> np.ndarray:
  split = task.splits[name]
  return np.asarray(split.tokens).astype(np.int32) + split.shift
