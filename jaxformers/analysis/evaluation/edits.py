"""Certified accuracy under insertions, deletions and replacements of tokens.

Two certificates count edits. *Randomised deletion* takes any classifier f of
texts whose tokens are deleted with probability p, and predicts the class that
wins a vote over random deletions (Huang et al. 2023,
https://arxiv.org/abs/2302.01757). Its bounds hold with a stated probability.
*The exact answer* exists for encoders that treat each token by itself and take
the mean: no edit of so many tokens changes their class. docs/theory.md, section
16, has the proofs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from jaxformers.data.engine.packed import Packed
from jaxformers.foundations import ranges
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Count, Fraction, PositiveCount
from jaxformers.foundations.registry import choose
from jaxformers.foundations.tables import markdown_table
from jaxformers.inference import TrainedModel
from jaxformers.models import Model, in_float32
from jaxformers.models.batches import apply_in_batches
from jaxformers.models.bounds import AFFINE
from jaxformers.models.certificates import ROUNDING, Evaluation
from jaxformers.tasks.deletion import Deleted, keep

ROWS = 1_000  # Number of texts that a model reads at a time.
CONFIDENCE = 0.95  # Probability with which a certificate of a vote holds.
DRAWS = (1_000, 4_000)  # Draws to predict a class, and to bound its share.
SAMPLES = 200  # Texts that are attacked.


def least_share(
  share: Any,
  rate: float,
  *,
  replaced: int = 0,
  inserted: int = 0,
  deleted: int = 0,
) -> Any:
  """Returns the least share of a class's votes after edits of a text.

  With n_s replaced, n_i inserted and n_d deleted tokens it is
  p^(n_i - n_d) (share - 1 + p^(n_s + n_d)), for every classifier.

  Args:
    share: share of the votes for the class before the edits, in [0, 1].
    rate: probability p that a token is deleted, in (0, 1).
    replaced, inserted, deleted: numbers of edits.
  """
  kept = share - 1 + rate ** (replaced + deleted)
  return np.maximum(rate ** float(inserted - deleted) * kept, 0)


def radius(share: Any, rate: float) -> Any:
  """Returns the greatest number of edits that leave a majority, int64.

  Any r edits leave at least share - 1 + p^r of the votes, since replacements
  are the worst. -1 stands for a share of at most one half, which is no majority
  before any edit.

  Args:
    share: lower bound of the share of the votes for the class.
    rate: probability p that a token is deleted, in (0, 1).
  """
  missing = 1.5 - np.asarray(share, np.float64)
  # p^r > 3/2 - share, without equality.
  most = np.ceil(np.log(missing) / math.log(rate)) - 1
  return np.where(missing < 1, np.maximum(most, 0), -1).astype(np.int64)


def lower_bound(votes: Any, draws: int, confidence: float = CONFIDENCE) -> Any:
  """Returns the lower bound of Clopper and Pearson for a probability.

  Args:
    votes: number of successes.
    draws: number of independent draws.
    confidence: probability with which the bound is below the probability.
  """
  import scipy.stats  # Slow to import.

  votes = np.asarray(votes)
  bound = scipy.stats.beta.ppf(1 - confidence, votes, draws - votes + 1)
  return np.where(votes > 0, bound, 0.0)


class Vote(Evaluation):
  """Classifier by a vote over random deletions of a text.

  Args:
    model, params: classifier of ids, [b, n], in float32, and its parameters.
    rate: probability p that a token is deleted. What is left is cut to the
      length that the model reads.

  Attributes:
    rate: probability p that a token is deleted.
  """

  def __init__(self, model: Model, params: Any, rate: float) -> None:
    super().__init__(model, params)
    self.rate = rate

  def count(
    self, ids: np.ndarray, draws: int, rng: np.random.Generator
  ) -> np.ndarray:
    """Returns the votes of the classes of one text, int64 [c].

    Args:
      ids: tokens of the whole text, [n].
      draws: number of random deletions.
      rng: source of the deletions.
    """
    ids = np.asarray(ids, np.int32)
    ids = ids if len(ids) else np.zeros(1, np.int32)
    votes = np.zeros(self._model.config.num_classes, np.int64)
    for start in range(0, draws, ROWS):
      rows = min(ROWS, draws - start)
      drawn = rng.random((rows, len(ids))) >= self.rate
      # One length for all texts: padding may change what a model reads.
      texts = np.broadcast_to(ids, drawn.shape)
      kept = keep(texts, drawn, self._model.config.max_len)
      classes = apply_in_batches(self.classes, kept, _padded(rows))
      votes += np.bincount(classes, minlength=len(votes))
    return votes

  def classes(self, ids: np.ndarray) -> np.ndarray:
    """Returns the classes of texts as they are, int32 [b]."""
    return self.logits(ids).argmax(-1)

  @functools.cached_property
  def single(self) -> np.ndarray:
    """Logits of the text of each single token, float64 [v, c]."""
    ids = np.arange(self._model.config.vocab_size)[:, None]
    logits = apply_in_batches(self.logits, ids, min(len(ids), 4_096))
    return logits.astype(np.float64)


def _padded(length: int) -> int:
  """Returns the next power of two, so that few numbers are compiled."""
  return 1 << math.ceil(math.log2(max(length, 1)))


class Certified(NamedTuple):
  """Certificates of examples.

  Attributes:
    labels: right classes, int [count].
    predicted: predicted classes, int [count].
    edits: numbers of edits that certainly keep the predicted class, int
      [count]; -1 where nothing is certain.
  """

  labels: np.ndarray
  predicted: np.ndarray
  edits: np.ndarray

  def accuracy(self, edits: int) -> float:
    """Returns the share of examples that stay right under so many edits."""
    is_right = self.predicted == self.labels
    return float((is_right & (self.edits >= edits)).mean())


def certify_vote(
  vote: Vote,
  texts: Sequence[np.ndarray],
  labels: np.ndarray,
  *,
  draws: tuple[int, int],
  seed: int,
  confidence: float = CONFIDENCE,
) -> Certified:
  """Certifies texts by randomised deletion.

  The class of a text is chosen by some draws, and the share of its votes is
  bounded by other draws: the same draws for both would make the bound too high.
  What is certified is the class that infinitely many draws would choose.

  Args:
    vote: classifier by vote.
    texts: tokens of each text, in full.
    labels: right classes, [count].
    draws: numbers of draws to predict a class and to bound its share.
    seed: seed of the deletions of all texts.
    confidence: probability with which the certificate of each text holds.
  """
  predicted, votes = [], []
  for i, ids in enumerate(tqdm(texts, "votes", disable=None)):
    rng = np.random.default_rng([9, seed, i])
    predicted.append(int(vote.count(ids, draws[0], rng).argmax()))
    votes.append(int(vote.count(ids, draws[1], rng)[predicted[-1]]))
  share = lower_bound(np.array(votes), draws[1], confidence)
  return Certified(labels, np.array(predicted), radius(share, vote.rate))


def is_token_wise(model: Model) -> bool:
  """Returns True if logits are means over tokens of functions of the token.

  So it is for `random_transject` with one expert, no positions, and the mean of
  the tokens before an affine map.
  """
  config, block = model.config, model.stacks()["encoder"]
  mixer = getattr(block, "mixer", None)
  mixer = mixer(parent=None) if mixer else None
  return (
    config.variant.mixer == "transject"
    and getattr(mixer, "num_experts", 0) == 1
    and getattr(mixer, "sigma", "") == "learned"
    and config.positions == "none"
    and not config.separator
    and config.pool == "mean"
    and config.pool_norm in AFFINE
    and not config.head_dim
  )


def exact_edits(logits: np.ndarray, ids: np.ndarray, label: int) -> int:
  """Returns the greatest number of edits that cannot change a text's class.

  It applies to token-wise encoders (`is_token_wise`), and is exact up to
  rounding for fewer edits than tokens. Let t_v be the logit of
  the class minus another logit for the text of the token v. The class wins if
  the sum of t over the tokens is positive. With the tokens in descending order
  of t, the i-th edit lowers the sum at most by the greatest of t_i - min t
  (replace), t_i (delete) and -min t (insert).

  Args:
    logits: logits of the text of each single token, float64
      [v, c]; row 0 is padding.
    ids: tokens of the text, [n], at least one.
    label: class of the text.

  Returns:
    The number, at most n - 1; -1 if rounding could change the class.
  """
  most = math.inf
  for other in range(logits.shape[1]):
    if other == label:
      continue
    gaps = logits[:, label] - logits[:, other]
    least = gaps[1:].min()
    ordered = -np.sort(-gaps[ids])
    # Leave room for rounding in float32, as other certificates do.
    total = ordered.sum() - ROUNDING * len(ids) * np.abs(logits).max()
    if total <= 0:
      return -1
    # Lowest sums after 1, 2, ... edits of different tokens.
    falls = np.maximum(ordered - least, np.maximum(ordered, -least))
    lowest = total - np.cumsum(falls)
    # n deletions leave an empty text, which has no mean.
    lost = np.nonzero(lowest <= 0)[0]
    most = min(most, int(lost[0]) if len(lost) else len(ids) - 1)
  return int(most)


CANDIDATES = 16  # Edits that each step of an attack tries.
STRONGEST = 64  # Tokens that an attack writes.


def attack(
  vote: Vote,
  ids: np.ndarray,
  label: int,
  counts: Sequence[int],
  *,
  draws: tuple[int, int],
  rng: np.random.Generator,
) -> dict[int, bool]:
  """Returns whether a text stays right after k edits of a greedy attack.

  Each step tries `CANDIDATES` random replacements, insertions and deletions,
  and keeps the one that leaves the fewest votes for the class. New tokens are
  those whose single texts speak most against it. A text that was wrong after
  fewer edits counts as wrong.

  Args:
    vote: classifier by vote.
    ids: tokens of the text, [n].
    label: right class.
    counts: numbers k of edits, increasing.
    draws: numbers of draws to try an edit, and to predict the class after it.
    rng: source of edits and deletions.
  """
  single = vote.single
  others = np.delete(single, label, 1).max(1)
  tokens = 1 + np.argsort((single[:, label] - others)[1:])[:STRONGEST]
  is_right, results = True, {}
  for step in range(max(counts) + 1):
    if step in counts:
      votes = vote.count(ids, draws[1], rng)
      is_right = is_right and int(votes.argmax()) == label
      results[step] = is_right
    if step == max(counts):
      break
    edited = [edit(ids, rng, tokens) for _ in range(CANDIDATES)]
    shares = [vote.count(each, draws[0], rng)[label] for each in edited]
    ids = edited[int(np.argmin(shares))]
  return results


def edit(
  ids: np.ndarray, rng: np.random.Generator, tokens: np.ndarray
) -> np.ndarray:
  """Returns a text with one random edit, [n - 1], [n] or [n + 1].

  Args:
    ids: tokens of the text, [n].
    rng: source of the edit.
    tokens: ids that the edit may write.
  """
  kind = rng.integers(3) if len(ids) else 1
  place, token = rng.integers(len(ids) + (kind == 1)), rng.choice(tokens)
  if kind == 0:
    return np.delete(ids, place)
  if kind == 1:
    return np.insert(ids, place, token)
  edited = ids.copy()
  edited[place] = token
  return edited


def measure_edits(
  run: TrainedModel,
  *,
  counts: Sequence[int],
  deletion: Fraction = 0.0,
  draws: tuple[int, int] = DRAWS,
  samples: PositiveCount = SAMPLES,
  examples: Count = 0,
  seed: Count = 0,
  split: str = "test",
  confidence: float = CONFIDENCE,
) -> dict[str, Any]:
  """Returns the accuracies of a run under edits, for JSON.

  Args:
    run: trained classifier of one sequence of ids.
    counts: numbers of edits.
    deletion: probability p that a token is deleted; 0 for its value in
      training. Without deletion in training, 0 asks for the exact answer.
    draws: numbers of draws to predict a class and to bound its share.
    samples: number of examples to attack.
    examples: number of examples to certify; 0 for `samples`, or for all where
      the answer is exact.
    seed: seed of the choice of examples, of deletions and of attacks.
    split: name of the task's split.
    confidence: probability with which the certificate of each text holds.

  Raises:
    UserError: for other inputs; without deletion for encoders without an
      exact answer; and for options of votes where the answer is exact.
  """
  numbers = {"deletion": deletion, "samples": samples}
  ranges.check(measure_edits, {**numbers, "examples": examples, "seed": seed})
  if min(counts, default=-1) < 0:
    raise UserError(f"edits={list(counts)}: give numbers from 0 on.")
  source, trained = _open(run, split)
  rate = deletion or trained
  model = in_float32(run.model)
  if not rate and not is_token_wise(model):
    raise UserError(
      "Without deletion, edits are certified only for random_transject with "
      "mixer.num_experts=1, positions=none, pool=mean, no norm of tokens and "
      "no hidden layer in the head. Give --deletion=0.9 for a vote over random "
      "deletions, best of a model that is trained with "
      "--config.task.deletion=0.9."
    )
  if not rate:
    ranges.refuse_changed(
      {"draws": draws, "samples": samples, "confidence": confidence},
      {"draws": DRAWS, "samples": SAMPLES, "confidence": CONFIDENCE},
      "the edits of this model are certified exactly, without a vote. Leave it "
      "out.",
    )
  order = np.random.default_rng(seed).permutation(len(source))
  chosen = order[: examples or (samples if rate else len(source))]
  texts, labels = [source[int(i)] for i in chosen], source.labels[chosen]
  vote = Vote(model, run.params, rate)
  counts = sorted(counts)
  content: dict[str, Any] = {
    "workdir": str(run.folder),
    "step": run.step,
    "split": split,
    "seed": seed,
    "deletion": rate,
    "examples": len(chosen),
  }
  if not rate:
    # The class belongs to the cut text.
    certified = _certify_exactly(vote, texts, labels, run.task.max_len)
    attacked: dict[int, Any] = dict.fromkeys(counts)
  else:
    certified = certify_vote(
      vote, texts, labels, draws=draws, seed=seed, confidence=confidence
    )
    content |= {"draws": list(draws), "confidence": confidence}
    attacked = _attacked(vote, texts[:samples], labels, counts, draws, seed)
    content["attacked"] = min(samples, len(chosen))
  content["accuracy"] = float((certified.predicted == labels).mean())
  content["undecided"] = float((certified.edits < 0).mean())
  content["edits"] = [
    {"edits": k, "certified": certified.accuracy(k), "attacked": attacked[k]}
    for k in counts
  ]
  return content


def _open(run: TrainedModel, split: str) -> tuple[Packed, float]:
  """Returns the whole texts of a split, and the rate of deletion in training.

  Raises:
    UserError: for inputs whose edits cannot be certified.
  """
  config = run.model.config
  source = run.task.splits[choose("split", split, run.task.splits)]
  trained = source.rate if isinstance(source, Deleted) else 0.0
  source = source.split if isinstance(source, Deleted) else source
  is_text = isinstance(source, Packed) and config.num_inputs == 1
  is_text = is_text and config.vocab_size > 0
  marks = is_text and (source.start or source.end)
  if config.objective != "classification" or not is_text or marks:
    raise UserError(
      "Edits apply to classifiers of one sequence of ids, without ids that "
      f"open or close it, and {run.task.name} has other inputs: give the run "
      "of a classifier of texts."
    )
  if config.mixer.get("inverse_init") == "batch":
    raise UserError(
      'With mixer.inverse_init="batch" a class depends on other texts, so no '
      "edit of a text can be certified: train with inverse_init=sample."
    )
  return source, trained


def _certify_exactly(
  vote: Vote, texts: Sequence[np.ndarray], labels: np.ndarray, max_len: int
) -> Certified:
  """Returns the exact certificates of texts, which are cut to `max_len`."""
  single = vote.single
  predicted, edits = [], []
  for ids in texts:
    part = ids[:max_len]
    means = single[part].mean(0) if len(part) else single[0]
    predicted.append(int(means.argmax()))
    is_text = len(part) > 0
    edits.append(exact_edits(single, part, predicted[-1]) if is_text else -1)
  return Certified(labels, np.array(predicted), np.array(edits))


def _attacked(
  vote: Vote,
  texts: Sequence[np.ndarray],
  labels: np.ndarray,
  counts: Sequence[int],
  draws: tuple[int, int],
  seed: int,
) -> dict[int, float]:
  """Returns the share of texts that stay right under attack, by k."""
  survived: dict[int, list[bool]] = {k: [] for k in counts}
  for i, ids in enumerate(tqdm(texts, "attacks", disable=None)):
    rng = np.random.default_rng([10, seed, i])
    # A tenth of the draws is enough to compare edits.
    few = max(draws[0] // 10, 1), draws[0]
    left_right = attack(vote, ids, int(labels[i]), counts, draws=few, rng=rng)
    for k, is_right in left_right.items():
      survived[k].append(is_right)
  return {k: float(np.mean(values)) for k, values in survived.items()}


def lines(content: dict[str, Any]) -> list[str]:
  """Returns the result of `measure_edits` as lines of text."""
  titles = ["edits", f"certified ({content['examples']:,})"]
  is_vote = bool(content["deletion"])
  if is_vote:
    titles.append(f"attacked ({content['attacked']:,})")
  names = ("certified", "attacked")[: len(titles) - 1]
  rows = [
    (str(row["edits"]), *(f"{row[name]:.2%}" for name in names))
    for row in content["edits"]
  ]
  text = [markdown_table(titles, rows, right=range(1, len(titles)))]
  if is_vote:
    predict, bound = content["draws"]
    text.append(
      f"Deletion with p = {content['deletion']:g}; {predict:,} draws predict, "
      f"{bound:,} others bound the share of votes. Each certificate is true "
      f"with probability {content['confidence']:g}. Accuracy of the vote "
      f"{content['accuracy']:.2%}; {content['undecided']:.2%} of the texts "
      "have no certain majority."
    )
  else:
    text.append(
      "Exact up to rounding: other texts can lose their class by so many "
      "edits, if they have more tokens and are not cut. Accuracy "
      f"{content['accuracy']:.2%}."
    )
  return text
