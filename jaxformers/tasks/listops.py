"""LRA ListOps: the value, 0 to 9, of a long nested expression."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from jaxformers.data.engine import encodings, packed, preparation
from jaxformers.data.generators import listops, listops_text
from jaxformers.data.sets import listops as listops_files
from jaxformers.errors import UserError
from jaxformers.registry import choose
from jaxformers.tasks.task import (
  TASKS,
  Task,
  data_folder,
  first_token_rule,
  majority_class,
)

# jaxformers, lra: 15 tokens, as LRA since March 2021. skyformer: the closing
# bracket is dropped, as by the tokenizer that LRA had before and Skyformer has
# still (an operator's id stands for "MIN" instead of "[MIN"), and 48 zeros
# follow. s4: two special ids more, and every sequence is closed by one of them.
PROTOCOLS = {
  "jaxformers": {},
  "lra": {},
  "skyformer": {"padded_len": 2_048},
  "s4": {"max_len": 2_048},
}
DEFAULTS = listops.Settings()


@TASKS.register("listops")
def load_listops(
  *,
  data_dir: str = "",
  protocol: str = "jaxformers",
  archive: str = "",
  seed: int = DEFAULTS.seed,
  num_train: int = DEFAULTS.num_train,
  num_validation: int = DEFAULTS.num_validation,
  num_test: int = DEFAULTS.num_test,
  max_depth: int = DEFAULTS.max_depth,
  max_args: int = DEFAULTS.max_args,
  min_length: int = DEFAULTS.min_length,
  max_length: int = DEFAULTS.max_length,
  test_min_length: int = DEFAULTS.test_min_length,
  test_max_length: int = DEFAULTS.test_max_length,
  operators: str = DEFAULTS.operators,
) -> Task:
  """Generates ListOps (once), or reads LRA's files.

  Args:
    data_dir: see `data_folder`.
    protocol: "jaxformers", "lra", "skyformer" or "s4".
    archive: LRA's lra_release.gz, its unpacked folder, or the folder of
      `basic_{train,val,test}.tsv`; "" generates.
    seed: of the generated data, not of the run.
    num_train, num_validation, num_test: examples to generate, or that the
      archive must hold.
    max_depth, max_args, min_length, max_length, test_min_length,
    test_max_length, operators: of generated data, see `listops.Settings`.
  """
  choose("protocol of listops", protocol, PROTOCOLS)
  counts = {
    "num_train": num_train,
    "num_validation": num_validation,
    "num_test": num_test,
  }
  settings = listops.Settings(
    seed=seed,
    max_depth=max_depth,
    max_args=max_args,
    min_length=min_length,
    max_length=max_length,
    test_min_length=test_min_length,
    test_max_length=test_max_length,
    operators=operators,
    **counts,
  )
  if archive:
    if settings != listops.Settings(**counts):
      raise UserError(
        f"{settings}: these are settings of generated data, and the archive "
        f"{archive} is read as it is. Leave one of the two out."
      )
    chosen = listops_files.released(**counts)
  else:
    chosen = listops_files.generated(settings)
  splits, info = preparation.open_splits(
    chosen,
    encodings.ids(),
    data_dir=data_folder(data_dir),
    archive=archive,
  )
  vocabulary: Any = (encodings.PAD, *listops.TOKENS)
  if protocol == "skyformer":
    splits = {n: packed.drop(s, listops.END) for n, s in splits.items()}
    vocabulary = (encodings.PAD, *(t.strip("[") for t in listops.TOKENS[:-1]))
  if protocol == "s4":
    special = (encodings.PAD, encodings.UNKNOWN, encodings.END)
    vocabulary = (*special, *listops.TOKENS)
    splits = {
      name: dataclasses.replace(split, shift=2, end=2)
      for name, split in splits.items()
    }
  lengths = PROTOCOLS[protocol]  # At least: test expressions may be longer.
  longest = max(int(split.lengths().max()) for split in splits.values())
  return Task(
    name="listops",
    protocol=protocol,
    splits=splits,
    selection="validation",
    vocabulary=vocabulary,
    num_classes=10,
    trivial={
      "majority class": majority_class,
      "first-token rule": first_token_rule,
    },
    info=info,
    tokenize=functools.partial(_ids, protocol),
    max_len=max(longest, lengths.get("max_len", 0)),
    padded_len=max(longest, lengths.get("padded_len", 0)),
  )


def _ids(protocol: str, text: str) -> np.ndarray:
  ids = listops_text.encode(text)
  if protocol == "skyformer":
    return ids[ids != listops.END]
  return ids + np.uint8(2) if protocol == "s4" else ids
