"""Texts and arrays as the inputs of a model, without a data set."""

import json
import re
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformers import tasks
from jaxformers.data.engine import encodings
from jaxformers.foundations import workdirs
from jaxformers.tasks.inputs import TOKENIZERS, Inputs, from_record

TEXT = Inputs(encodings.BYTES, 10, tokenizer="bytes", reading={"first_id": 1})
PIXELS = Inputs((), 4, reading={"first_id": 0, "scale": [100.0, 50.0]})
PAIRS = Inputs(encodings.BYTES, 10, num_inputs=2, tokenizer="bytes")
COLOURS = Inputs(
  (),
  0,
  image=(2, 2, 3),
  reading={"mean": [0.5] * 3, "deviation": [0.25] * 3},
)


@given(st.lists(st.text(max_size=20), min_size=1, max_size=4))
@pytest.mark.slow
def test_inputs_batch_decodes_to_the_text_up_to_max_len(texts):
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    batch = TEXT.batch(texts)
  assert batch.dtype == np.int32
  assert batch.shape[1] <= 10
  too_long = [text for text in texts if len(text.encode()) > 10]
  assert [str(w.message).split(" has ")[0] for w in caught] == [
    repr(text[:40]) for text in too_long
  ]
  for row, text in zip(batch, texts, strict=True):
    cut = text.encode()[:10].decode(errors="replace")
    assert TEXT.decode(row) == cut


@given(st.data())
def test_inputs_batch_pads_and_checks_ids(data):
  rows = data.draw(
    st.lists(st.lists(st.integers(1, 256), max_size=12), min_size=1)
  )
  if max(map(len, rows)) > 10:
    with pytest.raises(ValueError, match=rf"int64 \[{len(rows)}, .*10 ids"):
      TEXT.batch(rows)
    return
  batch = TEXT.batch(rows)
  for row, want in zip(batch, rows, strict=True):
    n = len(want)
    assert row[:n].tolist() == want
    assert not row[n:].any()


def test_inputs_batch_cuts_padding_beyond_max_len():
  ids = np.pad(np.ones((2, 10), np.int32), ((0, 0), (0, 7)))
  np.testing.assert_array_equal(TEXT.batch(ids), ids[:, :10])


@pytest.mark.parametrize(
  "shape", [(2, 4, 4, 3), (2, 8, 8), (2, 3), (2, 17)], ids=str
)
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("vocabulary", [(), tuple(map(str, range(257)))])
def test_inputs_batch_refuses_pixels_of_another_size(shape, dtype, vocabulary):
  """RGB for a grey model, larger images, and single rows: 4 x 4 is right."""
  scale = None if vocabulary else [127.5, 127.5]
  inputs = Inputs(vocabulary, 16, reading={"first_id": 1, "scale": scale})
  with pytest.raises(
    ValueError, match=re.escape(f"{np.dtype(dtype)} {[*shape]}")
  ):
    inputs.batch(np.ones(shape, dtype))
  assert inputs.batch(np.ones((2, 4, 4), np.uint8)).shape == (2, 16)


def test_inputs_batch_refuses_numbers_beyond_float32():
  with pytest.raises(ValueError, match=r"inputs\[1\].*finite"):
    Inputs((), 2).batch(np.array([[1.0, 2.0], [1e39, 0.0]]))


def test_inputs_batch_of_pairs():
  pairs = Inputs(encodings.BYTES, 10, num_inputs=2, tokenizer="bytes")
  batch = pairs.batch([("ab", "c"), ("", "defg")])
  assert batch.shape == (2, 2, 4)
  assert pairs.decode(batch[1, 1]) == "defg"
  with pytest.raises(ValueError, match=r"\[2, 3, 4\].*int32 \[b, 2, n\]"):
    pairs.batch(np.ones((2, 3, 4), np.int32))


@pytest.mark.parametrize(
  ("tokenizer", "vocabulary"),
  [("words", ("<pad>", "<eos>", "<unk>", "the", "cat")), ("byte_pairs", ())],
)
def test_inputs_batch_of_a_prompt_has_no_end_token(tokenizer, vocabulary):
  """A model that continues a text would begin another one."""
  options = {"tokenizer": tokenizer}
  if tokenizer == "byte_pairs":
    fit = encodings.byte_pairs("text", size=300).fit
    _, info = fit(iter([{"text": b"the cat and the cat"}] * 9))
    options["tokenizer_json"] = info["tokenizer"]
    vocabulary = encodings.pieces(info["tokenizer"])
  inputs = Inputs(vocabulary, 9, **options)
  closed, free = (
    inputs.batch(["the cat"], closed=each)[0].tolist() for each in (True, False)
  )
  assert closed[:-1] == free
  assert vocabulary[closed[-1]] == "<eos>"


@pytest.mark.parametrize("tokenizer", ["bytes", "byte_pairs", "words"])
def test_inputs_batch_reads_columns_and_lone_surrogates(tokenizer):
  options, vocabulary = {"tokenizer": tokenizer}, encodings.BYTES
  if tokenizer == "byte_pairs":
    fit = encodings.byte_pairs("text", size=300).fit
    _, info = fit(iter([{"text": b"the cat and the cat"}] * 9))
    options["tokenizer_json"] = info["tokenizer"]
    vocabulary = encodings.pieces(info["tokenizer"])
  if tokenizer == "words":
    vocabulary = ("<pad>", "<eos>", "<unk>", "the", "cat\ufffd")
  inputs = Inputs(vocabulary, 20, **options)
  texts = ["the cat\ud83d", "cat"]
  want = inputs.batch(["the cat\ufffd", "cat"])
  np.testing.assert_array_equal(inputs.batch(texts), want)
  for column in (np.array(texts, object), iter(texts), tuple(texts)):
    np.testing.assert_array_equal(inputs.batch(column), want)
  # An array of NumPy's texts cannot hold a lone surrogate everywhere.
  array = np.array(["the", "cat"])
  np.testing.assert_array_equal(inputs.batch(array), inputs.batch([*array]))


def test_inputs_batch_reads_lists_of_pixels_as_arrays():
  raw = np.array([[[0, 50], [100, 200]], [[1, 2], [3, 4]]], np.uint8)
  np.testing.assert_array_equal(PIXELS.batch([*raw]), PIXELS.batch(raw))
  with pytest.raises(ValueError, match=r"\(2,\), \(3,\)"):
    PIXELS.batch([np.ones(3, np.float32), np.ones(2, np.float32)])
  with pytest.raises(ValueError, match=r"float64 \[1\].*int32"):
    TEXT.batch([[1.5], [2, 3]])


def test_inputs_batch_scales_pixels_only():
  raw = np.array([[[0, 50], [100, 200]]], np.uint8)
  want = [[-2, -1, 0, 2]]
  np.testing.assert_array_equal(PIXELS.batch(raw), want)
  numbers = np.float64(want)
  np.testing.assert_array_equal(PIXELS.batch(numbers), want)
  assert PIXELS.batch(numbers).dtype == np.float32
  images = np.full((1, 2, 2, 3), 255, np.uint8)
  np.testing.assert_array_equal(COLOURS.batch(images), np.full((1, 2, 2, 3), 2))
  np.testing.assert_array_equal(COLOURS.batch(np.float32(images)), images)


@pytest.mark.parametrize(
  ("inputs", "x", "message"),
  [
    (TEXT, "a text", "inputs='a text'.*list"),
    (TEXT, [], "no inputs"),
    (TEXT, np.ones((2, 0), np.int32), r"int32 \[2, 0\]"),
    (TEXT, np.ones((2, 3)), r"float64 \[2, 3\].*int32 \[b, n\].*257"),
    (TEXT, [[1, 257]], "1 to 257.*257"),
    (TEXT, [[-1]], "-1 to -1.*257"),
    (PIXELS, ["text"], r"text.*float32 \[b, n\]"),
    (PIXELS, np.ones((2, 3), np.int32), r"int32 \[2, 3\].*float32"),
    (COLOURS, np.ones((1, 3, 2, 3)), r"uint8 \[b, 2, 2, 3\]"),
    (COLOURS, np.full((1, 2, 2, 3), 256), r"int64 \[1, 2, 2, 3\].*uint8"),
    (COLOURS, ["a"], r"inputs\[0\]='a'"),
    (COLOURS, [np.full((2, 2, 3), np.nan)], r"inputs\[0\].*finite"),
    (PIXELS, [[0.0], [np.inf]], r"inputs\[1\].*finite"),
    (TEXT, {"text": "good"}, "dict.*'text'"),
    (TEXT, [{"text": "good"}], r"inputs\[0\]=\{'text': 'good'\}"),
    (TEXT, {"good"}, "inputs is set.*order"),
    (TEXT, b"good", "inputs=b'good'.*list"),
    (TEXT, 3, r"inputs is int\b"),
    (TEXT, ["a", None], r"inputs\[1\]=None"),
    (TEXT, ["a", float("nan")], r"inputs\[1\]=nan"),
    (TEXT, [b"a"], r"inputs\[0\]=b'a'"),
    (TEXT, np.array([["a"], ["b"]]), r"inputs\[0\]=\['a'\]"),
    (TEXT, [[1], [1 << 40]], "1 to 1099511627776"),
    (PAIRS, ["ab", "cd"], r"inputs\[0\]='ab'.*pair"),
    (PAIRS, [("a", "b", "c")], r"\('a', 'b', 'c'\).*pair"),
    (PAIRS, [("a", None)], r"inputs\[0\]=None"),
  ],
)
def test_inputs_batch_refuses_wrong_inputs(inputs, x, message):
  with pytest.raises(ValueError, match=message):
    inputs.batch(x)


@pytest.mark.parametrize("protocol", ["jaxformers", "skyformer", "s4"])
def test_inputs_from_record_read_without_the_data(protocol, data_dir, tmp_path):
  sizes = {"num_train": 8, "num_validation": 2, "num_test": 2}
  sizes |= {"min_length": 5, "max_length": 20}
  task = tasks.get(
    "listops", protocol=protocol, data_dir=str(data_dir), **sizes
  )
  workdirs.write_vocabulary(tmp_path, task)
  inputs = from_record(workdirs.read_verified(tmp_path, "vocabulary.json"))
  text = "[MAX 2 [SM 3 9 ] ]"
  np.testing.assert_array_equal(inputs.encode(text), task.encode(text))
  assert inputs.batch([text, "[MIN 1 ]"]).shape[0] == 2
  assert task.classes == tuple("0123456789")


def test_inputs_of_word_pieces_need_their_tokenizer(tmp_path):
  path = tmp_path / "vocab.txt"
  path.write_text("\n".join([*encodings.SPECIAL, "good", "movie", "##s"]))
  tokenizer = encodings._read_vocabulary(path).to_str()
  names = encodings.pieces(tokenizer)
  inputs = Inputs(
    names,
    5,
    tokenizer="word_pieces",
    tokenizer_json=json.dumps(json.loads(tokenizer)),
    reading={"start_id": 2, "end_id": 3},
  )
  assert inputs.encode("Good movies").tolist() == [2, 5, 6, 7, 3]
  assert inputs.decode(inputs.encode("Good movies")) == "good movies"


def test_inputs_refuse_an_unknown_tokenizer():
  with pytest.raises(ValueError, match="tokenizer.*'letters'.*bytes"):
    Inputs(("_",), 3, tokenizer="letters").encode("a")
  assert {"bytes", "characters", "words", "listops"} <= TOKENIZERS.keys()
