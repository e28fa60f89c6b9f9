"""Errors of a disk: which are told in one message, and which pass."""

import errno

import pytest

from jaxformers.training import disk


def test_error_number_recognises_errors_of_a_disk():
  assert disk.error_number(OSError(errno.ENOSPC, "")) == errno.ENOSPC
  assert disk.error_number(ValueError("... UNAVAILABLE: later")) == errno.EIO
  assert disk.error_number(PermissionError(errno.EACCES, "")) == errno.EACCES
  assert not disk.error_number(FileNotFoundError(errno.ENOENT, ""))
  assert not disk.error_number(ValueError("of another model"))


@pytest.mark.parametrize(
  ("error", "number", "problem"),
  [
    (
      OSError(errno.ESTALE, "Stale file handle"),
      errno.ESTALE,
      "Stale file handle",
    ),
    (
      ValueError("... No space left on device"),
      errno.ENOSPC,
      "disk is full",
    ),
    (
      OSError(errno.EDQUOT, "Quota exceeded"),
      errno.EDQUOT,
      "disk quota",
    ),
  ],
)
def test_saving_names_folder_and_content_of_a_disk_error(
  tmp_path, error, number, problem
):
  message = f"Step 1 .*{tmp_path}.*{problem}"
  with (
    pytest.raises(OSError, match=message) as raised,
    disk.saving("Step 1", tmp_path),
  ):
    raise error
  assert raised.value.errno == number


def test_saving_passes_other_errors(tmp_path):
  (tmp_path / "config.json").touch()
  for error in (ValueError("of another model"), FileNotFoundError(2, "file")):
    with (
      pytest.raises(type(error)) as raised,
      disk.saving("Step 1", tmp_path),
    ):
      raise error
    assert raised.value is error


def test_saving_reports_a_missing_workdir_as_an_absent_disk(tmp_path):
  assert not disk.holds_run(tmp_path)
  with (
    pytest.raises(OSError, match="Step 1 .*metrics.jsonl") as raised,
    disk.saving("Step 1", tmp_path),
  ):
    (tmp_path / "metrics.jsonl").open("r+b")
  assert raised.value.errno == errno.EIO


def test_saving_reports_a_timeout_as_an_absent_disk(tmp_path):
  """As after a jump of the wall clock, when libraries wait by it."""
  with (
    pytest.raises(OSError, match="Step 3 .*barrier") as caught,
    disk.saving("Step 3", tmp_path),
  ):
    raise TimeoutError("barrier")
  assert caught.value.errno == errno.ETIMEDOUT
