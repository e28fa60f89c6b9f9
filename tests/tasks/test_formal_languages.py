"""Formal languages as tasks: lengths, classes and refusals."""

import numpy as np
import pytest

from jaxformers import tasks
from jaxformers.foundations.errors import UserError

pytestmark = pytest.mark.slow

SIZES = dict(num_train=60, num_validation=20, num_test=20)


def load(folder, **options):
  sizes = SIZES | {"min_length": 6, "length": 12} | options
  return tasks.get("formal_languages", data_dir=str(folder), **sizes)


def test_a_reversed_string_stands_at_the_blanks(tmp_path):
  task = load(tmp_path, test_lengths=(20,))
  assert (task.vocab_size, task.num_classes, task.max_len) == (4, 2, 24)
  assert task.longest == 40
  for name, split in task.splits.items():
    for k, size in enumerate(split.lengths()):
      batch = split.batch(np.array([k]), int(size))
      ids, n = batch["inputs"][0], int(size) // 2
      assert (n == 20) if name == "test_20" else (6 <= n <= 12)
      assert (ids[n:] == 3).all()
      assert (batch["targets"][0, n:] + 1).tolist() == ids[:n][::-1].tolist()
      assert batch["weights"][0].tolist() == [0] * n + [1] * n


def test_train_has_all_lengths_and_no_sequence_of_the_tests(tmp_path):
  """Of three bits there are only eight; the tests keep a part of them."""
  sizes = {"num_train": 2_000, "num_validation": 50, "num_test": 50}
  task = load(tmp_path, problem="parity_check", min_length=3, length=9, **sizes)
  drawn = {
    name: [
      split.batch(np.array([k]), int(size))["inputs"].tobytes()
      for k, size in enumerate(split.lengths())
    ]
    for name, split in task.splits.items()
  }
  tested = drawn["validation"] + drawn["test"]
  assert len({*tested}) == len(tested)
  assert not {*drawn["train"]} & {*tested}
  counts = np.bincount(task.splits["train"].lengths() - 1)[3:]
  assert len(counts) == 7
  assert counts.min() > 0.6 * counts.mean()


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"problem": "reverse"}, "problem"),
    ({"problem": "solve_equation", "min_length": 2}, "at least 3 symbols"),
    ({"min_length": 13}, "min_length of at most length"),
  ],
)
def test_wrong_options_are_refused(tmp_path, options, message):
  with pytest.raises(UserError, match=message):
    load(tmp_path, **options)
