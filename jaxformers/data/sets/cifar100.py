"""CIFAR-100 (Krizhevsky 2009): 60,000 images of 32 x 32 pixels in colour."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxformers.data.engine import archive as archives
from jaxformers.data.engine.source import Keyed, Source, collect
from jaxformers.data.sets.cifar10 import pickle_error, read_batch

_NAMES = """
  apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy
  bridge bus butterfly camel can castle caterpillar cattle chair chimpanzee
  clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
  flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower
  leopard lion lizard lobster man maple_tree motorcycle mountain mouse
  mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree
  plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea
  seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
  sunflower sweet_pepper table tank telephone television tiger tractor train
  trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
LABELS = tuple(_NAMES.split())
PER_LABEL = {"train": 500, "test": 100}
MAX_BYTES = 1 << 29


def _images(archive: Path) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
  """Yields (split, key, example) of every image, with its fine label."""
  for split, name, content in archives.placed_members(
    archive, _split, max_bytes=MAX_BYTES
  ):
    if not name.endswith(".bin"):
      raise pickle_error(archive, name, SOURCE)
    # Each image has two labels: coarse, then fine.
    images = read_batch(archive, name, content, LABELS, label_bytes=2)
    for k, (image, label) in enumerate(images):
      example = {"id": f"{split}_{k:05d}", "image": image, "label": label}
      yield split, k, example


def _split(name: str) -> str | None:
  """Returns the split of a batch, binary or pickled; None for other files."""
  stem = name.rpartition("/")[2].removesuffix(".bin")
  return stem if stem in PER_LABEL else None


def read(archive: Path) -> dict[str, list[Keyed]]:
  """Reads both splits: `id`, `image`, uint8 [32, 32, 3], and fine `label`.

  Args:
    archive: path of the authors' binary archive, or of its unpacked folder.

  Raises:
    UserError: for an archive that is truncated or has unexpected counts, and
      for the authors' Python archive, which consists of pickles.
  """
  return collect(_images(archive), archive, PER_LABEL, LABELS)


SOURCE = Source(
  name="cifar100",
  features={"id": bytes, "image": (32, 32, 3), "label": LABELS},
  read=read,
  archives=("cifar-100-binary.tar.gz", "cifar-100-binary"),
  url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
  sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
  size=168_513_733,
  counts={"train": 50_000, "test": 10_000},
  homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
)
