import dataclasses
import json
import pwd
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxformers.data.engine import preparation
from jaxformers.data.engine.preparation import open_splits
from jaxformers.data.engine.source import Encoding, Source

ENCODE = Encoding(
  "plain",
  lambda train: (lambda many: [[row["ids"]] for row in many], {"fitted": 1}),
  lambda example: int(example["ids"][0]),
)


def toy(read=None, **fields):
  rows = {
    "train": [
      (i, {"ids": np.full(i + 1, i, np.uint8), "label": "b"}) for i in (2, 5)
    ],
    "test": [(0, {"ids": np.array([7, 8], np.uint8), "label": "a"})],
  }
  return Source(
    name="toy",
    features={"ids": np.uint8, "label": ("a", "b")},
    read=read or (lambda archive: rows),
    settings={"seed": 3},
    shuffled=False,
    **fields,
  )


def test_open_splits_prepares_and_packs_once(tmp_path):
  calls = []

  def read(archive):
    calls.append(archive)
    return toy().read(archive)

  for _ in range(2):
    splits, info = open_splits(toy(read), ENCODE, data_dir=tmp_path)
  assert calls == [None]
  assert info["source"] == "generated"
  assert info["settings"] == {"seed": 3}
  assert (info["fitted"], info["splits"]) == (1, {"test": 1, "train": 2})
  assert [splits["train"][i].tolist() for i in range(2)] == [[2] * 3, [5] * 6]
  assert splits["train"].labels.tolist() == [1, 1]
  assert splits["train"].keys.tolist() == [2, 5]
  assert isinstance(splits["train"].tokens, np.memmap)
  # Packing anew needs no source: the array_record files are there.
  other = dataclasses.replace(ENCODE, name="other")
  open_splits(toy(read), other, data_dir=tmp_path)
  assert len(calls) == 1


def test_open_splits_leaves_no_files_after_a_failure(tmp_path):
  def rows():
    yield 0, {"ids": np.zeros(3, np.uint8), "label": "a"}
    raise ValueError("cut short")

  with pytest.raises(ValueError, match="cut short"):
    open_splits(
      toy(lambda archive: {"train": rows()}), ENCODE, data_dir=tmp_path
    )
  left = [p for p in tmp_path.rglob("*") if not p.name.startswith(".")]
  assert not [p for p in left if p.is_file()], left
  splits, _ = open_splits(toy(), ENCODE, data_dir=tmp_path)
  assert len(splits["train"]) == 2


@pytest.mark.slow
def test_open_splits_in_two_processes_agrees(tmp_path):
  code = (
    "import sys, time; from pathlib import Path;"
    "from tests.data.engine import test_preparation as t;"
    "from jaxformers.data.engine import preparation;"
    "read = lambda archive: (time.sleep(1), t.toy().read(archive))[1];"
    "folder = Path(sys.argv[1]);"
    "toy = t.toy(read);"
    "splits, _ = preparation.open_splits(toy, t.ENCODE, data_dir=folder);"
    "print(splits['train'].tokens.tolist())"
  )
  jobs = [
    subprocess.Popen(
      [sys.executable, "-c", code, str(tmp_path)],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for _ in range(2)
  ]
  outputs = [job.communicate(timeout=60) for job in jobs]
  assert [job.returncode for job in jobs] == [0, 0], outputs
  assert outputs[0][0] == outputs[1][0] == f"{[2] * 3 + [5] * 6}\n"
  waited = [text for _, text in outputs if "Another process" in text]
  assert len(waited) == 1, outputs
  prepared = [text for _, text in outputs if "Preparing toy" in text]
  assert len(prepared) == 1


def test_open_splits_removes_files_of_a_killed_process(tmp_path):
  for folder in ("tfds", "packed"):
    for name in ("toy-3", "toy-3-plain"):
      (tmp_path / folder / f".staged-{name}" / "half").mkdir(parents=True)
  open_splits(toy(), ENCODE, data_dir=tmp_path)
  assert not (tmp_path / "tfds" / ".staged-toy-3").exists()
  assert not (tmp_path / "packed" / ".staged-toy-3-plain").exists()


def archived(url="", **fields):
  return toy(archives=("toy.tar",), url=url, sha256="0" * 64, **fields)


def test_open_splits_refuses_another_archive(tmp_path):
  first, second = tmp_path / "one.tar", tmp_path / "two.tar"
  first.write_bytes(b"1")
  second.write_bytes(b"2")
  data = tmp_path / "data"
  _, info = open_splits(archived(), ENCODE, data_dir=data, archive=str(first))
  assert (info["source"], info["authors_checksum"]) == ("one.tar", False)
  record = json.loads((data / "tfds/toy-3/source.json").read_text())
  keys = ("source", "sha256", "authors_checksum")
  assert {key: record[key] for key in keys} == {key: info[key] for key in keys}
  for folder in ("packed", "nothing more"):
    with pytest.raises(ValueError, match="one.tar.*two.tar"):
      open_splits(archived(), ENCODE, data_dir=data, archive=str(second))
    if folder == "packed":  # Then the array_record files know as much.
      (data / "packed" / "toy-3-plain").rename(data / "packed" / "gone")
  first.unlink()
  open_splits(archived(), ENCODE, data_dir=data)
  also = dataclasses.replace(archived(), also=(info["sha256"],))
  assert preparation._describe(also, None)["authors_checksum"]


def test_open_splits_without_published_checksum_gives_no_warning(
  tmp_path, capsys
):
  path = tmp_path / "one.tar"
  path.write_bytes(b"1")
  unknown = dataclasses.replace(archived(), sha256="", also=())
  data = tmp_path / "data"
  _, info = open_splits(unknown, ENCODE, data_dir=data, archive=str(path))
  assert info["authors_checksum"] is None
  assert "another checksum" not in capsys.readouterr().err


def test_open_splits_without_archive_and_network_names_remedies(
  tmp_path, monkeypatch
):
  def refuse(*args, **kwargs):
    raise OSError("no route")

  monkeypatch.delenv("JAXFORMERS_DATA_ARCHIVES", raising=False)
  for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setattr(socket, "create_connection", refuse)
  began = time.monotonic()
  remote = archived("https://example.invalid/toy.tar")
  with pytest.raises(
    ValueError, match="example.invalid.*--archive PATH.*task.archive=PATH"
  ):
    open_splits(remote, ENCODE, data_dir=tmp_path)
  alone = archived(local_only="cannot be downloaded: it is LRA's")
  with pytest.raises(ValueError, match="LRA's.*toy.tar.*--archive"):
    open_splits(alone, ENCODE, data_dir=tmp_path)
  assert time.monotonic() - began < 5


@pytest.mark.parametrize("limit", [20_000, 600_000])
@pytest.mark.slow
def test_open_splits_reports_a_full_disk_with_its_folder(tmp_path, limit):
  """A limit on the size of a file stands for a full disk."""
  code = (
    "import resource, sys; from pathlib import Path; import numpy as np;"
    "from jaxformers.data.engine import preparation, source;"
    "from tests.data.engine import test_preparation as t;"
    "import tensorflow_datasets;"
    "size, folder = int(sys.argv[1]), Path(sys.argv[2]);"
    "ids = np.random.default_rng(0).integers(0, 256, 200_000, np.uint8);"
    "rows = [(0, {'ids': ids, 'label': 'a'})];"
    "toy = t.toy(lambda archive: {'train': rows});"
    "many = lambda some: [[np.tile(one['ids'], 5)] for one in some];"
    "fit = lambda train: (many, {});"
    "encoding = source.Encoding('long', fit, lambda example: 0);"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (size, size));"
    "preparation.open_splits(toy, encoding, data_dir=folder)"
  )
  command = [sys.executable, "-c", code, str(limit), str(tmp_path)]
  run = subprocess.run(command, capture_output=True, text=True, check=False)
  assert run.returncode == 1
  stage = "tfds/toy-3" if limit == 20_000 else "packed/toy-3-long"
  last = run.stderr.splitlines()[-1]
  assert f"{tmp_path / stage} " in last and "file size limit" in last
  assert "--data_dir" in last
  assert run.stderr.count("Traceback") == 1
  left = {path.parent.name for path in tmp_path.rglob("*") if path.is_file()}
  assert left <= {"packed", "tfds"} if limit == 20_000 else "packed" in left
  assert not list(tmp_path.rglob(".staged-*"))


def test_data_folder_is_the_given_or_default_folder(tmp_path, monkeypatch):
  assert preparation.data_folder(str(tmp_path / "a")) == tmp_path / "a"
  monkeypatch.setenv("JAXFORMERS_DATA_DIR", str(tmp_path / "b"))
  assert preparation.data_folder("") == tmp_path / "b"
  (tmp_path / "file").touch()
  with pytest.raises(ValueError, match="file/c.*config.data_dir"):
    preparation.data_folder(str(tmp_path / "file" / "c"))


def test_data_folder_without_home_is_refused(tmp_path, monkeypatch):
  def unknown(_):
    raise KeyError

  monkeypatch.delenv("HOME", raising=False)
  monkeypatch.delenv("JAXFORMERS_DATA_DIR", raising=False)
  monkeypatch.setattr(pwd, "getpwuid", unknown)
  with pytest.raises(ValueError, match="HOME.*--config.data_dir="):
    preparation.data_folder("")
  with pytest.raises(ValueError, match="'~/data'"):
    preparation.data_folder("~/data")
  assert preparation.data_folder(str(tmp_path / "a")) == tmp_path / "a"
  monkeypatch.setenv("JAXFORMERS_DATA_DIR", str(tmp_path / "b"))
  assert preparation.data_folder("") == tmp_path / "b"


def test_open_splits_ignores_files_of_operating_systems(tmp_path):
  folder = tmp_path / "toy"
  folder.mkdir()
  (folder / "a.txt").write_text("a")
  (folder / ".DS_Store").write_text("x")
  source = toy(archives=("toy",))

  def read(name):
    return open_splits(source, ENCODE, tmp_path / name, str(folder))

  read("now")
  (folder / ".DS_Store").write_text("xx")
  read("now")
  (folder / "a.txt").write_text("aa")
  with pytest.raises(ValueError, match="toy-3-plain.*listing"):
    read("now")
