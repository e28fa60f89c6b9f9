import dataclasses

import numpy as np

from jaxformers.data.engine.packed import pack
from jaxformers.tasks import baselines
from tests.tasks.test_task import example


def test_majority_class_and_first_token_rule_by_hand():
  toy = example(
    [[1, 2], [1], [2, 2], [2], [2]],
    [0, 0, 1, 1, 1],
    [[1], [2], [2], [1]],
    [0, 1, 0, 1],
    majority=baselines.majority_class,
    first=baselines.first_token_rule,
  )
  assert toy.baselines() == {"majority": 0.5, "first": 0.5}
  toy = example([[1], [2], [2]], [0, 1, 1], [[1], [2]], [0, 1])
  assert baselines.first_token_rule(toy) == 1.0
  assert baselines.majority_class(toy) == 0.5


def test_histograms_are_token_frequencies():
  split = pack([np.array([1, 1, 3, 2], np.uint8)], np.array([0]))
  np.testing.assert_allclose(
    baselines.histograms(split, 5), [[0, 0.5, 0.25, 0.25, 0]]
  )


def test_histogram_regression_learns_from_frequencies():
  rng = np.random.default_rng(0)
  rows = [rng.integers(1, 5, 30) for _ in range(400)]
  labels = [int(np.sum(row == 2) > np.sum(row == 3)) for row in rows]
  toy = example(rows[:300], labels[:300], rows[300:], labels[300:])
  assert baselines.histogram_regression(toy) > 0.9
  # The order within a row plays no part.
  turned = [row[::-1] for row in rows]
  same = example(turned[:300], labels[:300], turned[300:], labels[300:])
  assert baselines.histogram_regression(same) == baselines.histogram_regression(
    toy
  )


def test_bag_regression_learns_which_tokens_occur():
  rng = np.random.default_rng(0)
  labels = rng.integers(0, 2, 200)
  rows = [[1, 2 + label, 4][: 3 - i % 2] for i, label in enumerate(labels)]
  toy = example(rows[:150], labels[:150], rows[150:], labels[150:])
  assert baselines.bag_regression(toy) == 1.0


def test_pixel_regression_learns_positions():
  rng = np.random.default_rng(0)
  rows = rng.integers(0, 5, (400, 4))
  labels = (rows[:, 2] > rows[:, 0]).astype(int)
  toy = example(rows[:300], labels[:300], rows[300:], labels[300:])
  assert baselines.pixel_regression(toy) > 0.9


def test_histogram_similarity_separates_pairs():
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
  assert baselines.histogram_similarity(toy) > 0.95


def test_word_similarity_weighs_rare_words():
  common = ["of a", "is in", "to be"]

  def pairs(count, seed):
    rng = np.random.default_rng(seed)
    texts, labels = [], rng.integers(0, 2, count)
    for label in labels:
      first, second = rng.permutation(3)[:2]
      rare, other = rng.permutation(50)[:2]
      texts += [f"{common[first]} x{rare}"]
      # Related texts share a rare word, and unrelated ones two common words.
      texts += [
        f"{common[second]} x{rare}" if label else f"{common[first]} x{other}"
      ]
    rows = [np.frombuffer(text.encode(), np.uint8) for text in texts]
    return dataclasses.replace(pack(rows, labels, num_inputs=2), shift=1)

  toy = example([[1]], [0], [[1]], [0])
  splits = {"train": pairs(200, 0), "test": pairs(60, 1)}
  toy = dataclasses.replace(toy, splits=splits, num_inputs=2)
  assert baselines.word_similarity(toy) == 1.0
  # An empty text has no word.
  empty = pack([np.zeros(0, np.uint8)] * 2, [0], num_inputs=2)
  toy.splits["test"] = dataclasses.replace(empty, shift=1)
  assert baselines.word_similarity(toy) == 1.0
