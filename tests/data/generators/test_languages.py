"""The fifteen languages against Python, and against examples on paper."""

import math

import numpy as np
import pytest

from jaxformers.data.generators import languages
from jaxformers.data.generators.languages import LANGUAGES
from jaxformers.data.generators.words import NO_CLASS


def answer(name, text):
  """The output for an input that is written with the symbols of a language."""
  language = LANGUAGES[name]
  given = [language.symbols.index(symbol) for symbol in text]
  return "".join(map(str, language.answer(given)))


# Examples of the authors' docstrings, or worked by hand.
EXAMPLES = [
  ("modular_arithmetic", "1+2*3", "2"),
  ("modular_arithmetic", "1-1-1", "4"),
  ("modular_arithmetic", "0*1+4*3-2", "0"),
  ("parity_check", "1010100", "1"),
  ("parity_check", "01111", "0"),
  ("even_pairs", "aabbba", "0"),
  ("even_pairs", "abababb", "1"),
  ("cycle_navigation", "+-0--", "3"),
  ("cycle_navigation", "+++-", "2"),
  ("modular_arithmetic_brackets", "((2*3)-(-4))", "0"),
  ("reverse_string", "011010", "010110"),
  ("solve_equation", "(x-(-3))=1", "3"),
  ("stack_manipulation", "01103pp", "1102"),
  ("stack_manipulation", "110ppp", "2"),
  ("duplicate_string", "101", "101101"),
  ("missing_duplicate_string", "01100?10", "1"),
  ("missing_duplicate_string", "1011?1.", "0"),
  ("odds_first", "00110101", "01000111"),
  ("binary_addition", "001+01101", "010112"),
  ("binary_addition", "1001+000001", "1001012"),
  ("binary_multiplication", "001*01101", "00011012"),
  ("binary_multiplication", "1001*000001", "0000010012"),
  ("compute_sqrt", "100101", "110"),
  ("compute_sqrt", "111", "10"),
  ("bucket_sort", "10204112", "00111224"),
]


@pytest.mark.parametrize(("name", "text", "want"), EXAMPLES)
def test_languages_by_hand(name, text, want):
  assert answer(name, text) == want


def test_every_language_has_an_example():
  assert {name for name, *_ in EXAMPLES} == {*LANGUAGES}


@pytest.mark.parametrize("name", LANGUAGES)
def test_outputs_fit_their_blanks(name):
  """1,000 sequences: inputs, blanks, and classes only at the blanks."""
  language = LANGUAGES[name]
  rng = np.random.default_rng(0)
  for tokens, classes in languages.draw(language, rng, 1_000, 3, 24):
    is_blank = tokens == len(language.symbols)
    n = int((~is_blank).sum())
    assert not is_blank[:n].any() and is_blank[n:].all()
    assert is_blank.sum() == language.output_length(n)
    scored = classes != NO_CLASS
    # The output is at the first blanks.
    count = int(scored.sum())
    assert scored[n : n + count].all() and count
    assert 0 <= classes[scored].min() <= classes.max() < language.num_classes
    assert check(name, tokens[:n].tolist(), classes[scored].tolist())


def number(bits):
  """The number of bits from the lowest."""
  return int("".join(map(str, bits))[::-1] or "0", 2)


def check(name, given, output):
  """Computes an output in another way than the package does."""
  text = "".join(LANGUAGES[name].symbols[s] for s in given)
  match name:
    case "modular_arithmetic" | "modular_arithmetic_brackets":
      return [eval(text) % 5] == output
    case "solve_equation":
      left, _, right = text.partition("=")
      value = eval(left.replace("x", str(output[0])))
      return value % 5 == int(right)
    case "parity_check":
      return [text.count("1") % 2] == output
    case "even_pairs":
      return [(text.count("ab") + text.count("ba")) % 2] == output
    case "cycle_navigation":
      return [(text.count("+") - text.count("-")) % 5] == output
    case "reverse_string":
      return output == [*reversed(given)]
    case "duplicate_string":
      return output == given + given
    case "odds_first":
      odd, even = given[0::2], given[1::2]
      return output == odd + even
    case "bucket_sort":
      counts = np.bincount(given, minlength=5)
      return output == np.repeat(np.arange(5), counts).tolist()
    case "missing_duplicate_string":
      whole = text.rstrip(".").replace("?", str(output[0]))
      return whole[: len(whole) // 2] == whole[len(whole) // 2 :]
    case "compute_sqrt":
      root = int("".join(map(str, output)), 2)
      return root == math.isqrt(int(text, 2))
    case "binary_addition" | "binary_multiplication":
      first, second = text.split("+" if "addition" in name else "*")
      a, b = number(first), number(second)
      want = a + b if "addition" in name else a * b
      return output[-1] == 2 and number(output[:-1]) == want and output[-2] == 1
    case "stack_manipulation":
      stack = ""
      for symbol in text:
        stack = (
          stack[:-1] if symbol == "p" else stack + "0101"["0123".index(symbol)]
        )
      return output == [*map(int, stack[::-1]), 2]
  return False
