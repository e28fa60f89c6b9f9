"""LRA Retrieval: whether one of two papers cites the other, by their bytes."""

from __future__ import annotations

import dataclasses

from jaxformers.data.engine import encodings, preparation
from jaxformers.data.sets import aan
from jaxformers.registry import choose
from jaxformers.tasks.task import (
  TASKS,
  Task,
  data_folder,
  histogram_similarity,
  majority_class,
)


@dataclasses.dataclass(frozen=True)
class Protocol:
  """Tokens of each document, the padded length, and what tokens are."""

  max_len: int = 4_000
  padded_len: int = 0
  characters: bool = False


# All have 4000 tokens a document and the split of LRA's files. They differ in
# the head, which is the config's.
PROTOCOLS = {
  "jaxformers": Protocol(),
  "lra": Protocol(),
  "skyformer": Protocol(padded_len=4_096),
  "s4": Protocol(characters=True),
}


@TASKS.register("retrieval")
def load_retrieval(
  *,
  data_dir: str = "",
  protocol: str = "jaxformers",
  archive: str = "",
  max_len: int = 0,
  num_train: int = aan.COUNTS["train"],
  num_validation: int = aan.COUNTS["validation"],
  num_test: int = aan.COUNTS["test"],
) -> Task:
  """Opens the pairs; the first time from LRA's release.

  Args:
    data_dir: see `data_folder`.
    protocol: "jaxformers", "lra", "skyformer" (bytes) or "s4" (characters that
      occur 10 times in train, the last of 4000 an end).
    archive: path of lra_release.gz, its unpacked folder, or another archive or
      folder of `new_aan_pairs.{train,eval,test}.tsv`; "" looks for it.
    max_len: tokens a document is cut to; 0 for the protocol's.
    num_train, num_validation, num_test: pairs that there must be; other
      numbers than LRA's are of a stand-in.
  """
  chosen = PROTOCOLS[choose("protocol of retrieval", protocol, PROTOCOLS)]
  encoding = encodings.of_bytes("text1", "text2")
  if chosen.characters:
    encoding = encodings.characters("text1", "text2", min_count=10, first=3_999)
  splits, info = preparation.open_splits(
    aan.source(num_train, num_validation, num_test),
    encoding,
    data_dir=data_folder(data_dir),
    archive=archive,
  )
  if chosen.characters:
    vocabulary = tuple(info.pop("vocabulary"))
    added, read = {"end": 2}, encodings.character_ids(vocabulary)
  else:
    vocabulary, read = encodings.BYTES, encodings.byte_ids
    added = {"shift": 1}
  return Task(
    name="retrieval",
    protocol=protocol,
    splits={n: dataclasses.replace(s, **added) for n, s in splits.items()},
    selection="validation",
    vocabulary=vocabulary,
    max_len=max_len or chosen.max_len,
    padded_len=max_len or chosen.padded_len,
    num_classes=2,
    num_inputs=2,
    trivial={
      "majority class": majority_class,
      "histogram similarity": histogram_similarity,
    },
    info=info,
    tokenize=read,
  )
