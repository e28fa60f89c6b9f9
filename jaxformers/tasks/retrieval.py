"""LRA Retrieval: does one of two papers cite the other? Read as bytes."""

from __future__ import annotations

from jaxformers.data.engine.preparation import open_splits
from jaxformers.data.sets import aan
from jaxformers.foundations.ranges import Length, PositiveCount
from jaxformers.foundations.registry import choose
from jaxformers.tasks import baselines
from jaxformers.tasks.task import TASKS, Task
from jaxformers.tasks.text import TextProtocol, with_ids

# All have 4000 tokens a document and the split of LRA's files. They differ in
# the head, which the config chooses.
PROTOCOLS = {
  "jaxformers": TextProtocol(max_len=4_000),
  "lra": TextProtocol(max_len=4_000),
  "skyformer": TextProtocol(max_len=4_000, padded_len=4_096),
  "s4": TextProtocol(max_len=4_000, min_count=10),
}
# Numbers in TransJect's paper are of Skyformer\'s reading of the tasks.
PROTOCOLS["paper"] = PROTOCOLS["skyformer"]
CLASSES = ("unrelated", "citing")  # In the order of `aan.LABELS`.


@TASKS.register("retrieval")
def load_retrieval(
  *,
  data_dir: str = "",
  protocol: str = "jaxformers",
  archive: str = "",
  max_len: Length = 0,
  num_train: PositiveCount = aan.COUNTS["train"],
  num_validation: PositiveCount = aan.COUNTS["validation"],
  num_test: PositiveCount = aan.COUNTS["test"],
) -> Task:
  """Opens the pairs; the first time from LRA's release.

  Args:
    data_dir: folder of prepared data; see `data_folder`.
    protocol: "jaxformers", "lra", "skyformer", "paper" (bytes) or "s4"
      (characters that occur 10 times in train, the last of 4000 an end).
    archive: path of lra_release.gz, its unpacked folder, or another archive or
      folder of `new_aan_pairs.{train,eval,test}.tsv`; "" looks for it.
    max_len: number of tokens that a document is cut to; 0 for the protocol's.
    num_train, num_validation, num_test: number of pairs of each split; other
      numbers than LRA's are for a stand-in of the same format.
  """
  chosen = PROTOCOLS[choose("protocol of retrieval", protocol, PROTOCOLS)]
  origin = aan.source(num_train, num_validation, num_test)
  encoding = chosen.encoding("text1", "text2")
  splits, info = open_splits(origin, encoding, data_dir, archive)
  # The head combines the two sequences of a pair; see the config.
  splits, vocabulary, tokenizer = with_ids(splits, info)
  # Every example has two sequences, and a baseline that compares them.
  return Task(
    name="retrieval",
    protocol=protocol,
    splits=splits,
    vocabulary=vocabulary,
    max_len=max_len or chosen.max_len,
    padded_len=max_len or chosen.padded_len,
    num_classes=len(CLASSES),
    classes=CLASSES,
    num_inputs=2,
    trivial=baselines.MAJORITY
    | {"histogram similarity": baselines.histogram_similarity},
    info=info,
    tokenizer=tokenizer,
  )
