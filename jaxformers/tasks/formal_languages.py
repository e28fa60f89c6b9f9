"""Formal languages: fifteen maps of strings, by the Chomsky hierarchy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from jaxformers.data.engine import encodings
from jaxformers.data.generators import languages
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Count, PositiveCount
from jaxformers.foundations.registry import choose
from jaxformers.tasks import token_labels
from jaxformers.tasks.task import TASKS, Task

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

  No two sequences are equal, in all splits
  together, so that short strings are less frequent than others once all of them
  are taken.

  Differs from the authors' training: strings have at least three symbols, and
  are drawn once, while theirs are new in every step. Differs from their code
  for stack_manipulation, binary_addition and binary_multiplication in nothing
  else: what follows the end of an output is not scored.

  Args:
    data_dir: folder of prepared data; see `data_folder`.
    protocol: "jaxformers".
    problem: one of the fifteen tasks; see `languages.LANGUAGES`.
    seed: seed of the data, not of the run.
    num_train: number of training examples.
    num_validation: number of validation examples, which choose the checkpoint.
    num_test: number of examples of each test split.
    min_length, length: least and greatest number of symbols of an input in
      training, validation and test.
    test_lengths: numbers of symbols of the inputs of further test splits of one
      length each.
    causal: True if a token may see only itself and earlier tokens; False for
      models without a causal form, whose scores are of another protocol.

  Raises:
    UserError: for an unknown problem, for too many examples, or for lengths
      that do not fit.
  """
  choose("protocol", protocol, PROTOCOLS)
  language = languages.LANGUAGES[
    choose("problem", problem, languages.LANGUAGES)
  ]
  further = token_labels.check_test_lengths(test_lengths)
  if min_length > length or min(min_length, *further, 10) < language.least:
    raise UserError(
      f"min_length={min_length}, length={length}, test_lengths={[*further]}: "
      f"{problem} needs at least {language.least} symbols, and min_length is "
      "at most length."
    )
  seen: set[bytes] = set()

  def rows(
    number: int, count: int, least: int, most: int
  ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng([seed, number])
    return token_labels.distinct(
      lambda chunk: languages.draw(language, rng, chunk, least, most),
      count,
      seen,
    )

  # Splits that are drawn first do not depend on the sizes of the others.
  splits, info = token_labels.open_generated(
    "formal_languages",
    {
      "problem": problem,
      "seed": seed,
      "counts": f"{num_train}+{num_validation}+{num_test}",
      "lengths": f"{min_length}+{length}",
      "test_lengths": "+".join(map(str, further)),
    },
    {
      **{f"test_{n}": rows(2 + n, num_test, n, n) for n in further},
      "test": rows(2, num_test, min_length, length),
      "validation": rows(1, num_validation, min_length, length),
      "train": rows(0, num_train, min_length, length),
    },
    data_dir,
  )
  return Task(
    name="formal_languages",
    protocol=token_labels.describe_protocol(protocol, problem, causal=causal),
    splits=splits,
    vocabulary=(encodings.PAD, *language.tokens),
    max_len=length + language.output_length(length),
    num_classes=language.num_classes,
    classes=tuple(map(str, range(language.num_classes))),
    objective=token_labels.OBJECTIVE,
    causal=causal,
    test_lengths=further,
    trivial=token_labels.RULES_OF_IDS,
    info=info,
  )
