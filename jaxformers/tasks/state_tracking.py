"""State tracking: products of group elements, and final states of automata."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxformers.data.generators import words
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Count, PositiveCount
from jaxformers.foundations.registry import choose
from jaxformers.tasks import token_labels
from jaxformers.tasks.task import TASKS, Task
from jaxformers.tasks.token_labels import Rows

# Protocols, and whether a token <bos> without a class opens every sequence.
PROTOCOLS = {
  "jaxformers": False,
  "deltaproduct": True,
  "xlstm": False,
  "illusion": False,
}
START = "<bos>"


@TASKS.register("state_tracking")
def load_state_tracking(
  *,
  data_dir: str = "",
  protocol: str = "jaxformers",
  problem: str = "S3",
  seed: Count = 0,
  num_train: PositiveCount = 20_000,
  num_validation: PositiveCount = 500,
  num_test: PositiveCount = 500,
  min_length: PositiveCount = 64,
  length: PositiveCount = 64,
  tokens_per_element: PositiveCount = 1,
  test_min_length: Count = 0,
  test_max_length: Count = 0,
  test_lengths: Sequence[PositiveCount] = (),
  causal: bool = True,
) -> Task:
  """Generates sequences whose classes are the states that they lead to.

  In the word problem of a group the class of a token is the product of all
  elements up to it. The problems of automata have one class, at the last token.
  No training sequence occurs in another split; see `token_labels.generate`.

  Differs from the code of Siems et al.: <bos> has no class. Differs from the
  code of Beck et al.: sequences are drawn once, and the last token is read, not
  replaced by padding.

  Args:
    data_dir: folder of prepared data; see `data_folder`.
    protocol: "jaxformers"; "deltaproduct" (Siems et al. 2025), where <bos>
      opens every sequence; or "xlstm" (Beck et al. 2024; Grazzi et al. 2025),
      only for the problems of automata; or "illusion" (Merrill et al. 2024),
      only for groups, with short sequences.
    problem: group, such as Z2, Z3, S3, S4, A5, S5, A4xZ5, S5_swaps, S4_moves3;
      or automaton: parity, even_pairs, cycle_navigation, modular_arithmetic,
      modular_arithmetic_brackets. See `words.problem`.
    seed: seed of the data, not of the run.
    num_train: number of training examples.
    num_validation: number of validation examples, which choose the checkpoint.
    num_test: number of examples of each test split.
    min_length, length: least and greatest number of tokens in training, without
      <bos>. Modular arithmetic without brackets takes one token less for an odd
      length.
    tokens_per_element: number of tokens of each element; the last one has the
      class. For groups only.
    test_min_length, test_max_length: the same for validation and test; 0 for
      the lengths of training.
    test_lengths: lengths of further test splits of one length each.
    causal: True if a token may see only itself and earlier tokens; False for
      models without a causal form, whose scores have another protocol.

  Raises:
    UserError: for an unknown problem, for too many examples, or for lengths
      that do not fit.
  """
  has_start = PROTOCOLS[choose("protocol", protocol, PROTOCOLS)]
  chosen = words.problem(problem)
  is_automaton = problem in words.AUTOMATA
  if is_automaton and tokens_per_element > 1:
    raise UserError(
      f"tokens_per_element={tokens_per_element} is for groups, and "
      f"{problem!r} is an automaton: remove the option."
    )
  if protocol == "xlstm" and not is_automaton:
    raise UserError(
      f"protocol='xlstm' is for {', '.join(words.AUTOMATA)}, and {problem!r} "
      "is a group: choose another protocol."
    )
  if protocol == "illusion" and is_automaton:
    raise UserError(
      f"protocol='illusion' is for groups, and {problem!r} is an automaton: "
      "choose another protocol."
    )
  chosen = words.repeated(chosen, tokens_per_element)
  trained = (min_length, length)
  tested = (test_min_length or min_length, test_max_length or length)
  _check_lengths(problem, chosen.least, trained, tested, test_lengths)

  def draw(rng: np.random.Generator, count: int, least: int, most: int) -> Rows:
    drawn = words.draw_lengths(chosen, rng, count, least, most)
    return map(_open_sequence, drawn) if has_start else drawn

  def _open_sequence(
    row: tuple[np.ndarray, np.ndarray],
  ) -> tuple[np.ndarray, np.ndarray]:
    tokens, classes = row
    return np.r_[len(chosen.tokens), tokens], np.r_[words.NO_CLASS, classes]

  recipe = token_labels.Recipe(
    name="state_tracking",
    protocol=protocol,
    problem=problem,
    tokens=(*chosen.tokens, *([START] if has_start else [])),
    classes=chosen.classes,
    draw=draw,
    lengths=trained,
    held_out_lengths=tested,
    settings={"tokens_per_element": tokens_per_element},
    longest=max(length, tested[1]) + has_start,
    causal=causal,
    trivial=token_labels.RULES_OF_IDS,
  )
  counts = (num_train, num_validation, num_test)
  return token_labels.generate(recipe, data_dir, seed, counts, test_lengths)


def _check_lengths(
  problem: str,
  least: int,
  trained: tuple[int, int],
  tested: tuple[int, int],
  further: Sequence[int],
) -> None:
  """Raises UserError for lengths in a wrong order, or too small ones.

  Args:
    problem: name of the problem.
    least: least number of tokens of the problem.
    trained, tested: least and greatest length of training, and of validation
      and test.
    further: `test_lengths`.
  """
  if min([trained[0], tested[0], *further]) < least:
    raise UserError(
      f"min_length={trained[0]}, test_min_length={tested[0]}, "
      f"test_lengths={[*further]}: {problem} has at least {least} tokens. Give "
      "greater lengths."
    )
  for lower, upper in (trained, tested):
    if lower > upper:
      raise UserError(
        f"The least length {lower} is above the greatest, {upper}: exchange "
        "min_length and length, or test_min_length and test_max_length."
      )
