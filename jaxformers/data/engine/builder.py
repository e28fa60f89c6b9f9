"""Writes and reads array_record files with tensorflow-datasets.

The stock builders need TensorFlow to unpack their archives; `SourceBuilder`
does not. Import this module lazily: tensorflow-datasets takes a second.
"""

from __future__ import annotations

import contextlib
import io
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

from jaxformers.data.engine import metadata, pictures
from jaxformers.data.engine.source import Source
from jaxformers.errors import UserError

FORMAT = "array_record"


class SourceBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  """Builder of one source; `builder_class` makes its subclass.

  Attributes:
    source: the data set.
    archive: path of its archive, or None to download it.
  """

  VERSION = tfds.core.Version("1.0.0")
  source: Source
  archive: Path | None = None

  def _info(self) -> tfds.core.DatasetInfo:
    features = {
      name: _feature(kind) for name, kind in self.source.features.items()
    }
    return tfds.core.DatasetInfo(
      builder=self,
      homepage=self.source.homepage or None,
      features=tfds.features.FeaturesDict(features),
      disable_shuffling=not self.source.shuffled,
    )

  def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
    # Download where there is no local archive; generated data have no URL.
    archive = self.archive
    if archive is None and self.source.url:
      archive = Path(dl_manager.download(self.source.url))
    return {
      split: self._generate_examples(rows)
      for split, rows in self.source.read(archive).items()
    }

  def _generate_examples(self, rows: Any) -> Any:
    # Yield every example once, with its images as files.
    image_names = [
      name
      for name, feature in self.info.features.items()
      if isinstance(feature, tfds.features.Image)
    ]
    keys: set[str | int] = set()
    for key, example in rows:
      # Refuse duplicates here, to name the archive and the remedy.
      if key in keys:
        raise UserError(
          f"{self.archive or self.name} holds the example {key!r} twice: give "
          "an archive or a folder with one file of each name. Nothing was kept "
          "of it."
        )
      keys.add(key)
      # Encode arrays by Pillow, for tensorflow-datasets would use TensorFlow;
      # images that are files already, as bytes, stay as they are.
      encoded = {
        name: _png(example[name])
        for name in image_names
        if isinstance(example[name], np.ndarray)
      }
      yield key, {**example, **encoded}


def _png(pixels: np.ndarray) -> bytes:
  """Returns pixels [height, width, channels] as PNG, compressed for speed."""
  file = io.BytesIO()
  Image.fromarray(np.squeeze(pixels)).save(file, "PNG", compress_level=1)
  return file.getvalue()


def _feature(kind: Any) -> Any:
  """Returns the feature of tensorflow-datasets for one of a `Source`."""
  if kind is bytes:
    return tfds.features.Text()
  if kind is np.uint8:
    return tfds.features.Tensor(
      shape=(None,), dtype=np.uint8, encoding=tfds.features.Encoding.BYTES
    )
  if all(isinstance(part, int) for part in kind):
    return tfds.features.Image(shape=kind, encoding_format="png")
  return tfds.features.ClassLabel(names=list(kind))


def builder_class(source: Source) -> type[SourceBuilder]:
  """Returns the builder of a source, named after it."""
  # tensorflow-datasets compares a download with its size and checksum.
  fields: dict[str, Any] = {"source": source, "name": source.name}
  if source.url:
    info = tfds.download.checksums.UrlInfo(
      size=source.size, checksum=source.sha256, filename=source.archives[0]
    )
    fields["url_infos"] = {source.url: info}
  # Make the subclass without registering it: another source may share a name.
  title = "".join(word.capitalize() for word in source.name.split("_"))
  return types.new_class(
    title,
    (SourceBuilder,),
    {"skip_registration": True},
    lambda namespace: namespace.update(fields, __module__=__name__),
  )


def prepare(
  source: Source, archive: Path | None, folder: Path, downloads: Path
) -> None:
  """Writes a source into folder/NAME/VERSION.

  Args:
    source: the data set.
    archive: path of its archive, or None to download or generate it.
    folder: folder of the array_record files.
    downloads: folder of downloaded archives.

  Raises:
    UserError: for an archive with other content than expected, or a download
      that fails or has another checksum than the authors', with the remedy.
  """
  # Write the files without the messages of tensorflow-datasets.
  builder = builder_class(source)(data_dir=folder, file_format=FORMAT)
  builder.archive = archive
  tfds.disable_progress_bar()  # The bar of `archive.members` says more.
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
    # Other errors than those of a download keep their own message.
    if archive is not None or not source.url:
      raise
    name = source.archives[0]
    raise UserError(
      f"{source.url} could not be downloaded ({error}): run again, or fetch "
      f"{name} elsewhere and pass --archive PATH/{name} (prepare) or "
      f"--config.task.archive=PATH/{name}."
    ) from error


def open_prepared(source: Source, folder: Path) -> dict[str, Sequence[Any]]:
  """Returns the splits that `prepare` wrote, by random access."""
  builder = builder_class(source)(data_dir=folder, file_format=FORMAT)
  decoders = _decoders(source, builder.info.features, folder)
  return {
    name: builder.as_data_source(name, decoders=decoders)
    for name in builder.info.splits
  }


@tfds.decode.make_decoder()
def _pixels(content: bytes, feature: Any, folder: Path) -> np.ndarray:
  """Decodes a JPEG or PNG; tensorflow-datasets would accept any format."""
  height, width, channels = feature.shape
  picture = pictures.decode(
    content,
    lambda reason: UserError(
      f"{folder} holds an image that is {reason}. Delete it, and prepare it "
      "again."
    ),
    mode="L" if channels == 1 else "RGB",
    size=(width, height) if width and height else None,
  )
  return np.asarray(picture).reshape(picture.height, picture.width, channels)


def _decoders(
  source: Source, features: Mapping[str, Any], folder: Path
) -> dict[str, Any] | None:
  """Returns decoders of the images of a set: features of bytes stay files."""
  images = {
    name: kind
    for name, kind in source.features.items()
    if name in features and isinstance(features[name], tfds.features.Image)
  }
  decoders = {
    name: tfds.decode.SkipDecoding() if kind is bytes else _pixels(folder)
    for name, kind in images.items()
  }
  return decoders or None


def open_images(folder: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
  """Returns encoded images that a stock builder has prepared, and classes.

  Args:
    folder: folder of dataset_info.json, such as imagenet2012/5.1.0.

  Returns:
    The splits, by random access, `image` being bytes; and the names of classes.

  Raises:
    UserError: for another format than array_record, no images with labels, or
      metadata that cannot be read; see `metadata.open_directory`.
  """
  # Require an image and a label with names of classes.
  builder = metadata.open_directory(folder)
  _check_format(builder, folder)
  features = dict(builder.info.features.items())
  names = getattr(features.get("label"), "names", None)
  is_image = isinstance(features.get("image"), tfds.features.Image)
  if names is None or not is_image:
    raise UserError(
      f"{folder} has the features {sorted(features)}, not `image` and `label` "
      "with names of classes: give the directory of a set of images."
    )
  # Keep images encoded: they are decoded in batches.
  raw = {"image": tfds.decode.SkipDecoding()}
  splits = {
    name: builder.as_data_source(name, decoders=raw)
    for name in builder.info.splits
  }
  return splits, tuple(names)


def open_texts(folder: Path) -> dict[str, Iterator[bytes]]:
  """Returns the texts of every split that a stock builder has prepared.

  They are those of the feature `text`, or of the only text of an example.

  Args:
    folder: folder of dataset_info.json, such as wiki40b/en/1.3.0.

  Raises:
    UserError: for another format than array_record, or no such feature.
  """
  # Find the one feature of text.
  builder = metadata.open_directory(folder)
  _check_format(builder, folder)
  features = builder.info.features
  names = [
    name
    for name, feature in features.items()
    if isinstance(feature, tfds.features.Text)
  ]
  if "text" in names:
    names = ["text"]
  if len(names) != 1:
    texts_named = ", ".join(names) or "no text"
    raise UserError(
      f"{folder} has the features {sorted(features)}, and among them "
      f"{texts_named}: give the directory of a set with one text an example, "
      "or with one called text."
    )

  def texts(split: str) -> Iterator[bytes]:
    for example in builder.as_data_source(split):
      yield bytes(example[names[0]])

  return {split: texts(split) for split in builder.info.splits}


def _check_format(builder: Any, folder: Path) -> None:
  suffix = builder.info.file_format.file_suffix
  if suffix != FORMAT:
    raise UserError(
      f"{folder} is in {suffix}, which only TensorFlow can read: prepare it "
      f"again with file_format={FORMAT!r}."
    )


def open_stock(source: Source, folder: Path) -> dict[str, Sequence[Any]]:
  """Returns the splits of a directory that a stock builder has prepared.

  Args:
    source: expected data set; its counts and class names are verified.
    folder: folder of dataset_info.json.

  Raises:
    UserError: for other features, classes or counts, or another format than
      array_record.
  """
  if not source.counts:
    raise UserError(
      f"{folder} is a directory of tensorflow-datasets, but {source.name} is "
      f"read only from {' or '.join(source.archives)}: give one of these."
    )
  builder = metadata.open_directory(folder)
  _check_format(builder, folder)
  # Compare features and class names. Some stock builders have no `id`.
  features = dict(builder.info.features.items())
  for name, kind in source.features.items():
    if name == "id" and name not in features:
      continue
    classes = getattr(features.get(name), "names", None)
    if name not in features or (name == "label" and classes != list(kind)):
      raise UserError(
        f"{folder} has the features {features} and not those of "
        f"{source.name}, {dict(source.features)}: give the directory of "
        f"{source.name}."
      )
  # Compare the number of examples of every split.
  sizes = {
    name: split.num_examples for name, split in builder.info.splits.items()
  }
  for name, count in source.counts.items():
    if sizes.get(name) != count:
      raise UserError(
        f"{folder} holds {sizes.get(name, 0):,} examples under {name!r} "
        f"instead of {count:,}: prepare it again."
      )
  # Open the splits that the source has; a stock builder may have more.
  decoders = _decoders(source, features, folder)
  return {
    name: builder.as_data_source(name, decoders=decoders)
    for name in source.counts
  }
