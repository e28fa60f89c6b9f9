"""Reads vocabularies from folders of Hugging Face's models.

Word pieces: a `vocab.txt` has one piece per line. A `tokenizer.json` has the
vocabulary and the normalisation of texts. A `tokenizer_config.json` next to
either has options such as `do_lower_case`. Options that cannot be obeyed raise
an error.

Differs from transformers: [PAD] in a text is ordinary text, because id 0 is
padding. Without a `tokenizer_config.json`, [MASK] and the other special tokens
in a text are ordinary text too if there is only a `vocab.txt`; a
`tokenizer.json` is used unchanged.

Byte pairs: a `tokenizer.json` has everything. Ids are moved up by one, because
id 0 is padding.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from jaxformers.data.engine import files
from jaxformers.foundations.errors import UserError

PAD = "<pad>"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_SIZE = 1 << 16  # Ids are stored in 16 bits.
FILES = VOCABULARY, TOKENIZER = ("vocab.txt", "tokenizer.json")
CONFIG, NAMES, ADDED = (
  "tokenizer_config.json",
  "special_tokens_map.json",
  "added_tokens.json",
)
# Supported fields of a tokenizer_config.json, and their names in the normalizer
# of `tokenizers`.
NORMALIZER = {
  "do_lower_case": "lowercase",
  "strip_accents": "strip_accents",
  "tokenize_chinese_chars": "handle_chinese_chars",
}
# Fields with the only value that is supported.
FIXED = {
  **{f"{name[1:-1].lower()}_token": name for name in SPECIAL},
  "do_basic_tokenize": True,
  "never_split": [],
  "wordpieces_prefix": "##",
}
# Classes of `transformers` that read word pieces as BERT does. The last two
# read any tokenizer.json.
CLASSES = ("Bert", "DistilBert", "Electra", "MobileBert", "ConvBert")
GENERIC = ("PreTrainedTokenizer", "TokenizersBackend")


def read_tokenizer(path: Path) -> tokenizers.Tokenizer:
  """Returns the tokenizer of a vocabulary file and of the files next to it.

  Args:
    path: path of a vocab.txt, of a tokenizer.json, or of their folder.

  Raises:
    UserError: for a file that is missing or damaged, or that requires a
      tokenizer other than BERT's word pieces.
  """
  # Find the file, and read the options next to it.
  if path.is_dir():
    path = find(path) or path / VOCABULARY
  if not path.is_file():
    raise UserError(
      f"There is no vocabulary {path}: give the path of a vocab.txt, a "
      "tokenizer.json or their folder, or leave task.vocabulary empty to train "
      "one."
    )
  options = _options(path.parent)
  # Read the tokenizer.json, if any; compare it with the vocab.txt.
  file = path if path.suffix == ".json" else path.with_name(TOKENIZER)
  tokenizer = _from_json(file, options) if file.is_file() else None
  if path != file:
    pieces = _pieces(path)
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    if tokenizer is None:
      tokenizer = _from_pieces(path, vocabulary, options)
    elif tokenizer.get_vocab(with_added_tokens=False) != vocabulary:
      raise UserError(
        f"{path} and {file} have different vocabularies: remove the file that "
        "is not the model's."
      )
  assert tokenizer is not None  # `path` is one of the two files.
  # Check that all added tokens and ids can be used.
  _require_added(path.parent, tokenizer)
  _check(path, tokenizer)
  return tokenizer


def read_byte_pairs(path: Path) -> tokenizers.Tokenizer:
  """Returns the tokenizer of a tokenizer.json of byte pairs, such as GPT-2's.

  Id i of the file is the id i + 1 here, and id 0 is padding. If the id of <pad>
  is 0 in the file, as in files of this package, ids stay as they are.

  Args:
    path: path of the file or of its folder.

  Raises:
    UserError: for a file that is missing or damaged, or of another tokenizer.
  """
  file = path / TOKENIZER if path.is_dir() else path
  if not file.is_file():
    raise UserError(
      f"There is no {file}: give the path of a tokenizer.json of byte pairs, "
      "as transformers writes it, or leave task.vocabulary empty to train one."
    )
  content = _read_json(file, "BPE")
  model = content["model"]
  added = {token["content"]: token["id"] for token in content["added_tokens"]}
  taken = {**model["vocab"], **added}
  if taken.get(PAD) != 0:
    padding = PAD
    while padding in taken:
      padding = f"<{padding}>"
    ids = {token: i + 1 for token, i in model["vocab"].items()}
    model["vocab"] = {padding: 0, **ids}
    for token in content["added_tokens"]:
      token["id"] += 1
  # Ids that open and close a text are not added here.
  tokenizer = _parse(file, {**content, "post_processor": None})
  _require_complete(file, tokenizer)
  return tokenizer


def require_unpadded(folder: Path) -> None:
  """Raises UserError if the tokenizer of published weights has <pad> as id 0.

  Ids of published weights are moved up by one, but ids of such a file are not.

  Args:
    folder: folder with a tokenizer.json of byte pairs.
  """
  ids = _parse(folder / TOKENIZER, _read_json(folder / TOKENIZER, "BPE"))
  if ids.token_to_id(PAD) == 0:
    raise UserError(
      f"{folder / TOKENIZER} has the id 0 for {PAD}, which is not supported in "
      "a folder of published weights: rename this token in the file."
    )


def find(folder: Path, names: Sequence[str] = FILES) -> Path | None:
  """Returns the path of the first file in a folder, or None.

  Args:
    folder: any folder.
    names: names of files of vocabularies.
  """
  paths = [folder / name for name in names]
  return next((path for path in paths if path.is_file()), None)


def tokens(tokenizer: tokenizers.Tokenizer) -> list[str]:
  """Returns the tokens of a tokenizer in the order of their ids."""
  ids = tokenizer.get_vocab()
  return sorted(ids, key=ids.__getitem__)


def digest(tokenizer: tokenizers.Tokenizer) -> str:
  """Returns eight hexadecimal digits that identify a tokenizer."""
  return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()[:8]


def from_vocabulary(
  vocabulary: dict[str, int], **options: Any
) -> tokenizers.Tokenizer:
  """Returns BERT's tokenizer of word pieces, with lower case by default.

  Args:
    vocabulary: id of every piece.
    **options: arguments of `tokenizers.normalizers.BertNormalizer`.
  """
  model = models.WordPiece(
    vocabulary, unk_token="[UNK]", max_input_chars_per_word=100
  )
  tokenizer = tokenizers.Tokenizer(model)
  tokenizer.normalizer = normalizers.BertNormalizer(
    **{"lowercase": True, **options}
  )
  tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
  return tokenizer


def require_same(
  folder: Path, tokenizer_json: str, advice: str, kind: str = "word_pieces"
) -> None:
  """Raises UserError if the tokenizer in a folder differs from the task's.

  Does nothing if the folder has no tokenizer files.

  Args:
    folder: folder of weights.
    tokenizer_json: tokenizer of the task, as JSON.
    advice: last sentence of the message.
    kind: "word_pieces" or "byte_pairs".
  """
  # Compare the whole tokenizer if there is one, or only its normalizer.
  ours = json.loads(tokenizer_json)
  if kind == "byte_pairs":
    if not (folder / TOKENIZER).is_file():
      return
    theirs = json.loads(read_byte_pairs(folder).to_str())
    names = ["normalizer", "pre_tokenizer", "model", "added_tokens"]
  elif find(folder):
    theirs = json.loads(read_tokenizer(folder).to_str())
    names = ["normalizer", "pre_tokenizer", "model"]
  elif (folder / CONFIG).is_file():
    options = _options(folder) or {}
    theirs = json.loads(from_vocabulary({}, **options).to_str())
    names = ["normalizer"]
  else:
    return
  different = [name for name in names if ours[name] != theirs[name]]
  if different:
    values = [json.dumps(each[different[0]])[:200] for each in (theirs, ours)]
    raise UserError(
      f"The {different[0]} of the tokenizer in {folder} is {values[0]}, and "
      f"the task has {values[1]}: {advice}"
    )


def _pieces(path: Path) -> list[str]:
  """Returns the pieces of a vocab.txt in the order of its lines."""
  text = files.decode_text(path.read_bytes(), str(path))
  # Split at \n only: a piece may be another character that ends lines.
  lines = [line.rstrip(" \t\r") for line in text.split("\n")]
  while lines and not lines[-1]:
    lines.pop()
  if not lines or lines[0] != "[PAD]" or "[UNK]" not in lines:
    raise UserError(
      f"{path} is not a vocabulary of word pieces: give a vocab.txt whose "
      "first line is [PAD] and that has a line [UNK]."
    )
  if len(set(lines)) < len(lines):
    raise UserError(
      f"{path} holds {len(lines):,} pieces, {len(set(lines)):,} different "
      "ones: give a vocab.txt of distinct pieces."
    )
  return lines


def _from_pieces(
  path: Path, vocabulary: dict[str, int], options: Mapping[str, Any] | None
) -> tokenizers.Tokenizer:
  """Returns the tokenizer of a vocab.txt.

  Without a tokenizer_config.json, the tokenizer keeps the case of texts if any
  piece has capital letters. With one, [MASK] and the other special tokens in a
  text are special, except [PAD].

  Args:
    path: path of the file, for the message.
    vocabulary: id of every piece.
    options: options of the normalizer; None without a tokenizer_config.json.
  """
  # Find pieces with capital letters, besides special tokens.
  capitals = [
    piece
    for piece in vocabulary
    if piece != piece.lower() and not piece.startswith("[")
  ]
  if options is None:
    return from_vocabulary(vocabulary, lowercase=not capitals)
  if capitals and "lowercase" not in options:
    raise UserError(
      f"{path} has pieces with capital letters, such as {capitals[0]!r}, but "
      f"{CONFIG} next to it has no do_lower_case: add do_lower_case, with the "
      "value false to keep the case of texts."
    )
  tokenizer = from_vocabulary(vocabulary, **options)
  special = [name for name in SPECIAL[1:] if name in vocabulary]
  tokenizer.add_special_tokens(special)
  return tokenizer


def _from_json(
  path: Path, options: Mapping[str, Any] | None
) -> tokenizers.Tokenizer:
  """Returns the tokenizer of a tokenizer.json; checks it against `options`."""
  content = _read_json(path, "WordPiece")
  # Treat [PAD] in a text as text: id 0 is padding, and is masked.
  content["added_tokens"] = [
    token
    for token in content["added_tokens"]
    if token["id"] or token["content"] != SPECIAL[0]
  ]
  tokenizer = _parse(path, content)
  # Refuse a tokenizer.json that contradicts the tokenizer_config.json.
  normalizer = content.get("normalizer") or {}
  for name, value in (options or {}).items():
    if normalizer.get("type") != "BertNormalizer" or (
      normalizer.get(name) != value
    ):
      raise UserError(
        f"{path} has the normalizer {json.dumps(normalizer)[:200]}, and "
        f"{CONFIG} next to it asks for {name}={value}: correct or remove one."
      )
  return tokenizer


def _read_json(path: Path, kind: str) -> dict[str, Any]:
  """Returns the content of a tokenizer.json, which neither cuts nor pads texts.

  Args:
    path: path of the file.
    kind: type of the model that is expected, "WordPiece" or "BPE".
  """
  try:
    content = json.loads(path.read_bytes())
    fields = {"model": content["model"], "truncation": None, "padding": None}
    fields["added_tokens"] = content.get("added_tokens") or []
  except (ValueError, RecursionError, KeyError, TypeError) as error:
    raise _unreadable(path, error) from None
  content |= fields
  # Old files do not name the type of the model.
  actual = type(_parse(path, content).model).__name__
  if actual != kind:
    like = "BERT's" if kind == "WordPiece" else "GPT-2's"
    raise UserError(
      f"{path} is a tokenizer of {actual}: give one of {kind}, like {like}."
    )
  return content


def _parse(path: Path, content: Mapping[str, Any]) -> tokenizers.Tokenizer:
  """Returns the tokenizer of the content of a tokenizer.json."""
  try:
    return tokenizers.Tokenizer.from_str(json.dumps(content))
  except Exception as error:
    raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> UserError:
  return UserError(
    f"{path} cannot be read as a tokenizer ({error}): write it again with the "
    "program that wrote it."
  )


def _options(folder: Path) -> dict[str, Any] | None:
  """Returns the options of a normalizer; None without a tokenizer_config.json.

  Raises:
    UserError: for a file with an option that is not supported.
  """
  # Refuse fields whose values are not the supported ones.
  config = _read_object(folder / CONFIG)
  for file, fields in (
    (folder / CONFIG, config or {}),
    (folder / NAMES, _read_object(folder / NAMES) or {}),
  ):
    for name, value in FIXED.items():
      chosen = fields.get(name)
      chosen = chosen.get("content") if isinstance(chosen, dict) else chosen
      if chosen is not None and chosen != value:
        raise UserError(
          f"{file} has {name}={chosen!r}: only {value!r} is supported. Give a "
          "vocabulary like BERT's."
        )
  if config is None:
    return None
  # Refuse classes of other tokenizers than BERT's.
  name = config.get("tokenizer_class") or "Bert"
  family = str(name).removesuffix("Fast").removesuffix("Tokenizer")
  is_generic = str(name).startswith(GENERIC) and (folder / TOKENIZER).is_file()
  if family not in CLASSES and not is_generic:
    raise UserError(
      f"{folder / CONFIG} has tokenizer_class={name!r}: only tokenizers of "
      f"word pieces are supported, such as {', '.join(CLASSES)}."
    )
  # Take the options of the normalizer.
  options = {}
  for field, option in NORMALIZER.items():
    value = config.get(field)
    if value is not None and not isinstance(value, bool):
      raise UserError(
        f"{folder / CONFIG} has {field}={value!r}: give true or false."
      )
    if value is not None:
      options[option] = value
  return options


def _read_object(path: Path) -> dict[str, Any] | None:
  """Returns the object in a JSON file, or None if there is no file."""
  if not path.is_file():
    return None
  try:
    content = json.loads(path.read_bytes())
  except (ValueError, RecursionError) as error:
    raise UserError(f"{path} cannot be read ({error}): correct it.") from None
  if not isinstance(content, dict):
    raise UserError(f"{path} is not a JSON object with fields: correct it.")
  return content


def _require_added(folder: Path, tokenizer: tokenizers.Tokenizer) -> None:
  """Raises UserError if a tokenizer lacks a token that a folder adds."""
  vocabulary = tokenizer.get_vocab()
  for file, token in _added(folder):
    if token not in vocabulary:
      raise UserError(
        f"{file} adds the token {token!r}, which is not in the vocabulary: put "
        f"the model's {TOKENIZER}, which has it, into the folder."
      )


def _added(folder: Path) -> Iterator[tuple[Path, str]]:
  """Yields (file, token) of every token that files add to a vocabulary."""
  for name in (CONFIG, NAMES):
    fields = _read_object(folder / name) or {}
    added = fields.get("added_tokens_decoder") or {}
    names = ("additional_special_tokens", "extra_special_tokens")
    more = [token for key in names for token in _tokens(fields.get(key))]
    for token in (*added.values(), *more):
      content = token["content"] if isinstance(token, dict) else token
      yield folder / name, content
  for token in _read_object(folder / ADDED) or {}:
    yield folder / ADDED, token


def _tokens(tokens: Any) -> list[Any]:
  """Returns the tokens of a list, or of a mapping from names to tokens."""
  return list(tokens.values() if isinstance(tokens, dict) else tokens or [])


def _require_complete(path: Path, tokenizer: tokenizers.Tokenizer) -> None:
  """Raises UserError for ids with gaps, or for too many."""
  ids = {*tokenizer.get_vocab().values()}
  if ids != {*range(len(ids))} or len(ids) > MAX_SIZE:
    raise UserError(
      f"{path} has {len(ids):,} ids up to {max(ids, default=0):,}: give a "
      f"tokenizer whose ids have no gaps, at most {MAX_SIZE:,} with padding."
    )


def _check(path: Path, tokenizer: tokenizers.Tokenizer) -> None:
  """Raises UserError for ids with gaps, a missing [UNK], or [PAD] not at 0."""
  vocabulary = tokenizer.get_vocab()
  size = len(vocabulary)
  is_complete = {*vocabulary.values()} == {*range(size)} and size <= MAX_SIZE
  if not is_complete or vocabulary.get("[PAD]") or "[UNK]" not in vocabulary:
    raise UserError(
      f"{path} has {size:,} tokens with ids up to "
      f"{max(vocabulary.values(), default=0):,}, and [PAD] has the id "
      f"{vocabulary.get('[PAD]')}: give a vocabulary with [UNK] whose ids "
      f"begin with 0, [PAD], and have no gaps, at most {MAX_SIZE:,} of them."
    )
