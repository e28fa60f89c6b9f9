"""Content is on the disk before it has its name; full disks are recognised."""

import errno
import json
import os

import pytest

from jaxformers.foundations import durable


@pytest.fixture
def order(monkeypatch):
  """Names of the system calls in their order, with what they are called on."""
  calls = []
  fsync, rename, replace = os.fsync, os.rename, os.replace

  def note(name, call):
    def noted(target, *rest, **keywords):
      where = target
      if name == "sync":
        where = os.readlink(f"/proc/self/fd/{target}")
      calls.append((name, os.path.basename(where)))
      return call(target, *rest, **keywords)

    return noted

  monkeypatch.setattr(os, "fsync", note("sync", fsync))
  monkeypatch.setattr(os, "rename", note("rename", rename))
  monkeypatch.setattr(os, "replace", note("rename", replace))
  return calls


def test_write_json_syncs_before_renaming(tmp_path, order):
  durable.write_json(tmp_path / "a.json", {"x": 1})
  assert json.loads((tmp_path / "a.json").read_text()) == {"x": 1}
  staged = ".a.json.staged"
  assert order == [
    ("sync", staged),
    ("rename", staged),
    ("sync", tmp_path.name),
  ]
  assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_rename_syncs_a_folder_before_renaming(tmp_path, order):
  inner = tmp_path / "staged" / "train"
  inner.mkdir(parents=True)
  (inner / "tokens.npy").write_bytes(b"1")
  durable.rename(tmp_path / "staged", tmp_path / "data")
  assert (tmp_path / "data" / "train" / "tokens.npy").read_bytes() == b"1"
  assert order == [
    ("sync", "tokens.npy"),
    ("sync", "train"),
    ("sync", "staged"),
    ("rename", "staged"),
    ("sync", tmp_path.name),
  ]


def test_write_json_keeps_the_old_file_on_error(tmp_path, monkeypatch):
  path = tmp_path / "a.json"
  durable.write_json(path, {"x": 1})
  with pytest.raises(ValueError, match="JSON compliant: nan"):
    durable.write_json(path, {"x": float("nan")})

  def full(_):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(os, "fsync", full)
  with pytest.raises(OSError, match="Errno 28"):
    durable.write_json(path, {"x": 2})
  assert json.loads(path.read_text()) == {"x": 1}
  assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
  ("number", "reason"),
  [
    (errno.ENOSPC, "disk is full"),
    (errno.EDQUOT, "quota"),
    (errno.EFBIG, "-f"),
  ],
)
def test_full_disk_reason_reads_every_form_of_error(number, reason):
  plain = OSError(number, os.strerror(number))
  quoted = RuntimeError(f"write failed: {os.strerror(number)}")
  assert reason in durable.full_disk_reason(plain)
  assert reason in durable.full_disk_reason(quoted)
  for explicit in (True, False):
    try:
      try:
        raise plain
      except OSError as error:
        if explicit:
          raise ValueError("no data") from error
        raise ValueError("no data")  # noqa: B904
    except ValueError as error:
      assert reason in durable.full_disk_reason(error)
  hidden = ValueError("no data")
  hidden.__context__, hidden.__suppress_context__ = plain, True
  assert durable.full_disk_reason(hidden) is None
  assert durable.full_disk_reason(OSError(errno.EIO, "I/O")) is None
