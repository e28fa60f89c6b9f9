"""ListOps as text: expressions, their values, and LRA's TSV files."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxformers.data.engine.packed import Packed
from jaxformers.data.generators.listops import IDS, OPERATORS, PAD, TOKENS
from jaxformers.foundations.errors import UserError

FILES = {"train": "train", "validation": "val", "test": "test"}
_VALUES: dict[str, Callable[[list[int]], int]] = {
  "[MIN": min,
  "[MAX": max,
  "[MED": lambda values: int(statistics.median(values)),
  "[SM": lambda values: sum(values) % 10,
}


def evaluate(tokens: list[str]) -> int:
  """Returns the value of an expression such as `[MAX 2 [SM 3 9 ] ]`.

  MED is the mean of the two middle values, truncated; SM the sum modulo 10.

  Raises:
    UserError: if it is not one expression with its brackets closed.
  """
  # The values of each open operation; the first entry collects the result.
  stack: list[tuple[str, list[int]]] = [("", [])]
  for token in tokens:
    if token in _VALUES:
      stack.append((token, []))
    elif token == "]":
      operator, values = stack.pop()
      if not stack or not values:
        raise UserError("A bracket closes no operation.")
      stack[-1][1].append(_VALUES[operator](values))
    else:
      stack[-1][1].append(int(token))
  if len(stack) != 1 or len(stack[0][1]) != 1:
    raise UserError("The text is not one expression with its brackets closed.")
  return stack[0][1][0]


def encode(text: str) -> np.ndarray:
  """Returns the ids of an expression, uint8; parentheses are ignored.

  Raises:
    UserError: for a token that is not in ListOps.
  """
  words = text.replace("(", " ").replace(")", " ").split()
  try:
    return np.array([IDS[word] for word in words], np.uint8)
  except KeyError as error:
    raise UserError(
      f"{error.args[0]!r} is not a ListOps token: use {' '.join(TOKENS)}."
    ) from None


def decode(ids: np.ndarray) -> str:
  """Returns the expression of ids, with spaces and without padding."""
  return " ".join(TOKENS[i - 1] for i in ids if i != PAD)


def binarised(ids: np.ndarray) -> str:
  """Returns the expression as LRA writes it, every node with two children.

  `[MAX 2 3 ]` becomes `( ( ( [MAX 2 ) 3 ) ] )`.
  """
  # Each entry is an open operation as written so far.
  stack: list[str] = []
  for word in decode(ids).split():
    if word in OPERATORS:
      stack.append(word)
    elif word == "]":
      word = f"( {stack.pop()} ] )"
      if not stack:
        return word
      stack[-1] = f"( {stack[-1]} {word} )"
    else:
      stack[-1] = f"( {stack[-1]} {word} )"
  raise UserError(f"The expression {decode(ids)!r} is not closed.")


def write_tsv(splits: dict[str, Packed], folder: Path) -> None:
  """Writes `basic_{train,val,test}.tsv` with LRA's header and parentheses.

  Raises:
    OSError: if they cannot be written; no part of them is left.
  """
  staged = folder / ".staged"
  # Remove the remains of an export that was killed.
  shutil.rmtree(staged, ignore_errors=True)
  staged.mkdir(parents=True)
  # Write all three before any gets its name.
  try:
    for name, split in splits.items():
      path = staged / f"basic_{FILES[name]}.tsv"
      with path.open("w", encoding="utf-8") as file:
        file.write("Source\tTarget\n")
        for i in range(len(split)):
          file.write(f"{binarised(split[i])}\t{split.labels[i]}\n")
    for path in staged.iterdir():
      path.rename(folder / path.name)
  finally:
    shutil.rmtree(staged, ignore_errors=True)


def parse(line: str) -> tuple[np.ndarray, int]:
  """Returns the ids and the value of a line of LRA's files.

  Raises:
    UserError: if the line is not an expression, a tab and its value.
  """
  # Parse the line, and compare the label with the expression's value.
  source, tab, target = line.rstrip("\n").partition("\t")
  if not tab or not source or target not in tuple("0123456789"):
    raise UserError(
      "Expected an expression, a tab and a digit, found "
      f"{line.rstrip()[-60:]!r}."
    )
  ids = encode(source)
  value = evaluate(decode(ids).split())
  if value != int(target):
    raise UserError(f"The expression has the value {value}, not {target}.")
  return ids, value
