"""Folders of models are whole, or as they were, and damage is found."""

import json
import os
import re
import stat
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import safetensors.numpy

import jaxformers as jf
from jaxformers.data.engine import digests
from jaxformers.foundations import durable, workdirs
from jaxformers.foundations.errors import UserError
from jaxformers.training import exported, weights

CONTENT = {"model": {}, "task": {}, "step": 3, "imports": ""}


@pytest.fixture(scope="module")
def model():
  return jf.load("zoo:listops-transject")


@pytest.fixture
def folder(model, tmp_path):
  return model.save(tmp_path / "model")


def files(folder):
  return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_load_detects_damage_to_any_file(folder):
  """One bit anywhere in any file, a cut file, a file that is gone."""
  rng = np.random.default_rng(0)
  for path in sorted(folder.iterdir()):
    whole = path.read_bytes()
    for _ in range(10):
      damaged = bytearray(whole)
      damaged[rng.integers(len(whole))] ^= 1 << int(rng.integers(8))
      path.write_bytes(bytes(damaged))
      with pytest.raises(UserError, match=path.name):
        jf.load(folder)
    for content in (b"", whole[: len(whole) // 2], b"[]", b"[" * 10_000):
      path.write_bytes(content)
      with pytest.raises(UserError, match=path.name):
        jf.load(folder)
    path.unlink()
    with pytest.raises(UserError):
      jf.load(folder)
    path.write_bytes(whole)
  assert jf.load(folder).step > 0


def reseal(folder, **changes):
  """Writes a record that is intact, as somebody who means harm does."""
  content = json.loads((folder / exported.RECORD).read_text())
  del content["digest"], content["digests"]
  (folder / exported.RECORD).unlink()
  digests.seal(folder, exported.RECORD, content | changes)


@pytest.mark.parametrize(
  ("field", "value"),
  [("model", []), ("task", 5), ("step", "3"), ("imports", ["os"])],
)
def test_load_refuses_record_fields_of_a_wrong_type(folder, field, value):
  reseal(folder, **{field: value})
  with pytest.raises(
    UserError, match=re.escape(f"model.json has {field}={value!r}")
  ):
    jf.load(folder)


@pytest.mark.parametrize("place", ["/dev/zero", "../model/../../x", "a/../b"])
def test_load_refuses_files_of_other_folders(folder, place):
  record = json.loads((folder / exported.RECORD).read_text())
  del record["digest"]
  record["digests"][place] = "0"
  text = json.dumps(record, sort_keys=True)
  record["digest"] = digests.xxhash.xxh3_128_hexdigest(text.encode())
  (folder / exported.RECORD).write_text(json.dumps(record))
  with pytest.raises(UserError, match=f"{place} .*folder"):
    jf.load(folder)


def change_weights(folder, change):
  path = folder / exported.PARAMETERS
  flat = change(safetensors.numpy.load_file(path))
  path.write_bytes(safetensors.numpy.save(flat))
  reseal(folder)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda a: a[..., :-1].copy(), r"\[16, 15\].*\[16, 16\]"),
    (lambda a: a.astype(np.float64), "float64.*float32"),
    (lambda a: np.full_like(a, np.nan), "tokens/embedding.*finite"),
    (lambda a: np.full_like(a, np.inf), "tokens/embedding.*finite"),
  ],
)
def test_load_refuses_weights_of_another_shape_or_type(folder, change, message):
  def change_first(flat):
    name = sorted(flat)[0]
    return flat | {name: change(flat[name])}

  change_weights(folder, change_first)
  with pytest.raises(UserError, match=message):
    jf.load(folder).predict(["[MAX 2 9 ]"])


def test_load_names_missing_weights(folder):
  change_weights(folder, lambda flat: dict(list(flat.items())[1:]))
  with pytest.raises(UserError, match="tokens/embedding.*missing"):
    jf.load(folder).predict(["[MAX 2 9 ]"])


def test_save_replaces_a_model_but_no_other_files(model, folder, tmp_path):
  before = files(folder)
  assert model.save(folder) == folder
  assert files(folder).keys() == before.keys()
  (folder / "notes.txt").write_text("mine")
  with pytest.raises(UserError, match=r"other files.*'notes.txt'"):
    model.save(folder)
  assert files(folder) == before | {"notes.txt": b"mine"}
  own = tmp_path / "own"
  own.mkdir()
  (own / "a").touch()
  with pytest.raises(UserError, match="own.*other files.*'a'"):
    model.save(own)
  (own / "a").unlink()
  assert model.save(own) == own  # It is empty now.
  with pytest.raises(UserError, match="own/model.json"):
    model.save(own / "model.json")


def test_save_refuses_the_working_directory(model, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(UserError, match=f"{tmp_path} .*replaced"):
    model.save(".")


def test_save_writes_files_with_mode_644(model, tmp_path):
  before = os.umask(0o022)
  try:
    folder = model.save(tmp_path / "model")
  finally:
    os.umask(before)
  for path in folder.iterdir():
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


@pytest.mark.parametrize("exchanges", [True, False])
def test_writing_keeps_the_old_folder_on_error(folder, monkeypatch, exchanges):
  before = files(folder)
  if not exchanges:  # As on a file system that cannot exchange.
    monkeypatch.setattr(durable.ctypes, "CDLL", lambda *_: object())
  with (
    pytest.raises(OSError, match="disk is full"),
    exported.writing(folder, CONTENT),
  ):
    raise OSError(28, "the disk is full")
  assert files(folder) == before
  with exported.writing(folder, CONTENT) as staged:
    (staged / "new").write_text("x")
  assert files(folder).keys() == {"new", exported.RECORD}
  others = {path.name for path in folder.parent.iterdir()}
  assert others - {folder.name} <= {f".{folder.name}.lock"}


KILLED = """
import os, sys, time
from pathlib import Path
from jaxformers.training import exported
folder = Path(sys.argv[1])
print("go", flush=True)
for k in range(1_000):
  content = {"model": {}, "task": {}, "step": k, "imports": ""}
  with exported.writing(folder, content) as staged:
    for name in "abc":
      (staged / name).write_text(str(k))
"""


@pytest.mark.slow
@pytest.mark.long
def test_writing_killed_at_any_moment_leaves_a_whole_folder(tmp_path):
  folder = tmp_path / "model"
  rng = np.random.default_rng(0)
  for _ in range(5):
    with subprocess.Popen(
      [sys.executable, "-c", KILLED, str(folder)], stdout=subprocess.PIPE
    ) as process:
      process.stdout.readline()
      time.sleep(0.05 + 0.2 * rng.random())
      process.kill()
    content, names = digests.verify(folder, exported.RECORD)
    assert {*names} == {"a", "b", "c"}
    for name in names:
      assert (folder / name).read_text() == str(content["step"])


def test_writing_of_two_threads_takes_turns(tmp_path):
  folder, inside, most = tmp_path / "model", [], []

  def write(k):
    with exported.writing(folder, CONTENT | {"step": k}) as staged:
      inside.append(k)
      most.append(len(inside))
      time.sleep(0.05)
      (staged / "a").write_text(str(k))
      inside.remove(k)

  threads = [threading.Thread(target=write, args=(k,)) for k in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert max(most) == 1
  content, _ = digests.verify(folder, exported.RECORD)
  assert (folder / "a").read_text() == str(content["step"])


def test_load_during_saves_reads_one_of_them(tmp_path):
  """Never the weights of one with the step of another."""
  folder, stop, seen = tmp_path / "model", threading.Event(), set()

  def write(k):
    with exported.writing(folder, CONTENT | {"step": k}) as staged:
      exported.write_parameters(staged, {"w": np.full(50, k, np.float32)})
      workdirs.write(staged, "vocabulary.json", {"k": k})

  def save():
    k = 1
    while not stop.is_set():
      write(k)
      k += 1

  write(0)
  thread = threading.Thread(target=save)
  thread.start()
  try:
    for _ in range(200):
      read = weights.read_weights(folder)
      assert {*read.params["w"].tolist()} == {read.step}
      assert read.record["k"] == read.step
      seen.add(read.step)
  finally:
    stop.set()
    thread.join()
  assert len(seen) > 1


def test_load_names_a_missing_tokenizer(tmp_path):
  jf.load("zoo:language-allpass").save(tmp_path / "model")
  (tmp_path / "model" / "tokenizer.json").unlink()
  with pytest.raises(UserError, match="tokenizer.json"):
    jf.load(tmp_path / "model")
