"""LRA Text: IMDb reviews as bytes, negative or positive."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxformers.data.engine import encodings, preparation
from jaxformers.data.engine.packed import Packed
from jaxformers.data.sets import imdb
from jaxformers.registry import choose
from jaxformers.tasks.splits import with_validation
from jaxformers.tasks.task import (
  TASKS,
  Task,
  data_folder,
  histogram_regression,
  majority_class,
)


@dataclasses.dataclass(frozen=True)
class TextProtocol:
  """How texts are cut, and which of them choose the checkpoint.

  Attributes:
    max_len: largest number of tokens of a text.
    padded_len: length of Skyformer's tensors; 0 for max_len.
    held_out: number of training texts that choose the checkpoint; 0 if another
      split chooses it.
    characters: True if tokens are characters, False for bytes.
  """

  max_len: int
  padded_len: int = 0
  held_out: int = 0
  characters: bool = False


# IMDb has no validation split. LRA, Skyformer and S4 let the test split choose
# the checkpoint; LRA's config says 1000 bytes where its paper says 4K.
PROTOCOLS = {
  "jaxformers": TextProtocol(max_len=4_000, held_out=2_500),
  "lra": TextProtocol(max_len=1_000),
  "skyformer": TextProtocol(max_len=4_000, padded_len=4_096),
  "s4": TextProtocol(max_len=4_096, characters=True),
}


@TASKS.register("text")
def load_text(
  *,
  data_dir: str = "",
  protocol: str = "jaxformers",
  archive: str = "",
  max_len: int = 0,
) -> Task:
  """Opens the reviews; the first time from the archive or the network.

  Args:
    data_dir: folder of prepared data; see `data_folder`.
    protocol: "jaxformers" (4000 bytes; 2,500 reviews of train are validation),
      "lra" (1000 bytes), "skyformer" (4000), "s4" (4096 characters that occur
      15 times in train, the last an end); in these validation is test.
    archive: path of aclImdb_v1.tar.gz or its folder; "" looks for it, then
      downloads.
    max_len: number of tokens that a review is cut to; 0 for the protocol's.
  """
  chosen = PROTOCOLS[choose("protocol of text", protocol, PROTOCOLS)]
  encoding = encodings.of_bytes("text")
  # S4 cuts a text to 4,095 characters, then appends an end.
  if chosen.characters:
    encoding = encodings.characters("text", min_count=15, first=4_095)
  splits, info = preparation.open_splits(
    imdb.SOURCE, encoding, data_dir=data_folder(data_dir), archive=archive
  )
  splits, vocabulary, tokenize = with_ids(splits, info)
  return Task(
    name="text",
    protocol=protocol,
    splits=with_validation(splits, chosen.held_out),
    selection="validation" if chosen.held_out else "test",
    vocabulary=vocabulary,
    max_len=max_len or chosen.max_len,
    padded_len=max_len or chosen.padded_len,
    num_classes=2,
    trivial={
      "majority class": majority_class,
      "histogram regression": histogram_regression,
    },
    info=info,
    tokenize=tokenize,
  )


def with_ids(
  splits: Mapping[str, Packed], info: dict[str, Any]
) -> tuple[dict[str, Packed], tuple[str, ...], encodings.Ids]:
  """Gives splits of bytes or characters their ids.

  Characters have a fitted vocabulary, which is taken out of `info`, and end
  with <eos>; bytes have a fixed one, byte + 1.

  Returns:
    The splits, the vocabulary, and the function from a text to its ids.
  """
  fields = {"shift": 1}
  vocabulary, tokenize = encodings.BYTES, encodings.byte_ids
  if "vocabulary" in info:
    fields = {"end": 2}
    vocabulary = tuple(info.pop("vocabulary"))
    tokenize = encodings.character_ids(vocabulary)
  ids = {n: dataclasses.replace(s, **fields) for n, s in splits.items()}
  return ids, vocabulary, tokenize
