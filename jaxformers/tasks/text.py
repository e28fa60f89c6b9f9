"""LRA Text: classify IMDb reviews as negative or positive, from bytes."""

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
  """Lengths, tokens and validation texts of a protocol.

  Attributes:
    max_len: largest number of tokens of a text.
    padded_len: length to which Skyformer pads its tensors; 0 for max_len.
    held_out: number of training texts that are held out for validation; 0 if
      another split chooses the checkpoint.
    min_count: smallest number of occurrences in the training split for a
      character to get an id; 0 if tokens are bytes.
  """

  max_len: int
  padded_len: int = 0
  held_out: int = 0
  min_count: int = 0

  def encoding(self, *fields: str) -> Encoding:
    """Returns the encoding of text fields as bytes or characters."""
    if not self.min_count:
      return encodings.of_bytes(*fields)
    # S4 cuts a text to max_len - 1 characters, then appends <eos>.
    cut = self.max_len - 1
    return encodings.characters(*fields, min_count=self.min_count, first=cut)


# IMDb has no validation split. In LRA, Skyformer and S4 the test split chooses
# the checkpoint. LRA's config has 1,000 bytes, but its paper says 4K.
PROTOCOLS = {
  "jaxformers": TextProtocol(max_len=4_000, held_out=2_500),
  "lra": TextProtocol(max_len=1_000),
  "skyformer": TextProtocol(max_len=4_000, padded_len=4_096),
  "s4": TextProtocol(max_len=4_096, min_count=15),
}
# Numbers in TransJect's paper use Skyformer's protocol.
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
  """Opens IMDb reviews as bytes or characters, downloaded on first use.

  Args:
    data_dir: folder of prepared data; see `data_folder`.
    protocol: "jaxformers": 4,000 bytes, and 2,500 reviews of train are
      validation. The other protocols use the test split for validation. They
      read 1,000 bytes ("lra"), 4,000 bytes ("skyformer", "paper") or 4,096
      tokens ("s4"), which are the characters that occur at least 15 times in
      train, and <eos> at the end.
    archive: path of aclImdb_v1.tar.gz or of its folder; "" searches for one of
      them, and else downloads the archive.
    max_len: number of tokens to which reviews are cut; 0 for the length of the
      protocol.
  """
  # Open the reviews as bytes or characters, and give them ids.
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

  Characters use the fitted vocabulary, which is removed from `info`, and <eos>
  ends every text. Bytes use a fixed vocabulary: the id of a
  byte is its value plus 1.

  Returns:
    The splits, the vocabulary, and the name of the tokenizer.
  """
  if "vocabulary" not in info:
    return replace_all(splits, shift=1), encodings.BYTES, "bytes"
  vocabulary = tuple(info.pop("vocabulary"))
  return replace_all(splits, end=2), vocabulary, "characters"
