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
PROTOCOLS = {"jaxformers": True, "zoology": False, "based": True}
# Training of the protocol "based": tokens, pairs and share of the sequences.
MIXED = (
  (64, 4, 100 / 180),
  (128, 8, 20 / 180),
  (256, 16, 20 / 180),
  (256, 32, 20 / 180),
  (256, 64, 20 / 180),
)
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
    protocol: "jaxformers"; "zoology" (Arora, Eyuboglu et al. 2023, figure 2),
      where token 0 fills the places of mqar without a key, instead of random
      tokens; or "based" (Arora, Eyuboglu et al. 2024), mqar that is trained on
      the lengths and numbers of pairs of `MIXED`, and tested with n / 4 pairs
      in n tokens.
    problem: "mqar", "associative_recall" or "induction_heads"; see the
      functions of `data.generators.recall`.
    seed: seed of the data, not of the run.
    num_train: number of training examples.
    num_validation: number of validation examples, which choose the checkpoint.
    num_test: number of examples of each test split.
    length: number of tokens; 256 for "based".
    vocab_size: number of different tokens, without the mark.
    num_pairs: number of pairs; for mqar, which needs one or more, but 0 for
      "based".
    test_lengths: lengths of further test splits of one length each.
    causal: True if a token may see only itself and earlier tokens; False for
      models without a causal form, whose scores have another protocol.

  Raises:
    UserError: for sizes that do not fit.
  """
  fill = PROTOCOLS[choose("protocol", protocol, PROTOCOLS)]
  has_mark = PROBLEMS[choose("problem", problem, PROBLEMS)]
  is_mqar, is_mixed = problem == "mqar", protocol == "based"
  has_pairs = is_mqar and not is_mixed
  if has_pairs != (num_pairs > 0) or not (is_mqar or protocol == "jaxformers"):
    raise UserError(
      f"problem={problem!r}, num_pairs={num_pairs}, protocol={protocol!r}: "
      "mqar needs at least one pair; the other problems, and the protocol "
      "based of mqar, need num_pairs=0; and the other problems need "
      "protocol=jaxformers."
    )
  if is_mixed and length != 256:
    raise UserError(
      f"length={length}: the protocol 'based' trains on 64 to 256 tokens: set "
      "length=256."
    )
  if vocab_size < 4:
    raise UserError(f"vocab_size={vocab_size}: give at least 4.")

  def draw(rng: np.random.Generator, count: int, n: int, _: int) -> Rows:
    pairs = num_pairs or n // 4
    sizes = {"num_pairs": pairs, "fill": fill} if is_mqar else {}
    make: Callable[..., recall.Drawn] = getattr(recall, problem)
    tokens, classes = make(rng, count, n, vocab_size, **sizes)
    return zip(tokens, classes, strict=True)

  def draw_mixed(rng: np.random.Generator, count: int, *_: int) -> Rows:
    counts = rng.multinomial(count, [size[2] for size in MIXED])
    for (n, pairs, _share), part in zip(MIXED, counts, strict=True):
      drawn = recall.mqar(rng, part, n, vocab_size, pairs)
      yield from zip(*drawn, strict=True)

  # Refuse sizes that do not fit before anything is written.
  for n in (length, *test_lengths):
    draw(np.random.default_rng(0), 1, n, n)
  tokens = tuple(map(str, range(vocab_size)))
  rules = dict(token_labels.RULES_OF_IDS)
  if is_mqar:
    pairs = num_pairs or length // 4
    rules["random value of a pair"] = lambda task: 1 / pairs
  recipe = token_labels.Recipe(
    name="recall",
    protocol=protocol,
    problem=problem,
    tokens=(*tokens, *([MARK] if has_mark else [])),
    classes=tokens,
    draw=draw,
    draw_train=draw_mixed if is_mixed else None,
    lengths=(MIXED[0][0] if is_mixed else length, length),
    held_out_lengths=(length, length),
    settings={"vocab_size": vocab_size, "num_pairs": num_pairs},
    longest=length,
    causal=causal,
    trivial=rules,
  )
  counts = (num_train, num_validation, num_test)
  return token_labels.generate(recipe, data_dir, seed, counts, test_lengths)
