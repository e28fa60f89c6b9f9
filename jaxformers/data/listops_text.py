"""ListOps as text: expressions, their values, and LRA's TSV files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxformers.data.listops import IDS, OPERATORS, PAD, TOKENS
from jaxformers.data.packed import Packed, pack

FILES = {"train": "train", "validation": "val", "test": "test"}


def evaluate(tokens: list[str]) -> int:
  """The value of an expression such as `[MAX 2 [SM 3 9 ] ]`, with a stack.

  MED is the mean of the two middle values, truncated; SM the sum modulo 10.
  """
  functions = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda v: int(np.median(v)),
    "[SM": lambda v: sum(v) % 10,
  }
  stack: list[tuple[str, list[int]]] = [("", [])]
  for token in tokens:
    if token in functions:
      stack.append((token, []))
    elif token == "]":
      operator, values = stack.pop()
      stack[-1][1].append(functions[operator](values))
    else:
      stack[-1][1].append(int(token))
  return stack[0][1][0]


def encode(text: str) -> np.ndarray:
  """The ids of an expression, uint8; parentheses carry nothing and go.

  Raises:
    ValueError: for a token that ListOps has not.
  """
  words = text.replace("(", " ").replace(")", " ").split()
  try:
    return np.array([IDS[word] for word in words], np.uint8)
  except KeyError as error:
    raise ValueError(
      f"{error.args[0]!r} is no ListOps token; those are {' '.join(TOKENS)}."
    ) from None


def decode(ids: np.ndarray) -> str:
  """The expression of some ids, tokens apart by spaces, padding left out."""
  return " ".join(TOKENS[i - 1] for i in ids if i != PAD)


def binarised(ids: np.ndarray) -> str:
  """The expression as LRA writes it: every step applied to two things.

  `[MAX 2 3 ]` becomes `( ( ( [MAX 2 ) 3 ) ] )`.
  """
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
  raise ValueError(f"The expression {decode(ids)!r} is not closed.")


def write_tsv(splits: dict[str, Packed], folder: Path) -> None:
  """Writes `basic_{train,val,test}.tsv` with LRA's header and parentheses."""
  folder.mkdir(parents=True, exist_ok=True)
  for name, split in splits.items():
    path = folder / f"basic_{FILES[name]}.tsv"
    with path.open("w", encoding="utf-8") as file:
      file.write("Source\tTarget\n")
      for i in range(len(split)):
        file.write(f"{binarised(split[i])}\t{split.labels[i]}\n")


def read_tsv(folder: Path) -> dict[str, Packed]:
  """Reads LRA's `basic_{train,val,test}.tsv`.

  Raises:
    ValueError: for a missing file or a line that is not an expression, a tab
      and a digit, naming file and line.
  """
  splits = {}
  for name, short in FILES.items():
    path = folder / f"basic_{short}.tsv"
    if not path.exists():
      raise ValueError(
        f"{path} is missing: LRA's ListOps is basic_train.tsv, "
        "basic_val.tsv and basic_test.tsv in one folder."
      )
    rows, labels = [], []
    with path.open(encoding="utf-8") as file:
      for number, line in enumerate(file, 1):
        source, tab, target = line.rstrip("\n").partition("\t")
        if number == 1 and (source, target) == ("Source", "Target"):
          continue
        if not tab or target not in tuple("0123456789"):
          raise ValueError(
            f"{path}, line {number}: expected an expression, a tab and a "
            f"digit, found {line.rstrip()[-60:]!r}. Restore the file, or "
            "leave `tsv` empty to generate ListOps."
          )
        try:
          rows.append(encode(source))
        except ValueError as error:
          raise ValueError(f"{path}, line {number}: {error}") from None
        labels.append(int(target))
    splits[name] = pack(rows, np.array(labels))
  return splits
