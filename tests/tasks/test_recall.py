"""Recall tasks: splits, classes and refusals."""

import numpy as np
import pytest

from jaxformers import tasks
from jaxformers.foundations.errors import UserError
from jaxformers.tasks import recall

SIZES = dict(num_train=40, num_validation=10, num_test=10)


def load(folder, **options):
  return tasks.get("recall", data_dir=str(folder), **(SIZES | options))


def test_mqar_task_asks_for_the_value_of_each_key(tmp_path):
  task = load(tmp_path, length=32, vocab_size=64, test_lengths=(64,))
  assert (task.num_classes, task.vocab_size) == (64, 65)
  assert task.causal
  for split in task.splits.values():
    batch = split.batch(np.arange(len(split)), 64)
    assert (batch["weights"].sum(1) == 4).all()
    for ids, targets, weights in zip(
      batch["inputs"], batch["targets"], batch["weights"], strict=True
    ):
      pairs = dict(zip(ids[0:8:2] - 1, ids[1:8:2] - 1, strict=True))
      for place in np.flatnonzero(weights):
        assert pairs[ids[place] - 1] == targets[place]
  assert task.baselines()["random value of a pair"] == 0.25


@pytest.mark.parametrize("problem", ["associative_recall", "induction_heads"])
def test_problems_with_a_mark_ask_at_the_end(tmp_path, problem):
  task = load(tmp_path, problem=problem, length=12, vocab_size=8, num_pairs=0)
  assert task.vocabulary[-1] == "<mark>"
  batch = task.splits["test"].batch(np.arange(10), 12)
  assert batch["weights"][:, -1].all()
  assert batch["weights"].sum() == 10


@pytest.mark.slow
def test_same_bytes_on_every_machine(tmp_path):
  """Prepared data of other machines and versions must stay the same."""
  digests = [
    load(tmp_path / name, **options).splits["test"].digest()
    for name, options in (
      ("mqar", {}),
      ("induction", {"problem": "induction_heads", "num_pairs": 0}),
    )
  ]
  assert digests == [
    "e0f5ab49a0bfa2fc76953ff0eb25c05e",
    "fa172ba50ba8ba89a029aa16ea4d2b69",
  ]


@pytest.mark.slow
def test_zoology_fills_with_token_0(tmp_path):
  task = load(tmp_path, protocol="zoology", vocab_size=128)
  ids = task.splits["train"].batch(np.arange(40), 64)["inputs"]
  assert (ids[:, 8:] == 1).sum(1).tolist() == [52] * 40


@pytest.mark.slow
def test_based_trains_on_several_sizes(tmp_path):
  options = {"length": 256, "vocab_size": 256, "num_pairs": 0}
  options |= {"num_train": 400, "test_lengths": (64, 128)}
  task = load(tmp_path, protocol="based", **options)

  def sizes(name):
    split = task.splits[name]
    pairs = split.batch(np.arange(len(split)), 256)["weights"].sum(1)
    return list(zip(split.lengths().tolist(), pairs.tolist(), strict=True))

  trained = sizes("train")
  shares = {size: trained.count(size) / 400 for size in {*trained}}
  assert shares == {
    (n, pairs): pytest.approx(share, abs=0.1)
    for n, pairs, share in recall.MIXED
  }
  assert set(sizes("test")) == {(256, 64)}
  assert set(sizes("test_64")) == {(64, 16)}
  assert set(sizes("test_128")) == {(128, 32)}


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"problem": "mqa"}, "problem"),
    ({"num_pairs": 0}, "needs at least one"),
    ({"protocol": "based"}, "need num_pairs=0"),
    ({"protocol": "based", "num_pairs": 0}, "set length=256"),
    ({"problem": "induction_heads"}, "num_pairs=0"),
    ({"num_pairs": 20}, "4 num_pairs"),
    ({"vocab_size": 2}, "at least 4"),
    ({"vocab_size": 70_000}, "give less than 65,535"),
  ],
)
def test_wrong_sizes_are_refused(tmp_path, options, message):
  with pytest.raises(UserError, match=message):
    load(tmp_path, **options)
  assert not (tmp_path / "packed").exists()
