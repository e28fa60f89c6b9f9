"""LRA Text: IMDb reviews as bytes, negative or positive."""

from __future__ import annotations

import dataclasses

from jaxformers.data import imdb
from jaxformers.registry import choose
from jaxformers.tasks.task import (
  TASKS,
  Task,
  data_folder,
  histogram_regression,
  majority_class,
)


@dataclasses.dataclass(frozen=True)
class Protocol:
  """Length in bytes, and whether a tenth of train chooses the checkpoint."""

  max_len: int
  hold_out: bool


# IMDb has no validation split. LRA and Skyformer let the test split choose the
# checkpoint; LRA's config says 1000 bytes where its paper says 4K.
PROTOCOLS = {
  "holdout": Protocol(max_len=4_000, hold_out=True),
  "lra": Protocol(max_len=1_000, hold_out=False),
  "skyformer": Protocol(max_len=4_000, hold_out=False),
}


@TASKS.register("text")
def load(
  *,
  data_dir: str = "",
  protocol: str = "holdout",
  archive: str = "",
  max_len: int = 0,
) -> Task:
  """Opens the reviews; the first time from the archive or the network.

  Args:
    data_dir: see `data_folder`.
    protocol: "holdout" (4000 bytes; 2,500 reviews of train are validation),
      "lra" (1000 bytes; validation is test) or "skyformer" (4000; the same).
    archive: path of aclImdb_v1.tar.gz; "" looks for it, then downloads.
    max_len: bytes a review is cut to; 0 for the protocol's.
  """
  choose("protocol of text", protocol, PROTOCOLS)
  chosen = PROTOCOLS[protocol]
  splits, info = imdb.load(data_folder(data_dir), archive)
  train, test = splits["train"], splits["test"]
  if chosen.hold_out:
    train, validation = imdb.hold_out(train)
  else:
    validation = test
  return Task(
    name="text",
    protocol=protocol,
    splits={"train": train, "validation": validation, "test": test},
    selection="validation" if chosen.hold_out else "test",
    vocab_size=257,
    max_len=max_len or chosen.max_len,
    num_classes=2,
    trivial={
      "majority class": majority_class,
      "byte-histogram regression": histogram_regression,
    },
    info=info,
  )
