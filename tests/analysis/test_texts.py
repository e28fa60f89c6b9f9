"""The text whose tokens are drawn."""

import types

import numpy as np
import pytest

from jaxformers.analysis import texts


def test_a_text_is_read_as_its_task_reads_it():
  def task(vocabulary, **fields):
    own = {name: k for k, name in enumerate(vocabulary)}

    def encode(text, length):
      return np.array([own.get(word, 1) for word in text.split()])[:length]

    about = {"name": "t", "image": (), "encode": encode}
    return types.SimpleNamespace(**about | fields, vocabulary=vocabulary)

  words = task(("<pad>", "<unk>", "good", "bad", "or"))
  run = types.SimpleNamespace(
    task=words, sample=lambda count, length: np.array([[4, 2, 3, 2, 0]])
  )
  ids, names = texts.example(run, "or bad good or new", 99)
  assert ids.tolist() == [4, 3, 2, 4, 1]
  assert names == ["or", "bad", "good", "or", "<unk>"]
  with pytest.raises(ValueError, match="'good' has 1 tokens.*--text"):
    texts.example(run, "good", 99)
  # Of the paper's sentence it knows one word: the task's own is taken.
  ids, names = texts.example(run, "", 99)
  assert names == ["or", "good", "bad", "good"]
  run.task = task((), image=(2, 2, 3))
  with pytest.raises(ValueError, match="no tokens"):
    texts.example(run, "", 99)


def test_tokens_are_named_without_their_marks():
  names = ["\u0120the", "##ing", "a", "\u0120movie", "was", "good", "."]
  read = [texts.readable(name) for name in names]
  assert read == ["the", "ing", "a", "movie", "was", "good", "."]
  assert list(map(texts.readable, ("0x61", "0x0a"))) == ["a", "0x0a"]
  assert texts.name_tokens(read, ("was", "a")) == [2, 4]
  assert texts.name_tokens(read, ()) == [1, 3, 4, 5]
  with pytest.raises(ValueError, match="'bad' is not among the ing"):
    texts.name_tokens(read, ("bad",))
