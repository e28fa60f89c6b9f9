"""Sequences whose classes must be recalled from earlier tokens of the same one.

Tokens are numbered from 0 here; ids of a model are one greater. A class is a
token, and `NO_CLASS` where there is none.
"""

from __future__ import annotations

import numpy as np

from jaxformers.foundations.errors import UserError

NO_CLASS = -1
POWER = 0.01  # Exponent a of the distances of queries, p(j) ~ (j + 1)^(a - 1).
Drawn = tuple[np.ndarray, np.ndarray]  # Tokens and classes, int [count, n].


def choose_distinct(
  rng: np.random.Generator,
  count: int,
  size: int,
  picks: int,
  weights: np.ndarray | None = None,
) -> np.ndarray:
  """Draws `picks` different numbers below `size` for each row, in random order.

  Numbers are drawn one after the other, each with a probability in proportion
  to its weight among those that are left.

  Args:
    rng: generator.
    count: number of rows.
    size: number of numbers.
    picks: numbers of a row, at most `size`.
    weights: float [size]; None for equal weights.

  Returns:
    int64 [count, picks].
  """
  # Each number waits for an exponential time of its weight; take the first.
  waits = rng.exponential(size=(count, size))
  if weights is not None:
    waits /= weights
  first = np.argpartition(waits, picks - 1, axis=1)[:, :picks]
  order = np.argsort(np.take_along_axis(waits, first, 1), axis=1)
  return np.take_along_axis(first, order, 1)


def mqar(
  rng: np.random.Generator,
  count: int,
  n: int,
  vocab_size: int,
  num_pairs: int,
  *,
  fill: bool = True,
) -> Drawn:
  """Draws multi-query associative recall: k1 v1 ... km vm, then the keys again.

  Keys are different tokens of 1 to V / 2 - 1, values of V / 2 to V - 1. In the
  n - 2 m tokens after the pairs each key stands once, at an even distance that
  follows a power law, and its class is its value. All other tokens there are
  token 0, or uniform ones of 0 to V - 1.

  Source: Arora, Eyuboglu et al. 2023, https://arxiv.org/abs/2312.04927, and
  zoology's code, which draws its random tokens by another generator.

  Args:
    rng: generator.
    count: number of sequences.
    n: number of tokens, even.
    vocab_size: number V of tokens.
    num_pairs: number m of pairs.
    fill: True for random tokens where no key stands.

  Raises:
    UserError: if the pairs and the keys need more tokens, or more than
      V / 2 - 1 keys.
  """
  half = vocab_size // 2
  if n % 2 or 4 * num_pairs > n or num_pairs > half - 1:
    raise UserError(
      f"length={n}, num_pairs={num_pairs}, vocab_size={vocab_size}: give an "
      "even length of at least 4 num_pairs, and a vocabulary of more than "
      "2 num_pairs + 1."
    )
  keys = 1 + choose_distinct(rng, count, half - 1, num_pairs)
  values = half + choose_distinct(rng, count, vocab_size - half, num_pairs)
  context = 2 * num_pairs
  slots = (n - context) // 2
  weights = np.arange(1, slots + 1) ** (POWER - 1)
  gaps = choose_distinct(rng, count, slots, num_pairs, weights)
  tokens = np.zeros((count, n), np.int64)
  tokens[:, 0:context:2], tokens[:, 1:context:2] = keys, values
  np.put_along_axis(tokens, context + 2 * gaps, keys, 1)
  classes = np.full((count, n), NO_CLASS)
  np.put_along_axis(classes, context + 2 * gaps, values, 1)
  if fill:
    drawn = rng.integers(vocab_size, size=tokens.shape)
    tokens = np.where(tokens == 0, drawn, tokens)
  return tokens, classes


def associative_recall(
  rng: np.random.Generator, count: int, n: int, vocab_size: int
) -> Drawn:
  """Draws pairs of a key and its value, a mark, and one of the keys again.

  Each sequence has its own map from keys (the lower half of the tokens) to
  values (the upper half). Its keys are drawn with replacement. The last token
  has the class that belongs to it.

  Source: Fu et al. 2023 (H3), https://arxiv.org/abs/2212.14052, section 3.1.

  Args:
    rng: generator.
    count: number of sequences.
    n: number of tokens, even and at least 4.
    vocab_size: number V of tokens without the mark, which is token V.

  Raises:
    UserError: for an odd length, or less than four tokens.
  """
  if n % 2 or n < 4:
    raise UserError(f"length={n}: give an even length of at least 4.")
  half, pairs = vocab_size // 2, (n - 2) // 2
  values = rng.integers(half, vocab_size, size=(count, half))
  keys = rng.integers(half, size=(count, pairs))
  tokens = np.empty((count, n), np.int64)
  tokens[:, 0:-2:2] = keys
  tokens[:, 1:-2:2] = np.take_along_axis(values, keys, 1)
  # Ask for a key that has been seen.
  place = rng.integers(pairs, size=(count, 1))
  asked = np.take_along_axis(keys, place, 1)
  tokens[:, -2], tokens[:, -1] = vocab_size, asked[:, 0]
  classes = np.full((count, n), NO_CLASS)
  classes[:, -1] = np.take_along_axis(values, asked, 1)[:, 0]
  return tokens, classes


def induction_heads(
  rng: np.random.Generator, count: int, n: int, vocab_size: int
) -> Drawn:
  """Draws random tokens with a mark, which ends the sequence as well.

  The class of the last token is the token after the first mark.

  Source: Fu et al. 2023 (H3), https://arxiv.org/abs/2212.14052, section 3.1.

  Args:
    rng: generator.
    count: number of sequences.
    n: number of tokens, at least 3.
    vocab_size: number V of tokens without the mark, which is token V.

  Raises:
    UserError: for less than three tokens.
  """
  if n < 3:
    raise UserError(f"length={n}: give at least 3.")
  tokens = rng.integers(vocab_size, size=(count, n))
  rows, place = np.arange(count), rng.integers(n - 2, size=count)
  tokens[rows, place] = tokens[:, -1] = vocab_size
  classes = np.full((count, n), NO_CLASS)
  classes[:, -1] = tokens[rows, place + 1]
  return tokens, classes
