"""LRA ListOps: the value, 0 to 9, of a long nested expression."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from jaxformers.data import listops, listops_text, packed
from jaxformers.data.packed import Packed
from jaxformers.registry import choose
from jaxformers.tasks.task import (
  TASKS,
  Task,
  data_folder,
  first_token_rule,
  majority_class,
)

# lra: 15 tokens, as LRA since March 2021. skyformer: the closing bracket is
# dropped, as by the tokenizer that LRA had before and Skyformer still has; an
# operator's id stands for "MIN" instead of "[MIN".
PROTOCOLS = ("lra", "skyformer")


@TASKS.register("listops")
def load(
  *,
  data_dir: str = "",
  protocol: str = "lra",
  tsv: str = "",
  seed: int = 0,
  num_train: int = 96_000,
  num_validation: int = 2_000,
  num_test: int = 2_000,
  max_depth: int = 10,
  max_args: int = 10,
  min_length: int = 500,
  max_length: int = 2_000,
) -> Task:
  """Generates ListOps (8 s, once), or reads LRA's files.

  Args:
    data_dir: see `data_folder`.
    protocol: "lra" or "skyformer".
    tsv: folder of LRA's `basic_{train,val,test}.tsv`; "" generates.
    seed: of the generated data, not of the run.
    num_train, num_validation, num_test: examples to generate.
    max_depth, max_args, min_length, max_length: see `listops.Settings`.
  """
  choose("protocol of listops", protocol, PROTOCOLS)
  folder = data_folder(data_dir)
  if tsv:
    splits, info = _read(folder, Path(tsv).expanduser())
  else:
    settings = listops.Settings(
      seed=seed,
      num_train=num_train,
      num_validation=num_validation,
      num_test=num_test,
      max_depth=max_depth,
      max_args=max_args,
      min_length=min_length,
      max_length=max_length,
    )
    splits, info = _generate(folder, settings)
  last = listops.END
  if protocol == "skyformer":
    splits = {name: packed.drop(s, last) for name, s in splits.items()}
    last -= 1
  return Task(
    name="listops",
    protocol=protocol,
    splits=splits,
    selection="validation",
    vocab_size=last + 1,
    max_len=max(int(s.lengths().max()) for s in splits.values()),
    num_classes=10,
    trivial={
      "majority class": majority_class,
      "first-token rule": first_token_rule,
    },
    info=info,
  )


def _generate(folder: Path, settings: listops.Settings) -> Any:
  text = json.dumps(dataclasses.asdict(settings), sort_keys=True)
  digest = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
  info = {"source": "generated", "settings": dataclasses.asdict(settings)}
  return packed.build(
    folder / "packed" / f"listops-1-{digest}",
    lambda: (listops.generate(settings), info),
  )


def _read(folder: Path, tsv: Path) -> tuple[dict[str, Packed], Any]:
  checksum = hashlib.sha256()
  for short in listops_text.FILES.values():
    path = tsv / f"basic_{short}.tsv"
    if path.exists():  # A missing one is `read_tsv`'s to report.
      with path.open("rb") as file:
        checksum.update(hashlib.file_digest(file, "sha256").digest())
  info = {"source": "LRA's TSV files", "sha256": checksum.hexdigest()}
  return packed.build(
    folder / "packed" / f"listops-tsv-1-{checksum.hexdigest()[:12]}",
    lambda: (listops_text.read_tsv(tsv), info),
  )
