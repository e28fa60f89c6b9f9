"""Recall: classes against independent readings, and the traps of the source."""

import numpy as np
import pytest
from scipy import stats

from jaxformers.data.generators import recall
from jaxformers.foundations.errors import UserError


def rng(seed=0):
  return np.random.default_rng(seed)


@pytest.mark.parametrize("fill", [True, False])
def test_mqar_classes_are_the_values_of_their_keys(fill):
  tokens, classes = recall.mqar(rng(), 1_000, 32, 64, 5, fill=fill)
  for row, labels in zip(tokens, classes, strict=True):
    pairs = dict(zip(row[0:10:2], row[1:10:2], strict=True))
    assert len(pairs) == 5
    assert all(1 <= key < 32 <= value < 64 for key, value in pairs.items())
    assert len(set(pairs.values())) == 5
    asked = np.flatnonzero(labels != recall.NO_CLASS)
    # Each key is asked once, at even places after the pairs.
    assert sorted(row[asked]) == sorted(pairs)
    assert (asked >= 10).all() and (asked % 2 == 0).all()
    assert [pairs[key] for key in row[asked]] == labels[asked].tolist()
    if not fill:
      others = np.delete(row[10:], asked - 10)
      assert not others.any()


def test_mqar_by_hand(monkeypatch):
  """The example of zoology's docstring, with its keys, values and places."""
  picks = iter([[[1, 3]], [[2, 1]], [[4, 1]]])  # 1 + keys; 6 + values; places.
  monkeypatch.setattr(
    recall, "choose_distinct", lambda *_: np.array(next(picks))
  )
  tokens, classes = recall.mqar(rng(), 1, 16, 12, 2, fill=False)
  assert tokens[0].tolist() == [2, 8, 4, 7, 0, 0, 4, 0, 0, 0, 0, 0, 2, 0, 0, 0]
  assert np.flatnonzero(classes[0] >= 0).tolist() == [6, 12]
  assert classes[0, [6, 12]].tolist() == [7, 8]


def test_mqar_draws_keys_uniformly_and_gaps_by_the_power_law():
  tokens, classes = recall.mqar(rng(), 20_000, 32, 32, 1, fill=False)
  keys = np.bincount(tokens[:, 0], minlength=16)[1:16]
  assert stats.chisquare(keys).pvalue > 1e-4
  gaps = ((classes >= 0).argmax(1) - 2) // 2
  weights = np.arange(1, 16) ** (recall.POWER - 1)
  want = 20_000 * weights / weights.sum()
  counts = np.bincount(gaps, minlength=15)
  assert stats.chisquare(counts, want).pvalue > 1e-4


def test_mqar_fill_is_uniform_and_may_equal_a_key():
  tokens, classes = recall.mqar(rng(), 5_000, 24, 16, 2)
  is_filled = (classes < 0) & (np.arange(24) >= 4)
  counts = np.bincount(tokens[is_filled], minlength=16)
  assert stats.chisquare(counts).pvalue > 1e-4


def test_distinct_numbers_are_drawn_one_after_the_other():
  """The second number, given the first, follows the remaining weights."""
  weights = np.array([5.0, 3.0, 2.0])
  drawn = recall.choose_distinct(rng(), 30_000, 3, 2, weights)
  assert (drawn[:, 0] != drawn[:, 1]).all()
  first = np.bincount(drawn[:, 0], minlength=3)
  assert stats.chisquare(first, 3_000 * weights).pvalue > 1e-4
  after = drawn[drawn[:, 0] == 0, 1]
  want = len(after) * np.array([0.6, 0.4])
  assert stats.chisquare(np.bincount(after)[1:], want).pvalue > 1e-4


def test_associative_recall_asks_for_a_key_that_was_seen():
  tokens, classes = recall.associative_recall(rng(), 1_000, 20, 10)
  assert (classes[:, :-1] == recall.NO_CLASS).all()
  for row, label in zip(tokens, classes[:, -1], strict=True):
    pairs = dict(zip(row[0:-2:2], row[1:-2:2], strict=True))
    assert row[-2] == 10  # The mark.
    assert pairs[row[-1]] == label
    # A key has the same value each time.
    for key, value in zip(row[0:-2:2], row[1:-2:2], strict=True):
      assert pairs[key] == value and key < 5 <= value < 10


def test_induction_asks_for_the_token_after_the_mark():
  tokens, classes = recall.induction_heads(rng(), 1_000, 12, 6)
  for row, label in zip(tokens, classes[:, -1], strict=True):
    first, last = np.flatnonzero(row == 6)
    assert last == 11
    assert row[first + 1] == label
  places = np.bincount((tokens == 6).argmax(1), minlength=10)
  assert stats.chisquare(places).pvalue > 1e-4


@pytest.mark.parametrize(
  ("n", "vocab_size", "pairs"), [(31, 64, 4), (32, 64, 9), (64, 16, 8)]
)
def test_mqar_refuses_sizes_that_do_not_fit(n, vocab_size, pairs):
  with pytest.raises(UserError, match=f"length={n}, num_pairs={pairs}"):
    recall.mqar(rng(), 1, n, vocab_size, pairs)


def test_short_sequences_are_refused():
  with pytest.raises(UserError, match="length=3"):
    recall.associative_recall(rng(), 1, 3, 10)
  with pytest.raises(UserError, match="length=2"):
    recall.induction_heads(rng(), 1, 2, 10)
