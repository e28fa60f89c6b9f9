import dataclasses
import json
import pwd

import numpy as np
import pytest

from jaxformers import tasks
from jaxformers.data.engine.packed import pack
from jaxformers.tasks import task as t


def example(rows, labels, test_rows, test_labels, **fields):
  def split(rows, labels):
    return pack([np.array(row, np.uint8) for row in rows], np.array(labels))

  test = split(test_rows, test_labels)
  return t.Task(
    name="toy",
    protocol="own",
    splits={"train": split(rows, labels), "validation": test, "test": test},
    selection="validation",
    vocabulary=("<pad>", *"abcd"),
    max_len=4,
    num_classes=2,
    trivial=fields,
    info={},
  )


def test_the_trivial_rules_by_hand():
  toy = example(
    [[1, 2], [1], [2, 2], [2], [2]],
    [0, 0, 1, 1, 1],
    [[1], [2], [2], [1]],
    [0, 1, 0, 1],
    majority=t.majority_class,
    first=t.first_token_rule,
  )
  assert toy.baselines() == {"majority": 0.5, "first": 0.5}
  toy = example([[1], [2], [2]], [0, 1, 1], [[1], [2]], [0, 1])
  assert t.first_token_rule(toy) == 1.0
  assert t.majority_class(toy) == 0.5


def test_histograms_are_frequencies():
  split = pack([np.array([1, 1, 3, 2], np.uint8)], np.array([0]))
  np.testing.assert_allclose(t.histograms(split, 5), [[0, 0.5, 0.25, 0.25, 0]])


def test_histogram_regression_learns_what_histograms_tell():
  rng = np.random.default_rng(0)
  rows = [rng.integers(1, 5, 30) for _ in range(400)]
  labels = [int(np.sum(row == 2) > np.sum(row == 3)) for row in rows]
  toy = example(rows[:300], labels[:300], rows[300:], labels[300:])
  assert t.histogram_regression(toy) > 0.9
  # The order within a row plays no part.
  turned = [row[::-1] for row in rows]
  same = example(turned[:300], labels[:300], turned[300:], labels[300:])
  assert t.histogram_regression(same) == t.histogram_regression(toy)


def test_where_data_stands(tmp_path, monkeypatch):
  assert t.data_folder(str(tmp_path / "a")) == tmp_path / "a"
  monkeypatch.setenv("JAXFORMERS_DATA_DIR", str(tmp_path / "b"))
  assert t.data_folder("") == tmp_path / "b"
  (tmp_path / "file").touch()
  with pytest.raises(ValueError, match="cannot be made.*config.data_dir"):
    t.data_folder(str(tmp_path / "file" / "c"))


def test_unknown_tasks_and_options():
  with pytest.raises(ValueError, match="task 'listop'.*Did you mean 'listops'"):
    tasks.get("listop")
  with pytest.raises(ValueError, match="option of task 'text' 'length'"):
    tasks.get("text", length=3)


def test_bag_regression_learns_which_tokens_occur():
  rng = np.random.default_rng(0)
  labels = rng.integers(0, 2, 200)
  rows = [[1, 2 + label, 4][: 3 - i % 2] for i, label in enumerate(labels)]
  toy = example(rows[:150], labels[:150], rows[150:], labels[150:])
  assert t.bag_regression(toy) == 1.0


def test_pixel_regression_learns_where():
  rng = np.random.default_rng(0)
  rows = rng.integers(0, 5, (400, 4))
  labels = (rows[:, 2] > rows[:, 0]).astype(int)
  toy = example(rows[:300], labels[:300], rows[300:], labels[300:])
  assert t.pixel_regression(toy) > 0.9


def test_histogram_similarity_of_pairs():
  def pairs(count, seed):
    rng = np.random.default_rng(seed)
    rows, labels = [], rng.integers(0, 2, count)
    for label in labels:
      row = rng.integers(1, 5, 40)
      rows += [row, rng.permutation(row) if label else rng.integers(1, 3, 40)]
    return pack([row.astype(np.uint8) for row in rows], labels, num_inputs=2)

  toy = example([[1]], [0], [[1]], [0])
  splits = {"train": pairs(200, 0), "test": pairs(60, 1)}
  toy = dataclasses.replace(toy, splits=splits, num_inputs=2)
  assert t.histogram_similarity(toy) > 0.95


def test_the_description_tells_what_numbers_depend_on():
  toy = example([[1, 2]], [0], [[1]], [0])
  description = toy.description()
  assert description == json.loads(json.dumps(description))
  for change in (
    {"protocol": "other"},
    {"vocabulary": ("<pad>", *"abdc")},
    {"max_len": 5},
    {"padded_len": 5},
    {"selection": "test"},
    {
      "splits": {
        **toy.splits,
        "train": toy.splits["train"],
        "test": pack([], []),
      }
    },
  ):
    assert dataclasses.replace(toy, **change).description() != description, (
      change
    )


def test_the_description_tells_data_apart_by_every_token():
  rows = [[1 + k % 4, 1 + k % 3] for k in range(1_000)]
  description = example(rows, [0] * 1_000, [[1]], [0]).description()
  assert example(rows, [0] * 1_000, [[1]], [0]).description() == description
  rows[500][1] += 1
  other = example(rows, [0] * 1_000, [[1]], [0]).description()
  assert {key for key in description if description[key] != other[key]} == {
    "data"
  }
  assert description["data"]["test"] == other["data"]["test"]


def test_what_is_no_text_is_not_read_as_one():
  toy = example([[1]], [0], [[1]], [0])
  with pytest.raises(ValueError, match="inputs of toy are no text"):
    toy.encode("a movie")


def test_no_data_directory_without_a_home(tmp_path, monkeypatch):
  def unknown(_):
    raise KeyError

  monkeypatch.delenv("HOME", raising=False)
  monkeypatch.delenv("JAXFORMERS_DATA_DIR", raising=False)
  monkeypatch.setattr(pwd, "getpwuid", unknown)
  with pytest.raises(ValueError, match="HOME is not set .*--config.data_dir="):
    t.data_folder("")
  with pytest.raises(ValueError, match="'~/data' begins with ~"):
    t.data_folder("~/data")
  assert t.data_folder(str(tmp_path / "a")) == tmp_path / "a"
  monkeypatch.setenv("JAXFORMERS_DATA_DIR", str(tmp_path / "b"))
  assert t.data_folder("") == tmp_path / "b"
