"""LRA Retrieval: does one of two papers cite the other?"""

from __future__ import annotations

from jaxformers.data.engine.preparation import open_splits
from jaxformers.data.sets import aan
from jaxformers.foundations.ranges import Length, PositiveCount
from jaxformers.foundations.registry import choose
from jaxformers.tasks import baselines
from jaxformers.tasks.task import TASKS, Task
from jaxformers.tasks.text import TextProtocol, with_ids

# All protocols have 4,000 tokens per document and the splits of LRA's files.
# They differ in the head of the model, which the config chooses.
PROTOCOLS = {
  "jaxformers": TextProtocol(max_len=4_000),
  "lra": TextProtocol(max_len=4_000),
  "skyformer": TextProtocol(max_len=4_000, padded_len=4_096),
  "s4": TextProtocol(max_len=4_000, min_count=10),
}
# Numbers in TransJect's paper use Skyformer's protocol.
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
  """Opens pairs of papers; reads them from LRA's release on first use.

  Args:
    data_dir: folder of prepared data; see `data_folder`.
    protocol: "jaxformers", "lra", "skyformer" and "paper": tokens are bytes.
      "s4": tokens are the characters that occur at least 10 times in train, and
      <eos> ends every document.
    archive: path of lra_release.gz, of its unpacked folder, or of another
      archive or folder with `new_aan_pairs.{train,eval,test}.tsv`; "" searches
      for one.
    max_len: number of tokens to which documents are cut; 0 for the length of
      the protocol.
    num_train, num_validation, num_test: number of pairs of each split; numbers
      other than LRA's are for another data set in the same format.
  """
  # Open both texts of every pair as bytes or characters.
  chosen = PROTOCOLS[choose("protocol of retrieval", protocol, PROTOCOLS)]
  origin = aan.source(num_train, num_validation, num_test)
  encoding = chosen.encoding("text1", "text2")
  splits, info = open_splits(origin, encoding, data_dir, archive)
  # Give them ids. The head of the model combines the two sequences of a pair.
  splits, vocabulary, tokenizer = with_ids(splits, info)
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
    trivial=baselines.PAIRS,
    info=info,
    tokenizer=tokenizer,
  )
