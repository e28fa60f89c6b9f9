"""The fifteen tasks of "Neural Networks and the Chomsky Hierarchy".

A task maps a string of n symbols to a string of symbols. A sequence holds the
input and then one blank for each symbol of the output, whose class is at the
blank. Symbols are numbered from 0; the blank is the last one.

Source: Deletang et al. 2023, https://arxiv.org/abs/2207.02098, table 1 and the
authors' code.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxformers.data.generators import words
from jaxformers.data.generators.words import NO_CLASS

BLANK = "_"
MODULUS = words.MODULUS
END = 2  # Symbol that ends the output of tasks whose outputs vary in length.
Symbols = list[int]


@dataclasses.dataclass(frozen=True)
class Language:
  """One task.

  Attributes:
    level: level of the hierarchy: "regular", "deterministic context-free" or
      "context-sensitive".
    symbols: symbols of the input.
    num_classes: number of output symbols.
    draw: maps (generator, n) to an input of n symbols, or one less.
    answer: maps an input to its output; what follows the output is not scored.
    output_length: maps n to the number of blanks.
    least: least number n of symbols.
  """

  level: str
  symbols: str
  num_classes: int
  draw: Callable[[np.random.Generator, int], Symbols]
  answer: Callable[[Symbols], Symbols]
  output_length: Callable[[int], int] = lambda n: 1
  least: int = 1

  @property
  def tokens(self) -> tuple[str, ...]:
    """Names of all tokens, with the blank."""
    return (*self.symbols, BLANK)

  def sequence(
    self, rng: np.random.Generator, n: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Draws an input of n symbols.

    Returns:
      Tokens and classes, int [n + blanks], with `NO_CLASS` where there is none.
    """
    inputs = self.draw(rng, n)
    output = self.answer(inputs)
    blanks = self.output_length(len(inputs))
    classes = np.full(len(inputs) + blanks, NO_CLASS)
    classes[len(inputs) : len(inputs) + len(output)] = output
    blank = len(self.symbols)
    return np.array([*inputs, *[blank] * blanks]), classes


def draw(
  language: Language,
  rng: np.random.Generator,
  count: int,
  least: int,
  most: int,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Yields sequences whose inputs have uniform lengths from least to most."""
  for n in rng.integers(least, most + 1, size=count).tolist():
    yield language.sequence(rng, n)


def _uniform(size: int) -> Callable[[np.random.Generator, int], Symbols]:
  return lambda rng, n: rng.integers(size, size=n).tolist()


def _of_automaton(name: str) -> Callable[[Symbols], Symbols]:
  """Returns the function from an input to the class of an automaton."""
  label = words.AUTOMATA[name].label
  return lambda inputs: [int(label(np.array([inputs]))[0, -1])]


def _draw_arithmetic(rng: np.random.Generator, n: int) -> Symbols:
  """Draws digits with operators between them: an odd number of symbols."""
  draw = words.AUTOMATA["modular_arithmetic"].draw
  return draw(rng, 1, n + n % 2)[0, :-1].tolist()


def _arithmetic(inputs: Symbols) -> Symbols:
  label = words.AUTOMATA["modular_arithmetic"].label
  return [int(label(np.array([[*inputs, words.EQUALS]]))[0, -1])]


def _draw_brackets(rng: np.random.Generator, n: int) -> Symbols:
  return words.write(rng, n, operators=3)


def _brackets(inputs: Sequence[int]) -> Symbols:
  return [words.evaluate_brackets(iter(inputs))]


# Symbols of equations: those in modular arithmetic with brackets, and x.
EQUATION = "01234+-*()x="
UNKNOWN, EQUALS = EQUATION.index("x"), EQUATION.index("=")


def _draw_equation(rng: np.random.Generator, n: int) -> Symbols:
  """Draws an expression without products, in which x replaces a digit."""
  inputs = words.write(rng, n - 2, operators=2)
  value = words.evaluate_brackets(iter(inputs))
  place = int(rng.integers(len(inputs)))
  while inputs[place] >= MODULUS:  # The next digit.
    place = (place + 1) % len(inputs)
  inputs[place] = UNKNOWN
  return [*inputs, EQUALS, value]


def _solve(inputs: Symbols) -> Symbols:
  """Returns the digit x that solves an equation; there is exactly one."""
  *expression, _, value = inputs
  for digit in range(MODULUS):
    tried = (digit if s == UNKNOWN else s for s in expression)
    if words.evaluate_brackets(tried) == value:
      return [digit]
  raise AssertionError(inputs)


# Symbols of stacks: 0, 1, pop (2), push 0 (3) and push 1 (4).
POP, PUSH = 2, 3


def _draw_stack(rng: np.random.Generator, n: int) -> Symbols:
  """Draws a stack, and operations on it."""
  size = n if n == 1 else int(rng.integers(1, n))
  operations = rng.integers(POP, POP + 3, size=n - size)
  return [*rng.integers(2, size=size).tolist(), *operations.tolist()]


def _run_stack(inputs: Symbols) -> Symbols:
  """Returns the final stack from its top, and `END`."""
  stack: Symbols = []
  for symbol in inputs:
    if symbol < POP:
      stack.append(symbol)
    elif symbol == POP:
      stack = stack[:-1]
    else:
      stack.append(symbol - PUSH)
  return [*stack[::-1], END]


def _draw_missing(rng: np.random.Generator, n: int) -> Symbols:
  """Draws a binary string twice, with one symbol replaced by 2.

  For an odd n, a symbol 3 follows.
  """
  once = rng.integers(2, size=n // 2).tolist()
  twice = [*once, *once]
  twice[int(rng.integers(len(twice)))] = 2
  return [*twice, *[3] * (n % 2)]


def _find_missing(inputs: Symbols) -> Symbols:
  half = len(inputs) // 2
  return [inputs[(inputs.index(2) + half) % (2 * half)]]


def _bits(number: int) -> Symbols:
  """Returns the binary digits of a number, from the lowest; [] for 0."""
  return [int(bit) for bit in f"{number:b}"[::-1]] if number else []


def _number(bits: Sequence[int]) -> int:
  """Returns the number whose binary digits, from the lowest, are given."""
  return sum(bit << k for k, bit in enumerate(bits))


def _positive(rng: np.random.Generator, n: int) -> Symbols:
  """Draws n binary digits that are not all zero."""
  while True:
    drawn = rng.integers(2, size=n).tolist()
    if any(drawn):
      return drawn


def _draw_two(rng: np.random.Generator, n: int) -> Symbols:
  """Draws two positive binary numbers, with a symbol 2 between them."""
  first = int(rng.integers(1, n - 1))
  return [*_positive(rng, first), 2, *_positive(rng, n - 1 - first)]


def _combine(
  operate: Callable[[int, int], int],
) -> Callable[[Symbols], Symbols]:
  def answer(inputs: Symbols) -> Symbols:
    middle = inputs.index(2)
    a, b = _number(inputs[:middle]), _number(inputs[middle + 1 :])
    return [*_bits(operate(a, b)), END]

  return answer


def _root(inputs: Symbols) -> Symbols:
  """Returns the integer square root, from the highest digit."""
  bits = _bits(math.isqrt(_number(inputs[::-1])))
  missing = math.ceil(len(inputs) / 2) - len(bits)
  return [*[0] * missing, *bits[::-1]]


def _same(n: int) -> int:
  return n


REGULAR, FREE, SENSITIVE = (
  "regular",
  "deterministic context-free",
  "context-sensitive",
)
LANGUAGES: dict[str, Language] = {
  "modular_arithmetic": Language(
    REGULAR, "01234+-*", MODULUS, _draw_arithmetic, _arithmetic
  ),
  "parity_check": Language(
    REGULAR, "01", 2, _uniform(2), _of_automaton("parity")
  ),
  "even_pairs": Language(
    REGULAR, "ab", 2, _uniform(2), _of_automaton("even_pairs")
  ),
  "cycle_navigation": Language(
    REGULAR, "0+-", MODULUS, _uniform(3), _of_automaton("cycle_navigation")
  ),
  "modular_arithmetic_brackets": Language(
    FREE, "01234+-*()", MODULUS, _draw_brackets, _brackets
  ),
  "reverse_string": Language(
    FREE, "01", 2, _uniform(2), lambda inputs: inputs[::-1], _same
  ),
  "solve_equation": Language(
    FREE, EQUATION, MODULUS, _draw_equation, _solve, least=3
  ),
  "stack_manipulation": Language(
    FREE, "01p23", 3, _draw_stack, _run_stack, lambda n: n + 1
  ),
  "duplicate_string": Language(
    SENSITIVE, "01", 2, _uniform(2), lambda inputs: inputs * 2, lambda n: 2 * n
  ),
  "missing_duplicate_string": Language(
    SENSITIVE, "01?.", 2, _draw_missing, _find_missing, least=2
  ),
  # s_1 s_3 ... s_2 s_4 ..., as the examples of the authors' code say; the code
  # itself begins with s_2.
  "odds_first": Language(
    SENSITIVE,
    "01",
    2,
    _uniform(2),
    lambda inputs: [*inputs[::2], *inputs[1::2]],
    _same,
  ),
  "binary_addition": Language(
    SENSITIVE,
    "01+",
    3,
    _draw_two,
    _combine(lambda a, b: a + b),
    lambda n: n + 1,
    least=3,
  ),
  "binary_multiplication": Language(
    SENSITIVE, "01*", 3, _draw_two, _combine(lambda a, b: a * b), _same, least=3
  ),
  "compute_sqrt": Language(
    SENSITIVE, "01", 2, _positive, _root, lambda n: math.ceil(n / 2)
  ),
  "bucket_sort": Language(SENSITIVE, "01234", 5, _uniform(5), sorted, _same),
}
