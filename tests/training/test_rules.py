"""Trivial rules are fitted once for a data set."""

import dataclasses

import numpy as np

from jaxformers import tasks
from jaxformers.tasks import language
from jaxformers.training import rules

TASK = tasks.from_arrays((["a", "b"] * 20, ["x", "y"] * 20))


def counted(task):
  fits = []

  def rule(given):
    fits.append(given.name)
    return 0.25

  return dataclasses.replace(task, trivial={"a rule": rule}), fits


def test_rule_scores_are_fitted_once_and_read_again(tmp_path):
  task, fits = counted(TASK)
  said = []
  for _ in range(2):
    assert rules.scores(task, str(tmp_path), said.append) == {"a rule": 0.25}
  assert len(fits) == len(said) == 1
  # Other data, other rules and a damaged file are fitted again.
  other, fits = counted(tasks.from_arrays((["a", "c"] * 20, ["x", "y"] * 20)))
  rules.scores(other, str(tmp_path), said.append)
  assert len(fits) == 1
  more = dataclasses.replace(other, trivial=other.trivial | TASK.trivial)
  assert len(rules.scores(more, str(tmp_path), said.append)) == 2
  for path in (tmp_path / "rules").iterdir():
    path.write_bytes(path.read_bytes().replace(b"0.25", b"0.75"))
  assert rules.scores(other, str(tmp_path), said.append) == {"a rule": 0.25}


def test_rule_scores_depend_on_the_stride_of_the_scoring(tmp_path):
  words = [*"abcdefgh"]
  texts = [" ".join(np.roll(words, k)) + f" {k}\n" for k in range(40)]
  for stride in (4, 1):
    task = language.from_texts(
      texts, tokens="bytes", max_len=8, stride=stride, eval_windows=2
    )
    found = rules.scores(task, str(tmp_path), lambda _: None)
    assert found == task.baselines()


def test_rule_scores_are_fitted_without_a_writable_folder(tmp_path):
  (tmp_path / "rules").write_text("a file")
  task, fits = counted(TASK)
  for _ in range(2):
    assert rules.scores(task, str(tmp_path), print) == {"a rule": 0.25}
  assert len(fits) == 2
