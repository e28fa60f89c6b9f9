"""Word problems and automata against independent computations."""

import itertools

import numpy as np
import pytest
from scipy import stats

from jaxformers.data.generators import words
from jaxformers.foundations.errors import UserError

GROUPS = ("Z2", "Z3", "S3", "S4", "A4", "A5", "A4xZ5")


def draw(name, count, n, seed=0):
  made = words.problem(name)
  tokens = made.draw(np.random.default_rng(seed), count, n)
  return made, tokens, made.label(tokens)


def compose(a, b):
  """The permutation that applies b, then a; as names such as 213."""
  return "".join(a[int(i) - 1] for i in b)


@pytest.mark.parametrize("name", ["S3", "S4", "A5", "S5_swaps", "S4_moves3"])
def test_word_problems_of_permutations_are_their_products(name):
  made, tokens, classes = draw(name, 1_000, 9)
  for row, labels in zip(tokens, classes, strict=True):
    product = made.tokens[0]
    for token, label in zip(row, labels, strict=True):
      product = compose(product, made.tokens[token])
      assert made.classes[label] == product


@pytest.mark.parametrize("order", [2, 3, 60])
def test_word_problems_of_cyclic_groups_are_sums(order):
  _, tokens, classes = draw(f"Z{order}", 1_000, 12)
  np.testing.assert_array_equal(classes, tokens.cumsum(1) % order)


def test_a_product_of_groups_multiplies_both_parts():
  product, a4, z5 = (words.group(name) for name in ("A4xZ5", "A4", "Z5"))
  a, b = np.divmod(np.arange(60), 5)
  want = 5 * a4.table[a[:, None], a] + z5.table[b[:, None], b]
  np.testing.assert_array_equal(product.table, want)


@pytest.mark.parametrize("name", GROUPS)
def test_groups_are_groups(name):
  table = words.group(name).table
  order = len(table)
  numbers = np.arange(order)
  np.testing.assert_array_equal(table[0], numbers)  # The identity is first.
  np.testing.assert_array_equal(table[:, 0], numbers)
  for line in (*table, *table.T):  # Each element occurs once.
    np.testing.assert_array_equal(np.sort(line), numbers)
  if order <= 24:
    for a, b, c in itertools.product(range(order), repeat=3):
      assert table[table[a, b], c] == table[a, table[b, c]]


def test_groups_have_their_orders():
  orders = {"S3": 6, "S4": 24, "S5": 120, "A4": 12, "A5": 60, "Z60": 60}
  for name, order in orders.items():
    assert len(words.group(name).elements) == order
  # Commutators generate A5, which is perfect, but not S4.
  assert len(closure(words.group("A5").table)) == 60
  assert len(closure(words.group("S4").table)) == 12


def closure(table):
  """The subgroup that all commutators generate."""
  numbers = range(len(table))
  inverse = [int(np.flatnonzero(table[a] == 0)[0]) for a in numbers]
  found = {
    int(table[table[a, b], table[inverse[a], inverse[b]]])
    for a, b in itertools.product(numbers, repeat=2)
  }
  while True:
    more = {int(table[a, b]) for a in found for b in found} - found
    if not more:
      return found
    found |= more


def test_limited_inputs_are_swaps_and_small_moves():
  for name, most, count in (("S5_swaps", 2, 11), ("S4_moves3", 3, 15)):
    made, tokens, _ = draw(name, 2_000, 4)
    moved = {
      sum(c != str(i + 1) for i, c in enumerate(made.tokens[token]))
      for token in np.unique(tokens)
    }
    assert len(np.unique(tokens)) == count
    assert max(moved) == most


def evaluate(text):
  """The value modulo 5 of an expression, by Python."""
  return eval(text.removesuffix("=")) % 5


@pytest.mark.parametrize(
  ("name", "n"),
  [
    ("modular_arithmetic", 2),
    ("modular_arithmetic", 20),
    ("modular_arithmetic_brackets", 5),
    ("modular_arithmetic_brackets", 40),
  ],
)
def test_modular_arithmetic_equals_python(name, n):
  made, tokens, classes = draw(name, 1_000, n)
  assert (classes[:, :-1] == words.NO_CLASS).all()
  for row, label in zip(tokens, classes[:, -1], strict=True):
    assert evaluate("".join(made.tokens[t] for t in row)) == label


def test_brackets_with_products_equal_python():
  made = words.brackets(operators=3)
  tokens = made.draw(np.random.default_rng(0), 1_000, 30)
  texts = ["".join(made.tokens[t] for t in row) for row in tokens]
  assert any("*" in text for text in texts)
  labels = made.label(tokens)[:, -1]
  assert [evaluate(text) for text in texts] == labels.tolist()


def test_automata_by_hand():
  for name, text, want in (
    ("parity", "10110", 1),
    ("parity", "1001", 0),
    ("even_pairs", "aabba", 0),
    ("even_pairs", "abaab", 1),
  ):
    made = words.problem(name)
    tokens = np.array([[made.tokens.index(c) for c in text]])
    assert made.label(tokens)[0, -1] == want
  moves = np.array([[1, 2, 0, 2, 2], [1, 1, 1, 2, 0]])  # +1 -1 stay -1 -1, ...
  labels = words.problem("cycle_navigation").label(moves)
  assert labels[:, -1].tolist() == [3, 2]


def test_even_pairs_is_first_equals_last():
  _, tokens, classes = draw("even_pairs", 1_000, 9)
  np.testing.assert_array_equal(
    classes[:, -1], (tokens[:, 0] != tokens[:, -1]).astype(int)
  )


@pytest.mark.parametrize("name", ["S3", "parity", "cycle_navigation"])
def test_tokens_are_uniform(name):
  made, tokens, _ = draw(name, 2_000, 10)
  for column in tokens.T:
    counts = np.bincount(column, minlength=len(made.tokens))
    assert stats.chisquare(counts).pvalue > 1e-4


def test_lengths_are_uniform():
  rng = np.random.default_rng(0)
  drawn = words.draw_lengths(words.problem("parity"), rng, 5_000, 3, 12)
  lengths = [len(tokens) for tokens, _ in drawn]
  counts = np.bincount(lengths)[3:]
  assert len(counts) == 10
  assert stats.chisquare(counts).pvalue > 1e-4


def test_repeated_elements_have_a_class_at_the_last_copy():
  made = words.repeated(words.problem("S3"), 3)
  tokens = made.draw(np.random.default_rng(0), 50, 12)
  classes = made.label(tokens)
  np.testing.assert_array_equal(tokens[:, ::3], tokens[:, 2::3])
  assert (classes[:, [0, 1, 3, 4]] == words.NO_CLASS).all()
  plain = words.problem("S3").label(tokens[:, ::3])
  np.testing.assert_array_equal(classes[:, 2::3], plain)
  assert (made.fit(10), made.least) == (9, 3)


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("parities", "no problem 'parities'"),
    ("S3_hops", "no problem 'S3_hops'"),
    ("modular_counting", "no problem 'modular_counting'"),
    ("Z6_swaps", "no problem 'Z6_swaps'"),
    ("S7", "5,040 elements"),
    ("Z1", "has 1 elements"),
  ],
)
def test_unknown_problems_are_refused(name, message):
  with pytest.raises(UserError, match=message):
    words.problem(name)
