"""SQuAD v1.1 (Rajpurkar et al. 2016): questions answered by text spans."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxformers.data.engine import archive as archives
from jaxformers.data.engine.source import Keyed, Source, check_count
from jaxformers.foundations.errors import UserError

FILES = {"train-v1.1.json": "train", "dev-v1.1.json": "test"}
COUNTS = {"train": 87_599, "test": 10_570}
MAX_BYTES = 1 << 28  # Both files have 35 MB.
# Numbers of characters in a context are stored in 16 bits.
MAX_CHARACTERS = 1 << 16


def _questions(path: Path, name: str, content: bytes) -> Iterator[Any]:
  """Yields the examples of a file: texts as bytes, answers as JSON.

  Raises:
    UserError: for a context that is too long, or a question without an answer.
  """
  # A file holds articles, an article paragraphs, a paragraph questions.
  for article in json.loads(content)["data"]:
    for paragraph in article["paragraphs"]:
      context = paragraph["context"]
      if len(context) >= MAX_CHARACTERS:
        problem = f"of a paragraph of {len(context):,} characters"
        raise archives.refusal(path, name, problem)
      for question in paragraph["qas"]:
        answers = [
          (int(answer["answer_start"]), str(answer["text"]))
          for answer in question["answers"]
        ]
        if not answers:
          problem = f"with question {question['id']!r} without an answer"
          raise archives.refusal(path, name, problem)
        yield {
          "id": question["id"].encode(),
          "context": context.encode(),
          "question": question["question"].strip().encode(),
          "answers": json.dumps(answers).encode(),
        }


def source(num_train: int, num_test: int) -> Source:
  """Returns the source of the questions of both files.

  Args:
    num_train, num_test: number of questions of each file; numbers other than
      `COUNTS` are for another data set in the same format.
  """
  counts = {"train": num_train, "test": num_test}

  def read(path: Path) -> Mapping[str, Sequence[Keyed]]:
    splits: dict[str, list[Keyed]] = {split: [] for split in counts}
    files = archives.placed_members(
      path, archives.by_file(FILES), max_bytes=MAX_BYTES
    )
    for split, name, content in files:
      # Parse a file, and explain the errors of a wrong format.
      try:
        splits[split] = [*enumerate(_questions(path, name, content))]
      except UserError:
        raise
      except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"not of SQuAD v1.1's format ({error})"
        raise archives.refusal(path, name, problem) from None
    for split, examples in splits.items():
      check_count(path, split, len(examples), counts[split])
    return splits

  return Source(
    name="squad",
    features=dict.fromkeys(("id", "context", "question", "answers"), bytes),
    read=read,
    settings=counts,
    archives=("squad",),
    homepage="https://rajpurkar.github.io/SQuAD-explorer/",
    local_only=f"is read from a folder with {' and '.join(FILES)}",
    shuffled=False,
  )


def normalize(text: str) -> str:
  """Returns an answer without case, punctuation, articles and extra spaces.

  Source: evaluate-v1.1.py of SQuAD's authors, also for the functions below.
  """
  text = "".join(c for c in text.lower() if c not in string.punctuation)
  return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def f1_score(predicted: str, answer: str) -> float:
  """Returns the F1 score of the words of two answers, in [0, 1].

  F1 = 2 p r / (p + r), with the precision p and the recall r of the words.
  """
  words, wanted = normalize(predicted).split(), normalize(answer).split()
  num_same = sum((Counter(words) & Counter(wanted)).values())
  if not num_same:
    return 0.0
  precision, recall = num_same / len(words), num_same / len(wanted)
  return 2 * precision * recall / (precision + recall)


def exact_match(predicted: str, answer: str) -> float:
  """Returns 1 if the two normalised answers are equal, else 0."""
  return float(normalize(predicted) == normalize(answer))


def evaluate(
  predicted: Sequence[str], answers: Sequence[Sequence[str]]
) -> dict[str, float]:
  """Returns the means of `f1` and `exact_match` over questions, in [0, 1].

  Args:
    predicted: predicted answer to every question.
    answers: human answers to every question; the answer with the highest score
      counts.
  """
  if not predicted:
    raise UserError("There are no questions to score: give at least one.")
  pairs = [*zip(predicted, answers, strict=True)]
  return {
    name: sum(max(score(text, a) for a in right) for text, right in pairs)
    / len(pairs)
    for name, score in (("f1", f1_score), ("exact_match", exact_match))
  }
