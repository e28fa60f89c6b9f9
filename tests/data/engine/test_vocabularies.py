"""Vocabularies of word pieces, and the files next to them."""

import json
import shutil
from pathlib import Path

import pytest
import tokenizers

from jaxformers.data.engine import vocabularies

PIECES = [
  "[PAD]",
  "[UNK]",
  "[CLS]",
  "[SEP]",
  "[MASK]",
  "The",
  "Film",
  "the",
  "film",
  "caf\u00e9",
  "cafe",
  "Caf\u00e9",
  "##s",
  "\u4e2d\u6587",
  "\u4e2d",
  "\u6587",
  "[",
  "]",
  "mask",
  "pad",
]
GPT2 = Path(__file__).parents[2] / "models" / "pretrained" / "gpt2"
TEXT = "The Films Caf\u00e9 \u4e2d\u6587 [MASK]"


def write(folder, **files):
  """Writes files by name: bytes, lists of lines, or JSON."""
  for name, content in files.items():
    path = folder / name.replace("__", ".")
    if isinstance(content, list):
      content = "\n".join([*content, ""]).encode()
    if not isinstance(content, bytes):
      content = json.dumps(content).encode()
    path.write_bytes(content)
  return folder / "vocab.txt"


def ids(path, text):
  return (
    vocabularies.read_tokenizer(path).encode(text, add_special_tokens=False).ids
  )


@pytest.mark.parametrize(
  ("content", "expected"),
  [
    ("[PAD]\n[UNK]\n\u2028\na\nfilm\n", [3, 4]),
    ("[PAD]\n[UNK]\n\u0085\na\nfilm", [3, 4]),
    ("[PAD]\n[UNK]\nb\x0cc\na\nfilm", [3, 4]),
    ("[PAD]\n[UNK]\na\nfilm\n\n\n", [2, 3]),
    ("[PAD]\r\n[UNK]\r\na\r\nfilm\r\n\r\n", [2, 3]),
    ("\ufeff[PAD]\n[UNK]\na\nfilm\n", [2, 3]),
    ("[PAD]\n[UNK]\n\na\nfilm\n", [3, 4]),
  ],
)
def test_read_numbers_pieces_by_their_line(tmp_path, content, expected):
  """The ids of transformers 5.24."""
  path = write(tmp_path, vocab__txt=content.encode())
  assert ids(path, "a film") == expected
  path.write_bytes(content.removeprefix("\ufeff").encode("utf-16"))
  assert ids(path, "a film") == expected


# Options, and the ids of transformers 5.24 for `TEXT`.
OPTIONS = [
  ({}, None),
  ({"do_lower_case": True}, [7, 8, 12, 10, 14, 15, 4]),
  ({"do_lower_case": False}, [5, 6, 12, 11, 14, 15, 4]),
  (
    {"do_lower_case": True, "strip_accents": False},
    [7, 8, 12, 9, 14, 15, 4],
  ),
  (
    {"do_lower_case": False, "tokenize_chinese_chars": False},
    [5, 6, 12, 11, 13, 4],
  ),
]


@pytest.mark.parametrize(("options", "expected"), OPTIONS)
@pytest.mark.parametrize("has_vocabulary", [True, False])
@pytest.mark.parametrize("has_config", [True, False])
def test_read_obeys_tokenizer_options(
  tmp_path, options, expected, has_vocabulary, has_config
):
  if expected is None:
    expected = [5, 6, 12, 11, 14, 15, 16, 1, 17]  # Case is kept, [MASK] split.
    has_config, has_vocabulary = False, True
  elif not (has_vocabulary and has_config):
    names = vocabularies.NORMALIZER
    tokenizer = vocabularies.from_vocabulary(
      {piece: i for i, piece in enumerate(PIECES)},
      **{names[key]: value for key, value in options.items()},
    )
    tokenizer.add_special_tokens(PIECES[:5])
    # Files of sentence-transformers cut and pad.
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
  if has_config:
    config = {"tokenizer_class": "BertTokenizer", "pad_token": "[PAD]"}
    write(tmp_path, tokenizer_config__json=config | options)
  if has_vocabulary:
    write(tmp_path, vocab__txt=PIECES)
  file = "vocab.txt" if has_vocabulary else "tokenizer.json"
  for path in (tmp_path, tmp_path / file):
    assert ids(path, TEXT) == expected


def test_read_keeps_tokens_added_by_a_tokenizer(tmp_path):
  tokenizer = vocabularies.from_vocabulary(
    {piece: i for i, piece in enumerate(PIECES)}
  )
  tokenizer.add_special_tokens([*PIECES[:5], "<user>"])
  tokenizer.save(str(tmp_path / "tokenizer.json"))
  path = write(tmp_path, vocab__txt=PIECES, added_tokens__json={"<user>": 20})
  # [PAD] in a text is text, and not padding.
  assert ids(path, "<user>[PAD] film") == [20, 16, 19, 17, 8]
  (tmp_path / "tokenizer.json").unlink()
  with pytest.raises(ValueError, match=r"added_tokens.json adds .*'<user>'"):
    vocabularies.read_tokenizer(path)


@pytest.mark.parametrize(
  ("files", "message"),
  [
    (
      {"vocab__txt": b"[PAD]\n[UNK]\ncaf\xe9\n"},
      "vocab.txt.*UTF-8.*place 15",
    ),
    ({"tokenizer_config__json": {}}, "'The'.*do_lower_case"),
    ({"tokenizer_config__json": b"{"}, "tokenizer_config.json.*property name"),
    ({"tokenizer_config__json": b"[]"}, "tokenizer_config.json.*JSON object"),
    (
      {"tokenizer_config__json": {"do_lower_case": 0}},
      "do_lower_case=0.*true.*false",
    ),
    ({"tokenizer_config__json": {"unk_token": "the"}}, "unk_token='the'"),
    (
      {"special_tokens_map__json": {"sep_token": {"content": "</s>"}}},
      "special_tokens_map.json.*sep_token='</s>'",
    ),
    (
      {"tokenizer_config__json": {"tokenizer_class": "RobertaTokenizer"}},
      "tokenizer_class='RobertaTokenizer'",
    ),
    (
      {"tokenizer_config__json": {"tokenizer_class": "PreTrainedTokenizer"}},
      "tokenizer_class='PreTrainedTokenizer'",
    ),
    (
      {
        "tokenizer_config__json": {
          "do_lower_case": False,
          "added_tokens_decoder": {"20": {"content": "<user>"}},
        }
      },
      "tokenizer_config.json.*'<user>'",
    ),
    ({"tokenizer__json": b"{}"}, "tokenizer.json.*'model'"),
    (
      {"tokenizer__json": {"model": {"type": "X"}}},
      "tokenizer.json.*ModelUntagged",
    ),
  ],
)
def test_read_refuses_wrong_files(tmp_path, files, message):
  path = write(tmp_path, **{"vocab__txt": PIECES} | files)
  with pytest.raises(ValueError, match=message):
    vocabularies.read_tokenizer(path)


@pytest.mark.parametrize("case", ["kind", "pieces", "options", "padding"])
def test_read_refuses_a_tokenizer_unlike_the_vocabulary(tmp_path, case):
  path = write(tmp_path, vocab__txt=PIECES)
  pieces = PIECES[:6] if case == "pieces" else PIECES
  vocabulary = {piece: i for i, piece in enumerate(pieces)}
  message = "vocab.txt.*tokenizer.json.*vocabular"
  if case == "padding":
    path.unlink()
    vocabulary |= {"[PAD]": 1, "[UNK]": 0}
    message = r"\[PAD\].*\bid 1\b"
  tokenizer = vocabularies.from_vocabulary(vocabulary)
  if case == "kind":
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    message = r"tokenizer.json.*\bBPE\b"
  if case == "options":
    write(tmp_path, tokenizer_config__json={"do_lower_case": False})
    message = "tokenizer.json.*lowercase=False"
  tokenizer.save(str(tmp_path / "tokenizer.json"))
  with pytest.raises(ValueError, match=message):
    vocabularies.read_tokenizer(tmp_path)


def test_require_same_refuses_another_tokenizer(tmp_path):
  ours = vocabularies.from_vocabulary({p: i for i, p in enumerate(PIECES)})
  require = vocabularies.require_same
  require(tmp_path, ours.to_str(), "advice")
  write(tmp_path, tokenizer_config__json={"do_lower_case": True})
  require(tmp_path, ours.to_str(), "advice")
  write(tmp_path, tokenizer_config__json={"do_lower_case": False})
  with pytest.raises(ValueError, match='normalizer.*"lowercase": false'):
    require(tmp_path, ours.to_str(), "advice")
  write(
    tmp_path,
    tokenizer_config__json={"do_lower_case": True},
    vocab__txt=PIECES[:-1],
  )
  with pytest.raises(ValueError, match='model.*"WordPiece".*advice'):
    require(tmp_path, ours.to_str(), "advice")


def test_read_byte_pairs_moves_ids_up_by_one(tmp_path):
  published = tokenizers.Tokenizer.from_file(str(GPT2 / "tokenizer.json"))
  text = "the film of the \u4e2d actor<|endoftext|>and <pad>"
  want = published.encode(text, add_special_tokens=False).ids
  for path in (GPT2, GPT2 / "tokenizer.json"):
    tokenizer = vocabularies.read_byte_pairs(path)
    assert tokenizer.encode(text).ids == [i + 1 for i in want]
  assert tokenizer.decode(tokenizer.encode(text).ids) == published.decode(want)
  listed = vocabularies.tokens(tokenizer)
  assert (listed[0], listed[-1], len(listed)) == ("<pad>", "<|endoftext|>", 281)
  # A tokenizer of this package has padding.
  tokenizer.save(str(tmp_path / "tokenizer.json"))
  again = vocabularies.read_byte_pairs(tmp_path)
  assert again.to_str() == tokenizer.to_str()
  # Old files do not name the type of the model.
  content = json.loads((GPT2 / "tokenizer.json").read_text())
  del content["model"]["type"]
  write(tmp_path, tokenizer__json=content)
  again = vocabularies.read_byte_pairs(tmp_path)
  assert again.to_str() == tokenizer.to_str()
  # Padding elsewhere is another token, also if it was added.
  added = {**content["added_tokens"][0], "id": 280, "content": "<pad>"}
  more = {"added_tokens": [*content["added_tokens"], added]}
  write(tmp_path, tokenizer__json=content | more)
  padded = vocabularies.read_byte_pairs(tmp_path)
  assert padded.encode("the<pad>").ids[-1] == 281
  assert vocabularies.tokens(padded)[::281] == ["<<pad>>", "<pad>"]
  content["model"]["vocab"]["<pad>"] = content["added_tokens"][0]["id"]
  content["added_tokens"] = []
  write(tmp_path, tokenizer__json=content)
  listed = vocabularies.tokens(vocabularies.read_byte_pairs(tmp_path))
  assert (listed[0], listed[-1]) == ("<<pad>>", "<pad>")


def test_read_byte_pairs_refuses_other_files(tmp_path):
  with pytest.raises(ValueError, match=r"There is no .*tokenizer\.json"):
    vocabularies.read_byte_pairs(tmp_path)
  content = json.loads((GPT2 / "tokenizer.json").read_text())
  pieces = json.loads(vocabularies.from_vocabulary({"[UNK]": 0}).to_str())
  pieces = pieces["model"]
  gap = {**content["model"], "vocab": {**content["model"]["vocab"], "zz": 900}}
  for change, message in (
    ({"model": pieces}, "a tokenizer of WordPiece.*BPE.*GPT-2"),
    ({"model": {**content["model"], "vocab": {"!": "0"}}}, "cannot be read"),
    ({"model": {"type": "BPE", "vocab": {}, "merges": 3}}, "cannot be read"),
    ({"model": {"type": "BPE"}}, "cannot be read"),
    ({"added_tokens": ["a"]}, "cannot be read"),
    ({"model": gap}, "281 ids up to 901.*no gaps|282 ids up to 901.*no gaps"),
  ):
    write(tmp_path, tokenizer__json=content | change)
    with pytest.raises(ValueError, match=message):
      vocabularies.read_byte_pairs(tmp_path)
  write(tmp_path, tokenizer__json=b"{")
  with pytest.raises(ValueError, match="cannot be read"):
    vocabularies.read_byte_pairs(tmp_path)


def test_require_same_compares_byte_pairs(tmp_path):
  ours = vocabularies.read_byte_pairs(GPT2).to_str()
  vocabularies.require_same(tmp_path, ours, "advice", "byte_pairs")
  shutil.copy(GPT2 / "tokenizer.json", tmp_path)
  vocabularies.require_same(tmp_path, ours, "advice", "byte_pairs")
  content = json.loads((GPT2 / "tokenizer.json").read_text())
  vocab = content["model"]["vocab"]
  vocab["!"], vocab["#"] = vocab["#"], vocab["!"]
  write(tmp_path, tokenizer__json=content)
  with pytest.raises(ValueError, match="The model of the tokenizer.*advice"):
    vocabularies.require_same(tmp_path, ours, "advice", "byte_pairs")
