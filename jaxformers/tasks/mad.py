"""MAD: six small problems of recall, copying, compression and memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np

from jaxformers.data.generators import mad
from jaxformers.data.generators.recall import Drawn
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Count, Interval, PositiveCount
from jaxformers.foundations.registry import choose
from jaxformers.tasks import token_labels
from jaxformers.tasks.task import TASKS, Task
from jaxformers.tasks.token_labels import Rows

# Generators, and the options that they have.
GENERATORS: dict[str, tuple[Callable[..., Drawn], tuple[str, ...]]] = {
  "in_context_recall": (mad.recall, ("every",)),
  "noisy_recall": (mad.recall, ("every", "noise_tokens", "noise")),
  "fuzzy_recall": (mad.fuzzy_recall, ("every",)),
  "selective_copying": (mad.selective_copying, ("num_copied",)),
  "compression": (mad.compression, ()),
  "memorization": (mad.memorization, ()),
}
# Settings of each problem in the source (mad-lab 0f49a45, configs/tasks): the
# first one, and the options that take other values, one at a time.
FIRST: dict[str, dict[str, float]] = {
  "in_context_recall": {"vocab_size": 16, "length": 128, "num_train": 12_800},
  "noisy_recall": {
    "vocab_size": 32,
    "length": 128,
    "num_train": 12_800,
    "noise": 0.2,
  },
  "fuzzy_recall": {"vocab_size": 16, "length": 128, "num_train": 12_800},
  "selective_copying": {
    "vocab_size": 16,
    "length": 256,
    "num_train": 12_800,
    "num_copied": 16,
  },
  "compression": {"vocab_size": 16, "length": 32, "num_train": 12_800},
  "memorization": {"vocab_size": 256, "length": 32, "num_train": 256},
}
_COUNTS = (6_400, 3_200, 1_600, 800)
_LENGTHS = (256, 512, 1_024)
_VOCABULARIES = (32, 64, 128)
_RECALL: dict[str, tuple[float, ...]] = {
  "vocab_size": _VOCABULARIES,
  "length": _LENGTHS,
  "num_train": _COUNTS,
}
VARIED: dict[str, dict[str, tuple[float, ...]]] = {
  "in_context_recall": _RECALL,
  "noisy_recall": {
    **_RECALL,
    "vocab_size": (48, 80, 144),
    "noise": (0.4, 0.6, 0.8),
  },
  "fuzzy_recall": _RECALL,
  "selective_copying": {
    **_RECALL,
    "length": (512, 1_024),
    "num_copied": (32, 64, 96),
  },
  "compression": {**_RECALL, "length": (64, 128, 256)},
  "memorization": {"vocab_size": (512, 1_024, 2_048, 4_096, 8_192)},
}
# Protocols, and whether problems of recall train on every next token.
PROTOCOLS = {"paper": True, "jaxformers": False}


def settings(problem: str) -> list[dict[str, float]]:
  """Returns what each setting of a problem changes in the first one, `{}`."""
  varied = VARIED[problem].items()
  return [{}, *({name: value} for name, values in varied for value in values)]


@TASKS.register("mad")
def load_mad(
  *,
  data_dir: str = "",
  protocol: str = "paper",
  problem: str = "in_context_recall",
  seed: Count = 0,
  num_train: PositiveCount = 12_800,
  num_validation: PositiveCount = 1_280,
  num_test: PositiveCount = 1_280,
  length: PositiveCount = 128,
  vocab_size: PositiveCount = 16,
  noise_tokens: Count = 0,
  noise: Annotated[float, Interval("[0, 1)")] = 0.0,
  num_copied: Count = 0,
  test_lengths: Sequence[PositiveCount] = (),
  causal: bool = True,
) -> Task:
  """Generates one of the problems of MAD (Poli et al. 2024).

  No two sequences are equal, in all splits together.

  Differs from the source: validation examples choose the checkpoint, where the
  source uses the test split; accuracy is the share of right tokens, where the
  source averages the shares of the classes; and no sequence is drawn twice.

  Args:
    data_dir: folder of prepared data; see `data_folder`.
    protocol: "paper", where the class of each token in training is the next one
      in problems of recall, as in the source; or "jaxformers", where these
      problems train on the classes of the tests.
    problem: name in `GENERATORS`; see the functions of `data.generators.mad`.
    seed: seed of the data, not of the run.
    num_train: number of training examples.
    num_validation: number of validation examples, which choose the checkpoint.
    num_test: number of examples of each test split.
    length: number of tokens. The last token of the problems of recall is only a
      class.
    vocab_size: number of different tokens.
    noise_tokens: number of tokens of the noise, for noisy_recall only.
    noise: share of pairs that are noise, for noisy_recall only.
    num_copied: number of tokens to copy, for selective_copying only.
    test_lengths: lengths of further test splits of one length each.
    causal: True if a token may see only itself and earlier tokens; False for
      models without a causal form, whose scores have another protocol.

  Raises:
    UserError: for options that the problem does not have, or sizes that do not
      fit.
  """
  make, names = GENERATORS[choose("problem", problem, GENERATORS)]
  every = PROTOCOLS[choose("protocol", protocol, PROTOCOLS)]
  settings = {
    "noise_tokens": noise_tokens,
    "noise": noise,
    "num_copied": num_copied,
  }
  for name, value in settings.items():
    if bool(value) != (name in names):
      needs = "needs" if name in names else "does not have"
      raise UserError(
        f"{name}={value}: the problem {problem!r} {needs} this option."
      )
  has_labels = "every" in names
  if not (every or has_labels):
    raise UserError(
      f"protocol={protocol!r} is for problems of recall: set protocol=paper."
    )
  sizes: dict[str, Any] = {k: v for k, v in settings.items() if k in names}

  def rows(
    options: dict[str, Any],
    rng: np.random.Generator,
    count: int,
    n: int,
    _: int,
  ) -> Rows:
    drawn = make(rng, count, n, vocab_size, **sizes, **options)
    return zip(*drawn, strict=True)

  draw = functools.partial(rows, {})
  draw_train = None
  if has_labels and every:
    draw_train = functools.partial(rows, {"every": True})
  # Refuse sizes that do not fit before anything is written.
  widths = [
    len(next(iter(draw(np.random.default_rng(0), 1, n, n)))[0])
    for n in (length, *test_lengths)
  ]
  tokens = tuple(map(str, range(vocab_size)))
  # A rule that reads the token itself would solve compression.
  rules = dict(
    token_labels.RULES
    if problem == "compression"
    else token_labels.RULES_OF_IDS
  )
  if make is mad.recall:
    rules["random value"] = lambda task: 2 / (vocab_size - noise_tokens)
  recipe = token_labels.Recipe(
    name="mad",
    protocol=protocol,
    problem=problem,
    tokens=tokens,
    classes=tokens,
    draw=draw,
    draw_train=draw_train,
    lengths=(length, length),
    held_out_lengths=(length, length),
    settings={"vocab_size": vocab_size, **settings},
    longest=widths[0],
    causal=causal,
    trivial=rules,
  )
  counts = (num_train, num_validation, num_test)
  return token_labels.generate(recipe, data_dir, seed, counts, test_lengths)
