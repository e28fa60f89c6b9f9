"""Writes and reads array_record files with tensorflow-datasets.

The stock builders need TensorFlow to unpack their archives and to sort splits
of more than 1 GB; `SourceBuilder` does not need it. Import this module lazily:
importing tensorflow-datasets takes a second.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

from jaxformers.data.engine import metadata, pictures, sorting
from jaxformers.data.engine.source import Examples, Source
from jaxformers.foundations.errors import UserError

FORMAT = "array_record"
# `sorting` sorts large splits in parts, by sort keys below 2^128. The factor
# SPREAD distributes the places of ordered examples over all parts.
MOST_EXAMPLES = 1 << 24
SPREAD = (1 << 128) // MOST_EXAMPLES


class SourceBuilder(  # type: ignore[call-arg]  # Its base has no types.
  tfds.core.GeneratorBasedBuilder, skip_registration=True
):
  """Base class of the builder of one source; see `builder_class`.

  Attributes:
    source: the data set.
    archive: path of the archive of the data set, or None to download it.
  """

  VERSION = tfds.core.Version("1.0.0")
  source: Source
  archive: Path | None = None

  def _info(self) -> tfds.core.DatasetInfo:
    # tensorflow-datasets calls this hook to read the features.
    kinds = self.source.features
    features = {name: _feature(kind) for name, kind in kinds.items()}
    return tfds.core.DatasetInfo(
      builder=self,
      homepage=self.source.homepage or None,
      features=tfds.features.FeaturesDict(features),
      disable_shuffling=not self.source.shuffled,
    )

  def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
    # Download the archive if there is no local one; generated data have no URL.
    archive = self.archive
    if archive is None and self.source.url:
      archive = Path(dl_manager.download(self.source.url))
    return {
      split: self._generate_examples(split, rows)
      for split, rows in self.source.read(archive).items()
    }

  def _generate_examples(self, split: str, rows: Any) -> Iterator[Any]:
    # Yield (sort key, example) once per example, with images as PNG files.
    images = _names(self.info.features, tfds.features.Image)
    places: set[int] = set()
    for key, example in rows:
      # The key of an example that is not shuffled is its place.
      if not self.source.shuffled and int(key) >= MOST_EXAMPLES:
        raise UserError(
          f"{self.archive or self.name} holds more than {MOST_EXAMPLES:,} "
          "examples in one split: divide the split into several data sets."
        )
      shuffled = self.source.shuffled
      place = _hash(split, key) if shuffled else int(key) * SPREAD
      # Refuse two examples with the same key.
      if place in places:
        raise UserError(
          f"{self.archive or self.name} holds the example {key!r} twice: give "
          "an archive or a folder with one file of each name. Nothing was kept "
          "of it."
        )
      places.add(place)
      # Encode arrays with Pillow: tensorflow-datasets would use TensorFlow.
      # Images that are bytes are files already and stay unchanged.
      encoded = {
        name: _png(example[name])
        for name in images
        if isinstance(example[name], np.ndarray)
      }
      yield place, {**example, **encoded}

  def _download_and_prepare(
    self, dl_manager: Any, download_config: tfds.download.DownloadConfig
  ) -> None:
    # tensorflow-datasets calls this hook to write the files. The default hook
    # needs TensorFlow for splits of more than 1 GB.
    splits = self._split_generators(dl_manager)
    infos = [
      self._write_split(name, examples, download_config.get_shard_config())
      for name, examples in splits.items()
    ]
    self.info.set_splits(tfds.core.SplitDict(infos))

  def _write_split(
    self, split: str, examples: Iterator[Any], shard_config: Any
  ) -> tfds.core.SplitInfo:
    """Writes the same files of a split as tensorflow-datasets would."""
    # Sort all examples first: their total size determines the number of files.
    sorter = sorting.ExampleSorter(Path(self.data_dir))
    for place, example in examples:
      sorter.add(place, self.info.features.serialize_example(example))
    count, num_bytes = sorter.num_examples, sorter.num_bytes
    if not count:
      raise UserError(
        f"{self.archive or self.name} holds no example of the split {split!r}: "
        "give another archive. Nothing was kept of it."
      )
    # Divide the examples into files with equal numbers of examples.
    num_shards = shard_config.get_number_shards(num_bytes, count)
    stops = [round(count * i / num_shards) for i in range(num_shards + 1)]
    lengths = [stop - start for start, stop in itertools.pairwise(stops)]
    template = tfds.core.ShardedFileTemplate(
      data_dir=self.data_dir,
      dataset_name=self.name,
      split=split,
      filetype_suffix=FORMAT,
    )
    # Write the files one after the other.
    writer = tfds.core.ExampleWriter(self.info.file_format)
    ordered = iter(sorter)
    for i, length in enumerate(lengths):
      path = template.sharded_filepath(shard_index=i, num_shards=num_shards)
      writer.write(path, itertools.islice(ordered, length))
    return tfds.core.SplitInfo(
      name=split,
      shard_lengths=lengths,
      num_bytes=num_bytes,
      filename_template=template,
    )


def _hash(split: str, key: str | int) -> int:
  """Returns the 128-bit hash by which tensorflow-datasets sorts an example."""
  content = f"{split}{key}".replace("\\", "/").encode()
  digest = hashlib.md5(content, usedforsecurity=False).digest()
  return int.from_bytes(digest, "big")


def _names(features: Any, kind: type) -> list[str]:
  """Returns the names of the features that are instances of a class."""
  return [name for name, value in features.items() if isinstance(value, kind)]


def _png(pixels: np.ndarray) -> bytes:
  """Returns pixels [height, width, channels] as a fast, large PNG file."""
  file = io.BytesIO()
  Image.fromarray(np.squeeze(pixels)).save(file, "PNG", compress_level=1)
  return file.getvalue()


def _feature(kind: Any) -> Any:
  """Returns the feature class of tensorflow-datasets for a `Source` feature."""
  if kind is bytes:
    return tfds.features.Text()
  # Ids or real numbers: a sequence of unknown length.
  if kind in (np.uint8, np.uint16, np.float32):
    return tfds.features.Tensor(
      shape=(None,), dtype=kind, encoding=tfds.features.Encoding.BYTES
    )
  # A tuple of integers is the shape of an image; a tuple of names, of labels.
  if all(isinstance(part, int) for part in kind):
    return tfds.features.Image(shape=kind, encoding_format="png")
  return tfds.features.ClassLabel(names=list(kind))


def builder_class(source: Source) -> type[SourceBuilder]:
  """Returns the builder class of a source, which has the name of the source."""
  fields: dict[str, Any] = {"source": source, "name": source.name}
  # tensorflow-datasets verifies the size and the checksum of a download.
  if source.url:
    info = tfds.download.checksums.UrlInfo(
      size=source.size, checksum=source.sha256, filename=source.archives[0]
    )
    fields["url_infos"] = {source.url: info}
  # Do not register the subclass: several sources may have the same name.
  title = source.name.title().replace("_", "")
  fields["__module__"] = __name__
  make_class: Any = type(SourceBuilder)
  return make_class(title, (SourceBuilder,), fields, skip_registration=True)


def prepare(
  source: Source, archive: Path | None, folder: Path, downloads: Path
) -> None:
  """Writes a source into folder/NAME/VERSION.

  Args:
    source: the data set.
    archive: path of the archive, or None to download or generate the data.
    folder: folder of the array_record files.
    downloads: folder of downloaded archives.

  Raises:
    UserError: for an archive with unexpected content, a download that fails, or
      a download whose checksum differs from the authors'.
  """
  # Write the files, and hide the messages of tensorflow-datasets.
  builder = builder_class(source)(data_dir=folder, file_format=FORMAT)
  builder.archive = archive
  tfds.disable_progress_bar()  # `archive.members` has its own bar.
  failures = (
    tfds.core.download.download_manager.NonMatchingChecksumError,
    tfds.core.download.util.DownloadError,
    OSError,
  )
  try:
    with contextlib.redirect_stdout(io.StringIO()):
      builder.download_and_prepare(
        download_dir=downloads,
        download_config=tfds.download.DownloadConfig(try_download_gcs=False),
      )
  except failures as error:
    # Explain failed downloads only; keep the message of every other error.
    if archive is not None or not source.url:
      raise
    raise UserError(
      f"{source.url} could not be downloaded ({error}): run again, or fetch "
      f"{source.archives[0]} elsewhere and pass {source.archive_options}."
    ) from error


def open_prepared(source: Source, folder: Path) -> dict[str, Examples]:
  """Returns the splits that `prepare` wrote, with random access."""
  builder = builder_class(source)(data_dir=folder, file_format=FORMAT)
  return builder.as_data_source(decoders=_decoders(source, builder, folder))


@tfds.decode.make_decoder()
def _pixels(content: bytes, feature: Any, folder: Path) -> np.ndarray:
  """Decodes a JPEG or PNG file; tensorflow-datasets would accept any format."""
  height, width, channels = feature.shape
  picture = pictures.decode(
    content,
    lambda reason: UserError(
      f"{folder} holds an image that is {reason}. Delete the folder, and "
      "prepare the data again."
    ),
    mode="L" if channels == 1 else "RGB",
    size=(width, height) if width and height else None,
  )
  return np.asarray(picture).reshape(picture.height, picture.width, channels)


def _decoders(source: Source, builder: Any, folder: Path) -> dict[str, Any]:
  """Returns a decoder for every image feature; `bytes` features stay files."""
  names = _names(builder.info.features, tfds.features.Image)
  is_file = {name: source.features.get(name) is bytes for name in names}
  return {
    name: tfds.decode.SkipDecoding() if is_file[name] else _pixels(folder)
    for name in names
  }


def open_images(folder: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
  """Returns encoded images that a stock builder has prepared, and classes.

  Args:
    folder: folder of dataset_info.json, such as imagenet2012/5.1.0.

  Returns:
    The splits with random access, in which `image` is the bytes of a file; and
    the names of the classes.

  Raises:
    UserError: for a format other than array_record, a set without labelled
      images, or unreadable metadata; see `metadata.open_directory`.
  """
  # Require the features `image` and `label`, and names of the classes.
  builder = _open_directory(folder)
  features = dict(builder.info.features.items())
  names = getattr(features.get("label"), "names", None)
  is_image = isinstance(features.get("image"), tfds.features.Image)
  if names is None or not is_image:
    raise UserError(
      f"{folder} has the features {sorted(features)}, not `image` and `label` "
      "with names of classes: give the directory of a set of images."
    )
  # Keep images encoded: `Images.batch` decodes them.
  raw = {"image": tfds.decode.SkipDecoding()}
  return builder.as_data_source(decoders=raw), tuple(names)


def open_texts(folder: Path) -> dict[str, Iterator[bytes]]:
  """Returns the texts of every split that a stock builder has prepared.

  Reads the feature `text`, or the only text feature if there is no `text`.

  Args:
    folder: folder of dataset_info.json, such as wiki40b/en/1.3.0.

  Raises:
    UserError: for a format other than array_record, or if the text feature is
      missing or ambiguous.
  """
  # Find the text feature.
  builder = _open_directory(folder)
  features = builder.info.features
  names = _names(features, tfds.features.Text)
  if len(names) != 1 and "text" not in names:
    texts_named = ", ".join(names) or "no text"
    raise UserError(
      f"{folder} has the features {sorted(features)}, of which are texts: "
      f"{texts_named}. Give the directory of a set with one text feature, or "
      "with a feature called text."
    )
  text = "text" if "text" in names else names[0]
  return {
    name: (bytes(example[text]) for example in examples)
    for name, examples in builder.as_data_source().items()
  }


def _open_directory(folder: Path) -> tfds.core.DatasetBuilder:
  """Returns the builder of a directory; requires the format array_record."""
  builder = metadata.open_directory(folder)
  suffix = builder.info.file_format.file_suffix
  if suffix != FORMAT:
    raise UserError(
      f"{folder} is in {suffix}, which only TensorFlow can read: prepare it "
      f"again with file_format={FORMAT!r}."
    )
  return builder


def open_stock(source: Source, folder: Path) -> dict[str, Examples]:
  """Returns the splits of a directory that a stock builder has prepared.

  Args:
    source: expected data set; its counts and class names are verified.
    folder: folder of dataset_info.json.

  Raises:
    UserError: for unexpected features, classes or counts, or a format other
      than array_record.
  """
  if not source.counts:
    raise UserError(
      f"{folder} is a directory of tensorflow-datasets, but {source.name} is "
      f"read only from {' or '.join(source.archives)}: give one of these."
    )
  builder = _open_directory(folder)
  # Compare features and class names. Some stock builders have no `id`.
  features = dict(builder.info.features.items())
  for name, kind in source.features.items():
    if name == "id" and name not in features:
      continue
    classes = getattr(features.get(name), "names", None)
    if name not in features or (name == "label" and classes != list(kind)):
      raise UserError(
        f"{folder} has the features {features}, but {source.name} has "
        f"{dict(source.features)}: give the directory of "
        f"{source.name}."
      )
  # Compare the number of examples of every split.
  splits = builder.info.splits
  for name, count in source.counts.items():
    size = splits[name].num_examples if name in splits else 0
    if size != count:
      raise UserError(
        f"{folder} holds {size:,} examples under {name!r} instead of "
        f"{count:,}: prepare it again."
      )
  # Open only the splits of the source; a stock builder may have more.
  decoders = _decoders(source, builder, folder)
  return {
    name: builder.as_data_source(name, decoders=decoders)
    for name in source.counts
  }
