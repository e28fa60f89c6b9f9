"""Tasks of examples that are given in Python."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformers.tasks import from_arrays, rows
from jaxformers.tasks.inputs import Inputs

RNG = np.random.default_rng(0)


def inputs_of(split):
  return split.batch(np.arange(len(split)), int(split.lengths().max()))


@given(st.lists(st.tuples(st.text(), st.sampled_from("ab")), min_size=10))
@pytest.mark.slow
def test_from_arrays_puts_every_text_in_one_split(pairs):
  task = from_arrays(iter(pairs), classes=("a", "b"))
  train, validation = task.splits["train"], task.splits["validation"]
  assert len(train) + len(validation) == len(pairs)
  assert task.splits["test"] is validation
  assert task.selection == "test"
  # An example keeps its label, wherever it went.
  for split in (train, validation):
    batch = inputs_of(split)
    for row, label in zip(batch["inputs"], batch["targets"], strict=True):
      text = task.inputs.decode(row)
      assert any(
        (x or " ") == text and y == task.classes[label] for x, y in pairs
      )


def test_from_arrays_holds_out_equal_inputs_together():
  texts = [f"text {k % 50}" for k in range(100)]
  task = from_arrays((texts, [k % 2 for k in range(100)]))
  rows = [
    {tuple(row) for row in inputs_of(task.splits[name])["inputs"].tolist()}
    for name in ("train", "validation")
  ]
  assert not rows[0] & rows[1]


def write_csv(path, labels):
  lines = [f"{label},text {k}" for k, label in enumerate(labels)]
  path.write_text("\n".join(["label,text", *lines]) + "\n")
  return path


def test_labels_of_all_files_are_read_as_those_of_train(tmp_path):
  """Integers of a file whose train has names are names, too."""
  train = write_csv(tmp_path / "train.csv", 6 * ["1", "2", "3", "unknown"])
  test = write_csv(tmp_path / "test.csv", ["1", "2", "3"])
  task = from_arrays(train, test=test)
  assert task.classes == ("1", "2", "3", "unknown")
  labels = task.splits["test"].labels
  assert [task.classes[k] for k in labels] == ["1", "2", "3"]
  other = write_csv(tmp_path / "other.csv", ["1", "7"])
  with pytest.raises(ValueError, match="test has the label '7' at 1"):
    from_arrays(train, test=other)


@pytest.mark.parametrize("pair", rows.PAIRS)
def test_every_pair_of_columns_is_a_pair_of_texts(pair):
  table = {pair[0]: ["a", "b"], pair[1]: ["c", "d"], "label": [0, 1]}
  columns = rows.read_columns(table, "train")
  assert [*columns.inputs] == [("a", "c"), ("b", "d")]


@pytest.mark.parametrize(
  ("inputs", "options", "message"),
  [
    (["a", "b", "c"], {"vocab_size": 9}, "vocab_size=9.*inputs are texts"),
    (
      RNG.integers(0, 9, (3, 8, 8, 3)).astype(np.uint8),
      {"max_len": 9},
      "max_len=9.*inputs are images",
    ),
  ],
)
def test_from_arrays_refuses_sizes_of_other_inputs(inputs, options, message):
  with pytest.raises(ValueError, match=message):
    from_arrays((inputs, [0, 1, 0]), **options)


def test_from_arrays_keeps_numeric_labels_without_names():
  rows = [[1, 2, 3], [4], [2, 2]] * 4
  task = from_arrays((rows, [0, 1, 0] * 4))
  assert (task.classes, task.num_classes) == ((), 2)
  named = from_arrays((rows, [0, 1, 0] * 4), classes=("x", "y"))
  other = from_arrays((rows, [0, 1, 0] * 4), classes=("x", "z"))
  assert len({t.protocol for t in (task, named, other)}) == 3


def test_from_arrays_pads_ids_of_unequal_lengths():
  rows = [[1, 2, 3], [4], [2, 2, 0]]
  task = from_arrays((rows, [0, 1, 0]), (rows, [0, 1, 0]), (rows, [1, 1, 1]))
  assert (task.vocab_size, task.max_len, task.num_classes) == (5, 3, 2)
  batch = inputs_of(task.splits["train"])
  assert batch["inputs"].tolist() == [[1, 2, 3], [4, 0, 0], [2, 2, 0]]
  assert inputs_of(task.splits["test"])["targets"].tolist() == [1, 1, 1]
  assert task.selection == "validation"
  assert from_arrays((rows, [0, 1, 0]), vocab_size=9).vocab_size == 9


def test_from_arrays_reads_numbers_and_images():
  x = RNG.normal(size=(20, 6))
  task = from_arrays((x, np.arange(20) % 3), max_len=4)
  assert (task.vocab_size, task.max_len, task.image) == (0, 4, ())
  split = task.splits["train"]
  batch = split.batch(np.arange(len(split)), 4)
  assert batch["inputs"].dtype == np.float32
  assert batch["inputs"].shape == (18, 4)
  pixels = RNG.integers(0, 256, (20, 8, 8, 3), np.uint8)
  task = from_arrays((pixels, np.arange(20) % 3))
  assert task.image == (8, 8, 3)
  batch = task.splits["train"].batch(np.arange(2))
  assert batch["inputs"].shape == (2, 8, 8, 3)


def test_from_arrays_replaces_lone_surrogates():
  texts = ["bad \ud83d", "joined \ud83d\ude00", "good"] * 4
  task = from_arrays((texts, [0, 1, 1] * 4))
  rows = inputs_of(task.splits["train"])["inputs"]
  decoded = {task.inputs.decode(row) for row in rows}
  assert decoded == {"bad \ufffd", "joined \U0001f600", "good"}


def test_from_arrays_description_depends_on_the_examples():
  x = RNG.normal(size=(20, 6))
  y = np.arange(20) % 3
  assert from_arrays((x, y)).description() == from_arrays((x, y)).description()
  other = from_arrays((x + 1, y)).description()
  assert other["data"] != from_arrays((x, y)).description()["data"]


@pytest.mark.parametrize(
  ("examples", "options", "message"),
  [
    (3, {}, r"train is int\b"),
    ([("a",)], {}, "train is list.*'a',"),
    ((["a", "b"], [0]), {}, "2 inputs.*1 labels"),
    (([], []), {}, "0 inputs.*0 labels"),
    ((["a"] * 3, ["x", "y", "z"]), {"classes": ("x", "y")}, "label 'z' at 2"),
    (
      (["a"] * 3, [0, 1, 5]),
      {"classes": ("x", "y")},
      "int64.*5 at 2.*0 to 1",
    ),
    ((["a"] * 3, [0.5, 1, 1]), {}, "float64.*0.5 at 0"),
    (([[1, 9]] * 3, [0, 1, 1]), {"vocab_size": 5}, r"vocab_size=5.*\b10\b"),
    (([[-1]] * 3, [0, 1, 1]), {}, r"int64 \[1\] at 0"),
    (([[1, 0, 2]] * 3, [0, 1, 1]), {}, r"int64 \[3\] at 0"),
    (([[1.0], [1.0, 2.0]] * 3, [0, 1] * 3), {}, r"\(1,\), \(2,\)"),
    (
      ([np.ones((3, 1)), np.ones((3, 2))] * 3, [0, 1] * 3),
      {},
      r"float64 \[3, 2\] at 1.*\[n, 1\]",
    ),
    (
      ([np.full((3, 1), np.inf), np.ones((2, 1))] * 3, [0, 1] * 3),
      {},
      "infinite ones, at 0",
    ),
    ((np.zeros((3, 4, 4, 1), np.uint8), [0, 1, 1]), {}, r"\[3, 4, 4, 1\]"),
    ((["a", float("nan"), "b"], [0, 1, 1]), {}, "input nan at 1"),
    ((["a", None, "b"], [0, 1, 1]), {}, "input None at 1"),
    (([None, "a", "b"], [0, 1, 1]), {}, "input None at 0"),
    ((["a", "b", b"c"], [0, 1, 1]), {}, "b'c' at 2"),
    (([["a", "b", "c"]] * 3, [0, 1, 1]), {}, r"\['a', 'b', 'c'\] at 0"),
    (([("a", "b"), "ab"] * 3, [0, 1] * 3), {}, "'ab' at 1.*pair"),
    (([1, 2, 3], [0, 1, 1]), {}, "input 1 at 0"),
    (([[1], [], [2]], [0, 1, 1]), {}, r"\[\] at 1"),
    (([[1], [0], [2]], [0, 1, 1]), {}, r"int64 \[1\] at 1"),
    ((np.ones((3, 0)), [0, 1, 1]), {}, r"\[\], dtype=float64"),
    (([[1.0], [np.nan], [2]], [0, 1, 1]), {}, "finite at 1"),
    ((["a"] * 3, ["x", "y", float("nan")]), {}, "nan at 2"),
    ((["a"] * 3, ["x", None, "y"]), {}, "labels.*None at 1"),
    ((["a"] * 3, ["x", "", "y"]), {}, "label '' at 1"),
    ((["a"] * 3, np.array([0, 1, np.nan])), {}, "np.float64.nan. at 2"),
    ((["a"] * 3, [0, 1, -1]), {}, "-1 at 2"),
    (
      (["a"] * 3, [0, 1, 1 << 40]),
      {"classes": "xy"},
      "int64.*1099511627776 at 2.*0 to 1",
    ),
    ((["a"] * 3, [True, False, True]), {}, "bool.*True at 0"),
    ((["a"] * 3, [[0], [1, 2], [0]]), {}, r"\[0\] at 0"),
    (([0, 1] * 3, [*"abcdef"]), {}, "6 different labels.*6.*classes="),
    (([0, 1] * 3, [*"abcdea"]), {}, "5 different labels.*6.*'a'"),
    ((["a"] * 3, [0, 1, 1]), {"max_len": -1}, "max_len=-1"),
  ],
)
def test_from_arrays_refuses_wrong_examples(examples, options, message):
  with pytest.raises(ValueError, match=message):
    from_arrays(examples, **options)


@pytest.mark.parametrize("max_len", [0, 16, 64])
def test_inputs_read_numbers_as_in_training(max_len):
  rows = np.random.default_rng(0).normal(size=(40, 32)).astype(np.float32)
  task = from_arrays((rows, np.arange(40) % 2), max_len=max_len)
  assert task.max_len == (16 if max_len == 16 else 32)
  inputs = Inputs((), task.max_len, reading=task.splits["train"].reading())
  assert inputs.batch(rows[:, : task.max_len]).shape == (40, task.max_len)


def test_inputs_read_uint8_ids_as_ids():
  ids = np.random.default_rng(0).integers(1, 9, (40, 32)).astype(np.uint8)
  ids[:, 28:] = 0
  task = from_arrays((ids, np.arange(40) % 2))
  reading = task.splits["train"].reading()
  inputs = Inputs(task.vocabulary, task.max_len, reading=reading)
  for x in (ids, ids[:, :10], ids.astype(np.int32)):
    np.testing.assert_array_equal(inputs.batch(x), x[:, :28])


def test_from_arrays_refuses_ids_that_are_identifiers():
  ids = np.array([[1, 2], [3, 10**9]] * 5)
  with pytest.raises(ValueError, match=r"id 1000000000 at 1\b"):
    from_arrays((ids, np.arange(10) % 2))


def test_from_arrays_reads_time_series_of_unequal_lengths():
  x = [RNG.normal(size=(k % 4 + 2, 3)) for k in range(20)]
  x[5][1, 2] = np.nan
  task = from_arrays((x, np.arange(20) % 2))
  assert (task.channels, task.max_len, task.vocab_size) == (3, 5, 0)
  batch = inputs_of(task.splits["train"])
  assert batch["inputs"].shape == (18, 5, 3)
  lengths = task.splits["train"].lengths()
  np.testing.assert_array_equal(
    (~np.isnan(batch["inputs"]).all(-1)).sum(1), lengths
  )
  # A label for each step.
  labels = [np.arange(len(each)) % 3 for each in x]
  task = from_arrays((x, labels))
  batch = inputs_of(task.splits["train"])
  assert task.sizes()["channels"] == 3 and task.num_classes == 3
  assert batch["targets"].shape == batch["weights"].shape == (18, 5)
  np.testing.assert_array_equal(batch["weights"].sum(1), lengths)
