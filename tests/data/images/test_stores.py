"""Images where they lie."""

import io
import os
import shutil

import numpy as np
import pytest
from PIL import Image

from jaxformers.data.images import stores
from jaxformers.data.images.splits import Images
from tests.data import pictures
from tests.data.archives import write_folder


def jpeg(value, size=(20, 16)):
  file = io.BytesIO()
  Image.new("RGB", size, (value, value, value)).save(file, "JPEG")
  return file.getvalue()


@pytest.fixture
def root(tmp_path):
  files = {
    f"n0{label}/{k}.JPEG": jpeg(60 * label + k)
    for label in (1, 2, 3)
    for k in range(label)
  }
  return write_folder(tmp_path / "train", files | {"n01/note.txt": b"no"})


def test_open_folder_reads_class_folders(root):
  classes = stores.list_classes(root)
  assert classes == ("n01", "n02", "n03")
  store = stores.open_folder(root, classes)
  assert store.labels.tolist() == [0, 1, 1, 2, 2, 2]
  assert len(set(store.keys.tolist())) == 6
  split = Images(store, (16, 16, 3), True, mean=(0,) * 3, deviation=(1,) * 3)
  batch = split.batch(np.array([5, 0]))
  assert batch["targets"].tolist() == [2, 0]
  np.testing.assert_allclose(batch["inputs"][0], 182 / 255, atol=0.01)
  few = split.select(np.array([4, 1]))
  assert few.labels.tolist() == [2, 1]
  np.testing.assert_allclose(few.pixels(np.array([0])), 181, atol=1)
  assert few.digest() != split.digest()
  (root / "n02" / "0.JPEG").rename(root / "n02" / "7.JPEG")
  assert stores.open_folder(root, classes).digest() != store.digest()
  (root / "n02" / "7.JPEG").rename(root / "n02" / "0.JPEG")
  assert stores.open_folder(root, classes).digest() == store.digest()
  # A part of the classes keeps their numbers.
  with_empty = stores.open_folder(root, ("n00", "n01", "n02", "n03"))
  assert with_empty.labels.min() == 1


def test_open_folder_refuses_folders_that_are_no_classes(root, tmp_path):
  with pytest.raises(ValueError, match="'n02'.*'n01' to 'n03'"):
    stores.open_folder(root, ("n01", "n03"))
  (tmp_path / "empty" / "n01").mkdir(parents=True)
  with pytest.raises(ValueError, match=r"empty.*\.jpeg"):
    stores.open_folder(tmp_path / "empty", ("n01",))


def test_open_prepared_reads_labels_once(tmp_path):
  class Examples(list):
    asked = 0

    def __getitems__(self, rows):
      Examples.asked += len(rows)
      return [self[k] for k in rows]

  examples = Examples({"image": jpeg(k), "label": k % 3} for k in range(7))
  for _ in range(2):
    store = stores.open_prepared(examples, tmp_path / "labels")
    assert store.labels.tolist() == [0, 1, 2, 0, 1, 2, 0]
  assert Examples.asked == 7
  # Damaged labels are refused, and made again once they are removed.
  np.save(tmp_path / "labels" / "labels.npy", np.zeros(7, np.int32))
  with pytest.raises(ValueError, match=f"{tmp_path / 'labels'}/labels.npy"):
    stores.open_prepared(examples, tmp_path / "labels")
  shutil.rmtree(tmp_path / "labels")
  again = stores.open_prepared(examples, tmp_path / "labels", "other")
  assert again.labels.tolist() == store.labels.tolist()
  assert Examples.asked == 14
  assert again.digest() != store.digest()
  split = Images(store.select(np.array([6, 2])), (16, 16, 3), True)
  np.testing.assert_allclose(split.pixels(np.array([0])), 6, atol=1)


@pytest.mark.parametrize("content", [pictures.EPS, jpeg(9)[:-40], b""])
def test_pixels_names_an_image_that_cannot_be_decoded(
  root, tmp_path, no_program, content
):
  (root / "n02" / "1.JPEG").write_bytes(content)
  store = stores.open_folder(root, stores.list_classes(root))
  split = Images(store, (16, 16, 3), True)
  with pytest.raises(ValueError, match=r"n02/1\.JPEG"):
    split.pixels(np.array([1, 2]))

  class Examples(list):
    def __getitems__(self, rows):
      return [self[k] for k in rows]

  examples = Examples({"image": x, "label": 0} for x in (jpeg(1), content))
  store = stores.open_prepared(
    examples, tmp_path / "labels", origin="PATH, split 'test'"
  )
  split = Images(store.select(np.array([1])), (16, 16, 3), True)
  message = "example 1 of PATH.*'test'"
  with pytest.raises(ValueError, match=message):
    split.pixels(np.array([0]))


def test_open_folder_ignores_files_of_operating_systems(root):
  classes = stores.list_classes(root)
  digest = stores.open_folder(root, classes).digest()
  (root / ".ipynb_checkpoints").mkdir()
  (root / "__MACOSX" / "n01").mkdir(parents=True)
  (root / "n01" / "._0.JPEG").write_bytes(b"\0\5\x16\7")
  write_folder(root / "n01" / ".ipynb_checkpoints", {"0.JPEG": jpeg(1)})
  assert stores.list_classes(root) == classes
  assert stores.open_folder(root, classes).digest() == digest


def test_open_folder_follows_links_and_reads_non_utf8_names(root, tmp_path):
  other = write_folder(tmp_path / "other", {"deep/9.jpg": jpeg(9)})
  (root / "n01" / "more").symlink_to(other)
  name = os.fsencode(root) + b"/n02/\xe9.png"
  os.rename(root / "n02" / "1.JPEG", name)
  store = stores.open_folder(root, stores.list_classes(root))
  assert store.labels.tolist() == [0, 0, 1, 1, 2, 2, 2]
  split = Images(store, (16, 16, 3), True)
  assert split.pixels(np.arange(4)).shape == (4, 16, 16, 3)
  (other / "none.png").symlink_to(tmp_path / "nowhere")
  with pytest.raises(ValueError, match=r"none\.png.*link"):
    stores.open_folder(root, ("n01", "n02", "n03"))
  (other / "none.png").unlink()
  (other / "up").symlink_to(root)
  with pytest.raises(ValueError, match="up/n01.*link"):
    stores.open_folder(root, ("n01", "n02", "n03"))
