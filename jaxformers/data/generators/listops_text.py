"""Reads and writes ListOps as text: expressions, values and LRA's TSV files."""

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

  MED is the truncated median: the mean of the two middle values if their number
  is even. SM is the sum modulo 10.

  Raises:
    UserError: if the tokens are not one expression with closed brackets.
  """
  # Keep the values of each open operation; the first entry holds the result.
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
  """Returns the ids of an expression, uint8 [n]; ignores parentheses.

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
  """Returns the expression of ids, tokens between spaces, without padding."""
  return " ".join(TOKENS[i - 1] for i in ids if i != PAD)


def binarised(ids: np.ndarray) -> str:
  """Returns the expression in LRA's binary form: every node has two children.

  `[MAX 2 3 ]` becomes `( ( ( [MAX 2 ) 3 ) ] )`.
  """
  # Each entry of the stack is the text of an open operation so far.
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
    UserError: if a file of such a name exists.
    OSError: if the files cannot be written; partial files are removed.
  """
  for name in splits:
    path = folder / f"basic_{FILES[name]}.tsv"
    if path.exists():
      raise UserError(
        f"{path} exists already: delete it, or choose another folder."
      )
  staged = folder / ".staged"
  # Remove the remains of a killed export.
  shutil.rmtree(staged, ignore_errors=True)
  staged.mkdir(parents=True)
  # Write all three files before any of them gets its final name.
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
    UserError: if the line is not an expression, a tab and the right value.
  """
  # Split the line into expression and label.
  source, tab, target = line.rstrip("\n").partition("\t")
  if not tab or not source or target not in tuple("0123456789"):
    raise UserError(
      "Expected an expression, a tab and a digit, found "
      f"{line.rstrip()[-60:]!r}."
    )
  # Compare the label with the value of the expression.
  ids = encode(source)
  value = evaluate(decode(ids).split())
  if value != int(target):
    raise UserError(f"The expression has the value {value}, not {target}.")
  return ids, value
