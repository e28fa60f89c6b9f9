"""Word problems of groups, and problems of automata: tokens and their classes.

A word problem gives the product of all elements up to each token. The other
problems have one class, at the last token. Tokens are numbered from 0 here;
ids of a model are one greater.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxformers.foundations.errors import UserError

NO_CLASS = -1
MODULUS = 5  # Modulus in cycle navigation and in modular arithmetic.
MOST_ELEMENTS = 1_000  # Elements of the largest group.
Draw = Callable[[np.random.Generator, int, int], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Problem:
  """Tokens that are drawn at random, and a class for some of them.

  Attributes:
    tokens: names of the tokens.
    classes: names of the classes.
    draw: maps (generator, count, n) to tokens, int [count, n].
    label: maps tokens [count, n] to classes, int [count, n], with `NO_CLASS`
      where there is none.
    fit: maps a number of tokens to the greatest possible one up to it.
    least: least number of tokens.
  """

  tokens: tuple[str, ...]
  classes: tuple[str, ...]
  draw: Draw
  label: Callable[[np.ndarray], np.ndarray]
  fit: Callable[[int], int] = lambda n: n
  least: int = 1


@dataclasses.dataclass(frozen=True)
class Group:
  """A finite group.

  Attributes:
    elements: names of the elements; the first one is the identity.
    table: table[a, b] is the number of a b, int [order, order].
  """

  elements: tuple[str, ...]
  table: np.ndarray

  def __mul__(self, other: Group) -> Group:
    """Returns the direct product; (a, b) has the number a order(other) + b."""
    order = len(other.elements)
    table = np.kron(self.table, np.ones_like(other.table)) * order
    table += np.kron(np.ones_like(self.table), other.table)
    names = itertools.product(self.elements, other.elements)
    return Group(tuple(f"{a},{b}" for a, b in names), table)


def cyclic(order: int) -> Group:
  """Returns the integers modulo `order` under addition."""
  numbers = np.arange(order)
  table = (numbers[:, None] + numbers) % order
  return Group(tuple(map(str, numbers)), table)


@functools.cache
def permutations(points: int, *, even: bool = False) -> np.ndarray:
  """Returns all (even) permutations in lexicographic order, [order, points]."""
  every = np.array([*itertools.permutations(range(points))])
  if not even:
    return every
  pairs = itertools.combinations(range(points), 2)
  inversions = sum(every[:, i] > every[:, j] for i, j in pairs)
  return every[np.asarray(inversions) % 2 == 0]


def symmetric(points: int, *, even: bool = False) -> Group:
  """Returns the symmetric, or the alternating group; (a b)(i) = a(b(i))."""
  rows = permutations(points, even=even)
  numbers = {row.tobytes(): k for k, row in enumerate(rows)}
  products = rows[:, rows]  # [a, b, i] = a(b(i))
  table = [[numbers[product.tobytes()] for product in row] for row in products]
  names = ("".join(str(i + 1) for i in row) for row in rows)
  return Group(tuple(names), np.array(table))


@functools.cache
def group(name: str) -> Group:
  """Returns the group with a name: Z60, S5, A5, or a product such as A4xZ5.

  Raises:
    UserError: for another name, or a group of more than 1,000 elements.
  """
  orders = {
    "Z": lambda m: m,
    "S": lambda m: functools.reduce(int.__mul__, range(1, m + 1)),
    "A": lambda m: functools.reduce(int.__mul__, range(1, m + 1)) // 2,
  }
  parts = re.findall(r"([ZSA])([1-9]\d{0,2})(?:x|$)", name)
  if "x".join(map("".join, parts)) != name or not parts:
    raise _unknown(name)
  sizes = [orders[kind](int(number)) for kind, number in parts]
  order = functools.reduce(int.__mul__, sizes)
  if not 2 <= order <= MOST_ELEMENTS:
    raise UserError(
      f"problem={name!r} has {order:,} elements: choose a group of 2 to "
      f"{MOST_ELEMENTS:,}."
    )
  factors = [
    cyclic(int(number))
    if kind == "Z"
    else symmetric(int(number), even=kind == "A")
    for kind, number in parts
  ]
  return functools.reduce(Group.__mul__, factors)


def _unknown(name: str) -> UserError:
  return UserError(
    f"There is no problem {name!r}: choose {', '.join(AUTOMATA)}; or a group: "
    "Z2, Z3, ..., S3, S4, S5, A4, A5, or a product such as A4xZ5; or "
    "S5_swaps, S4_moves3, whose inputs are limited."
  )


def word_problem(name: str) -> Problem:
  """Returns the word problem of a group: y_t = x_1 ... x_t.

  In "S5_swaps" the inputs are the identity and transpositions, and in
  "S4_moves3" elements that move at most three points. The classes are all
  elements in both.

  Sources: Merrill, Petty, Sabharwal 2024, https://arxiv.org/abs/2404.08819;
  Siems et al. 2025, https://arxiv.org/abs/2502.10297 for limited inputs.
  """
  base, _, limit = name.partition("_")
  moves = re.fullmatch(r"swaps|moves([2-9])", limit)
  points = re.fullmatch(r"S(\d)", base)
  if limit and not (moves and points):
    raise _unknown(name)
  members = group(base)
  allowed = np.arange(len(members.elements))
  if moves and points:
    rows = permutations(int(points[1]))
    moved = (rows != np.arange(rows.shape[1])).sum(1)
    allowed = np.flatnonzero(moved <= int(moves[1] or 2))

  def draw(rng: np.random.Generator, count: int, n: int) -> np.ndarray:
    return allowed[rng.integers(len(allowed), size=(count, n))]

  def label(tokens: np.ndarray) -> np.ndarray:
    products = np.empty_like(tokens)
    product = np.zeros(len(tokens), tokens.dtype)
    for t in range(tokens.shape[1]):
      product = members.table[product, tokens[:, t]]
      products[:, t] = product
    return products

  return Problem(members.elements, members.elements, draw, label)


def _at_end(values: np.ndarray, n: int) -> np.ndarray:
  """Returns classes [count, n] that only the last token has."""
  classes = np.full((len(values), n), NO_CLASS)
  classes[:, -1] = values
  return classes


def _automaton(
  tokens: Sequence[str],
  num_classes: int,
  evaluate: Callable[[np.ndarray], np.ndarray],
) -> Problem:
  """Returns a problem of uniform tokens with a class at the last one."""
  return Problem(
    tuple(tokens),
    tuple(map(str, range(num_classes))),
    lambda rng, count, n: rng.integers(len(tokens), size=(count, n)),
    lambda x: _at_end(evaluate(x), x.shape[1]),
  )


# Tokens of modular arithmetic: digits are 0 to 4.
ARITHMETIC = (*map(str, range(MODULUS)), "+", "-", "*", "=")
PLUS, MINUS, TIMES, EQUALS = range(MODULUS, MODULUS + 4)
BRACKETS = (*ARITHMETIC[:-1], "(", ")", "=")
OPEN, CLOSE, EQUALS_IN_BRACKETS = range(MODULUS + 3, MODULUS + 6)


def _draw_arithmetic(
  rng: np.random.Generator, count: int, n: int
) -> np.ndarray:
  """Draws digits with operators between them, and an equals sign."""
  tokens = rng.integers(MODULUS, size=(count, n))
  tokens[:, 1:-1:2] = rng.integers(PLUS, EQUALS, size=tokens[:, 1:-1:2].shape)
  tokens[:, -1] = EQUALS
  return tokens


def _label_arithmetic(tokens: np.ndarray) -> np.ndarray:
  """Returns the value modulo 5, with products before sums and differences."""
  total = np.zeros(len(tokens), np.int64)
  # The last product, with its sign; a new term adds it to the total.
  term = tokens[:, 0].astype(np.int64)
  for t in range(1, tokens.shape[1] - 1, 2):
    operator, digit = tokens[:, t], tokens[:, t + 1]
    is_product = operator == TIMES
    total = np.where(is_product, total, total + term)
    signed = np.where(operator == MINUS, -digit, digit)
    term = np.where(is_product, term * digit, signed) % MODULUS
  return _at_end((total + term) % MODULUS, tokens.shape[1])


def write(rng: np.random.Generator, n: int, operators: int) -> list[int]:
  """Draws an expression of n tokens: d, -d, (d), (-d), or (left op right).

  Args:
    rng: generator.
    n: number of tokens.
    operators: number of operators, of +, - and *.
  """
  if n < 5:
    digit = int(rng.integers(MODULUS))
    forms = ([digit], [MINUS, digit], [OPEN, digit, CLOSE])
    return [*forms, [OPEN, MINUS, digit, CLOSE]][n - 1]
  left = int(rng.integers(1, n - 3))
  operator = PLUS + int(rng.integers(operators))
  return [
    OPEN,
    *write(rng, left, operators),
    operator,
    *write(rng, n - left - 3, operators),
    CLOSE,
  ]


def evaluate_brackets(tokens: Iterator[int]) -> int:
  """Returns the value modulo 5 of the next expression of `write`.

  Args:
    tokens: tokens; the tokens of one expression are taken from them.
  """
  token = next(tokens)
  if token < MODULUS:
    return token
  if token == MINUS:
    return -next(tokens) % MODULUS
  # An opening bracket: one value in brackets, or two with an operator.
  value = evaluate_brackets(tokens)
  operator = next(tokens)
  if operator == CLOSE:
    return value
  other = evaluate_brackets(tokens)
  next(tokens)  # The closing bracket.
  results = {PLUS: value + other, MINUS: value - other, TIMES: value * other}
  return results[operator] % MODULUS


def brackets(operators: int = 2) -> Problem:
  """Returns modular arithmetic with brackets.

  Args:
    operators: 2 for + and -, 3 for + , - and *.
  """

  def draw(rng: np.random.Generator, count: int, n: int) -> np.ndarray:
    rows = (write(rng, n - 1, operators) for _ in range(count))
    return np.array([[*row, EQUALS_IN_BRACKETS] for row in rows])

  def label(tokens: np.ndarray) -> np.ndarray:
    values = [evaluate_brackets(iter(row)) for row in tokens.tolist()]
    return _at_end(np.array(values), tokens.shape[1])

  classes = tuple(map(str, range(MODULUS)))
  return Problem(BRACKETS, classes, draw, label, least=2)


# Problems of automata, as Grazzi et al. 2025 (https://arxiv.org/abs/2411.12537)
# and Beck et al. 2024 (xLSTM) read Deletang et al. 2023
# (https://arxiv.org/abs/2207.02098). In `even_pairs` the number of unequal
# neighbours is even exactly if the first and the last bit are equal.
AUTOMATA: dict[str, Problem] = {
  "parity": _automaton("01", 2, lambda x: x.sum(1) % 2),
  "even_pairs": _automaton(
    "ab", 2, lambda x: (x[:, 1:] != x[:, :-1]).sum(1) % 2
  ),
  "cycle_navigation": _automaton(
    ("stay", "+1", "-1"),
    MODULUS,
    lambda x: np.array([0, 1, -1])[x].sum(1) % MODULUS,
  ),
  "modular_arithmetic": Problem(
    ARITHMETIC,
    tuple(map(str, range(MODULUS))),
    _draw_arithmetic,
    _label_arithmetic,
    fit=lambda n: n - n % 2,
    least=2,
  ),
  "modular_arithmetic_brackets": brackets(),
}


def problem(name: str) -> Problem:
  """Returns the problem with a name: an automaton, or a group's word problem.

  Raises:
    UserError: for an unknown name.
  """
  return AUTOMATA[name] if name in AUTOMATA else word_problem(name)


def repeated(source: Problem, copies: int) -> Problem:
  """Returns a word problem in which each element takes several tokens.

  An element is repeated, and its last copy has the class. Lengths are rounded
  down to multiples of `copies`.
  """
  if copies == 1:
    return source

  def draw(rng: np.random.Generator, count: int, n: int) -> np.ndarray:
    return np.repeat(source.draw(rng, count, n // copies), copies, 1)

  def label(tokens: np.ndarray) -> np.ndarray:
    classes = np.full(tokens.shape, NO_CLASS)
    last = slice(copies - 1, None, copies)
    classes[:, last] = source.label(tokens[:, last])
    return classes

  return dataclasses.replace(
    source,
    draw=draw,
    label=label,
    fit=lambda n: n - n % copies,
    least=copies,
  )


def draw_lengths(
  source: Problem, rng: np.random.Generator, count: int, least: int, most: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Yields (tokens, classes) of sequences whose lengths are uniform.

  Args:
    source: problem to draw from.
    rng: generator.
    count: number of sequences.
    least, most: least and greatest number of tokens.
  """
  drawn = rng.integers(least, most + 1, size=count)
  for n in np.unique(drawn):
    tokens = source.draw(rng, int((drawn == n).sum()), source.fit(int(n)))
    yield from zip(tokens, source.label(tokens), strict=True)
