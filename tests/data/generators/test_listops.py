import dataclasses
import random

import numpy as np
import pytest

from jaxformers.data.generators import listops, listops_text


def recursive_tree(rng, settings, depth=1):
  """LRA's definition, one node at a time: the tokens of a tree."""
  if depth == settings.max_depth or rng.random() > 0.25:
    return [str(rng.randint(0, 9))]
  tokens = [rng.choice(listops.OPERATORS)]
  for _ in range(rng.randint(2, settings.max_args)):
    tokens += recursive_tree(rng, settings, depth + 1)
  return [*tokens, "]"]


@pytest.fixture(scope="module")
def lra():
  return listops.generate(
    listops.Settings(num_train=6_000, num_validation=500, num_test=500)
  )


@pytest.mark.slow
def test_generate_lengths_follow_the_definition(lra):
  settings, rng, lengths, labels = listops.Settings(), random.Random(7), [], []
  while len(lengths) < 1_500:
    tree = recursive_tree(rng, settings)
    if 500 < len(tree) < 2_000:
      lengths.append(len(tree))
      labels.append(listops_text.evaluate(tree))
  ours = lra["train"].lengths()
  assert 501 <= ours.min() < 505
  assert 1990 < ours.max() <= 1999
  # Standard error of the difference is 11 (lengths) and 0.011 (labels).
  assert abs(np.mean(lengths) - ours.mean()) < 40
  for quantile in (0.1, 0.5, 0.9):
    assert (
      abs(np.quantile(lengths, quantile) / np.quantile(ours, quantile) - 1)
      < 0.08
    )
  there = np.bincount(labels, minlength=10) / len(labels)
  generated = np.bincount(lra["train"].labels, minlength=10) / 6_000
  assert np.abs(there - generated).max() < 0.04


def test_generate_labels_are_values_of_the_expressions(lra):
  split = lra["test"]
  for i in range(len(split)):
    tokens = listops_text.decode(split[i]).split()
    assert listops_text.evaluate(tokens) == split.labels[i]


def test_generate_operators_are_uniform_with_2_to_10_arguments(lra):
  tokens = lra["train"].tokens
  operators = np.bincount(tokens, minlength=16)[1:5]
  np.testing.assert_allclose(operators / operators.sum(), 0.25, atol=0.01)
  digits = np.bincount(tokens, minlength=16)[5:15]
  np.testing.assert_allclose(digits / digits.sum(), 0.1, atol=0.005)
  assert (tokens == listops.END).sum() == operators.sum()
  counts = set()
  for i in range(50):
    stack = [0]
    for token in lra["train"][i]:
      if token <= 4:
        stack[-1] += 1
        stack.append(0)
      elif token == listops.END:
        counts.add(stack.pop())
      else:
        stack[-1] += 1
      assert len(stack) <= 10  # Operations nest at depths 1 to 9.
  assert counts == set(range(2, 11))


def test_generate_has_the_known_accuracy_of_trivial_rules(lra):
  train = lra["train"]
  first = train.tokens[train.starts]
  shares = [
    np.bincount(train.labels[first == k]).max() / np.sum(first == k)
    for k in range(1, 5)
  ]
  # MIN gives 0 and MAX gives 9 more than half of the time.
  np.testing.assert_allclose(shares, [0.566, 0.566, 0.215, 0.103], atol=0.045)


def test_generate_repeats_no_tree():
  splits = listops.generate(
    listops.Settings(
      num_train=300,
      num_validation=100,
      num_test=100,
      min_length=3,
      max_length=8,
      max_depth=3,
      max_args=3,
    )
  )
  rows = [tuple(s[i]) for s in splits.values() for i in range(len(s))]
  assert len(rows) == len(set(rows)) == 500


def test_generate_smaller_training_set_is_a_prefix():
  kw = dict(num_validation=5, num_test=5, min_length=5, max_length=60)
  less, more = (
    listops.generate(listops.Settings(num_train=n, **kw)) for n in (10, 200)
  )
  for name in ("test", "validation"):
    np.testing.assert_array_equal(less[name].tokens, more[name].tokens)
  np.testing.assert_array_equal(
    less["train"].tokens, more["train"].tokens[: len(less["train"].tokens)]
  )


def test_generate_is_a_function_of_the_seed(monkeypatch):
  kw = dict(
    num_train=50, num_validation=5, num_test=5, min_length=5, max_length=60
  )
  tokens = listops.generate(listops.Settings(seed=1, **kw))["train"].tokens
  monkeypatch.setattr("os.cpu_count", lambda: 7)
  again = listops.generate(listops.Settings(seed=1, **kw))["train"].tokens
  other = listops.generate(listops.Settings(seed=2, **kw))["train"].tokens
  np.testing.assert_array_equal(tokens, again)
  assert not np.array_equal(tokens, other)


def test_trees_of_seed_zero_begin_as_before():
  ids, offsets, values = listops.trees(
    listops.Settings(min_length=5, max_length=20), 0
  )
  first = listops_text.decode(ids[: offsets[1]])
  assert (first, values[0]) == ("[SM 9 5 0 3 0 8 3 ]", 8)


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    (dict(max_args=1), "max_args=1"),
    (
      dict(num_validation=0),
      "num_validation=0.*split",
    ),
    (dict(min_length=10, max_length=11), "10.*11.*min_length"),
  ],
)
def test_settings_refuse_impossible_lengths(settings, message):
  with pytest.raises(ValueError, match=message):
    listops.Settings(**settings)


def test_generate_refuses_more_trees_than_exist(monkeypatch):
  monkeypatch.setattr(listops, "ROOTS", 50)
  settings = listops.Settings(
    min_length=3, max_length=5, max_depth=2, max_args=2, num_train=10_000
  )
  with pytest.raises(ValueError, match="5,000 roots.*max_depth=2"):
    listops.generate(settings)


SMALL = dict(num_train=60, num_validation=10, num_test=30)


def test_generate_leaves_out_operators():
  settings = listops.Settings(
    min_length=5, max_length=60, operators="MAX SM", **SMALL
  )
  tokens = np.unique(listops.generate(settings)["train"].tokens).tolist()
  assert set(tokens) & set(range(1, 5)) == {
    listops.IDS["[MAX"],
    listops.IDS["[SM"],
  }


def test_generate_makes_longer_test_expressions():
  settings = listops.Settings(
    min_length=5,
    max_length=40,
    test_min_length=60,
    test_max_length=90,
    **SMALL,
  )
  splits = listops.generate(settings)
  for name, low, high in (("train", 5, 40), ("test", 60, 90)):
    lengths = splits[name].lengths()
    assert low < lengths.min() <= lengths.max() < high
  # Where the lengths overlap no tree is in both.
  near = listops.Settings(
    min_length=5, max_length=40, test_min_length=4, test_max_length=40, **SMALL
  )
  splits = listops.generate(near)
  trees = [bytes(s[i]) for s in splits.values() for i in range(len(s))]
  assert len(set(trees)) == len(trees) == 100


def test_generate_adds_short_training_expressions():
  plain = listops.Settings(min_length=60, max_length=90, **SMALL)
  want = listops.generate(plain)
  fields = dict(num_short=40, short_min_length=5, short_max_length=30)
  settings = dataclasses.replace(plain, **fields)
  found = listops.generate(settings)
  lengths = found["train"].lengths()
  assert lengths[:60].min() > 60 and len(lengths) == 100
  assert 5 < lengths[60:].min() <= lengths[60:].max() < 30
  # All other examples are those without short ones.
  for name, split in want.items():
    for i in range(len(split)):
      np.testing.assert_array_equal(found[name][i], split[i])
  for i in range(60, 100):
    tree = found["train"][i]
    value = listops_text.evaluate(listops_text.decode(tree).split())
    assert found["train"].labels[i] == value


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    (
      {"num_short": 5, "min_length": 150},
      "short_max_length=200.*min_length . 1 = 151",
    ),
    ({"num_short": 5, "short_min_length": 199}, "longer than 199"),
    ({"operators": ""}, "operators.*MIN, MAX"),
    ({"operators": "MIN AVG"}, "operator.*AVG.*MAX"),
    ({"test_min_length": 90, "test_max_length": 80}, "90.*80.*test_min_length"),
  ],
)
def test_settings_refuse_wrong_arguments(fields, message):
  with pytest.raises(ValueError, match=message):
    listops.Settings(**fields)
