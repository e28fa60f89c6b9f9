"""The text whose tokens are drawn one by one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

TEXT = "This movie is terrible but it has some good effects."

UNKNOWN = ("<unk>", "[UNK]")

SHORT = 32  # Tokens of a text that are drawn one by one, at most.


def example(run: Any, text: str, length: int) -> tuple[np.ndarray, list[str]]:
  """Ids of the text whose tokens are drawn, and what each stands for.

  Raises:
    ValueError: for a task without tokens, or a text that is given and has fewer
      than four in the task's vocabulary.
  """
  task = run.task
  if task.image or not task.vocabulary:
    raise ValueError(f"the inputs of {task.name} are no tokens")
  length = min(length, SHORT)
  try:
    ids = task.encode(text or TEXT, length)
    names = [task.vocabulary[k] for k in ids]
    known = sum(name not in UNKNOWN for name in names)
    if known < 4:
      raise ValueError(
        f"{text or TEXT!r} has {known} tokens in the vocabulary of "
        f"{task.name}: give another with --text"
      )
  except ValueError:
    if text:
      raise
    ids = run.sample(1, length)[0]
    ids = ids[0] if ids.ndim > 1 else ids  # Of a pair the first.
    ids = ids[ids > 0]
    names = [task.vocabulary[k] for k in ids]
  return ids, names


def readable(name: str) -> str:
  """A token as one reads it: a byte as its character, a piece without marks."""
  if re.fullmatch("0x[0-9a-f]{2}", name) and chr(int(name, 16)).isprintable():
    name = chr(int(name, 16))
  bare = name.removeprefix("\u0120").removeprefix("##").removesuffix("</w>")
  return {"\u010a": "newline", "": "space", " ": "space"}.get(bare, bare)


def name_tokens(names: Sequence[str], wanted: Sequence[str]) -> list[int]:
  """Places of the tokens to name: the wanted ones, or the longest words.

  Raises:
    ValueError: for a wanted token that is not there.
  """
  for name in wanted:
    if name not in names:
      raise ValueError(f"the token {name!r} is not among {' '.join(names)}")
  if wanted:
    return sorted({names.index(name) for name in wanted})
  words = {
    name: k
    for k, name in reversed([*enumerate(names)])
    if re.fullmatch(r"\w+", name)
  }
  if len(words) < 4:
    words = {f"{name} {k}": k for k, name in enumerate(names)}
  return sorted(sorted(words.values(), key=lambda k: -len(names[k]))[:4])
