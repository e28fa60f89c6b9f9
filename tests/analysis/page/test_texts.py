"""The text whose tokens are drawn."""

import types

import numpy as np
import pytest

from jaxformers.analysis.page import texts
from jaxformers.data.engine import encodings


def test_example_reads_a_text_as_its_task():
  def task(vocabulary, **fields):
    ids_by_word = {name: k for k, name in enumerate(vocabulary)}

    def encode(text, length=0):
      return np.array([ids_by_word.get(word, 1) for word in text.split()])[
        : length or 6
      ]

    about = {"name": "t", "image": (), "encode": encode, "max_len": 6}
    return types.SimpleNamespace(**about | fields, vocabulary=vocabulary)

  words = task(("<pad>", "<unk>", "good", "bad", "or"))
  run = types.SimpleNamespace(
    task=words,
    sample=lambda count, length: np.array([[4, 2, 3, 2, 2, 0]])[:, :length],
  )
  ids, names, candidates, quote = texts.example(run, "or bad good or new", 99)
  assert ids.tolist() == [4, 3, 2, 4, 1]
  assert names == candidates == ["or", "bad", "good", "or", "<unk>"]
  assert quote == "'or bad good or <unk>', all 5 tokens"
  quote = texts.example(run, "or bad good or new", 4).quote
  assert quote == "'or bad good or', the first 4 of 5 tokens"
  # A text beyond max_len is counted whole.
  quote = texts.example(run, "or bad good " * 3, 4).quote
  assert quote == "'or bad good or', the first 4 of 9 tokens"
  with pytest.raises(ValueError, match="'good'.*1 token.*--text"):
    texts.example(run, "good", 99)
  # Of the paper's sentence it knows one word: the task's own is taken.
  _, names, _, quote = texts.example(run, "", 4)
  assert names == ["or", "good", "bad", "good"]
  assert quote == (
    "'or good bad good', the first 4 of 5 tokens that the model reads"
  )
  run.task = task((), image=(2, 2, 3))
  with pytest.raises(ValueError, match=r"\bt\b.*images.*tokens"):
    texts.example(run, "", 99)


def test_name_tokens_names_letters_by_their_words():
  task = types.SimpleNamespace(
    name="bytes",
    image=(),
    vocabulary=encodings.BYTES,
    max_len=99,
    encode=lambda text, length=99: encodings.byte_ids(text)[:length],
  )
  run = types.SimpleNamespace(task=task)
  _, names, words, quote = texts.example(run, "It's a caf\u00e9, <br />x", 99)
  assert [word for word in words if word] == [
    "It",
    "s",
    "a",
    "caf\u00e9",
    "br",
    "x",
  ]
  assert [name for name in names if "(" in name] == [
    "I(t)",
    "c(af\u00e9)",
    "b(r)",
  ]
  assert quote.startswith('"It\'s a caf\u00e9, <br />x", all 21 tokens')
  assert texts.name_tokens(words, ("br", "It")) == [0, 15]
  assert texts.name_tokens(words, ()) == [0, 7, 15, 20]
  with pytest.raises(ValueError, match="'t'.*It s a caf"):
    texts.name_tokens(words, ("t",))
  # The paper's text is shown in whole.
  quote = texts.example(run, "", 512).quote
  assert quote.startswith(f"'{texts.TEXT}', all 52 tokens, which are single")
  # Characters stand for themselves; other tokens spell no words.
  assert texts.spell(["a", "b", "<eos>"]) == ("ab\ufffd", ["ab", "", ""])
  word, eos = ["0xc3", "0xa9"], "<eos>"  # The two bytes of a letter.
  assert texts.spell([*word, eos]) == ("\u00e9\ufffd", ["\u00e9", "", ""])
  assert texts.spells_words(("<pad>", "<unk>", "a", "\n"))
  assert not texts.spells_words(("<pad>", "MAX", "1"))


def test_readable_strips_the_marks_of_word_pieces():
  names = ["\u0120the", "##ing", "a", "\u0120movie", "was", "good", "."]
  read = [texts.readable(name) for name in names]
  assert read == ["the", "ing", "a", "movie", "was", "good", "."]
  assert list(map(texts.readable, ("0x61", "0x0a"))) == ["a", "0x0a"]
  assert texts.name_tokens(read, ("was", "a")) == [2, 4]
  assert texts.name_tokens(read, ()) == [1, 3, 4, 5]
  with pytest.raises(ValueError, match="'bad'.*the ing"):
    texts.name_tokens(read, ("bad",))
