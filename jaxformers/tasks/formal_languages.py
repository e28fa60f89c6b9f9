"""Formal languages: fifteen maps of strings, by the Chomsky hierarchy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxformers.data.generators import languages
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Count, PositiveCount
from jaxformers.foundations.registry import choose
from jaxformers.tasks import token_labels
from jaxformers.tasks.task import TASKS, Task
from jaxformers.tasks.token_labels import Rows

PROTOCOLS = ("jaxformers",)


@TASKS.register("formal_languages")
def load_formal_languages(
  *,
  data_dir: str = "",
  protocol: str = "jaxformers",
  problem: str = "reverse_string",
  seed: Count = 0,
  num_train: PositiveCount = 20_000,
  num_validation: PositiveCount = 500,
  num_test: PositiveCount = 500,
  min_length: PositiveCount = 3,
  length: PositiveCount = 40,
  test_lengths: Sequence[PositiveCount] = (),
  causal: bool = True,
) -> Task:
  """Generates strings, followed by blanks whose classes are the output.

  No training sequence occurs in another split; see `token_labels.generate`.

  Differs from the authors' training: sequences are drawn once, while theirs are
  new in every step; and the loss leaves out what follows the end of an output,
  as their accuracy does.

  Args:
    data_dir: folder of prepared data; see `data_folder`.
    protocol: "jaxformers".
    problem: "modular_arithmetic", "parity_check", "even_pairs",
      "cycle_navigation", "modular_arithmetic_brackets", "reverse_string",
      "solve_equation", "stack_manipulation", "duplicate_string",
      "missing_duplicate_string", "odds_first", "binary_addition",
      "binary_multiplication", "compute_sqrt" or "bucket_sort".
    seed: seed of the data, not of the run.
    num_train: number of training examples.
    num_validation: number of validation examples, which choose the checkpoint.
    num_test: number of examples of each test split.
    min_length, length: least and greatest number of symbols of an input in
      training, validation and test.
    test_lengths: numbers of symbols of the inputs of further test splits of one
      length each.
    causal: True if a token may see only itself and earlier tokens; False for
      models without a causal form, whose scores have another protocol.

  Raises:
    UserError: for an unknown problem, for too many examples, or for lengths
      that do not fit.
  """
  choose("protocol", protocol, PROTOCOLS)
  language = languages.LANGUAGES[
    choose("problem", problem, languages.LANGUAGES)
  ]
  least = min([min_length, *test_lengths])
  if min_length > length or least < language.least:
    raise UserError(
      f"min_length={min_length}, length={length}, "
      f"test_lengths={[*test_lengths]}: {problem} needs at least "
      f"{language.least} symbols. Give greater lengths, and a min_length of at "
      "most length."
    )

  def draw(rng: np.random.Generator, count: int, least: int, most: int) -> Rows:
    return languages.draw(language, rng, count, least, most)

  lengths = (min_length, length)
  recipe = token_labels.Recipe(
    name="formal_languages",
    protocol=protocol,
    problem=problem,
    tokens=language.tokens,
    classes=tuple(map(str, range(language.num_classes))),
    draw=draw,
    lengths=lengths,
    held_out_lengths=lengths,
    settings={},
    longest=length + language.output_length(length),
    causal=causal,
    trivial=token_labels.RULES_OF_IDS,
  )
  counts = (num_train, num_validation, num_test)
  return token_labels.generate(recipe, data_dir, seed, counts, test_lengths)
