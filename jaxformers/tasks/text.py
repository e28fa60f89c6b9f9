"""LRA Text: IMDb reviews as bytes, negative or positive."""

from __future__ import annotations

import dataclasses

from jaxformers.data.engine import encodings, preparation
from jaxformers.data.sets import imdb
from jaxformers.registry import choose
from jaxformers.tasks.splits import hold_out
from jaxformers.tasks.task import (
  TASKS,
  Task,
  data_folder,
  histogram_regression,
  majority_class,
)


@dataclasses.dataclass(frozen=True)
class Protocol:
  """How reviews are cut, and what chooses the checkpoint.

  Attributes:
    max_len: tokens of a review.
    padded_len: of Skyformer's tensors; 0 for max_len.
    held_out: reviews of train that choose the checkpoint; 0 for all of test.
    characters: tokens are characters and not bytes.
  """

  max_len: int
  padded_len: int = 0
  held_out: int = 0
  characters: bool = False


# IMDb has no validation split. LRA, Skyformer and S4 let the test split choose
# the checkpoint; LRA's config says 1000 bytes where its paper says 4K.
PROTOCOLS = {
  "jaxformers": Protocol(max_len=4_000, held_out=2_500),
  "lra": Protocol(max_len=1_000),
  "skyformer": Protocol(max_len=4_000, padded_len=4_096),
  "s4": Protocol(max_len=4_096, characters=True),
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
    data_dir: see `data_folder`.
    protocol: "jaxformers" (4000 bytes; 2,500 reviews of train are validation),
      "lra" (1000 bytes), "skyformer" (4000), "s4" (4096 characters that occur
      15 times in train, the last an end); in these validation is test.
    archive: path of aclImdb_v1.tar.gz or its folder; "" looks for it, then
      downloads.
    max_len: tokens a review is cut to; 0 for the protocol's.
  """
  chosen = PROTOCOLS[choose("protocol of text", protocol, PROTOCOLS)]
  encoding = encodings.of_bytes("text")
  if chosen.characters:
    encoding = encodings.characters("text", min_count=15, first=4_095)
  splits, info = preparation.open_splits(
    imdb.SOURCE, encoding, data_dir=data_folder(data_dir), archive=archive
  )
  if chosen.characters:
    vocabulary = tuple(info.pop("vocabulary"))
    added, read = {"end": 2}, encodings.character_ids(vocabulary)
  else:
    vocabulary, read = encodings.BYTES, encodings.byte_ids
    added = {"shift": 1}
  splits = {n: dataclasses.replace(s, **added) for n, s in splits.items()}
  if chosen.held_out:
    splits |= hold_out(splits["train"], chosen.held_out)
  else:
    splits["validation"] = splits["test"]
  return Task(
    name="text",
    protocol=protocol,
    splits=splits,
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
    tokenize=read,
  )
