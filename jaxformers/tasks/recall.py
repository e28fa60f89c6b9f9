"""Recall: classes that earlier tokens of the same sequence determine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxformers.data.engine import encodings
from jaxformers.data.generators import recall
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Count, PositiveCount
from jaxformers.foundations.registry import choose
from jaxformers.tasks import token_labels
from jaxformers.tasks.task import TASKS, Task

# Protocols, and whether random tokens stand where mqar has no key.
PROTOCOLS = {"jaxformers": True, "zoology": False}
# Problems, and whether a mark is added to the tokens.
PROBLEMS = {
  "mqar": False,
  "associative_recall": True,
  "induction_heads": True,
}
MARK = "<mark>"


@TASKS.register("recall")
def load_recall(
  *,
  data_dir: str = "",
  protocol: str = "jaxformers",
  problem: str = "mqar",
  seed: Count = 0,
  num_train: PositiveCount = 20_000,
  num_validation: PositiveCount = 500,
  num_test: PositiveCount = 500,
  length: PositiveCount = 64,
  vocab_size: PositiveCount = 256,
  num_pairs: Count = 4,
  test_lengths: Sequence[PositiveCount] = (),
  causal: bool = True,
) -> Task:
  """Generates sequences whose classes are in earlier tokens of the sequence.

  No two sequences are equal, in all splits together.

  Args:
    data_dir: folder of prepared data; see `data_folder`.
    protocol: "jaxformers"; or "zoology" (Arora, Eyuboglu et al. 2023, figure
      2), where token 0 fills the places of mqar without a key, instead of
      random tokens.
    problem: "mqar", "associative_recall" or "induction_heads"; see the
      functions of `data.generators.recall`.
    seed: seed of the data, not of the run.
    num_train: number of training examples.
    num_validation: number of validation examples, which choose the checkpoint.
    num_test: number of examples of each test split.
    length: number of tokens.
    vocab_size: number of different tokens, without the mark.
    num_pairs: number of pairs; for mqar only, which needs one or more.
    test_lengths: lengths of further test splits of one length each.
    causal: True if a token may see only itself and earlier tokens; False for
      models without a causal form, whose scores are of another protocol.

  Raises:
    UserError: for sizes that do not fit.
  """
  fill = PROTOCOLS[choose("protocol", protocol, PROTOCOLS)]
  has_mark = PROBLEMS[choose("problem", problem, PROBLEMS)]
  is_mqar = problem == "mqar"
  if is_mqar != (num_pairs > 0) or (not is_mqar and not fill):
    raise UserError(
      f"problem={problem!r}, num_pairs={num_pairs}, protocol={protocol!r}: "
      "pairs are of mqar, which needs at least one, and so is the protocol "
      "zoology. Give num_pairs=0 and protocol=jaxformers for other problems."
    )
  if vocab_size < 4:
    raise UserError(f"vocab_size={vocab_size}: give at least 4.")

  def draw(rng: np.random.Generator, count: int, n: int) -> recall.Drawn:
    if is_mqar:
      return recall.mqar(rng, count, n, vocab_size, num_pairs, fill=fill)
    make: Callable[..., recall.Drawn] = getattr(recall, problem)
    return make(rng, count, n, vocab_size)

  further = token_labels.check_test_lengths(test_lengths)
  # Refuse sizes that do not fit before anything is written.
  for n in (length, *further):
    draw(np.random.default_rng(0), 1, n)
  seen: set[bytes] = set()

  def rows(
    number: int, count: int, n: int
  ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng([seed, number])
    return token_labels.distinct(
      lambda chunk: zip(*draw(rng, chunk, n), strict=True), count, seen
    )

  # Splits that are drawn first do not depend on the sizes of the others.
  splits, info = token_labels.open_generated(
    "recall",
    {
      "protocol": protocol,
      "problem": problem,
      "seed": seed,
      "counts": f"{num_train}+{num_validation}+{num_test}",
      "sizes": f"{length}+{vocab_size}+{num_pairs}",
      "test_lengths": "+".join(map(str, further)),
    },
    {
      **{f"test_{n}": rows(2 + n, num_test, n) for n in further},
      "test": rows(2, num_test, length),
      "validation": rows(1, num_validation, length),
      "train": rows(0, num_train, length),
    },
    data_dir,
  )
  tokens = tuple(map(str, range(vocab_size)))
  rules = dict(token_labels.RULES_OF_IDS)
  if is_mqar:
    rules["random value of a pair"] = lambda task: 1 / num_pairs
  return Task(
    name="recall",
    protocol=token_labels.describe_protocol(protocol, problem, causal=causal),
    splits=splits,
    vocabulary=(encodings.PAD, *tokens, *([MARK] if has_mark else [])),
    max_len=length,
    num_classes=vocab_size,
    classes=tokens,
    objective=token_labels.OBJECTIVE,
    causal=causal,
    test_lengths=further,
    trivial=rules,
    info=info,
  )
