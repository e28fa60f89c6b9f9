"""Encodings of examples: bytes, characters, word pieces, grey pixels.

Vocabularies are closed and written out, or sorted by what they were fitted to;
none depends on the order of a set. Id 0 is padding wherever there is any.
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

PAD, UNKNOWN, END = "<pad>", "<unk>", "<eos>"
SPECIAL = vocabularies.SPECIAL
_read_vocabulary = vocabularies.read_tokenizer
# Largest number of characters of a trained vocabulary.
ALPHABET = 1_000
BYTES = (PAD, *(f"0x{value:02x}" for value in range(256)))

Ids = Callable[[str], np.ndarray]
Fitted = tuple[Encode, dict[str, Any]]


def well_formed(text: str) -> str:
  """Returns a text that UTF-8 can encode.

  Two surrogates of one character are joined, as JSON writes them; each other
  surrogate becomes U+FFFD.
  """
  try:
    text.encode()
  except UnicodeEncodeError:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
  return text


def _hash(content: bytes) -> int:
  return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


def text_key(*fields: str) -> Callable[[Example], int]:
  """Returns a hash function of fields: equal texts have equal keys."""
  return lambda example: _hash(b"\0".join(example[field] for field in fields))


def id_key(example: Example) -> int:
  """Returns the number that an `id` such as b"train_00042" ends with."""
  return int(example["id"].rpartition(b"_")[2])


def _texts(examples: Iterable[Example], fields: Sequence[str]) -> Iterator[str]:
  """Yields the text of every field, example by example."""
  for example in examples:
    for field in fields:
      yield example[field].decode(errors="replace")


def _each_field(ids: Ids, fields: Sequence[str]) -> Encode:
  """Returns a function that encodes every field as a sequence."""
  return lambda examples: (
    [ids(text) for text in _texts([example], fields)] for example in examples
  )


def _by_frequency(counts: Counter[str]) -> list[str]:
  """Returns what was counted, the most frequent first, then by code point."""
  return sorted(counts, key=lambda token: (-counts[token], token))


def _check_size(size: int, least: int, kind: str, advice: str = "") -> None:
  """Raises UserError for a vocabulary that is too small, or beyond 16 bits."""
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
  """Returns the encoding of a function that needs no training split."""
  return Encoding(name, lambda train: (lambda many: map(rows, many), {}), key)


def of_bytes(*fields: str) -> Encoding:
  """Encodes UTF-8 bytes unchanged, one sequence a field; `shift` adds 1."""

  def rows(example: Example) -> Sequence[np.ndarray]:
    return [np.frombuffer(example[field], np.uint8) for field in fields]

  return _without_fit("bytes", rows, text_key(*fields))


def characters(*fields: str, min_count: int, first: int) -> Encoding:
  """Encodes Unicode characters, one sequence a field.

  The vocabulary is <pad>, <unk>, <eos> and every character that occurs at least
  min_count times among the first so many characters of the training split's
  texts, the most frequent first and equally frequent ones by code point. It is
  kept in `info.json` as `vocabulary`.

  Source: S4's text and retrieval tasks, where min_count is 15 and 10, and a
  text is cut before it is counted.
  """

  def fit(train: Iterator[Example]) -> Fitted:
    # Count characters of the training split, and sort the frequent ones.
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
  """Encodes lower-case word pieces as BERT does, fields joined by a space.

  No [CLS] and no [SEP] are added. The tokenizer is kept in `info.json` as
  `tokenizer`, in the format of Hugging Face's `tokenizers`.

  Args:
    fields: names of the fields, whose texts become one sequence.
    vocabulary: path of a `vocab.txt` as BERT's, of a `tokenizer.json`, or of
      their folder, see `vocabularies`; "" trains one on the training split.
    size: size of the vocabulary that is trained, special tokens included.

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
  """Encodes texts of an example as word pieces, whose rows a function makes.

  Args:
    texts: function from an example to its texts.
    rows: function from an example and its encoded texts, which have the ids and
      the offsets of their pieces, to rows of integers below 2^16.
    key: key of the encoding.
    vocabulary, size: as for `word_pieces`.

  Raises:
    UserError: as `word_pieces`.
  """
  # Name the encoding after the file's content, or after the size.
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
        # Take as many of the encoded texts as the example has.
        parts = [next(encoded) for _ in texts(example)]
        yield [np.array(row, np.uint16) for row in rows(example, parts)]

    return encode, {"tokenizer": tokenizer.to_str()}

  return Encoding(name, fit, key, dtype=np.uint16)


def words(*fields: str, size: int = 0) -> Encoding:
  """Encodes words between white space, with <eos> at the end of every line.

  An empty line is an <eos> of its own, as the published perplexities on
  WikiText count. The vocabulary is <pad> and then the words of the training
  split, the most frequent first and equally frequent ones by code point; it is
  kept in `info.json` as `vocabulary`. Other words are <unk>.

  Args:
    fields: names of the fields, whose texts become one sequence each.
    size: largest size of the vocabulary, <pad> included; 0 for all words.

  Raises:
    UserError: for a size under 4.
  """
  if size and size < 4:
    raise UserError(f"vocab_size={size}: choose at least 4, or 0 for all.")

  def fit(train: Iterator[Example]) -> Fitted:
    # Count the words of the training split; every line has an <eos>.
    counts: Counter[str] = Counter()
    for text in _texts(train, fields):
      for line in _lines(text):
        counts.update([*line.split(), END])
    # Keep <unk> and <eos> however rare they are.
    always = {word: counts.pop(word, 0) for word in (UNKNOWN, END)}
    frequent = _by_frequency(counts)[: size - 3 if size else None]
    kept = Counter({word: counts[word] for word in frequent} | always)
    vocabulary = [PAD, *_by_frequency(kept)]
    encode = _each_field(word_ids(vocabulary), fields)
    return encode, {"vocabulary": vocabulary}

  name = f"words-{size}" if size else "words"
  return Encoding(name, fit, text_key(*fields), dtype=np.uint32)


def byte_pairs(*fields: str, size: int) -> Encoding:
  """Encodes byte pairs as GPT-2 does, with <eos> after each text.

  Trained on the training split by Hugging Face's `tokenizers`, and kept in
  `info.json` as `tokenizer`. Ids are <pad>, <eos>, the 256 bytes, and merges
  in the order of their making.

  Source: Sennrich et al. 2016, https://arxiv.org/abs/1508.07909; Radford et al.
  2019 for bytes.

  Args:
    fields: names of the fields, whose texts become one sequence each.
    size: size of the vocabulary, <pad> and <eos> included.

  Raises:
    UserError: for a size without room for the bytes or above 65,536.
  """
  _check_size(size, 259, "byte pairs")

  def fit(train: Iterator[Example]) -> Fitted:
    # Train merges of bytes, the smallest ids for <pad>, <eos> and the bytes.
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
    # Only the trainer treats <eos> as special: in a text "<eos>" is five
    # characters.
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = []
    plain = tokenizers.Tokenizer.from_str(json.dumps(content))
    end = np.array([tokenizer.token_to_id(END)], np.uint16)

    def encode(examples: Sequence[Example]) -> Iterator[Sequence[np.ndarray]]:
      texts = [*_texts(examples, fields)]
      encoded = plain.encode_batch(texts, add_special_tokens=False)
      rows = (np.append(np.array(row.ids, np.uint16), end) for row in encoded)
      # Give every example a row for each of its fields.
      return zip(*[rows] * len(fields), strict=True)

    return encode, {"tokenizer": plain.to_str()}

  return Encoding(f"byte-pairs-{size}", fit, text_key(*fields), dtype=np.uint16)


def _train_pieces(texts: list[str], size: int) -> tokenizers.Tokenizer:
  """Trains a tokenizer of word pieces that depends on the texts alone.

  The trainer numbers the pieces "##c" of one character as it meets them in a
  hash map, whose order differs from process to process, and breaks ties between
  equally frequent pairs by these numbers. So we number them before it does.
  """
  # Count the characters as the trainer will see them, without white space.
  normalizer = normalizers.BertNormalizer(lowercase=True)
  counts: Counter[str] = Counter()
  for text in texts:
    counts.update(normalizer.normalize_str(text))
  frequent = [c for c in _by_frequency(counts) if not c.isspace()]
  # Choose the most frequent; a third of the vocabulary is enough for them.
  most = min(ALPHABET, max((size - len(SPECIAL)) // 3, 1))
  alphabet = sorted(frequent[:most])
  # Name "##c" as special tokens, which are numbered first and in order.
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
  # A new tokenizer, for which "##c" in a text is nothing special.
  return vocabularies.from_vocabulary(trained.get_vocab())


def _lines(text: str) -> list[str]:
  lines = text.split("\n")
  return lines[:-1] if not lines[-1].strip() else lines


def byte_ids(text: str) -> np.ndarray:
  """Returns the ids of a text under `BYTES`: each byte plus one."""
  content = well_formed(text).encode()
  return np.frombuffer(content, np.uint8).astype(np.uint16) + 1


def character_ids(vocabulary: Sequence[str]) -> Ids:
  """Returns a function from text to ids under a vocabulary of `characters`."""
  ids = {c: i for i, c in enumerate(vocabulary) if i > 2}
  return lambda text: np.array([ids.get(c, 1) for c in text], np.uint16)


def word_ids(vocabulary: Sequence[str]) -> Ids:
  """Returns a function from a text to ids under a vocabulary of `words`."""
  # Words outside of the vocabulary are <unk>, and every line has an <eos>.
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
    end: True to append <eos>, as to the texts of `byte_pairs`.
  """
  loaded = tokenizers.Tokenizer.from_str(tokenizer)
  last = [loaded.token_to_id(END)] if end else []

  def encode(text: str) -> np.ndarray:
    encoded = loaded.encode(text, add_special_tokens=False)
    return np.array([*encoded.ids, *last], np.uint16)

  return encode


def marks(vocabulary: Sequence[str]) -> tuple[int, int]:
  """Returns the ids of [CLS] and [SEP], by which BERT marks its sequences.

  Raises:
    UserError: for a vocabulary without them.
  """
  if missing := {"[CLS]", "[SEP]"} - {*vocabulary}:
    raise UserError(
      f"The vocabulary has no {' and no '.join(sorted(missing))}: give a "
      "vocab.txt as BERT's, or leave task.vocabulary empty to train one."
    )
  return vocabulary.index("[CLS]"), vocabulary.index("[SEP]")


def pieces(tokenizer: str) -> tuple[str, ...]:
  """Returns the vocabulary of a tokenizer of `info.json`, by id."""
  vocabulary = tokenizers.Tokenizer.from_str(tokenizer).get_vocab()
  return tuple(sorted(vocabulary, key=vocabulary.__getitem__))


def grey_itu(image: np.ndarray) -> np.ndarray:
  """Turns colours grey with Pillow's weights and rounding.

  ITU-R 601: 0.299 red, 0.587 green, 0.114 blue, in 16-bit integers, half up.
  S4, S5 and Mega read CIFAR-10 by it.

  Shapes: uint8 [..., 3] -> uint8 [...].
  """
  weights = np.array([19_595, 38_470, 7_471], np.uint32)
  total = image.astype(np.uint32) @ weights + 0x8000
  return (total >> 16).astype(np.uint8)


def grey_tf(image: np.ndarray) -> np.ndarray:
  """Turns colours grey as `tf.image.rgb_to_grayscale` does.

  0.2989 red, 0.587 green, 0.114 blue on values over 255, in float32, then
  times 255.5 and cut. LRA and Skyformer read CIFAR-10 by it; it differs from
  `grey_itu` by one at most.

  Shapes: uint8 [..., 3] -> uint8 [...].
  """
  weights = np.array([0.2989, 0.587, 0.114], np.float32)
  real = image.astype(np.float32) * np.float32(1 / 255) @ weights
  return np.clip(real * np.float32(255.5), 0, 255).astype(np.uint8)


def grey(name: str, convert: Callable[[np.ndarray], np.ndarray]) -> Encoding:
  """Encodes pixels in raster order, made grey by a function."""
  return _without_fit(name, lambda e: [convert(e["image"]).ravel()], id_key)


def pixels() -> Encoding:
  """Encodes pixels row by row with their channels last, unchanged."""
  return _without_fit("pixels", lambda e: [e["image"].ravel()], id_key)


def files(*fields: str) -> Encoding:
  """Encodes the bytes of fields unchanged: files, which are not tokens."""
  return dataclasses.replace(of_bytes(*fields), name="files")


def ids() -> Encoding:
  """Encodes the field `ids` unchanged; the key is a hash of the ids."""
  return _without_fit(
    "ids", lambda e: [e["ids"]], lambda e: _hash(e["ids"].tobytes())
  )
