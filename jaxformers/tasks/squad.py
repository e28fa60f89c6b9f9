"""SQuAD v1.1: find the span of a paragraph that answers a question."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxformers.data.engine import digests, encodings
from jaxformers.data.engine.packed import Packed
from jaxformers.data.engine.preparation import open_splits
from jaxformers.data.engine.source import Encoding, Example
from jaxformers.data.engine.split import Key, Split
from jaxformers.data.sets import squad
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Count, Length, PositiveCount
from jaxformers.foundations.registry import choose
from jaxformers.tasks.splits import with_validation
from jaxformers.tasks.task import TASKS, Task

# jaxformers: paragraphs with about 8,000 questions of train choose the
# checkpoint. paper: the dev set, which is the test set, chooses it.
HELD_OUT = {"jaxformers": 8_000, "paper": 0}


class Windows(NamedTuple):
  """Parts of contexts, each of which is read together with its question.

  Attributes:
    examples: number of the question of each window, int64 [count].
    firsts: place in the context of the first piece of each window, int64
      [count].
    sizes: number of context pieces in each window, int64 [count].
  """

  examples: np.ndarray
  firsts: np.ndarray
  sizes: np.ndarray


@dataclasses.dataclass(frozen=True)
class Questions(Split):
  """Split of windows [CLS] question [SEP] part of the context [SEP].

  A context that is too long is read in several windows, and the answer with the
  highest score over all windows counts, as in BERT's run_squad.py. A window
  only predicts answers whose first piece has most context in this window.

  Attributes:
    pieces: four sequences for each question: the pieces of the question, the
      pieces of the context, and for each piece of the context the numbers of
      its first character and of the character after its last one.
    texts: three sequences for each question: the bytes of the context, of the
      answers in JSON, and of the question.
    start, end: ids of [CLS] and [SEP].
    max_len: largest number of pieces of a window, including [CLS] and [SEP].
    stride: number of pieces between the starts of two windows.
    question_len: number of pieces to which questions are cut.
  """

  pieces: Packed
  texts: Packed
  start: int
  end: int
  max_len: int
  stride: int
  question_len: int

  @functools.cached_property
  def windows(self) -> Windows:
    """All windows, in the order of the questions."""
    # Compute the room for context next to the question, [CLS] and two [SEP].
    sizes = self.pieces.sizes.reshape(-1, 4)
    rooms = self.max_len - 3 - np.minimum(sizes[:, 0], self.question_len)
    rows = []
    # Move a window by the stride until it reaches the end of the context.
    for example, (total, room) in enumerate(
      zip(sizes[:, 1].tolist(), rooms.tolist(), strict=True)
    ):
      first = 0
      while first + room < total:
        rows.append((example, first, room))
        first += min(room, self.stride)
      rows.append((example, first, total - first))
    columns = np.array(rows, np.int64).reshape(-1, 3).T
    return Windows(*columns)

  def __len__(self) -> int:
    return len(self.windows.examples)

  def lengths(self) -> np.ndarray:
    """Returns the number of pieces of every window, with [CLS] and [SEP]."""
    questions = self.pieces.sizes.reshape(-1, 4)[self.windows.examples, 0]
    return np.minimum(questions, self.question_len) + self.windows.sizes + 3

  def reading(self) -> dict[str, Any]:
    """Returns the settings that turn texts into inputs, as plain JSON."""
    marks = {"first_id": 0, "start_id": self.start, "end_id": self.end}
    return marks | {"stride": self.stride, "question_len": self.question_len}

  def digest(self) -> str:
    """Returns the digest of all pieces and texts."""
    return digests.of_parts(self.pieces.digest(), self.texts.digest())

  def text(self, example: int) -> tuple[str, list[tuple[int, str]], str]:
    """Returns context, known answers and question of an example.

    An answer is a pair of the number of its first character and its text.
    """
    context, answers, question = (
      self.texts.raw(3 * example + k).tobytes().decode() for k in range(3)
    )
    return context, json.loads(answers), question

  def batch(
    self,
    indices: np.ndarray,
    max_len: int,
    key: Key | None = None,
  ) -> dict[str, np.ndarray]:
    """Returns a batch of windows.

    Args:
      indices: numbers of the windows in the split, integers [b].
      max_len: n, the number of pieces of every row of the batch.
      key: ignored, because texts are not augmented.

    Returns:
      inputs int32 [b, n]; targets int32 [b, 2], the places of the first and the
      last piece of the first known answer, or (0, 0) if the answer is not in
      the window; and places [b, n] and numbers [b], the inputs of
      `training.losses.best_spans`.
    """
    del key
    inputs, places = np.zeros((2, len(indices), max_len), np.int32)
    targets = np.zeros((len(indices), 2), np.int32)
    for row, window in enumerate(np.asarray(indices).tolist()):
      # Look up the pieces of the question and of the window's context.
      example, first, size = (int(a[window]) for a in self.windows)
      question = self.pieces.raw(4 * example)[: self.question_len]
      context = self.pieces.raw(4 * example + 1)[first : first + size]
      # Write [CLS] question [SEP] context [SEP]; the context begins at `at`.
      at = len(question) + 2
      ids: list[Any] = [[self.start], question, [self.end], context, [self.end]]
      inputs[row, : at + size + 1] = np.concatenate(ids)
      # Places are 2 where an answer may begin, 1 in the rest of the context.
      places[row, at : at + size] = 1 + self._is_widest(window)
      targets[row] = self._target(example, first, size, at)
    return {
      "inputs": inputs,
      "targets": targets,
      "places": places,
      "numbers": np.asarray(indices, np.int32),
    }

  def _is_widest(self, window: int) -> np.ndarray:
    """Returns True at pieces that have most context in this window, [size]."""
    # Find all windows of the same question.
    example, first, size = (int(a[window]) for a in self.windows)
    low, high = np.searchsorted(
      self.windows.examples, [example, example + 1]
    ).tolist()
    # Score windows by the pieces on the shorter side, plus 0.01 times the size,
    # as in BERT's code; the first window with the highest score wins.
    at = np.arange(first, first + size)
    firsts = self.windows.firsts[low:high, None]
    sizes = self.windows.sizes[low:high, None]
    left, right = at - firsts, firsts + sizes - 1 - at
    context = np.minimum(left, right)
    score = np.where(context >= 0, context + 0.01 * sizes, -1.0)
    return score.argmax(0) == window - low

  def _target(
    self, example: int, first: int, size: int, at: int
  ) -> tuple[int, int]:
    """Returns places of the first and the last piece of the first known answer.

    Returns (0, 0) if the window does not hold the whole answer.
    """
    start, text = self.text(example)[1][0]
    begins, ends = (self.pieces.raw(4 * example + k) for k in (2, 3))
    inside = np.flatnonzero((begins < start + len(text)) & (ends > start))
    if not len(inside) or inside[0] < first or inside[-1] >= first + size:
      return 0, 0
    return int(inside[0]) - first + at, int(inside[-1]) - first + at

  def predicted(self, rows: Mapping[str, np.ndarray]) -> list[str]:
    """Returns the best answer to every question, a part of the context.

    Args:
      rows: result of `training.losses.best_spans` for every window.
    """
    # Sort the results by window.
    order = np.argsort(rows["numbers"], kind="stable")
    scores, starts, stops = (
      rows[name][order] for name in ("scores", "starts", "stops")
    )
    # Choose the window with the highest score for each question.
    examples, firsts, _ = self.windows
    best = np.lexsort((-scores, examples))
    _, chosen = np.unique(examples[best], return_index=True)
    # Cut the answer out of the context, from its first to its last character.
    texts = []
    for example, window in enumerate(best[chosen].tolist()):
      if scores[window] == -np.inf:
        texts.append("")  # The context is empty.
        continue
      question = self.pieces.raw(4 * example)[: self.question_len]
      offset = int(firsts[window]) - len(question) - 2
      begins, ends = (self.pieces.raw(4 * example + k) for k in (2, 3))
      begin = int(begins[starts[window] + offset])
      end = int(ends[stops[window] + offset])
      texts.append(self.text(example)[0][begin:end])
    return texts

  def score(self, rows: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns `f1`, `exact_match` and the number of questions, `count`.

    Args:
      rows: argument of `predicted`.
    """
    texts = self.predicted(rows)
    return squad.evaluate(texts, self.known()) | {"count": len(texts)}

  def known(self) -> list[list[str]]:
    """Returns the texts of the known answers to every question."""
    count = len(self.pieces)
    return [[text for _, text in self.text(i)[1]] for i in range(count)]


def nearest_sentence(task: Task) -> float:
  """Returns F1 of the sentences that share most words with their questions.

  The rule answers every question by one sentence of its context.
  """
  split = task.splits["test"]

  def words(text: str) -> set[str]:
    return {*squad.normalize(text).split()}

  # Split every context into sentences, and choose the best one.
  answers = []
  for example in range(len(split.pieces)):
    context, _, question = split.text(example)
    asked = words(question)
    parts = re.split(r"(?<=[.!?])\s+", context)
    answers.append(max(parts, key=lambda part: len(asked & words(part))))
  return squad.evaluate(answers, split.known())["f1"]


def _encoding(vocabulary: str, size: int) -> Encoding:
  """Returns the encoding of the four sequences of `Questions.pieces`."""

  def texts(example: Example) -> list[str]:
    return [example[name].decode() for name in ("question", "context")]

  def rows(example: Example, encoded: Sequence[Any]) -> list[Any]:
    del example
    question, context = encoded
    offsets = np.array(context.offsets, np.int64).reshape(-1, 2)
    return [question.ids, context.ids, *offsets.T]

  key = encodings.text_key("context")
  return encodings.pieces_of(texts, rows, key, vocabulary=vocabulary, size=size)


@TASKS.register("squad")
def load_squad(
  *,
  data_dir: str = "",
  protocol: str = "jaxformers",
  archive: str = "",
  vocabulary: str = "",
  vocab_size: Count = 30_522,
  max_len: Length = 384,
  stride: Count = 128,
  question_len: Count = 64,
  num_train: PositiveCount = squad.COUNTS["train"],
  num_test: PositiveCount = squad.COUNTS["test"],
) -> Task:
  """Opens SQuAD's questions; the score is F1 on the dev set, as in papers.

  Args:
    data_dir: folder of prepared data; see `data_folder`.
    protocol: "jaxformers": paragraphs with about 8,000 questions of train are
      validation. "paper": validation is test.
    archive: path of a folder with train-v1.1.json and dev-v1.1.json; ""
      searches for a folder `squad`.
    vocabulary: path of a vocab.txt in BERT's format; "" trains a vocabulary.
    vocab_size: size of a trained vocabulary.
    max_len: largest number of word pieces of question and context together;
      longer contexts are read in several windows.
    stride: number of word pieces between the starts of two windows of a
      context.
    question_len: number of word pieces to which questions are cut.
    num_train, num_test: number of questions of each file; numbers other than
      SQuAD's are for another data set in the same format.

  Raises:
    UserError: for windows without room for a context.
  """
  # Check the options.
  held_out = HELD_OUT[choose("protocol of squad", protocol, HELD_OUT)]
  sizes = {"max_len": max_len, "stride": stride, "question_len": question_len}
  _check_windows(**sizes)
  # Pack pieces for the model, and texts for the scores. The key of both is the
  # context, so both are divided into the same splits.
  coding = _encoding(vocabulary, vocab_size)
  texts = encodings.of_bytes("context", "answers", "question")
  texts = dataclasses.replace(texts, key=encodings.text_key("context"))
  (coded, info), (written, _) = (
    open_splits(squad.source(num_train, num_test), each, data_dir, archive)
    for each in (coding, texts)
  )
  coded, written = (with_validation(s, held_out) for s in (coded, written))
  # Read the vocabulary, and cut contexts into windows.
  tokenizer = info.pop("tokenizer")
  names = encodings.pieces(tokenizer)
  start, end = encodings.marks(names)
  return Task(
    name="squad",
    protocol=protocol,
    splits={
      split: Questions(coded[split], written[split], start, end, **sizes)
      for split in coded
    },
    selection="validation" if held_out else "test",
    vocabulary=names,
    max_len=max_len,
    num_classes=0,
    trivial={"sentence nearest to the question": nearest_sentence},
    info=info,
    tokenizer="word_pieces",
    tokenizer_json=tokenizer,
    objective="spans",
    separator=end,
  )


def _check_windows(max_len: int, stride: int, question_len: int) -> None:
  """Raises UserError for windows without room for a context."""
  if max_len < question_len + 4 or stride < 1:
    raise UserError(
      f"max_len={max_len}, question_len={question_len}, stride={stride}: give "
      "a stride of at least 1, and windows with room for a question, three "
      "marks and a part of the context."
    )
