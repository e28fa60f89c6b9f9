"""LRA Text: IMDb reviews as bytes, negative or positive."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxformers.data.engine import encodings
from jaxformers.data.engine.packed import Packed
from jaxformers.data.engine.preparation import open_splits
from jaxformers.data.engine.source import Encoding
from jaxformers.data.sets import imdb
from jaxformers.foundations.ranges import Length
from jaxformers.foundations.registry import choose
from jaxformers.tasks import baselines
from jaxformers.tasks.splits import replace_all, with_validation
from jaxformers.tasks.task import TASKS, Task


@dataclasses.dataclass(frozen=True)
class TextProtocol:
  """Lengths of texts, and number of those that choose the checkpoint.

  Attributes:
    max_len: largest number of tokens of a text.
    padded_len: length of Skyformer's tensors; 0 for max_len.
    held_out: number of training texts that choose the checkpoint; 0 if another
      split chooses it.
    min_count: number of times that a character occurs in train to have an id
      of its own; 0 if tokens are bytes.
  """

  max_len: int
  padded_len: int = 0
  held_out: int = 0
  min_count: int = 0

  def encoding(self, *fields: str) -> Encoding:
    """Returns the encoding of text fields as bytes or characters."""
    if not self.min_count:
      return encodings.of_bytes(*fields)
    # S4 cuts a text to max_len - 1 characters, then appends an end.
    cut = self.max_len - 1
    return encodings.characters(*fields, min_count=self.min_count, first=cut)


# IMDb has no validation split. LRA, Skyformer and S4 let the test split choose
# the checkpoint; LRA's config says 1000 bytes where its paper says 4K.
PROTOCOLS = {
  "jaxformers": TextProtocol(max_len=4_000, held_out=2_500),
  "lra": TextProtocol(max_len=1_000),
  "skyformer": TextProtocol(max_len=4_000, padded_len=4_096),
  "s4": TextProtocol(max_len=4_096, min_count=15),
}
# Numbers in TransJect's paper are of Skyformer\'s reading of the tasks.
PROTOCOLS["paper"] = PROTOCOLS["skyformer"]
CLASSES = ("negative", "positive")  # In the order of `imdb.LABELS`.


@TASKS.register("text")
def load_text(
  *,
  data_dir: str = "",
  protocol: str = "jaxformers",
  archive: str = "",
  max_len: Length = 0,
) -> Task:
  """Opens the reviews; the first time from the archive or the network.

  Args:
    data_dir: folder of prepared data; see `data_folder`.
    protocol: "jaxformers" (4000 bytes; 2,500 reviews of train are validation),
      "lra" (1000 bytes), "skyformer" and "paper" (4000), "s4" (4096
      characters that occur 15 times in train, the last an end); in these
      validation is test.
    archive: path of aclImdb_v1.tar.gz or its folder; "" looks for it, then
      downloads.
    max_len: number of tokens that a review is cut to; 0 for the protocol's.
  """
  chosen = PROTOCOLS[choose("protocol of text", protocol, PROTOCOLS)]
  encoding = chosen.encoding("text")
  splits, info = open_splits(imdb.SOURCE, encoding, data_dir, archive)
  splits, vocabulary, tokenizer = with_ids(splits, info)
  return Task(
    name="text",
    protocol=protocol,
    splits=with_validation(splits, chosen.held_out),
    selection="validation" if chosen.held_out else "test",
    vocabulary=vocabulary,
    max_len=max_len or chosen.max_len,
    padded_len=max_len or chosen.padded_len,
    num_classes=len(CLASSES),
    trivial=baselines.HISTOGRAMS,
    info=info,
    tokenizer=tokenizer,
    classes=CLASSES,
  )


def with_ids(
  splits: Mapping[str, Packed], info: dict[str, Any]
) -> tuple[dict[str, Packed], tuple[str, ...], str]:
  """Gives splits of bytes or characters their ids.

  Characters have a fitted vocabulary, which is taken out of `info`, and end
  with <eos>; bytes have a fixed one, byte + 1.

  Returns:
    The splits, the vocabulary, and the name of the tokenizer.
  """
  if "vocabulary" not in info:
    return replace_all(splits, shift=1), encodings.BYTES, "bytes"
  vocabulary = tuple(info.pop("vocabulary"))
  return replace_all(splits, end=2), vocabulary, "characters"
