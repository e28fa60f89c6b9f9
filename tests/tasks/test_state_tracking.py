"""State tracking: labels, splits that share no sequence, and lengths."""

import numpy as np
import pytest

from jaxformers import tasks
from jaxformers.data.generators import words
from jaxformers.foundations.errors import UserError

SIZES = dict(num_train=60, num_validation=20, num_test=20)


def load(folder, **options):
  sizes = SIZES | {"min_length": 12, "length": 12} | options
  return tasks.get("state_tracking", data_dir=str(folder), **sizes)


def rows(split):
  """(tokens, classes) of every example, counted from 0."""
  for k, length in enumerate(split.lengths()):
    batch = split.batch(np.array([k]), int(length))
    classes = np.where(batch["weights"] > 0, batch["targets"], words.NO_CLASS)
    yield batch["inputs"][0] - 1, classes[0]


def test_a_word_problem_has_a_class_at_every_token(tmp_path):
  task = load(tmp_path, problem="S3", test_lengths=(12, 24))
  assert (task.num_classes, task.vocab_size, task.max_len) == (6, 7, 12)
  assert task.sizes()["max_len"] == 24
  assert task.sizes()["causal"] is True
  table = words.group("S3").table
  for split in task.splits.values():
    for tokens, classes in rows(split):
      product = 0
      for token, label in zip(tokens, classes, strict=True):
        product = table[product, token]
        assert label == product
  assert set(task.splits["test_24"].lengths()) == {24}


def test_no_sequence_occurs_twice_in_all_splits(tmp_path):
  """Six elements and three tokens give 216 sequences; all but 16 are drawn."""
  sizes = dict(num_train=100, num_validation=40, num_test=30)
  lengths = {"min_length": 3, "length": 3, "test_lengths": (3,)}
  task = load(tmp_path, problem="S3", **sizes, **lengths)
  drawn = [
    tokens.tobytes()
    for split in task.splits.values()
    for tokens, _ in rows(split)
  ]
  assert len(drawn) == len({*drawn}) == 200
  with pytest.raises(UserError, match="further sequences were found"):
    load(tmp_path, problem="S3", **sizes | {"num_train": 120}, **lengths)


def test_automata_have_one_class_and_many_lengths(tmp_path):
  task = load(
    tmp_path,
    problem="parity",
    min_length=3,
    protocol="xlstm",
    test_min_length=20,
    test_max_length=30,
  )
  assert task.max_len == 30
  for name, (least, most) in {"train": (3, 12), "test": (20, 30)}.items():
    for tokens, classes in rows(task.splits[name]):
      assert least <= len(tokens) <= most
      assert (classes[:-1] == words.NO_CLASS).all()
      assert classes[-1] == tokens.sum() % 2


def test_a_start_token_has_no_class(tmp_path):
  task = load(
    tmp_path, problem="Z2", protocol="deltaproduct", test_lengths=(20,)
  )
  assert task.vocabulary[-1] == "<bos>"
  assert (task.max_len, task.longest) == (13, 21)
  for tokens, classes in rows(task.splits["train"]):
    assert (tokens[0], classes[0]) == (2, words.NO_CLASS)
    np.testing.assert_array_equal(classes[1:], tokens[1:].cumsum() % 2)


def test_a_seed_and_a_size_change_only_their_own_splits(tmp_path):
  first, more, other = (
    load(tmp_path / name, problem="S3", **options)
    for name, options in (
      ("a", {}),
      ("b", {"num_train": 30, "test_lengths": (16,)}),
      ("c", {"seed": 1}),
    )
  )
  for name in ("validation", "test"):
    assert first.splits[name].digest() == more.splits[name].digest()
    assert first.splits[name].digest() != other.splits[name].digest()


def test_same_bytes_on_every_machine(tmp_path):
  """Prepared data of other machines and versions must stay the same."""
  split = load(tmp_path, problem="S3").splits["test"]
  tokens = np.concatenate([tokens for tokens, _ in rows(split)])
  assert tokens[:12].tolist() == [5, 0, 1, 2, 1, 3, 5, 0, 2, 0, 0, 1]
  assert split.digest() == "7b2941be2114ee8c6250f860c8a6cde6"


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"problem": "S9"}, "choose a group"),
    ({"problem": "parity", "tokens_per_element": 2}, "is for groups"),
    ({"min_length": 20}, "exchange min_length and length"),
    ({"protocol": "wp"}, "protocol"),
    ({"protocol": "illusion", "problem": "parity"}, "is for groups"),
  ],
)
def test_wrong_options_are_refused(tmp_path, options, message):
  with pytest.raises(UserError, match=message):
    load(tmp_path, **options)
