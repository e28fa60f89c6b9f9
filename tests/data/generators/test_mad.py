"""MAD: classes against independent readings of the sequences."""

import numpy as np
import pytest
from scipy import stats

from jaxformers.data.generators import mad
from jaxformers.data.generators.recall import NO_CLASS
from jaxformers.foundations.errors import UserError


def rng(seed=0):
  return np.random.default_rng(seed)


def by_reading(tokens, low_noise):
  """Classes of a sequence of pairs: values of keys that were seen."""
  seen, classes = {}, [NO_CLASS] * len(tokens)
  for place in range(0, len(tokens), 2):
    key = tokens[place]
    if key >= low_noise:
      continue
    if key in seen:
      classes[place] = seen[key]
    elif place + 1 < len(tokens):
      seen[key] = tokens[place + 1]
  return classes


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_recall_asks_for_the_values_of_keys_that_were_seen(noise):
  sizes = {"noise_tokens": 6, "noise": noise} if noise else {}
  tokens, classes = mad.recall(rng(), 1_000, 20, 18, **sizes)
  assert tokens.shape == classes.shape == (1_000, 19)
  low_noise = 12 if noise else 18
  for row, labels in zip(tokens.tolist(), classes.tolist(), strict=True):
    assert by_reading(row, low_noise) == labels
    # The last key has always been seen.
    assert labels[-1] != NO_CLASS
  is_noise = tokens[:, 0:18:2] >= low_noise
  # One of the nine pairs before the last one is never noise.
  assert is_noise.mean() == pytest.approx(noise * 8 / 9, abs=0.02)


def test_recall_in_training_has_the_next_token_as_class():
  tokens, classes = mad.recall(rng(), 100, 20, 16, every=True)
  np.testing.assert_array_equal(tokens[:, 1:], classes[:, :-1])
  assert (classes[:, -1] >= 8).all()
  held_out = mad.recall(rng(), 100, 20, 16)
  np.testing.assert_array_equal(tokens, held_out[0])


def test_recall_by_hand():
  """Pairs (0 3) (1 2) (0 3) and the question 1, with two keys and values."""
  for seed in range(2_000):
    tokens, classes = mad.recall(rng(seed), 1, 8, 4)
    if tokens[0].tolist() == [0, 3, 1, 2, 0, 3, 1]:
      assert classes[0].tolist() == [-1, -1, -1, -1, 3, -1, 2]
      return
  raise AssertionError("no seed draws the example")


def test_recall_draws_uniformly():
  tokens, _ = mad.recall(rng(), 5_000, 20, 16)
  for counts in (
    np.bincount(tokens[:, 0], minlength=8),
    np.bincount(tokens[:, 1] - 8, minlength=8),
  ):
    assert stats.chisquare(counts).pvalue > 1e-4
  # Of the keys that were seen, each is asked for equally often.
  ranks = [
    sorted(set(row[:-1:2])).index(row[-1])
    for row in tokens.tolist()
    if len(set(row[:-1:2])) == 4
  ]
  assert len(ranks) > 200
  assert stats.chisquare(np.bincount(ranks, minlength=4)).pvalue > 1e-4


def read_fuzzy(tokens, pad):
  """Pairs of a sequence without padding, by the halves of the vocabulary."""
  pairs, half = [], pad // 2
  for token in tokens:
    if token == pad:
      assert not pairs
    elif token < half:
      if not pairs or pairs[-1][1]:
        pairs.append(([], []))
      pairs[-1][0].append(token)
    else:
      pairs[-1][1].append(token)
  return [(tuple(key), tuple(value)) for key, value in pairs]


@pytest.mark.parametrize("every", [False, True])
def test_fuzzy_recall_repeats_the_value_of_a_key(every):
  tokens, classes = mad.fuzzy_recall(rng(), 1_000, 48, 16, every=every)
  assert tokens.shape == (1_000, 48)
  for row, labels in zip(tokens.tolist(), classes.tolist(), strict=True):
    whole = [*row, labels[-1]]
    pairs = read_fuzzy(whole, 15)
    seen = {}
    expected = []
    for key, value in pairs:
      assert len(key) in ((1, 2, 3) if every else (3,))
      assert len({*key}) == len(key) and len({*value}) == len(value) <= 3
      scored = key in seen
      assert seen.setdefault(key, value) == value
      expected += [NO_CLASS] * len(key)
      expected += value if scored else [NO_CLASS] * len(value)
    # The last key stands in an earlier pair, and is asked for.
    assert pairs[-1] in pairs[:-1]
    if every:
      assert labels == whole[1:]
    else:
      pads = [NO_CLASS] * (len(whole) - len(expected))
      assert labels == [*pads, *expected][1:]


def test_selective_copying_repeats_the_tokens_without_blanks():
  tokens, classes = mad.selective_copying(rng(), 1_000, 24, 8, num_copied=4)
  for row, labels in zip(tokens.tolist(), classes.tolist(), strict=True):
    assert row[19:] == [7, 6, 6, 6, 6]
    copied = [token for token in row[:19] if token != 6]
    assert len(copied) == 4 and max(copied) < 6
    assert labels == [NO_CLASS] * 20 + copied
    # No blank stands between the last token and the mark.
    assert row[18] == copied[-1]
  # Each of the 15 blanks stands before one of the four tokens at random.
  first = (tokens != 6).argmax(1)
  counts = np.bincount(first, minlength=16)
  expected = 1_000 * stats.binom.pmf(np.arange(16), 15, 0.25)
  kept = expected > 5
  counts, expected = counts[kept], expected[kept]
  assert (
    stats.chisquare(counts, expected * counts.sum() / expected.sum())[1] > 1e-4
  )


def test_compression_asks_for_all_tokens():
  tokens, classes = mad.compression(rng(), 1_000, 16, 8)
  np.testing.assert_array_equal(tokens, classes)
  assert (tokens[:, -1] == 7).all()
  counts = np.bincount(tokens[:, :-1].ravel(), minlength=7)
  assert stats.chisquare(counts).pvalue > 1e-4


def test_memorization_has_one_map():
  tokens, classes = mad.memorization(rng(), 1_000, 16, 64)
  table = mad.memorized(64)
  assert [*table] != sorted(table)
  assert {*table} == {*range(31)}
  assert len({*table.values()}) == 31 and min(table.values()) >= 31
  assert (tokens[:, 1::2] == 63).all()
  assert (classes[:, 0::2] == NO_CLASS).all()
  for key, value in zip(
    tokens[:, 0::2].ravel(), classes[:, 1::2].ravel(), strict=True
  ):
    assert table[key] == value


def test_the_map_is_the_one_of_the_source():
  """First pairs of MAD's generate_kv_map(255), seed 12345."""
  assert [*mad.memorized(256).items()][:5] == MAP


MAP = [(120, 175), (0, 239), (101, 249), (119, 185), (114, 174)]


@pytest.mark.parametrize(
  ("make", "sizes", "options", "message"),
  [
    (mad.recall, (7, 16), {}, "even length"),
    (mad.recall, (8, 16), {"noise": 0.5}, "or neither"),
    (mad.fuzzy_recall, (20, 16), {}, "at least 24"),
    (mad.fuzzy_recall, (48, 6), {}, "at least 7"),
    (mad.selective_copying, (9, 8), {"num_copied": 4}, r"2 num_copied \+ 2"),
    (mad.compression, (1, 8), {}, "length=1"),
    (mad.memorization, (9, 8), {}, "even length"),
  ],
)
def test_sizes_that_do_not_fit_are_refused(make, sizes, options, message):
  with pytest.raises(UserError, match=message):
    make(rng(), 1, *sizes, **options)
