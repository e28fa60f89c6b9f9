"""Sequences of MAD: recall, copying, compression and memorization.

Tokens are numbered from 0 here; ids of a model are one greater. A class is a
token, and `NO_CLASS` where there is none.

Source: Poli et al. 2024, https://arxiv.org/abs/2403.17844, and the code of MAD
(mad-lab 0f49a45), from which the sizes and the special
tokens come. The random numbers are others.
"""

from __future__ import annotations

import numpy as np

from jaxformers.data.generators.recall import NO_CLASS, Drawn, choose_distinct
from jaxformers.foundations.errors import UserError

MAP_SEED = 12_345  # Seed of the map of `memorization`, as in the source.
MOTIF = 3  # Greatest number of tokens of a key or value of `fuzzy_recall`.


def _shifted(tokens: np.ndarray, is_target: np.ndarray | None) -> Drawn:
  """Returns all tokens but the last, and the next token as the class of each.

  Args:
    tokens: int [count, n + 1].
    is_target: tokens that are classes, bool [count, n + 1]; None for all.
  """
  classes = tokens[:, 1:]
  if is_target is not None:
    classes = np.where(is_target[:, 1:], classes, NO_CLASS)
  return tokens[:, :-1], classes


def recall(
  rng: np.random.Generator,
  count: int,
  n: int,
  vocab_size: int,
  *,
  noise_tokens: int = 0,
  noise: float = 0.0,
  every: bool = False,
) -> Drawn:
  """Draws pairs of a key and its value, with noise between them.

  Each sequence has its own map from keys (the lower half of the tokens without
  noise) to values (the upper half). Each pair but the last one is noise with
  probability `noise`: two tokens of the last `noise_tokens`. The last key has
  been seen before; each key that was seen is equally likely.

  Args:
    rng: generator.
    count: number of sequences.
    n: number of tokens with the last value, which the model does not read.
    vocab_size: number V of tokens, with the tokens of noise.
    noise_tokens: number of tokens that are only noise.
    noise: share of the pairs that are noise.
    every: True for the next token as the class of each token, as in training;
      False for the values of keys that were seen before.

  Returns:
    Tokens and classes, int64 [count, n - 1].

  Raises:
    UserError: for an odd length, less than two pairs, or too few tokens.
  """
  half, pairs = (vocab_size - noise_tokens) // 2, n // 2
  if n % 2 or n < 4 or half < 1 or (noise > 0) != (noise_tokens > 0):
    raise UserError(
      f"length={n}, vocab_size={vocab_size}, noise_tokens={noise_tokens}, "
      f"noise={noise}: give an even length of at least 4, two tokens besides "
      "the noise, and tokens and a share of the noise, or neither."
    )
  values = rng.integers(half, 2 * half, size=(count, half))
  keys = rng.integers(half, size=(count, pairs))
  # One pair that is not the last is never noise.
  is_noise = rng.random((count, pairs)) < noise
  is_noise[np.arange(count), rng.integers(pairs - 1, size=count)] = False
  is_noise[:, -1] = False
  # Find the first place of each key, and ask for one that was seen.
  places = np.where(is_noise, half, keys)[:, :-1]
  seen = (places[:, :, None] == np.arange(half)).any(1)
  keys[:, -1] = np.where(seen, rng.random(seen.shape), -1).argmax(1)
  tokens = np.empty((count, n), np.int64)
  tokens[:, 0::2] = keys
  tokens[:, 1::2] = np.take_along_axis(values, keys, 1)
  if noise_tokens:
    low = vocab_size - noise_tokens
    drawn = rng.integers(low, vocab_size, size=tokens.shape)
    tokens = np.where(np.repeat(is_noise, 2, 1), drawn, tokens)
  if every:
    return _shifted(tokens, None)
  # A pair is scored if its key stands in an earlier pair.
  keys = np.where(is_noise, -1, keys)
  is_scored = np.zeros(keys.shape, bool)
  for pair in range(1, pairs):
    is_scored[:, pair] = (keys[:, :pair] == keys[:, pair, None]).any(1)
  is_target = np.zeros(tokens.shape, bool)
  is_target[:, 1::2] = is_scored & ~is_noise
  return _shifted(tokens, is_target)


def fuzzy_recall(
  rng: np.random.Generator,
  count: int,
  n: int,
  vocab_size: int,
  *,
  every: bool = False,
) -> Drawn:
  """Draws pairs whose keys and values have one to three tokens each.

  A key is a row of different tokens of the lower half, a value one of the upper
  half, and the last token of the vocabulary stands in front until there are n
  tokens. In training (`every`) keys have one to three tokens, else three.

  Differs from the source: a pair is always shown before it is asked for, which
  the source's code misses at times.

  Args:
    rng: generator.
    count: number of sequences.
    n: number of tokens.
    vocab_size: number V of tokens.
    every: see `recall`.

  Returns:
    Tokens and classes, int64 [count, n].

  Raises:
    UserError: for less than 24 tokens, or a vocabulary of less than 7.
  """
  half = (vocab_size - 1) // 2
  if n < 24 or half < MOTIF:
    raise UserError(
      f"length={n}, vocab_size={vocab_size}: give a length of at least 24 and "
      "at least 7 tokens."
    )
  most = n // 2  # Pairs of a sequence.
  draws = count * most
  least = 1 if every else MOTIF
  key_sizes = rng.integers(least, MOTIF + 1, size=draws)
  value_sizes = rng.integers(1, MOTIF + 1, size=draws)
  keys = choose_distinct(rng, draws, half, MOTIF)
  values = half + choose_distinct(rng, draws, vocab_size - 1 - half, MOTIF)
  shares = rng.random(count)
  rows = [
    [
      (tuple(keys[i][: key_sizes[i]]), tuple(values[i][: value_sizes[i]]))
      for i in range(row * most, (row + 1) * most)
    ]
    for row in range(count)
  ]
  tokens = np.full((count, n + 1), vocab_size - 1)
  is_target = np.zeros((count, n + 1), bool)
  for row, (pairs, share) in enumerate(zip(rows, shares, strict=True)):
    drawn, scored = _pairs(pairs, n, share)
    tokens[row, n + 1 - len(drawn) :] = drawn
    is_target[row, n + 1 - len(drawn) :] = scored
  return _shifted(tokens, None if every else is_target)


def _pairs(
  pairs: list[tuple[tuple[int, ...], tuple[int, ...]]], n: int, share: float
) -> tuple[list[int], list[bool]]:
  """Returns the tokens of a sequence of pairs, and whether each is scored.

  Args:
    pairs: keys and values; the first pair is the one that is asked for.
    n: greatest number of tokens.
    share: place of that pair, in [0, 1).
  """
  asked, others = pairs[0], iter(pairs[1:])
  size = len(asked[0]) + len(asked[1])
  room = n - size - 2 * MOTIF
  # The last pair before `place` ends before `room`.
  place = int(share * (room - 2 * MOTIF + 1))
  value_of: dict[tuple[int, ...], tuple[int, ...]] = {asked[0]: asked[1]}
  shown: set[tuple[int, ...]] = set()
  tokens: list[int] = []
  scored: list[bool] = []

  def add(key: tuple[int, ...]) -> None:
    value = value_of[key]
    tokens.extend((*key, *value))
    scored.extend([False] * len(key) + [key in shown] * len(value))
    shown.add(key)

  while len(tokens) < room:
    if len(tokens) >= place and asked[0] not in shown:
      add(asked[0])
      continue
    key, value = next(others)
    value_of.setdefault(key, value)
    add(key)
  add(asked[0])
  return tokens, scored


def selective_copying(
  rng: np.random.Generator,
  count: int,
  n: int,
  vocab_size: int,
  *,
  num_copied: int,
) -> Drawn:
  """Draws tokens between blanks, a mark, and as many blanks as tokens.

  The classes of the blanks behind the mark are the tokens in their order. Every
  blank before the mark stands before one of the tokens, which is drawn.

  Args:
    rng: generator.
    count: number of sequences.
    n: number of tokens.
    vocab_size: number V of tokens; V - 2 is the blank, V - 1 the mark.
    num_copied: number of tokens to copy.

  Returns:
    Tokens and classes, int64 [count, n].

  Raises:
    UserError: for sizes that do not fit.
  """
  blanks = n - 2 * num_copied - 1
  if blanks < 1 or num_copied < 1 or vocab_size < 3:
    raise UserError(
      f"length={n}, num_copied={num_copied}, vocab_size={vocab_size}: give a "
      "length of at least 2 num_copied + 2, a token to copy, and 3 tokens."
    )
  copied = rng.integers(vocab_size - 2, size=(count, num_copied))
  before = rng.multinomial(blanks, [1 / num_copied] * num_copied, size=count)
  places = np.arange(num_copied) + before.cumsum(1)
  tokens = np.full((count, n), vocab_size - 2)
  np.put_along_axis(tokens, places, copied, 1)
  tokens[:, n - num_copied - 1] = vocab_size - 1
  classes = np.full((count, n), NO_CLASS)
  classes[:, n - num_copied :] = copied
  return tokens, classes


def compression(
  rng: np.random.Generator, count: int, n: int, vocab_size: int
) -> Drawn:
  """Draws random tokens and a mark; the class of each token is the token.

  The task is not trivial only for a model that reads all classes from the state
  of the last token.

  Args:
    rng: generator.
    count: number of sequences.
    n: number of tokens, at least 2.
    vocab_size: number V of tokens, at least 2; V - 1 is the mark.

  Returns:
    Tokens and classes, int64 [count, n].

  Raises:
    UserError: for sizes that do not fit.
  """
  if n < 2 or vocab_size < 2:
    raise UserError(
      f"length={n}, vocab_size={vocab_size}: give at least 2 of each."
    )
  tokens = rng.integers(vocab_size - 1, size=(count, n))
  tokens[:, -1] = vocab_size - 1
  return tokens, tokens.copy()


def memorized(vocab_size: int) -> dict[int, int]:
  """Returns the map of `memorization`, the same one in every sequence.

  It equals the map of MAD's code with the seed 12,345.
  """
  rng = np.random.default_rng(MAP_SEED)
  half = (vocab_size - 1) // 2
  keys, values = [*range(half)], [*range(half, vocab_size - 1)]
  rng.shuffle(keys)
  rng.shuffle(values)
  return dict(zip(keys, values, strict=False))


def memorization(
  rng: np.random.Generator, count: int, n: int, vocab_size: int
) -> Drawn:
  """Draws keys, each before a mark whose class is the value of the key.

  Args:
    rng: generator.
    count: number of sequences.
    n: number of tokens, even.
    vocab_size: number V of tokens, at least 3; V - 1 is the mark.

  Returns:
    Tokens and classes, int64 [count, n].

  Raises:
    UserError: for sizes that do not fit.
  """
  if n % 2 or vocab_size < 3:
    raise UserError(
      f"length={n}, vocab_size={vocab_size}: give an even length, and at least "
      "3 tokens."
    )
  table = memorized(vocab_size)
  values = np.array([table[key] for key in range(len(table))])
  keys = rng.integers(len(table), size=(count, n // 2))
  tokens = np.full((count, n), vocab_size - 1)
  tokens[:, 0::2] = keys
  classes = np.full((count, n), NO_CLASS)
  classes[:, 1::2] = values[keys]
  return tokens, classes
