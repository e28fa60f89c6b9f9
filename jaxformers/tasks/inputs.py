"""Turns texts and arrays of users into the inputs of a model."""

from __future__ import annotations

import dataclasses
import functools
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from jaxformers.data.engine import encodings, series
from jaxformers.data.engine.packed import pack
from jaxformers.data.generators import listops, listops_text
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import Registry
from jaxformers.tasks import rows

Ids = Callable[[str], np.ndarray]
# Functions of a vocabulary and of a tokenizer as JSON. Each returns a function
# from a text to its ids, without the ids that open and close a sequence.
TOKENIZERS: Registry = Registry("tokenizer")


@TOKENIZERS.register("bytes")
def _bytes(vocabulary: Sequence[str], tokenizer_json: str) -> Ids:
  del vocabulary, tokenizer_json
  return encodings.byte_ids


@TOKENIZERS.register("characters")
def _characters(vocabulary: Sequence[str], tokenizer_json: str) -> Ids:
  del tokenizer_json
  return encodings.character_ids(vocabulary)


@TOKENIZERS.register("words")
def _words(vocabulary: Sequence[str], tokenizer_json: str) -> Ids:
  del tokenizer_json
  return encodings.word_ids(vocabulary)


@TOKENIZERS.register("word_pieces")
def _word_pieces(vocabulary: Sequence[str], tokenizer_json: str) -> Ids:
  del vocabulary
  return encodings.piece_ids(tokenizer_json)


@TOKENIZERS.register("byte_pairs")
def _byte_pairs(vocabulary: Sequence[str], tokenizer_json: str) -> Ids:
  del vocabulary
  return encodings.piece_ids(tokenizer_json, end=True)


@TOKENIZERS.register("listops")
def _listops(vocabulary: Sequence[str], tokenizer_json: str) -> Ids:
  """Returns a function from an expression to its ids.

  Leaves out the tokens that the vocabulary lacks, such as closing brackets.
  """
  del tokenizer_json
  # Ignore opening brackets: some protocols write "MIN" instead of "[MIN".
  by_name = {name.strip("["): i for i, name in enumerate(vocabulary)}
  table = np.array(
    [0, *(by_name.get(token.strip("["), 0) for token in listops.TOKENS)],
    np.uint8,
  )

  def ids(text: str) -> np.ndarray:
    encoded = table[listops_text.encode(text)]
    return encoded[encoded > 0]

  return ids


@dataclasses.dataclass(frozen=True)
class Inputs:
  """Description of a model's inputs: texts, ids, numbers or images.

  Attributes:
    vocabulary: meaning of each id; () if the inputs are numbers or images.
    max_len: largest number of tokens; 0 for images.
    num_inputs: number of sequences of an example; 2 for pairs.
    channels: number of channels of a step of a time series, with the channel of
      the time; 0 for other inputs.
    image: (height, width, channels), or () for sequences.
    tokenizer: name in `TOKENIZERS`; "" if the inputs are not text.
    tokenizer_json: tokenizer of word pieces or byte pairs; "" for other tokens.
    reading: settings that turn stored integers into inputs; see
      `Split.reading`.
  """

  vocabulary: tuple[str, ...]
  max_len: int
  num_inputs: int = 1
  image: tuple[int, ...] = ()
  tokenizer: str = ""
  tokenizer_json: str = ""
  reading: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  channels: int = 0

  @functools.cached_property
  def tokenize(self) -> Ids:
    """Function from a text to its ids, without opening and closing ids.

    Raises:
      UserError: if the inputs are not text.
    """
    if not self.tokenizer:
      raise UserError(
        "The inputs of this model are not text: give arrays, as "
        f"{self.expected()}."
      )
    ids = TOKENIZERS[self.tokenizer](self.vocabulary, self.tokenizer_json)
    return lambda text: ids(encodings.well_formed(text))

  @functools.cached_property
  def _reader(self) -> tokenizers.Tokenizer:
    """Tokenizer of `tokenizer_json`, which decodes ids."""
    # A large vocabulary takes a fifth of a second.
    reader = tokenizers.Tokenizer.from_str(self.tokenizer_json)
    if self.tokenizer == "word_pieces" and reader.decoder is None:
      reader.decoder = tokenizers.decoders.WordPiece()
    return reader

  def expected(self) -> str:
    """Returns a description of the expected arrays, for messages."""
    if self.image:
      shape = ", ".join(map(str, self.image))
      return f"pixels uint8 [b, {shape}], or normalised ones in float32"
    pair = "2, " if self.num_inputs > 1 else ""
    if self.channels:
      return (
        f"time series float32 [n, {self._stored_channels}], of equal or "
        "unequal lengths, with NaN for missing numbers"
      )
    if not self.vocabulary:
      return f"numbers float32 [b, {pair}n], or pixels uint8"
    texts = "pairs of texts, or " if pair else "texts, or "
    return (
      texts if self.tokenizer else ""
    ) + f"ids int32 [b, {pair}n] below {len(self.vocabulary)}, 0 for padding"

  def encode(
    self, text: str, length: int = 0, *, closed: bool = True
  ) -> np.ndarray:
    """Returns the ids of a text as a model reads it, int32 [n], not padded.

    Cuts a text that is too long, like the examples of the task. Warns about it
    if `length` is 0.

    Args:
      text: any text; unknown words are encoded as in the examples of the task.
      length: largest number of ids, including the opening and closing ids; 0
        for max_len.
      closed: False to leave out the closing id, for a model that continues the
        text, which is not cut then.

    Raises:
      UserError: if the inputs are not text, if this text cannot be encoded, or
        if a text that is to be continued is too long.
    """
    # Look up the opening and closing ids of the task's examples.
    names = {"start": "start_id", "end": "end_id"}
    marks = {key: self.reading.get(name) or 0 for key, name in names.items()}
    ids = self.tokenize(text)
    # Remove the closing id if the text is to be continued.
    if not closed:
      marks["end"] = 0
      ids = self._without_end(ids, (encodings.END,))
    # Cut and mark the text with the code that reads the task's examples.
    split = pack([ids], np.zeros(1, np.int32), **marks)
    num_tokens = int(split.lengths()[0])
    n = min(num_tokens, length or self.max_len)
    if n < num_tokens and not closed:
      raise UserError(
        f"{text[:40]!r} has {num_tokens:,} tokens, and this model reads at "
        f"most {n:,}: give a shorter text."
      )
    if n < num_tokens and not length:
      warnings.warn(
        f"{text[:40]!r} has {num_tokens:,} tokens, and is cut to {n:,}, the "
        "most that this model reads.",
        stacklevel=2,
      )
    return split.batch(np.array([0]), n)["inputs"][0]

  def _without_end(self, ids: Any, ends: tuple[str, ...]) -> Any:
    """Returns ids [n] without a token of `ends` at their end."""
    has_end = len(ids) and self.vocabulary[int(ids[-1])] in ends
    return ids[:-1] if has_end else ids

  def decode(self, ids: np.ndarray) -> str:
    """Returns the text of ids [n] without padding, opening and closing ids.

    Separates tokens by spaces if the task has no text.
    """
    # Remove padding, opening and closing ids.
    marks = {0, *(self.reading.get(name) for name in ("start_id", "end_id"))}
    kept = [int(i) for i in np.asarray(ids).ravel() if int(i) not in marks]
    kept = self._without_end(kept, (encodings.END, encodings.END_OF_TEXT))
    # Decode by the kind of the tokens.
    if self.tokenizer == "bytes":
      return bytes(i - 1 for i in kept if i <= 256).decode(errors="replace")
    if self.tokenizer == "characters":
      return "".join(self.vocabulary[i] for i in kept)
    if self.tokenizer_json:
      return self._reader.decode(kept, skip_special_tokens=False)
    return " ".join(self.vocabulary[i] for i in kept)

  def batch(self, inputs: Any, *, closed: bool = True) -> np.ndarray:
    """Returns inputs as a model reads them, padded to the longest.

    Args:
      inputs: texts; pairs of texts; arrays as `expected` describes them; or
        sequences of ids of different lengths. Pixels that are read as sequences
        may have axes for rows and columns.
      closed: argument of `encode`.

    Returns:
      int32 or float32 [b, (2,) n], float32 [b, n, channels] with NaN at
      padding, or float32 [b, height, width, c].

    Raises:
      UserError: for inputs of another kind or shape.
    """
    # Require at least one input.
    inputs = rows.values(inputs, "inputs")
    if not len(inputs):
      raise UserError("There are no inputs: give at least one.")
    if self.channels:
      return self._series([self._numbers(k, x) for k, x in enumerate(inputs)])
    # Read images, and arrays of sequences.
    if self.image:
      is_array = isinstance(inputs, np.ndarray)
      images = enumerate([] if is_array else inputs)
      stacked = [self._numbers(k, image) for k, image in images]
      return self._images(inputs if is_array else self._stacked(stacked))
    if isinstance(inputs, np.ndarray):
      return self._array(inputs)
    # Flatten pairs, and encode texts; keep sequences of numbers.
    flat = list(inputs)
    if self.num_inputs > 1:
      flat = [
        part for k, pair in enumerate(flat) for part in self._pair(k, pair)
      ]
    sequences = [
      self.encode(row, closed=closed)
      if isinstance(row, str)
      else self._numbers(k // self.num_inputs, row)
      for k, row in enumerate(flat)
    ]
    # Stack pixels and real numbers, which are not padded.
    is_raw = sequences[0].dtype == np.uint8 or sequences[0].ndim > 1
    if is_raw or not self.vocabulary:
      return self._array(self._stacked(sequences))
    # Pad sequences of ids to the longest; an empty one has no dtype.
    for row in sequences:
      is_ids = np.issubdtype(row.dtype, np.integer) or not row.size
      if row.ndim != 1 or not is_ids:
        raise self._refusal(row)
    n = max(1, *(len(row) for row in sequences))
    padded = [np.pad(np.int64(row), (0, n - len(row))) for row in sequences]
    return self._array(self._stacked(padded))

  def _pair(self, k: int, pair: Any) -> Sequence[Any]:
    """Returns the parts of pair k.

    Raises:
      UserError: if the pair is not a sequence of two parts.
    """
    is_sequence = isinstance(pair, tuple | list | np.ndarray)
    if not is_sequence or len(pair) != self.num_inputs:
      raise UserError(
        f"inputs[{k}]={rows.show(pair)} is not a pair: give {self.expected()}."
      )
    return pair

  def _numbers(self, k: int, row: Any) -> np.ndarray:
    """Returns input k as an array of numbers.

    Raises:
      UserError: for another value, such as None or NaN instead of a text.
    """
    try:
      array = np.asarray(row)
    except (TypeError, ValueError):
      array = np.zeros((), object)
    if not array.ndim or array.dtype.kind not in "iuf":
      raise UserError(
        f"inputs[{k}]={rows.show(row)} is not what this model reads: give "
        f"{self.expected()}."
      )
    return array

  def _stacked(self, sequences: Sequence[np.ndarray]) -> np.ndarray:
    """Returns rows of equal shapes as an array, [b, 2, ...] for pairs.

    Raises:
      UserError: for rows of different shapes.
    """
    shapes = {row.shape for row in sequences}
    if len(shapes) > 1:
      raise UserError(
        f"Inputs have the shapes {', '.join(map(str, sorted(shapes)))}: give "
        f"{self.expected()}, all of one length."
      )
    x = np.stack(sequences)
    if self.num_inputs > 1:
      x = x.reshape(-1, self.num_inputs, *x.shape[1:])
    return x

  def _misfit(self, x: np.ndarray, remedy: str) -> UserError:
    """Returns the error for inputs of a wrong size."""
    return UserError(
      f"Inputs {x.dtype} {list(x.shape)} have another size than this model "
      f"reads: give {remedy}."
    )

  def _refusal(self, x: np.ndarray) -> UserError:
    """Returns the error for inputs of another kind."""
    return UserError(
      f"Inputs {x.dtype} {list(x.shape)} are not what this model reads: give "
      f"{self.expected()}."
    )

  def _array(self, x: np.ndarray) -> np.ndarray:
    """Checks, cuts and scales an array of sequences."""
    # Recognise raw pixels, which are not ids.
    front = 1 + (self.num_inputs > 1)
    is_read = self.reading.get("scale") or self.reading.get("first_id")
    is_pixels = x.dtype == np.uint8 and not self.tokenizer
    if is_pixels and (is_read or x.ndim > front + 1):
      # Flatten rows and columns of raw pixels, then number or scale the values.
      pixels = x.reshape(*x.shape[:front], -1)
      if pixels.shape[-1] != self.max_len:
        raise self._misfit(x, f"{self.max_len} pixels, grey, each")
      x = pixels.astype(np.int32)
      x = x + self.reading.get("first_id", 0)
      if scale := self.reading.get("scale"):
        x = ((x - scale[0]) / scale[1]).astype(np.float32)
    # Check the axes and the type.
    is_real = x.dtype.kind == "f"
    is_pair = self.num_inputs == 1 or x.shape[1:2] == (self.num_inputs,)
    is_shaped = x.ndim == front + 1 and x.shape[-1] > 0 and is_pair
    is_number = x.dtype.kind in "iuf"
    if not is_shaped or not is_number or is_real == bool(self.vocabulary):
      raise self._refusal(x)
    # Real numbers must be finite, and have the length of the task.
    if is_real:
      x = _finite(x)
      if x.shape[-1] != self.max_len:
        raise self._misfit(x, f"{self.max_len} numbers each")
      return x
    # Cut padding beyond max_len, and check the range of ids.
    if x[..., self.max_len :].any():
      raise self._misfit(x, f"at most {self.max_len} ids each, or cut them")
    x = x[..., : self.max_len]
    if x.min() < 0 or x.max() >= len(self.vocabulary):
      raise UserError(
        f"Inputs have ids from {x.min()} to {x.max()}: give {self.expected()}."
      )
    return x.astype(np.int32)

  @property
  def _stored_channels(self) -> int:
    """Number of channels without the channel of the time."""
    return self.channels - bool(self.reading.get("include_time"))

  def normalise(self, x: np.ndarray) -> np.ndarray:
    """Returns steps of time series, [..., channels], as a model reads them.

    Other inputs do not change.
    """
    return series.normalise(x, self.reading) if self.channels else x

  def _series(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Checks time series, and normalises and pads them, [b, n, channels]."""
    for x in arrays:
      if x.ndim != 2 or x.shape[1] != self._stored_channels or not len(x):
        raise self._refusal(x)
      if len(x) > self.max_len:
        raise self._misfit(x, f"at most {self.max_len} steps each, or cut them")
    for k, x in enumerate(arrays):
      if series.has_no_numbers(x):
        raise UserError(
          f"inputs[{k}] has no number, or infinite ones: correct it. NaN "
          "stands for a missing number."
        )
    return series.pad(
      [series.normalise(x, self.reading) for x in arrays],
      max(len(x) for x in arrays),
    )

  def _images(self, x: np.ndarray) -> np.ndarray:
    """Checks images [b, height, width, c], and normalises 8-bit pixels."""
    if x.shape[1:] != tuple(self.image):
      raise self._refusal(x)
    if x.dtype.kind == "f":
      return _finite(x)
    if x.dtype.kind not in "iu" or x.min() < 0 or x.max() > 255:
      raise self._refusal(x)
    mean, deviation = (
      np.float32(self.reading[name]) for name in ("mean", "deviation")
    )
    return (x.astype(np.float32) / 255 - mean) / deviation


def _finite(x: np.ndarray) -> np.ndarray:
  """Returns numbers as float32, and requires that all of them are finite.

  Raises:
    UserError: for a number that is not finite.
  """
  with np.errstate(over="ignore"):
    x = x.astype(np.float32)
  is_finite = np.isfinite(x).reshape(len(x), -1).all(1)
  if not is_finite.all():
    raise UserError(
      f"inputs[{int(is_finite.argmin())}] has numbers that are not finite: "
      "correct them."
    )
  return x


def from_record(
  content: Mapping[str, Any], tokenizer_json: Any = None
) -> Inputs:
  """Returns the inputs that the files of a run describe.

  Args:
    content: content of the run's `vocabulary.json`.
    tokenizer_json: content of the run's `tokenizer.json`; None if there is no
      such file.
  """
  sizes = content["sizes"]
  return Inputs(
    tuple(content["tokens"]),
    sizes["max_len"],
    num_inputs=sizes["num_inputs"],
    image=tuple(sizes["image"]),
    tokenizer=content["tokenizer"],
    tokenizer_json=json.dumps(tokenizer_json) if tokenizer_json else "",
    reading=content,
    channels=sizes.get("channels", 0),
  )


def read_as_bert(vocabulary: Path, max_len: int) -> Inputs:
  """Returns the inputs of BERT: word pieces between [CLS] and [SEP].

  Args:
    vocabulary: path of a `vocab.txt`, a `tokenizer.json` or their folder.
    max_len: largest number of tokens, including [CLS] and [SEP].

  Raises:
    UserError: for a file that is missing or damaged, or lacks [CLS] or [SEP].
  """
  # Read the tokenizer.
  encoding = encodings.word_pieces("text", vocabulary=str(vocabulary))
  tokenizer = encoding.fit(iter(()))[1]["tokenizer"]
  listed = encodings.pieces(tokenizer)
  # Require the pieces that open and close a text.
  marks = {"start_id": "[CLS]", "end_id": "[SEP]"}
  for piece in marks.values():
    if piece not in listed:
      raise UserError(
        f"{vocabulary} has no line {piece}, which BERT reads at an end of each "
        "text: give the vocab.txt of the weights."
      )
  return Inputs(
    tuple(listed),
    max_len,
    tokenizer="word_pieces",
    tokenizer_json=tokenizer,
    reading={name: listed.index(piece) for name, piece in marks.items()},
  )
