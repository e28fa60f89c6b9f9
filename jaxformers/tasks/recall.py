"""Recall: classes that earlier tokens of the same sequence determine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxformers.data.generators import recall
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Count, PositiveCount
from jaxformers.foundations.registry import choose
from jaxformers.tasks import token_labels
from jaxformers.tasks.task import TASKS, Task
from jaxformers.tasks.token_labels import Rows

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
      models without a causal form, whose scores have another protocol.

  Raises:
    UserError: for sizes that do not fit.
  """
  fill = PROTOCOLS[choose("protocol", protocol, PROTOCOLS)]
  has_mark = PROBLEMS[choose("problem", problem, PROBLEMS)]
  is_mqar = problem == "mqar"
  if is_mqar != (num_pairs > 0) or (not is_mqar and not fill):
    raise UserError(
      f"problem={problem!r}, num_pairs={num_pairs}, protocol={protocol!r}: "
      "mqar needs at least one pair; the other problems need num_pairs=0 and "
      "protocol=jaxformers."
    )
  if vocab_size < 4:
    raise UserError(f"vocab_size={vocab_size}: give at least 4.")

  def draw(rng: np.random.Generator, count: int, n: int, _: int) -> Rows:
    sizes = {"num_pairs": num_pairs, "fill": fill} if is_mqar else {}
    make: Callable[..., recall.Drawn] = getattr(recall, problem)
    tokens, classes = make(rng, count, n, vocab_size, **sizes)
    return zip(tokens, classes, strict=True)

  # Refuse sizes that do not fit before anything is written.
  for n in (length, *test_lengths):
    draw(np.random.default_rng(0), 1, n, n)
  tokens = tuple(map(str, range(vocab_size)))
  rules = dict(token_labels.RULES_OF_IDS)
  if is_mqar:
    rules["random value of a pair"] = lambda task: 1 / num_pairs
  recipe = token_labels.Recipe(
    name="recall",
    protocol=protocol,
    problem=problem,
    tokens=(*tokens, *([MARK] if has_mark else [])),
    classes=tokens,
    draw=draw,
    lengths=(length, length),
    held_out_lengths=(length, length),
    settings={"vocab_size": vocab_size, "num_pairs": num_pairs},
    longest=length,
    causal=causal,
    trivial=rules,
  )
  counts = (num_train, num_validation, num_test)
  return token_labels.generate(recipe, data_dir, seed, counts, test_lengths)
