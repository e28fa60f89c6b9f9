"""Splits with a label for every token: of users, and generated."""

import numpy as np
import pytest

from jaxformers import tasks
from jaxformers.foundations.errors import UserError
from jaxformers.tasks import token_labels

IDS = [[1, 2, 3], [2, 1], [3, 3, 1, 2]] * 8
LABELS = [[0, 1, None], [1, 0], [2, 2, 0, 1]] * 8


def load(ids=IDS, labels=LABELS, **options):
  return tasks.from_arrays((ids, labels), **options)


def test_labels_of_tokens_become_targets_and_weights():
  task = load()
  assert task.objective == "token_classification"
  assert (task.num_classes, task.max_len, task.vocab_size) == (3, 4, 4)
  assert not task.causal
  train = task.splits["train"]
  batch = train.batch(np.arange(len(train)), 4)
  for ids, targets, weights in zip(
    batch["inputs"], batch["targets"], batch["weights"], strict=True
  ):
    row = [int(i) for i in ids if i]
    labels = LABELS[IDS.index(row)]
    assert targets[: len(row)].tolist() == [label or 0 for label in labels]
    assert weights[: len(row)].tolist() == [x is not None for x in labels]
    assert not weights[len(row) :].any()
  assert batch["targets"].dtype == np.int32
  assert batch["weights"].dtype == np.float32


def test_a_batch_is_cut_with_its_labels():
  split = load().splits["train"]
  (k,) = np.flatnonzero(split.lengths() == 4)[:1]
  batch = split.batch(np.array([k]), 2)
  assert batch["inputs"].tolist() == [[3, 3]]
  assert batch["targets"].tolist() == [[2, 2]]


def test_negative_labels_and_padding_have_no_class():
  ids = np.array([[1, 2, 0, 0], [2, 2, 1, 0]] * 10)
  labels = np.array([[0, -100, 1, 1], [1, 0, -1, 0]] * 10)
  split = load(ids, labels).splits["train"]
  batch = split.batch(np.arange(2), 4)
  assert batch["weights"].sum(1).tolist() in ([1, 2], [2, 1])


def test_names_of_classes_and_numbers_as_inputs():
  values = np.linspace(-1, 1, 60, dtype=np.float32).reshape(20, 3)
  labels = [["low", None, "high"]] * 20
  task = load(values, labels)
  assert task.classes == ("high", "low")
  batch = task.splits["train"].batch(np.arange(2), 3)
  assert batch["inputs"].dtype == np.float32
  assert batch["targets"][0].tolist() == [1, 0, 0]
  assert batch["weights"][0].tolist() == [1, 0, 1]


@pytest.mark.parametrize(
  ("ids", "labels", "message"),
  [
    ([[1, 2]] * 4, [[0, 1]] * 3 + [[0]], "1 labels for the input"),
    ([[1, 2]] * 4, [[0, 1]] * 3 + [0], "the label 0 for the input"),
    ([[1, 2]] * 4, [[None, -1]] * 4, "no label at any token"),
    (["ab"] * 4, [[0, 1]] * 4, "flatten the labels"),
    (["ab"] * 4, np.zeros((4, 1), int), "flatten the labels"),
    ([1, 2, 3, 4], [[0]] * 4, "flatten the labels"),
    (
      [[1, 2]] * 4,
      [[0, 1]] * 3 + [[None, 1.5]],
      r"train.3. has labels .* at 1",
    ),
    ([[1, 2]] * 4, [[0, [1]]] * 4, "train has labels object"),
  ],
)
def test_labels_that_do_not_fit_are_refused(ids, labels, message):
  with pytest.raises(UserError, match=message):
    load(ids, labels)


def test_rules_score_labels_by_hand():
  ids = [[1, 2, 2]] * 20
  labels = [[0, 1, 1]] * 20
  task = load(ids, labels)
  assert token_labels.majority_label(task) == pytest.approx(2 / 3)
  assert token_labels.token_rule(task) == 1.0


def test_distinct_sequences_are_refused_when_there_are_no_more():
  def draw(count):
    return [(np.array([k % 3]), np.array([0])) for k in range(count)]

  seen = set()
  assert len(list(token_labels.distinct(draw, 3, seen))) == 3
  with pytest.raises(UserError, match="Only 0 of 1 further sequences"):
    list(token_labels.distinct(draw, 1, seen))


@pytest.mark.parametrize("lengths", [(8, 8), (1, 4)])
def test_test_lengths_are_checked(tmp_path, lengths):
  with pytest.raises(UserError, match="different lengths of at least 2"):
    tasks.get("state_tracking", data_dir=str(tmp_path), test_lengths=lengths)
