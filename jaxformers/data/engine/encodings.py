"""Encodings of examples: bytes, characters, word pieces, grey pixels.

A vocabulary is fixed, or is fitted to the training split and then sorted by
frequency and code point. No vocabulary depends on the order of a set. Id 0 is
padding in every encoding that has padding.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from jaxformers.data.engine import vocabularies
from jaxformers.data.engine.source import Encode, Encoding, Example
from jaxformers.foundations import paths
from jaxformers.foundations.errors import UserError

PAD, UNKNOWN, END = vocabularies.PAD, "<unk>", "<eos>"
# Token at the end of each text in the texts that GPT-2 was trained on.
END_OF_TEXT = "<|endoftext|>"
SPECIAL = vocabularies.SPECIAL
_read_vocabulary = vocabularies.read_tokenizer
# Largest number of characters of a trained vocabulary.
ALPHABET = 1_000
BYTES = (PAD, *(f"0x{value:02x}" for value in range(256)))

Ids = Callable[[str], np.ndarray]
Fitted = tuple[Encode, dict[str, Any]]


def well_formed(text: str) -> str:
  """Returns a text that UTF-8 can encode.

  A pair of surrogates, as JSON writes it, becomes one character; every other
  surrogate becomes U+FFFD.
  """
  try:
    text.encode()
  except UnicodeEncodeError:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
  return text


def hash_key(content: bytes) -> int:
  """Returns a hash of a content, the key of an example, below 2^64."""
  return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


def text_key(*fields: str) -> Callable[[Example], int]:
  """Returns a function from an example to a hash of its text fields."""
  return lambda example: hash_key(
    b"\0".join(example[field] for field in fields)
  )


def id_key(example: Example) -> int:
  """Returns the number at the end of an `id` such as b"train_00042"."""
  return int(example["id"].rpartition(b"_")[2])


def _texts(examples: Iterable[Example], fields: Sequence[str]) -> Iterator[str]:
  """Yields the texts of the fields, example by example."""
  for example in examples:
    for field in fields:
      yield example[field].decode(errors="replace")


def _each_field(ids: Ids, fields: Sequence[str]) -> Encode:
  """Returns a function that encodes every field as one sequence."""
  return lambda examples: (
    [ids(text) for text in _texts([example], fields)] for example in examples
  )


def _by_frequency(counts: Counter[str]) -> list[str]:
  """Returns the counted tokens by falling frequency, then by code point."""
  return sorted(counts, key=lambda token: (-counts[token], token))


def _check_size(size: int, least: int, kind: str, advice: str = "") -> None:
  """Raises UserError for a vocabulary of less than `least` or over 2^16 ids."""
  if not least <= size <= 1 << 16:
    raise UserError(
      f"vocab_size={size} is out of range: {kind} need {least} to "
      f"{1 << 16:,}, such as 8000{advice}."
    )


def _without_fit(
  name: str,
  rows: Callable[[Example], Sequence[np.ndarray]],
  key: Callable[[Example], int],
) -> Encoding:
  """Returns an encoding that is not fitted to the training split."""
  return Encoding(name, lambda train: (lambda many: map(rows, many), {}), key)


def of_bytes(*fields: str) -> Encoding:
  """Returns the encoding of fields as their UTF-8 bytes, one sequence a field.

  Bytes are stored unchanged; `Packed.shift` adds 1 when they are read.
  """

  def rows(example: Example) -> Sequence[np.ndarray]:
    return [np.frombuffer(example[field], np.uint8) for field in fields]

  return _without_fit("bytes", rows, text_key(*fields))


def characters(*fields: str, min_count: int, first: int) -> Encoding:
  """Returns the encoding of fields as Unicode characters, one sequence a field.

  The vocabulary is <pad>, <unk>, <eos>, and then every character that occurs at
  least `min_count` times in the training split. Of each text, only the first
  `first` characters are counted. Characters are sorted by falling frequency,
  then by code point. `info.json` keeps the vocabulary as `vocabulary`.

  Source: S4's text and retrieval tasks, where min_count is 15 and 10, and a
  text is cut before its characters are counted.
  """

  def fit(train: Iterator[Example]) -> Fitted:
    # Count the characters of the training split, and sort the frequent ones.
    counts: Counter[str] = Counter()
    for text in _texts(train, fields):
      counts.update(text[:first])
    frequent = [c for c in _by_frequency(counts) if counts[c] >= min_count]
    vocabulary = [PAD, UNKNOWN, END, *frequent]
    encode = _each_field(character_ids(vocabulary), fields)
    return encode, {"vocabulary": vocabulary}

  name = f"characters{min_count}-{first}"
  return Encoding(name, fit, text_key(*fields), dtype=np.uint16)


def word_pieces(*fields: str, vocabulary: str = "", size: int = 0) -> Encoding:
  """Returns the encoding of texts as BERT's lower-case word pieces.

  Joins the fields by a space. Adds no [CLS] and no [SEP]. `info.json` keeps the
  tokenizer as `tokenizer`, in the format of Hugging Face's `tokenizers`.

  Args:
    fields: names of the fields, whose texts become one sequence.
    vocabulary: path of a `vocab.txt` in BERT's format, of a `tokenizer.json`,
      or of their folder (see `vocabularies`); "" trains a vocabulary on the
      training split.
    size: size of the trained vocabulary, special tokens included.

  Raises:
    UserError: for a vocabulary file that is missing or damaged, or a size out
      of range.
  """
  return pieces_of(
    lambda example: [" ".join(_texts([example], fields))],
    lambda example, encoded: [encoded[0].ids],
    text_key(*fields),
    vocabulary=vocabulary,
    size=size,
  )


def pieces_of(
  texts: Callable[[Example], Sequence[str]],
  rows: Callable[[Example, Sequence[tokenizers.Encoding]], Sequence[Any]],
  key: Callable[[Example], int],
  *,
  vocabulary: str = "",
  size: int = 0,
) -> Encoding:
  """Returns the encoding that makes rows of integers from word pieces.

  Args:
    texts: function from an example to its texts.
    rows: function from an example and its encoded texts (ids and offsets of the
      pieces) to the rows of the example, which hold integers below 2^16.
    key: function from an example to its key; see `Encoding.key`.
    vocabulary, size: arguments of `word_pieces`.

  Raises:
    UserError: for the same reasons as `word_pieces`.
  """
  # Name the encoding after the content of the file, or after the size.
  if vocabulary:
    path = paths.expand(vocabulary)
    published = _read_vocabulary(path)
    name = f"wordpiece-{vocabularies.digest(published)}"
  else:
    advice = ", or a vocab.txt"
    _check_size(size, len(SPECIAL) + 2, "word pieces", advice)
    published, name = None, f"wordpiece-{size}"

  def flat(examples: Iterable[Example]) -> list[str]:
    return [text for example in examples for text in texts(example)]

  def fit(train: Iterator[Example]) -> Fitted:
    # Use the published vocabulary, or train one on the training split.
    tokenizer = published or _train_pieces(flat(train), size)

    def encode(examples: Sequence[Example]) -> Iterator[Sequence[np.ndarray]]:
      encoded = iter(
        tokenizer.encode_batch(flat(examples), add_special_tokens=False)
      )
      for example in examples:
        # Take the encoded texts of this example.
        parts = [next(encoded) for _ in texts(example)]
        yield [np.array(row, np.uint16) for row in rows(example, parts)]

    return encode, {"tokenizer": tokenizer.to_str()}

  return Encoding(name, fit, key, dtype=np.uint16)


def words(*fields: str, size: int = 0) -> Encoding:
  """Returns the encoding of words between white space; <eos> ends every line.

  An empty line becomes one <eos>, as in published perplexities on WikiText. The
  vocabulary is <pad>, and then the words of the training split by falling
  frequency and by code point. `info.json` keeps it as `vocabulary`. All other
  words become <unk>.

  Args:
    fields: names of the fields, each of which becomes one sequence.
    size: largest size of the vocabulary, <pad> included; 0 for all words.

  Raises:
    UserError: for a size below 4 other than 0.
  """
  if size and size < 4:
    raise UserError(f"vocab_size={size}: choose at least 4, or 0 for all.")

  def fit(train: Iterator[Example]) -> Fitted:
    # Count the words of the training split; every line has an <eos>.
    counts: Counter[str] = Counter()
    for text in _texts(train, fields):
      for line in _lines(text):
        counts.update([*line.split(), END])
    # Always keep <unk> and <eos>, even if they are rare.
    always = {word: counts.pop(word, 0) for word in (UNKNOWN, END)}
    frequent = _by_frequency(counts)[: size - 3 if size else None]
    kept = Counter({word: counts[word] for word in frequent} | always)
    vocabulary = [PAD, *_by_frequency(kept)]
    encode = _each_field(word_ids(vocabulary), fields)
    return encode, {"vocabulary": vocabulary}

  name = f"words-{size}" if size else "words"
  return Encoding(name, fit, text_key(*fields), dtype=np.uint32)


def byte_pairs(*fields: str, size: int = 0, vocabulary: str = "") -> Encoding:
  """Returns the encoding of texts as GPT-2's byte pairs; <eos> ends each text.

  Hugging Face's `tokenizers` trains the tokenizer on the training split, and
  `info.json` keeps it as `tokenizer`. Ids are <pad>, <eos>, the 256 bytes, and
  then the merges in the order of training. Texts of a published tokenizer
  without <eos> end with <|endoftext|>, if it has this token.

  Source: Sennrich et al. 2016, https://arxiv.org/abs/1508.07909; Radford et al.
  2019 for bytes.

  Args:
    fields: names of the fields, each of which becomes one sequence.
    size: size of the trained vocabulary, <pad> and <eos> included.
    vocabulary: path of a `tokenizer.json` or of its folder, see
      `vocabularies.read_byte_pairs`; "" trains a vocabulary.

  Raises:
    UserError: for a size below 259 or above 65,536; for a vocabulary file that
      is missing or damaged.
  """
  if vocabulary:
    published = vocabularies.read_byte_pairs(paths.expand(vocabulary))
    name = f"byte-pairs-{vocabularies.digest(published)}"
  else:
    _check_size(size, 259, "byte pairs")
    published, name = None, f"byte-pairs-{size}"

  def train_pairs(train: Iterator[Example]) -> tokenizers.Tokenizer:
    # Train merges of bytes; <pad>, <eos> and the bytes get the smallest ids.
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
      vocab_size=size,
      special_tokens=[PAD, END],
      initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
      show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(train, fields), trainer)
    # Make <eos> an ordinary token after training: "<eos>" in a text is five
    # characters.
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = []
    return tokenizers.Tokenizer.from_str(json.dumps(content))

  def fit(train: Iterator[Example]) -> Fitted:
    plain = published or train_pairs(train)
    ends = [plain.token_to_id(token) for token in (END, END_OF_TEXT)]
    end = np.array([i for i in ends if i is not None][:1], np.uint16)

    def encode(examples: Sequence[Example]) -> Iterator[Sequence[np.ndarray]]:
      texts = [*_texts(examples, fields)]
      encoded = plain.encode_batch(texts, add_special_tokens=False)
      rows = (np.append(np.array(row.ids, np.uint16), end) for row in encoded)
      # Group the rows by example: one row for each field.
      return zip(*[rows] * len(fields), strict=True)

    return encode, {"tokenizer": plain.to_str()}

  return Encoding(name, fit, text_key(*fields), dtype=np.uint16)


def _train_pieces(texts: list[str], size: int) -> tokenizers.Tokenizer:
  """Trains a tokenizer of word pieces deterministically.

  The trainer numbers the pieces "##c" of one character in the order of a hash
  map, which differs between processes, and breaks ties between equally frequent
  pairs by these numbers. This function numbers the pieces "##c" before training
  and so makes the result a function of the texts.
  """
  # Count the normalised characters, without white space.
  normalizer = normalizers.BertNormalizer(lowercase=True)
  counts: Counter[str] = Counter()
  for text in texts:
    counts.update(normalizer.normalize_str(text))
  frequent = [c for c in _by_frequency(counts) if not c.isspace()]
  # Choose the most frequent ones, at most a third of the vocabulary.
  most = min(ALPHABET, max((size - len(SPECIAL)) // 3, 1))
  alphabet = sorted(frequent[:most])
  # Pass "##c" as special tokens: the trainer numbers these first and in order.
  continuations = [f"##{c}" for c in alphabet]
  trainer = trainers.WordPieceTrainer(
    vocab_size=size,
    special_tokens=[*SPECIAL, *continuations],
    initial_alphabet=alphabet,
    limit_alphabet=len(alphabet),
    show_progress=False,
  )
  trained = vocabularies.from_vocabulary({})
  trained.train_from_iterator(texts, trainer)
  # Make a new tokenizer, in which "##c" is not a special token.
  return vocabularies.from_vocabulary(trained.get_vocab())


def _lines(text: str) -> list[str]:
  """Returns the lines of a text; drops the last line if it is blank."""
  lines = text.split("\n")
  return lines[:-1] if not lines[-1].strip() else lines


def byte_ids(text: str) -> np.ndarray:
  """Returns the ids of a text under `BYTES`: every byte plus one."""
  content = well_formed(text).encode()
  return np.frombuffer(content, np.uint8).astype(np.uint16) + 1


def character_ids(vocabulary: Sequence[str]) -> Ids:
  """Returns a function from text to ids under a vocabulary of `characters`."""
  # Skip <pad>, <unk> and <eos>; unknown characters get the id 1, <unk>.
  ids = {c: i for i, c in enumerate(vocabulary) if i > 2}
  return lambda text: np.array([ids.get(c, 1) for c in text], np.uint16)


def word_ids(vocabulary: Sequence[str]) -> Ids:
  """Returns a function from a text to ids under a vocabulary of `words`."""
  # Words outside of the vocabulary become <unk>; every line ends with <eos>.
  ids = {word: i for i, word in enumerate(vocabulary)}
  unknown = ids[UNKNOWN]
  return lambda text: np.array(
    [
      ids.get(word, unknown)
      for line in _lines(text)
      for word in (*line.split(), END)
    ],
    np.uint32,
  )


def piece_ids(tokenizer: str, *, end: bool = False) -> Ids:
  """Returns a function from a text to ids under a tokenizer of `info.json`.

  Args:
    tokenizer: tokenizer of `word_pieces` or `byte_pairs`, as JSON.
    end: True to append <eos> if the tokenizer has it, as `byte_pairs` does.
  """
  loaded = tokenizers.Tokenizer.from_str(tokenizer)
  has_end = end and loaded.token_to_id(END) is not None
  last = [loaded.token_to_id(END)] if has_end else []

  def encode(text: str) -> np.ndarray:
    encoded = loaded.encode(text, add_special_tokens=False)
    return np.array([*encoded.ids, *last], np.uint16)

  return encode


def marks(vocabulary: Sequence[str]) -> tuple[int, int]:
  """Returns the ids of [CLS] and [SEP], which open and close BERT's sequences.

  Raises:
    UserError: for a vocabulary without [CLS] or [SEP].
  """
  if missing := {"[CLS]", "[SEP]"} - {*vocabulary}:
    raise UserError(
      f"The vocabulary has no {' and no '.join(sorted(missing))}: give a "
      "vocab.txt like BERT's, or leave task.vocabulary empty to train one."
    )
  return vocabulary.index("[CLS]"), vocabulary.index("[SEP]")


def pieces(tokenizer: str) -> tuple[str, ...]:
  """Returns the vocabulary of a tokenizer of `info.json`, by id."""
  return tuple(vocabularies.tokens(tokenizers.Tokenizer.from_str(tokenizer)))


def grey_itu(image: np.ndarray) -> np.ndarray:
  """Converts colours to grey with Pillow's weights and rounding.

  ITU-R 601: 0.299 red + 0.587 green + 0.114 blue, in fixed-point numbers with
  16 fractional bits, rounded half up. S4, S5 and Mega use it for CIFAR-10.

  Shapes: uint8 [..., 3] -> uint8 [...].
  """
  weights = np.array([19_595, 38_470, 7_471], np.uint32)
  total = image.astype(np.uint32) @ weights + 0x8000
  return (total >> 16).astype(np.uint8)


def grey_tf(image: np.ndarray) -> np.ndarray:
  """Converts colours to grey as `tf.image.rgb_to_grayscale` does.

  0.2989 red + 0.587 green + 0.114 blue of values divided by 255, in float32,
  then multiplied by 255.5 and truncated. LRA and Skyformer use it for CIFAR-10.
  The result differs from `grey_itu` by at most one.

  Shapes: uint8 [..., 3] -> uint8 [...].
  """
  weights = np.array([0.2989, 0.587, 0.114], np.float32)
  real = image.astype(np.float32) * np.float32(1 / 255) @ weights
  return np.clip(real * np.float32(255.5), 0, 255).astype(np.uint8)


def grey(name: str, convert: Callable[[np.ndarray], np.ndarray]) -> Encoding:
  """Returns the encoding of images as grey pixels in raster order.

  Args:
    name: name of the encoding.
    convert: function from the pixels of an image to grey pixels.
  """
  return _without_fit(name, lambda e: [convert(e["image"]).ravel()], id_key)


def pixels() -> Encoding:
  """Returns the encoding of unchanged pixels, row by row, channels last."""
  return _without_fit("pixels", lambda e: [e["image"].ravel()], id_key)


def files(*fields: str) -> Encoding:
  """Returns the encoding of files, whose bytes are stored unchanged."""
  return dataclasses.replace(of_bytes(*fields), name="files")


def ids(*fields: str, dtype: Any = np.uint8) -> Encoding:
  """Returns the encoding of fields of ids, unchanged, one sequence a field.

  Args:
    *fields: names of the fields; the key of an example is the hash of the first
      one. Without names, the field is `ids`.
    dtype: integer type of the ids.
  """
  first, *others = fields or ("ids",)
  encoding = _without_fit(
    "-".join([first, *others]),
    lambda e: [e[field] for field in (first, *others)],
    lambda e: hash_key(e[first].tobytes()),
  )
  return dataclasses.replace(encoding, dtype=dtype)
