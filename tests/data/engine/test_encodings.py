import json

import numpy as np
import pytest
import tokenizers
from PIL import Image

from jaxformers.data.engine import encodings as e

TEXTS = [b"a fine film", b"a film, so so", "na\u00efve \u00e9".encode()] * 9


def fitted(encoding, examples):
  encode, extra = encoding.fit(iter(examples))
  return list(encode(examples)), extra


def test_of_bytes_keeps_bytes():
  rows, extra = fitted(e.of_bytes("x", "y"), [{"x": b"\x00\xff", "y": b""}])
  assert [part.tolist() for part in rows[0]] == [[0, 255], []]
  assert extra == {}
  assert (len(e.BYTES), e.BYTES[0], e.BYTES[1], e.BYTES[256]) == (
    257,
    "<pad>",
    "0x00",
    "0xff",
  )


def test_text_key_and_id_key_are_equal_for_equal_content():
  key = e.text_key("x", "y")
  assert key({"x": b"a", "y": b"b"}) == key({"y": b"b", "x": b"a", "z": 1})
  assert key({"x": b"ab", "y": b""}) != key({"x": b"a", "y": b"b"})
  assert 0 <= key({"x": b"", "y": b""}) < 1 << 64
  assert e.id_key({"id": b"train_00042"}) == e.id_key({"id": b"42"}) == 42


def test_words_are_sorted_by_frequency_and_lines_end_in_eos():
  examples = [{"text": b" b b a\n\n = c = \n"}, {"text": b"a <unk> b"}]
  rows, extra = fitted(e.words("text"), examples)
  vocabulary = ["<pad>", "<eos>", "b", "=", "a", "<unk>", "c"]
  assert extra["vocabulary"] == vocabulary
  named = [[vocabulary[i] for i in row[0]] for row in rows]
  assert named[0] == ["b", "b", "a", "<eos>", "<eos>", "=", "c", "=", "<eos>"]
  assert named[1] == ["a", "<unk>", "b", "<eos>"]
  rows, extra = fitted(e.words("text", size=4), examples)
  assert extra["vocabulary"] == ["<pad>", "<eos>", "b", "<unk>"]
  assert rows[0][0].tolist() == [2, 2, 3, 1, 1, 3, 3, 3, 1]
  with pytest.raises(ValueError, match="vocab_size=3"):
    e.words("text", size=3)


def test_byte_pairs_decode_to_the_text():
  texts = [{"text": t + b" <eos> <pad>"} for t in TEXTS]
  rows, extra = fitted(e.byte_pairs("text", size=270), texts)
  tokenizer = tokenizers.Tokenizer.from_str(extra["tokenizer"])
  assert e.pieces(extra["tokenizer"])[:2] == ("<pad>", "<eos>")
  for row, text in zip(rows, texts, strict=True):
    ids = row[0].tolist()
    assert ids[-1] == 1
    assert 0 not in ids
    assert 1 not in ids[:-1]  # As text it is only text.
    assert tokenizer.decode(ids[:-1]) == text["text"].decode()
  assert len(rows[0][0]) < len(texts[0]["text"])
  # Bytes that the training split had not.
  encode, _ = e.byte_pairs("text", size=270).fit(iter(texts))
  new = next(iter(encode([{"text": "\u4e2d".encode()}])))[0]
  assert tokenizer.decode(new[:-1].tolist()) == "\u4e2d"
  with pytest.raises(ValueError, match="vocab_size=258"):
    e.byte_pairs("text", size=258)


@pytest.mark.slow
def test_byte_pairs_are_the_same_in_every_process(prints_alike):
  code = """
import hashlib, random
from jaxformers.data.engine import encodings as e
random.seed(0)
words = ["".join(random.choices("abcdef", k=4)) for _ in range(99)]
texts = [{"text": " ".join(random.choices(words, k=400)).encode()}] * 3
print(hashlib.md5(
  e.byte_pairs("text", size=500).fit(iter(texts))[1]["tokenizer"].encode()
).hexdigest())
"""
  prints_alike(code)


def test_pixels_are_in_raster_order():
  image = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
  rows, _ = fitted(e.pixels(), [{"image": image, "id": b"train_1"}])
  assert rows[0][0].tolist() == list(range(18))


def test_characters_are_sorted_by_frequency_then_code_point():
  examples = [{"text": b"bbbaac"}, {"text": "aacc\u00e9zz".encode()}]
  rows, extra = fitted(e.characters("text", min_count=2, first=100), examples)
  assert extra["vocabulary"] == ["<pad>", "<unk>", "<eos>", *"abcz"]
  assert rows[1][0].tolist() == [3, 3, 5, 5, 1, 6, 6]
  # What is beyond the cut is not counted.
  _, extra = fitted(e.characters("text", min_count=2, first=4), examples)
  assert extra["vocabulary"][3:] == ["a", "b", "c"]


def vocabulary(folder, pieces):
  path = folder / "vocab.txt"
  path.write_text("\n".join(pieces) + "\n", encoding="utf-8")
  return str(path)


def test_word_pieces_of_a_given_vocabulary(tmp_path):
  path = vocabulary(
    tmp_path, ["[PAD]", "[UNK]", "a", "fil", "##m", ",", "naive"]
  )
  examples = [{"t": b"A FILM,", "u": "na\u00efve \u4e2d".encode()}]
  rows, extra = fitted(e.word_pieces("t", "u", vocabulary=path), examples)
  assert rows[0][0].tolist() == [2, 3, 4, 5, 6, 1]
  assert e.pieces(extra["tokenizer"])[:4] == ("[PAD]", "[UNK]", "a", "fil")
  again = tokenizers.Tokenizer.from_str(extra["tokenizer"])
  assert again.encode("a film").ids == [2, 3, 4]


def test_word_pieces_name_depends_on_the_tokenizer(tmp_path):
  pieces = ["[PAD]", "[UNK]", "a"]
  path = vocabulary(tmp_path, pieces)
  names = [e.word_pieces("t", vocabulary=path).name]
  assert e.word_pieces("t", vocabulary=path).name == names[0]
  (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
  names.append(e.word_pieces("t", vocabulary=path).name)
  (tmp_path / "tokenizer_config.json").unlink()
  for piece in ("\u2028", "A"):
    path = vocabulary(tmp_path, [*pieces, piece])
    names.append(e.word_pieces("t", vocabulary=path).name)
  assert len({*names}) == 4


def test_well_formed_replaces_half_a_surrogate_pair():
  assert e.well_formed("a \u00e9 \U0001f600") == "a \u00e9 \U0001f600"
  assert e.well_formed("\ud83d\ude00 \ud83d") == "\U0001f600 \ufffd"
  assert e.byte_ids("\ude00").tolist() == e.byte_ids("\ufffd").tolist()


def test_word_pieces_of_bert_vocabulary_have_bert_ids(archives):
  path = str(archives / "bert-base-uncased-vocab.txt")
  encoding = e.word_pieces("t", vocabulary=path)
  rows, extra = fitted(encoding, [{"t": b"GOOD film!"}])
  assert rows[0][0].tolist() == [2204, 2143, 999]
  assert len(e.pieces(extra["tokenizer"])) == 30_522


@pytest.mark.parametrize(
  ("pieces", "message"),
  [
    (["a", "b"], r"vocab.txt.*\[PAD\]"),
    (["[PAD]", "a"], r"vocab.txt.*\[PAD\]"),
    (["[PAD]", "[UNK]", "a", "a"], "4 pieces, 3 different"),
    (["[PAD]", "[UNK]", "", "", "a"], "5 pieces, 4 different"),
  ],
)
def test_word_pieces_refuse_wrong_vocabularies(tmp_path, pieces, message):
  with pytest.raises(ValueError, match=message):
    e.word_pieces("t", vocabulary=vocabulary(tmp_path, pieces))


def test_word_pieces_name_a_missing_vocabulary():
  with pytest.raises(ValueError, match="nowhere.txt.*task.vocabulary"):
    e.word_pieces("t", vocabulary="nowhere.txt")
  for size in (3, 65_537):
    with pytest.raises(ValueError, match=f"vocab_size={size}"):
      e.word_pieces("t", size=size)


@pytest.mark.slow
def test_word_pieces_trained_on_equal_texts_are_equal(prints_alike):
  code = (
    "from jaxformers.data.engine import encodings as e; import zlib;"
    "texts = [(f'w{i % 97} x{i * 7 % 31}y {i}').encode() for i in range(3000)];"
    "encode, extra = e.word_pieces('t', size=300).fit("
    "{'t': t} for t in texts);"
    "print(zlib.crc32(extra['tokenizer'].encode()))"
  )
  prints_alike(code)
  examples = [{"t": text} for text in TEXTS]
  rows, extra = fitted(e.word_pieces("t", size=40), examples)
  pieces = e.pieces(extra["tokenizer"])
  assert pieces[:5] == e.SPECIAL
  assert len(pieces) <= 40
  assert rows[0][0].min() > 1
  assert json.loads(extra["tokenizer"])["model"]["type"] == "WordPiece"


def test_grey_itu_is_that_of_pillow():
  image = (
    np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8)
  )
  want = np.asarray(Image.fromarray(image).convert("L"))
  np.testing.assert_array_equal(e.grey_itu(image), want)


def test_grey_tf_is_near_grey_itu():
  image = (
    np.random.default_rng(1).integers(0, 256, (64, 64, 3)).astype(np.uint8)
  )
  exact = image.astype(np.float64) @ [0.2989, 0.587, 0.114] / 255 * 255.5
  grey = e.grey_tf(image)
  near = np.abs(exact - np.round(exact)) < 1e-3
  np.testing.assert_array_equal(grey[~near], np.floor(exact)[~near])
  white = np.full((1, 1, 3), 255, np.uint8)
  assert e.grey_tf(white) == 255
  difference = e.grey_itu(image).astype(int) - grey
  assert set(np.unique(difference)) <= {-1, 0, 1}


def test_grey_is_in_raster_order_and_ids_are_unchanged():
  image = np.arange(12, dtype=np.uint8).reshape(3, 4, 1)
  encoding = e.grey("grey", lambda image: image[..., 0])
  rows, _ = fitted(encoding, [{"image": image}])
  assert rows[0][0].tolist() == list(range(12))
  ids = np.array([3, 1], np.uint8)
  assert fitted(e.ids(), [{"ids": ids}])[0][0][0] is ids
  assert e.ids().key({"ids": ids}) == e.ids().key({"ids": ids.copy()})
