"""LRA ListOps: predict the value, 0 to 9, of a long nested expression."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from jaxformers.data.engine import encodings, packed
from jaxformers.data.engine.packed import Packed
from jaxformers.data.engine.preparation import open_splits
from jaxformers.data.engine.source import Source
from jaxformers.data.generators import listops
from jaxformers.data.sets import listops as listops_files
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Count, Interval, PositiveCount
from jaxformers.foundations.registry import choose
from jaxformers.tasks import baselines
from jaxformers.tasks.splits import replace_all
from jaxformers.tasks.task import TASKS, Task

# jaxformers, lra: 15 tokens, as in LRA since March 2021.
# skyformer: no closing brackets, as in Skyformer's tokenizer, which is LRA's
#   older one (an operator is named "MIN" instead of "[MIN"). Sequences are
#   padded to 2,048.
# s4: two more special ids, <unk> and <eos>; <eos> closes every sequence.
PROTOCOLS = {
  "jaxformers": {},
  "lra": {},
  "skyformer": {"padded_len": 2_048},
  "s4": {"max_len": 2_048},
}
# Numbers in TransJect's paper use Skyformer's protocol.
PROTOCOLS["paper"] = PROTOCOLS["skyformer"]
WITHOUT_END = ("skyformer", "paper")  # Protocols without closing brackets.
DEFAULTS = listops.Settings()


@TASKS.register("listops")
def load_listops(
  *,
  data_dir: str = "",
  protocol: str = "jaxformers",
  archive: str = "",
  seed: Count = DEFAULTS.seed,
  num_train: PositiveCount = DEFAULTS.num_train,
  num_validation: PositiveCount = DEFAULTS.num_validation,
  num_test: PositiveCount = DEFAULTS.num_test,
  max_depth: Annotated[int, Interval("[2, 100]")] = DEFAULTS.max_depth,
  max_args: Annotated[int, Interval("[2, 1000]")] = DEFAULTS.max_args,
  min_length: Count = DEFAULTS.min_length,
  max_length: PositiveCount = DEFAULTS.max_length,
  test_min_length: Count = DEFAULTS.test_min_length,
  test_max_length: Count = DEFAULTS.test_max_length,
  operators: str = DEFAULTS.operators,
  num_short: Count = DEFAULTS.num_short,
  short_min_length: Count = DEFAULTS.short_min_length,
  short_max_length: PositiveCount = DEFAULTS.short_max_length,
) -> Task:
  """Generates ListOps once, or reads LRA's files.

  Args:
    data_dir: folder of prepared data; see `data_folder`.
    protocol: "jaxformers", "lra", "skyformer", "s4", or "paper" (equal to
      "skyformer").
    archive: path of LRA's lra_release.gz, of its unpacked folder, or of the
      folder with `basic_{train,val,test}.tsv`; "" generates the data.
    seed: seed of the generated data, not of the run.
    num_train, num_validation, num_test: number of examples of each split to
      generate, or to require in the archive.
    max_depth, max_args, min_length, max_length, test_min_length,
    test_max_length, operators, num_short, short_min_length,
    short_max_length: settings of generated data; see `listops.Settings`.
  """
  # Check the settings of the data.
  choose("protocol of listops", protocol, PROTOCOLS)
  settings = listops.Settings(
    seed=seed,
    num_train=num_train,
    num_validation=num_validation,
    num_test=num_test,
    max_depth=max_depth,
    max_args=max_args,
    min_length=min_length,
    max_length=max_length,
    test_min_length=test_min_length,
    test_max_length=test_max_length,
    operators=operators,
    num_short=num_short,
    short_min_length=short_min_length,
    short_max_length=short_max_length,
  )
  # Open the splits in LRA's tokens, then apply the protocol.
  origin = _source(settings, archive)
  opened, info = open_splits(origin, encodings.ids(), data_dir, archive)
  splits, vocabulary = _under(protocol, opened)
  # Extend the protocol's lengths if an expression is longer.
  longest = max(int(split.lengths().max()) for split in splits.values())
  least = {"max_len": longest, "padded_len": longest} | PROTOCOLS[protocol]
  return Task(
    name="listops",
    protocol=protocol,
    splits=splits,
    vocabulary=vocabulary,
    num_classes=len(listops_files.LABELS),
    classes=listops_files.LABELS,
    trivial=baselines.MAJORITY
    | {"first-token rule": baselines.first_token_rule},
    info=info,
    tokenizer="listops",
    max_len=max(longest, least["max_len"]),
    padded_len=max(longest, least["padded_len"]),
  )


def _source(settings: listops.Settings, archive: str) -> Source:
  """Returns the source that generates ListOps, or that reads an archive."""
  if not archive:
    return listops_files.generated(settings)
  # An archive allows no settings besides the counts.
  names = ("num_train", "num_validation", "num_test")
  counts = {name: getattr(settings, name) for name in names}
  if settings != listops.Settings(**counts):
    raise UserError(
      f"{settings}: these are settings for generated data, but the archive "
      f"{archive} is read: remove the settings or the archive."
    )
  return listops_files.released(**counts)


def _under(
  protocol: str, splits: Mapping[str, Packed]
) -> tuple[Mapping[str, Packed], tuple[str, ...]]:
  """Returns the splits with the tokens of a protocol, and its vocabulary."""
  # Remove closing brackets.
  if protocol in WITHOUT_END:
    operators = (token.strip("[") for token in listops.TOKENS[:-1])
    dropped = {n: packed.drop(s, listops.END) for n, s in splits.items()}
    return dropped, (encodings.PAD, *operators)
  # Shift the ids by two special tokens, and append <eos>.
  if protocol == "s4":
    special = (encodings.PAD, encodings.UNKNOWN, encodings.END)
    closed = replace_all(splits, shift=2, end=2)
    return closed, (*special, *listops.TOKENS)
  return splits, (encodings.PAD, *listops.TOKENS)
