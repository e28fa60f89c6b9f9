"""Training sentences for SimCSE, and scored pairs of STS-12 and STS-B.

The training text has one sentence per line. The pairs are in files of
SentEval's folder `STS`: STS.input.NAME.txt has two sentences per line, and
STS.gs.NAME.txt has their scores from 0 to 5 (Agirre et al. 2012); sts-dev.csv
is the development set of STS-B (Cer et al. 2017).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxformers.data.engine import archive as archives
from jaxformers.data.engine.source import Keyed, Source
from jaxformers.foundations.errors import UserError

# Subsets in SentEval's order, in which the pairs of all subsets are joined.
SUBSETS = (
  "MSRpar",
  "MSRvid",
  "SMTeuroparl",
  "surprise.OnWN",
  "surprise.SMTnews",
)
TRAIN = ("wiki1m_for_simcse.txt", "train.txt")
VALIDATION = "sts-dev.csv"
MAX_BYTES = 1 << 30  # SimCSE's million sentences have 120 MB.
FOLDER = "STS12-en-test"


def _place(name: str) -> str | None:
  """Returns "train", "validation", or the name of a file of STS-12.

  Returns None for other files.
  """
  *folders, file = name.split("/")
  if file in TRAIN:
    return "train"
  if file == VALIDATION:
    return "validation"
  # Skip other years, which have files with the same names.
  is_other = any(
    f.startswith("STS") and f[3:5] not in ("", "12") for f in folders
  )
  is_pairs = any(file in _names(subset) for subset in SUBSETS)
  return file if is_pairs and not is_other else None


def _names(subset: str) -> tuple[str, str]:
  """Returns the names of a subset's files: the pairs, and the scores."""
  return f"STS.input.{subset}.txt", f"STS.gs.{subset}.txt"


def _lines(content: bytes) -> list[str]:
  # Only \n ends a line; the last line may have none.
  text = content.decode(errors="replace")
  return text.removesuffix("\n").split("\n")


def _example(first: str, second: str, score: str) -> dict[str, bytes]:
  texts = (first.strip(), second.strip(), f"{float(score):.6f}")
  names = ("first", "second", "score")
  return {n: t.encode() for n, t in zip(names, texts, strict=True)}


def _pairs(inputs: bytes, scores: bytes) -> Iterator[dict[str, bytes]]:
  """Yields the scored pairs of a subset.

  Raises:
    ValueError: for another format, or different numbers of lines.
  """
  for line, score in zip(_lines(inputs), _lines(scores), strict=True):
    if score.strip():
      first, second = line.split("\t")[:2]
      yield _example(first, second, score)


def _benchmark(content: bytes) -> Iterator[dict[str, bytes]]:
  """Yields the pairs of sts-dev.csv, from the tab-separated columns 5 to 7."""
  for line in _lines(content):
    score, first, second = line.split("\t")[4:7]
    yield _example(first, second, score)


def read(path: Path) -> Mapping[str, list[Keyed]]:
  """Reads sentences and pairs: `first`, `second` and `score`, as bytes.

  In a training example, `first` and `second` are the same sentence. There is no
  `validation` if sts-dev.csv is missing.

  Raises:
    UserError: for files that are missing or have an unexpected format.
  """
  # Read all files; refuse two files with the same role.
  contents: dict[str, bytes] = {}
  for place, name, content in archives.placed_members(
    path, _place, max_bytes=MAX_BYTES
  ):
    if place in contents:
      raise UserError(
        f"{path} holds two files for {place}, one of them {name}: remove one."
      )
    contents[place] = content
  # Require the training text and all files of STS-12.
  wanted = ["train", *(name for s in SUBSETS for name in _names(s))]
  if missing := [name for name in wanted if name not in contents]:
    names = [" or ".join(TRAIN) if n == "train" else n for n in missing]
    raise UserError(
      f"{path} holds no {', no '.join(names)}: put the training text next to "
      f"SentEval's folders {FOLDER} and STSBenchmark."
    )
  # Pair every training sentence with itself, and parse the scored pairs.
  splits: dict[str, list[dict[str, bytes]]] = {}
  splits["train"] = [
    _example(line, line, "5")
    for line in _lines(contents["train"])
    if line.strip()
  ]
  try:
    if "validation" in contents:
      splits["validation"] = [*_benchmark(contents["validation"])]
    splits["test"] = [
      pair
      for subset in SUBSETS
      for pair in _pairs(*(contents[name] for name in _names(subset)))
    ]
  except ValueError as error:
    raise UserError(
      f"{path} has pairs that are not in SentEval's format ({error}): fetch "
      "the files again."
    ) from None
  return {split: [*enumerate(rows)] for split, rows in splits.items()}


SOURCE = Source(
  name="sts12",
  features=dict.fromkeys(("first", "second", "score"), bytes),
  read=read,
  archives=("simcse",),
  homepage="https://github.com/facebookresearch/SentEval",
  local_only=(
    f"is read from a folder with {TRAIN[0]}, SentEval's {FOLDER} and "
    f"{VALIDATION}"
  ),
  shuffled=False,
)
