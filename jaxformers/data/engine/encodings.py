"""From examples to tokens: bytes, characters, word pieces, grey pixels.

Vocabularies are closed and written out, or sorted by what they were fitted to;
none depends on the order of a set. Id 0 is padding wherever there is any.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import (
  decoders,
  models,
  normalizers,
  pre_tokenizers,
  trainers,
)

from jaxformers import paths
from jaxformers.data.engine.source import Encoding, Example
from jaxformers.errors import UserError

PAD, UNKNOWN, END = "<pad>", "<unk>", "<eos>"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ALPHABET = 1_000  # Characters that a trained vocabulary has at most.
BYTES = (PAD, *(f"0x{value:02x}" for value in range(256)))


def text_key(*fields: str) -> Callable[[Example], int]:
  """A hash of some fields: equal texts are known by the same number."""

  def key(example: Example) -> int:
    text = b"\0".join(example[field] for field in fields)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")

  return key


def id_key(example: Example) -> int:
  """The number that an `id` such as b"train_00042" ends with."""
  return int(example["id"].rpartition(b"_")[2])


def of_bytes(*fields: str) -> Encoding:
  """UTF-8 bytes as they stand, one sequence a field; id byte + 1 by `shift`."""

  def encode(examples: Sequence[Example]) -> Iterator[Sequence[np.ndarray]]:
    for example in examples:
      yield [np.frombuffer(example[field], np.uint8) for field in fields]

  return Encoding("bytes", lambda train: (encode, {}), text_key(*fields))


def characters(*fields: str, min_count: int, first: int) -> Encoding:
  """Unicode characters, one sequence a field.

  The vocabulary is <pad>, <unk>, <eos> and every character that occurs at least
  min_count times among the first so many characters of the training split's
  texts, the most frequent first and equally frequent ones by code point. It is
  kept in `info.json` as `vocabulary`.

  Source: S4's text and retrieval tasks, where min_count is 15 and 10, and a
  text is cut before it is counted.
  """

  def fit(train: Iterator[Example]) -> tuple[Any, dict[str, Any]]:
    counts: Counter[str] = Counter()
    for example in train:
      for field in fields:
        counts.update(example[field].decode(errors="replace")[:first])
    known = sorted(
      (c for c, n in counts.items() if n >= min_count),
      key=lambda c: (-counts[c], c),
    )
    vocabulary = [PAD, UNKNOWN, END, *known]
    ids = character_ids(vocabulary)

    def encode(examples: Sequence[Example]) -> Iterator[Sequence[np.ndarray]]:
      for example in examples:
        yield [ids(example[field].decode(errors="replace")) for field in fields]

    return encode, {"vocabulary": vocabulary}

  return Encoding(
    f"characters{min_count}-{first}", fit, text_key(*fields), dtype=np.uint16
  )


def word_pieces(*fields: str, vocabulary: str = "", size: int = 0) -> Encoding:
  """Lower-case word pieces as BERT's, the fields joined by a space.

  No [CLS] and no [SEP] are added. The tokenizer is kept in `info.json` as
  `tokenizer`, in the format of Hugging Face's `tokenizers`.

  Args:
    fields: whose texts become one sequence.
    vocabulary: path of a `vocab.txt` as BERT's, one piece a line; "" trains
      one on the training split.
    size: of the vocabulary that is trained, special tokens included.

  Raises:
    UserError: for a vocabulary that is not there or no vocabulary.
  """
  if vocabulary:
    path = paths.expand(vocabulary)
    given = _given(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    name = f"wordpiece-{digest}"
  else:
    if not len(SPECIAL) + 2 <= size <= 1 << 16:
      raise UserError(
        f"vocab_size={size}: a vocabulary of word pieces has "
        f"{len(SPECIAL) + 2} to {1 << 16:,}, such as 8000; or give a vocab.txt."
      )
    given, name = None, f"wordpiece-{size}"

  def text(example: Example) -> str:
    return " ".join(example[f].decode(errors="replace") for f in fields)

  def fit(train: Iterator[Example]) -> tuple[Any, dict[str, Any]]:
    tokenizer = given or _trained((text(one) for one in train), size)

    def encode(examples: Sequence[Example]) -> Iterator[Sequence[np.ndarray]]:
      texts = [text(example) for example in examples]
      for one in tokenizer.encode_batch(texts, add_special_tokens=False):
        yield [np.array(one.ids, np.uint16)]

    return encode, {"tokenizer": tokenizer.to_str()}

  return Encoding(name, fit, text_key(*fields), dtype=np.uint16)


def words(*fields: str, size: int = 0) -> Encoding:
  """Words between white space, <eos> at the end of every line.

  An empty line is an <eos> of its own, as the published perplexities on
  WikiText count. The vocabulary is <pad> and then the words of the training
  split, the most frequent first and equally frequent ones by code point; it is
  kept in `info.json` as `vocabulary`. Others are <unk>.

  Args:
    fields: whose texts become one sequence each.
    size: of the vocabulary at most, <pad> included; 0 for all words.

  Raises:
    UserError: for a size under 4.
  """
  if size and size < 4:
    raise UserError(f"vocab_size={size}: choose at least 4, or 0 for all.")

  def rank(counts: Counter[str]) -> Callable[[str], tuple[int, str]]:
    return lambda word: (-counts[word], word)

  def fit(train: Iterator[Example]) -> tuple[Any, dict[str, Any]]:
    counts: Counter[str] = Counter()
    for example in train:
      for field in fields:
        for line in _lines(example[field].decode(errors="replace")):
          counts.update(line.split())
          counts[END] += 1
    # Both are in the vocabulary, however rare they are.
    most = size - 3 if size else len(counts)
    order = sorted(counts.keys() - {UNKNOWN, END}, key=rank(counts))
    known = sorted([*order[:most], UNKNOWN, END], key=rank(counts))
    vocabulary = [PAD, *known]
    ids = word_ids(vocabulary)

    def encode(examples: Sequence[Example]) -> Iterator[Sequence[np.ndarray]]:
      for example in examples:
        yield [ids(example[field].decode(errors="replace")) for field in fields]

    return encode, {"vocabulary": vocabulary}

  name = f"words-{size}" if size else "words"
  return Encoding(name, fit, text_key(*fields), dtype=np.uint32)


def byte_pairs(*fields: str, size: int) -> Encoding:
  """Pieces of a byte-pair encoding of bytes as GPT-2's, <eos> after each text.

  Trained on the training split by Hugging Face's `tokenizers`, and kept in
  `info.json` as `tokenizer`. Ids are <pad>, <eos>, the 256 bytes, and merges
  in the order of their making.

  Source: Sennrich et al. 2016, https://arxiv.org/abs/1508.07909; Radford et al.
  2019 for bytes.

  Args:
    fields: whose texts become one sequence each.
    size: of the vocabulary, <pad> and <eos> included.

  Raises:
    UserError: for a size without room for the bytes or above 65,536.
  """
  if not 258 < size <= 1 << 16:
    raise UserError(
      f"vocab_size={size}: byte pairs need 259 to {1 << 16:,}, such as 8000."
    )

  def text(example: Example, field: str) -> str:
    return example[field].decode(errors="replace")

  def fit(train: Iterator[Example]) -> tuple[Any, dict[str, Any]]:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
      vocab_size=size,
      special_tokens=[PAD, END],
      initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
      show_progress=False,
    )
    texts = (text(one, field) for one in train for field in fields)
    tokenizer.train_from_iterator(texts, trainer)
    # Special to the trainer alone: in a text "<eos>" is five characters.
    plain = _without_special(tokenizer)
    end = np.array([tokenizer.token_to_id(END)], np.uint16)

    def encode(examples: Sequence[Example]) -> Iterator[Sequence[np.ndarray]]:
      texts = [text(one, field) for one in examples for field in fields]
      found = plain.encode_batch(texts, add_special_tokens=False)
      rows = [np.append(np.array(one.ids, np.uint16), end) for one in found]
      for at in range(0, len(rows), len(fields)):
        yield rows[at : at + len(fields)]

    return encode, {"tokenizer": plain.to_str()}

  return Encoding(f"byte-pairs-{size}", fit, text_key(*fields), dtype=np.uint16)


def _without_special(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
  """The same pieces and ids, none of which is found in a text as it stands."""
  content = json.loads(tokenizer.to_str())
  content["added_tokens"] = []
  return tokenizers.Tokenizer.from_str(json.dumps(content))


def _given(path: Path) -> tokenizers.Tokenizer:
  if not path.is_file():
    raise UserError(
      f"There is no vocabulary {path}: give the path of a vocab.txt, or leave "
      "task.vocabulary empty to train one."
    )
  pieces = path.read_text(encoding="utf-8").splitlines()
  if not pieces or pieces[0] != "[PAD]" or "[UNK]" not in pieces:
    raise UserError(
      f"{path} is no vocabulary of word pieces: [PAD] must be its first line "
      "and [UNK] among the others."
    )
  if not len(set(pieces)) == len(pieces) <= 1 << 16:
    raise UserError(
      f"{path} holds {len(pieces):,} pieces, {len(set(pieces)):,} different "
      f"ones: they must be distinct and at most {1 << 16:,}."
    )
  return _tokenizer({piece: i for i, piece in enumerate(pieces)})


def _tokenizer(vocabulary: dict[str, int]) -> tokenizers.Tokenizer:
  model = models.WordPiece(
    vocabulary, unk_token="[UNK]", max_input_chars_per_word=100
  )
  tokenizer = tokenizers.Tokenizer(model)
  tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
  tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
  return tokenizer


def _trained(texts: Iterable[str], size: int) -> tokenizers.Tokenizer:
  """A tokenizer of word pieces that depends on the texts alone.

  The trainer numbers the pieces "##c" of one character as it meets them in a
  hash map, whose order differs from process to process, and decides between
  equally frequent pairs by these numbers. So we number them before it does.
  """
  texts = list(texts)
  clean, split = normalizers.BertNormalizer(lowercase=True), _tokenizer({})
  counts: Counter[str] = Counter()
  for one in texts:
    counts.update(clean.normalize_str(one))
  for space in [c for c in counts if c.isspace()]:
    del counts[space]
  alphabet = sorted(counts, key=lambda c: (-counts[c], c))[:ALPHABET]
  # More than a third of the vocabulary for single characters helps nobody.
  alphabet = sorted(alphabet[: max((size - len(SPECIAL)) // 3, 1)])
  inner = [f"##{c}" for c in alphabet]
  trainer = trainers.WordPieceTrainer(
    vocab_size=size,
    special_tokens=[*SPECIAL, *inner],
    initial_alphabet=alphabet,
    limit_alphabet=len(alphabet),
    show_progress=False,
  )
  split.train_from_iterator(texts, trainer)
  # A tokenizer of its own, for which "##c" in a text is nothing special.
  return _tokenizer(split.get_vocab())


def _lines(text: str) -> list[str]:
  found = text.split("\n")
  return found[:-1] if not found[-1].strip() else found


Ids = Callable[[str], np.ndarray]


def byte_ids(text: str) -> np.ndarray:
  """Ids of a text under `BYTES`, each byte and one."""
  return np.frombuffer(text.encode(), np.uint8).astype(np.uint16) + 1


def character_ids(vocabulary: Sequence[str]) -> Ids:
  """A function: the ids of a text under the vocabulary of `characters`."""
  ids = {c: i for i, c in enumerate(vocabulary) if i > 2}
  return lambda text: np.array([ids.get(c, 1) for c in text], np.uint16)


def word_ids(vocabulary: Sequence[str]) -> Ids:
  """A function: the ids of a text under the vocabulary of `words`."""
  ids = {word: i for i, word in enumerate(vocabulary)}
  unknown, end = ids[UNKNOWN], ids[END]

  def encode(text: str) -> np.ndarray:
    found: list[int] = []
    for line in _lines(text):
      found += [ids.get(word, unknown) for word in line.split()]
      found.append(end)
    return np.array(found, np.uint32)

  return encode


def piece_ids(tokenizer: str, *, end: bool = False) -> Ids:
  """A function: the ids of a text under a tokenizer that `info.json` keeps.

  Args:
    tokenizer: of `word_pieces` or `byte_pairs`.
    end: whether <eos> stands after it, as after the texts of `byte_pairs`.
  """
  own = tokenizers.Tokenizer.from_str(tokenizer)
  last = [own.token_to_id(END)] if end else []

  def encode(text: str) -> np.ndarray:
    found = own.encode(text, add_special_tokens=False)
    return np.array([*found.ids, *last], np.uint16)

  return encode


def pieces(tokenizer: str) -> tuple[str, ...]:
  """The vocabulary of a tokenizer that `info.json` keeps, by id."""
  vocabulary = tokenizers.Tokenizer.from_str(tokenizer).get_vocab()
  return tuple(sorted(vocabulary, key=vocabulary.__getitem__))


def grey_itu(image: np.ndarray) -> np.ndarray:
  """uint8 [..., 3] -> uint8 [...] with Pillow's weights and rounding.

  ITU-R 601: 0.299 red, 0.587 green, 0.114 blue, in 16-bit integers, half up.
  S4, S5 and Mega read CIFAR-10 by it.
  """
  weights = np.array([19_595, 38_470, 7_471], np.uint32)
  total = image.astype(np.uint32) @ weights + 0x8000
  return (total >> 16).astype(np.uint8)


def grey_tf(image: np.ndarray) -> np.ndarray:
  """uint8 [..., 3] -> uint8 [...] as `tf.image.rgb_to_grayscale` has it.

  0.2989 red, 0.587 green, 0.114 blue on values over 255, in float32, then
  times 255.5 and cut. LRA and Skyformer read CIFAR-10 by it; it differs from
  `grey_itu` by one at most.
  """
  weights = np.array([0.2989, 0.587, 0.114], np.float32)
  real = image.astype(np.float32) * np.float32(1 / 255) @ weights
  return np.clip(real * np.float32(255.5), 0, 255).astype(np.uint8)


def grey(name: str, convert: Callable[[np.ndarray], np.ndarray]) -> Encoding:
  """Pixels in raster order, made grey by a function; ids by `shift`."""

  def encode(examples: Sequence[Example]) -> Iterator[Sequence[np.ndarray]]:
    for example in examples:
      yield [convert(example["image"]).ravel()]

  return Encoding(name, lambda train: (encode, {}), id_key)


def pixels() -> Encoding:
  """Pixels row by row with their channels last, as they stand."""

  def encode(examples: Sequence[Example]) -> Iterator[Sequence[np.ndarray]]:
    for example in examples:
      yield [example["image"].ravel()]

  return Encoding("pixels", lambda train: (encode, {}), id_key)


def files(*fields: str) -> Encoding:
  """The bytes of some fields as they stand: files, and nothing is a token."""
  return dataclasses.replace(of_bytes(*fields), name="files")


def ids() -> Encoding:
  """The field `ids` as it stands; an example is known by its ids."""

  def encode(examples: Sequence[Example]) -> Iterator[Sequence[np.ndarray]]:
    for example in examples:
      yield [example["ids"]]

  def key(example: Example) -> int:
    digest = hashlib.blake2b(example["ids"].tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big")

  return Encoding("ids", lambda train: (encode, {}), key)
