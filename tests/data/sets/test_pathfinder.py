import errno
import io

import numpy as np
import pytest
from PIL import Image

from jaxformers.data.engine import encodings, preparation
from jaxformers.data.generators import pathfinder, snakes
from jaxformers.data.sets import pathfinder as f
from tests.data.archives import write_folder, write_tar
from tests.data.pictures import EPS

ENCODING = encodings.grey("grey", lambda image: image[..., 0])
SETTINGS = pathfinder.Settings(num_images=12, difficulty="easy")


def pack(source, folder, archive=""):
  return preparation.open_splits(
    source, ENCODING, data_dir=folder, archive=archive
  )


@pytest.fixture
def small_chunks(monkeypatch):
  monkeypatch.setattr(f, "CHUNK", 5)
  monkeypatch.setattr(snakes, "CHUNK", 5)


@pytest.mark.slow
def test_pathfinder_generated_equals_its_export(tmp_path, small_chunks):
  splits, info = pack(f.generated(SETTINGS, tmp_path / "work"), tmp_path)
  images = splits["easy"]
  assert (len(images), info["source"]) == (12, "generated")
  for i in range(12):
    drawing = snakes.sample(SETTINGS, i)
    np.testing.assert_array_equal(images[i], drawing.pixels.ravel())
    assert (images.labels[i], images.keys[i]) == (drawing.label, i)
  assert not list((tmp_path / "work").iterdir())
  f.export(SETTINGS, tmp_path / "lra")
  released = f.released(32, "easy", 12)
  for number, archive in enumerate(
    ("lra", "lra/pathfinder32", "lra/pathfinder32/curv_baseline")
  ):
    data = tmp_path / f"data{number}"
    splits, _ = pack(released, data, str(tmp_path / archive))
    back = splits["easy"]
    # In the order of the keys' hashes; by key it is the order of the files.
    order = np.argsort(back.keys)
    assert back.keys[order].tolist() == list(range(12))
    for i, k in enumerate(order):
      np.testing.assert_array_equal(back[k], images[i])
    np.testing.assert_array_equal(back.labels[order], images.labels)


def test_pathfinder_generation_resumes_after_an_interrupt(
  tmp_path, small_chunks, monkeypatch
):
  chunk = snakes.chunk
  asked = []

  def stopping(settings, start):
    if start == 10 and len(asked) < 3:
      asked.append(start)
      raise KeyboardInterrupt
    asked.append(start)
    return chunk(settings, start)

  monkeypatch.setattr(snakes, "chunk", stopping)
  monkeypatch.setattr(snakes.os, "cpu_count", lambda: 1)
  source = f.generated(SETTINGS, tmp_path / "work")
  with pytest.raises(KeyboardInterrupt):
    pack(source, tmp_path)
  assert not (tmp_path / "packed" / "pathfinder32-easy-12-0-grey").exists()
  before, asked[:] = sorted(set(asked)), [0, 0, 0]
  splits, _ = pack(source, tmp_path)
  assert len(splits["easy"]) == 12
  assert (before, asked[3:]) == ([0, 5, 10], [10])


def array(content):
  file = io.BytesIO()
  np.save(file, content)
  return file.getvalue()


def test_pathfinder_regenerates_damaged_chunks(tmp_path, small_chunks):
  source = f.generated(SETTINGS, tmp_path / "work")
  list(f._generate(SETTINGS, tmp_path / "work" / source.key))
  chunks = sorted((tmp_path / "work" / source.key).iterdir())
  assert [path.name for path in chunks] == [
    f"{start:09d}.npz" for start in (0, 5, 10)
  ]
  chunks[0].write_bytes(chunks[0].read_bytes()[:1_000])
  with np.load(chunks[1]) as arrays:
    flipped = {**arrays, "labels": 1 - arrays["labels"]}
  np.savez(chunks[1], **flipped)
  splits, _ = pack(source, tmp_path)
  for i in range(12):
    sample = snakes.sample(SETTINGS, i)
    np.testing.assert_array_equal(splits["easy"][i], sample.pixels.ravel())
    assert splits["easy"].labels[i] == sample.label


def test_pathfinder_generation_leaves_no_partial_chunk(
  tmp_path, small_chunks, monkeypatch
):
  def fail(file, **arrays):
    file.write(b"half")
    raise OSError(errno.ENOSPC, "No space left on device")

  monkeypatch.setattr(np, "savez", fail)
  source = f.generated(SETTINGS, tmp_path / "work")
  with pytest.raises(ValueError, match="pathfinder32-easy.*disk is full"):
    pack(source, tmp_path)
  assert not list((tmp_path / "work" / source.key).iterdir())


def picture(size=32, mode="L"):
  file = io.BytesIO()
  Image.new(mode, (size, size)).save(file, "PNG")
  return file.getvalue()


def release(rows=4, **files):
  names = [f"imgs/0/sample_{i}.png" for i in range(rows)]
  text = "".join(
    f"imgs/0 sample_{i}.png {i} {i % 2} 1.0 14 4 2 0.5 1 1\n"
    for i in range(rows)
  )
  root = "lra_release/lra_release/pathfinder32/curv_contour_length_14"
  content = dict.fromkeys(names, picture())
  content |= {"metadata/0.npy": text.encode()} | files
  others = {
    "lra_release/lra_release/pathfinder32/curv_baseline/imgs/0/x.png": b"",
    "lra_release/pathfinder64/curv_contour_length_14/imgs/0/y.png": b"",
    "lra_release/lra_release/listops-1000/basic_test.tsv": b"x",
  }
  return others | {f"{root}/{name}": data for name, data in content.items()}


def test_pathfinder_released_finds_its_level_in_the_release(tmp_path):
  path = write_tar(tmp_path / "lra_release.gz", release())
  rows = f.released(32, "hard", 4).read(path)["hard"]
  # Keys are those of LRA's own builder: they decide the split.
  assert [key for key, _ in rows] == [
    f"imgs/0_sample_{i}.png_{i + 1}" for i in range(4)
  ]
  assert [example["label"] for _, example in rows] == [
    "different",
    "same",
    "different",
    "same",
  ]


@pytest.mark.parametrize("name", ["pathfinder.tar", "pathfinder64.tar.gz"])
def test_pathfinder_released_accepts_any_archive_name(tmp_path, name):
  files = release() | {"x.png": b"a stranger", "y.npy": b"another"}
  rows = f.released(32, "hard", 4).read(write_tar(tmp_path / name, files))
  assert len(rows["hard"]) == 4


def test_pathfinder_export_refuses_to_overwrite(tmp_path):
  f.export(SETTINGS, tmp_path)
  with pytest.raises(ValueError, match="pathfinder32/curv_baseline"):
    f.export(SETTINGS, tmp_path)


def test_pathfinder_released_reads_npy_metadata(tmp_path):
  rows = [["imgs/0", f"sample_{i}.png", str(i), "1"] for i in range(4)]
  file = io.BytesIO()
  np.save(file, np.array(rows))
  path = write_folder(
    tmp_path / "x", release(**{"metadata/0.npy": file.getvalue()})
  )
  rows = f.released(32, "hard", 4).read(path)["hard"]
  assert {example["label"] for _, example in rows} == {"same"}


def test_pathfinder_released_skips_the_one_empty_picture(tmp_path):
  empty = {"imgs/0/sample_2.png": b""}
  path = write_folder(tmp_path / "x", release(**empty))
  assert len(f.released(32, "hard", 4).read(path)["hard"]) == 3
  empty["imgs/0/sample_3.png"] = b""
  path = write_folder(tmp_path / "y", release(**empty))
  with pytest.raises(ValueError, match="2 examples.*'hard'.*3"):
    f.released(32, "hard", 4).read(path)


@pytest.mark.parametrize(
  ("files", "message"),
  [
    ({"imgs/0/sample_1.png": picture(31)}, "sample_1.png.*31 x 31"),
    ({"imgs/0/sample_1.png": picture(mode="RGB")}, "sample_1.png.*mode RGB"),
    ({"imgs/0/sample_1.png": b"junk"}, "sample_1.png.*no PNG"),
    ({"imgs/0/sample_1.png": EPS}, "sample_1.png.*no PNG"),
    ({"imgs/0/sample_1.png": picture()[:50]}, "sample_1.png.*truncated"),
    (
      {"metadata/0.npy": b"imgs/0 sample_9.png 0 1\n"},
      "0.npy, row 1.*sample_9.png",
    ),
    (
      {"metadata/0.npy": b"imgs/0 sample_1.png 0 2\n"},
      "0.npy, row 1.*label '2'",
    ),
    ({"metadata/0.npy": b"imgs/0\n"}, "0.npy.*four fields"),
    ({"metadata/0.npy": b"\xff\xfe"}, "0.npy.*no metadata"),
    ({"metadata/0.npy": b"\x93NUMPYjunk"}, "0.npy.*no metadata"),
    ({"metadata/0.npy": array(np.arange(4))}, "0.npy.*four fields"),
    ({"metadata/0.npy": array(np.array(None))}, "0.npy.*no metadata"),
    ({"metadata/0.npy": array(np.ones((2, 3)))}, "0.npy.*four fields"),
    ({"metadata/0.npy": array(np.ones((2, 4)))}, "0.npy, row 1.*'1.0/1.0'"),
    (
      {
        "metadata/0.npy": array(np.ones((10, 4))).replace(
          b"(10, 4), }" + b" " * 11, b"(9999999999999, 4), }"
        )
      },
      "0.npy.*no metadata",
    ),
    ({"metadata/0.npy": b""}, "0 examples.*'hard'.*4"),
  ],
)
def test_pathfinder_released_refuses_broken_files(
  tmp_path, no_program, files, message
):
  path = write_folder(tmp_path / "x", release(**files))
  with pytest.raises(ValueError, match=message):
    f.released(32, "hard", 4).read(path)
