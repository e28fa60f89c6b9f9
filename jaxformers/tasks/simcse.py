"""SimCSE: sentence embeddings, trained without labels and tested on STS-12."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from jaxformers.data.engine import encodings
from jaxformers.data.engine.packed import Packed
from jaxformers.data.engine.preparation import open_splits
from jaxformers.data.engine.source import Encoding, Example
from jaxformers.data.engine.split import Key
from jaxformers.data.sets import sts12
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Count, Length
from jaxformers.foundations.registry import choose
from jaxformers.tasks.task import TASKS, Task

# jaxformers: the development set of STS-B chooses the checkpoint, as in
# SimCSE's code. paper: STS-12, the test set, chooses it.
PROTOCOLS = ("jaxformers", "paper")
MOST = 5.0  # Largest score: the two sentences have the same meaning.


@dataclasses.dataclass(frozen=True)
class ScoredPairs(Packed):
  """Pairs of sentences with human scores of their similarity.

  Attributes:
    similarity: human scores in [0, 1], float64 [count].
  """

  similarity: np.ndarray = dataclasses.field(
    default_factory=lambda: np.zeros(0)
  )

  def select(self, indices: Any) -> Self:
    """Returns the split of the pairs at `indices`; see `Packed.select`."""
    chosen = super().select(indices)
    return dataclasses.replace(chosen, similarity=self.similarity[indices])

  def batch(
    self,
    indices: np.ndarray,
    max_len: int,
    key: Key | None = None,
  ) -> dict[str, np.ndarray]:
    """Returns a batch of pairs; see `Packed.batch`.

    Returns:
      inputs and targets; scores, float32 [b]; and numbers, int32 [b], the
      numbers of the pairs in the split.
    """
    return super().batch(indices, max_len, key) | {
      "scores": self.similarity[indices].astype(np.float32),
      "numbers": np.asarray(indices, np.int32),
    }

  def score(self, rows: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns `spearman`, the rank correlation over all pairs together.

    Source: SentEval's setting "all", in which the pairs of all subsets are
    joined before they are ranked.

    Args:
      rows: `cosines` and `numbers` of all pairs.
    """
    similarity = self.similarity[rows["numbers"]]
    return {"spearman": spearman(rows["cosines"], similarity)}


def spearman(x: np.ndarray, y: np.ndarray) -> float:
  """Returns Spearman's rank correlation, or 0 if x or y is constant."""
  import scipy.stats  # Slow to import.

  if np.ptp(x) == 0 or np.ptp(y) == 0:
    return 0.0
  return float(scipy.stats.spearmanr(x, y).statistic)


def shared_pieces(task: Task) -> float:
  """Scores the rule that compares the sets of word pieces of a pair.

  The similarity is |A & B| / |A | B|, the share of common pieces.
  """
  split = task.splits["test"]
  shares = []
  for i in range(len(split)):
    first, second = ({*split[2 * i + k].tolist()} for k in (0, 1))
    shares.append(len(first & second) / max(len(first | second), 1))
  return spearman(np.array(shares), split.similarity)


def _encoding(vocabulary: str, size: int) -> Encoding:
  """Returns the encoding of two sentences, and of the text of their score."""

  def texts(example: Example) -> list[str]:
    return [example[n].decode(errors="replace") for n in ("first", "second")]

  def rows(example: Example, encoded: Sequence[Any]) -> list[Any]:
    # Three rows: pieces of both sentences, and the bytes of the score.
    return [*(e.ids for e in encoded), list(example["score"])]

  key = encodings.text_key("first", "second")
  return encodings.pieces_of(texts, rows, key, vocabulary=vocabulary, size=size)


def _take(packed: Packed, columns: Sequence[int]) -> dict[str, Any]:
  """Returns fields of `Packed` that keep two of the three sequences.

  Args:
    packed: split with three sequences per example.
    columns: indices of the two sequences to keep.
  """
  starts, stops = (
    a.reshape(-1, 3)[:, columns].ravel() for a in (packed.starts, packed.stops)
  )
  return {"starts": starts, "stops": stops, "num_inputs": 2}


def _scored(packed: Packed, marks: Mapping[str, int]) -> ScoredPairs:
  """Returns the pairs of a split, with their scores divided by `MOST`."""
  # Parse the scores, the third sequence of each example.
  scores = [
    float(bytes(packed.raw(3 * i + 2).tolist())) for i in range(len(packed))
  ]
  # Keep the two sentences.
  fields = {f.name: getattr(packed, f.name) for f in dataclasses.fields(packed)}
  fields |= {**_take(packed, (0, 1)), **marks}
  return ScoredPairs(**fields, similarity=np.array(scores) / MOST)


@TASKS.register("simcse")
def load_simcse(
  *,
  data_dir: str = "",
  protocol: str = "jaxformers",
  archive: str = "",
  vocabulary: str = "",
  vocab_size: Count = 30_522,
  max_len: Length = 128,
  train_len: Length = 32,
) -> Task:
  """Opens sentences and the pairs of STS-12, scored by rank correlation.

  A training example is a pair of the same sentence twice; dropout makes its two
  embeddings different.

  Args:
    data_dir: folder of prepared data; see `data_folder`.
    protocol: "jaxformers": the development set of STS-B is validation. "paper":
      validation is test.
    archive: path of a folder with wiki1m_for_simcse.txt (or train.txt, one
      sentence per line), SentEval's STS12-en-test and sts-dev.csv; "" searches
      for a folder `simcse`.
    vocabulary: path of a vocab.txt in BERT's format; "" trains a vocabulary.
    vocab_size: size of a trained vocabulary.
    max_len: number of word pieces to which the sentences of pairs are cut,
      including [CLS] and [SEP].
    train_len: number of word pieces to which training sentences are cut,
      including [CLS] and [SEP]; 0 for max_len.

  Raises:
    UserError: for lengths without room for a word, or for "jaxformers" without
      sts-dev.csv.
  """
  # Check the options, and open the sentences.
  choose("protocol of simcse", protocol, PROTOCOLS)
  cut = train_len or max_len
  _check_lengths(max_len, train_len)
  packed, info = open_splits(
    sts12.SOURCE, _encoding(vocabulary, vocab_size), data_dir, archive
  )
  if protocol == "jaxformers" and "validation" not in packed:
    raise UserError(
      f"The archive of simcse has no {sts12.VALIDATION} to choose the "
      "checkpoint on: add it and prepare the data again, or set "
      "task.protocol=paper, under which STS-12 chooses the checkpoint."
    )
  # Read the vocabulary, and the ids of [CLS] and [SEP].
  tokenizer = info.pop("tokenizer")
  names = encodings.pieces(tokenizer)
  start, end = encodings.marks(names)
  ends: dict[str, Any] = {"start": start, "end": end}
  # Pair every training sentence with itself, and cut both.
  pairs = _take(packed["train"], (0, 0))
  pairs["stops"] = np.minimum(pairs["stops"], pairs["starts"] + cut - 2)
  chosen = "validation" if protocol == "jaxformers" else "test"
  return Task(
    name="simcse",
    protocol=protocol,
    splits={
      "train": dataclasses.replace(packed["train"], **pairs, **ends),
      "validation": _scored(packed[chosen], ends),
      "test": _scored(packed["test"], ends),
    },
    selection=chosen,
    vocabulary=names,
    max_len=max_len,
    num_classes=0,
    num_inputs=2,
    trivial={"share of common pieces": shared_pieces},
    info=info,
    tokenizer="word_pieces",
    tokenizer_json=tokenizer,
    objective="sentences",
  )


def _check_lengths(max_len: int, train_len: int) -> None:
  """Raises UserError for lengths without room for a word."""
  if not 3 <= (train_len or max_len) <= max_len:
    raise UserError(
      f"max_len={max_len}, train_len={train_len}: give at least 3 word pieces, "
      "of which [CLS] and [SEP] are two, and a train_len of at most max_len."
    )
