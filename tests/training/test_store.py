"""The folder of a run: what is waited for, and what is not."""

import errno

import pytest

from jaxformers.training import store
from jaxformers.training.store import Store


def test_what_is_trouble():
  assert store.trouble(OSError(errno.ENOSPC, "")) == errno.ENOSPC
  assert store.trouble(ValueError("... UNAVAILABLE: try later")) == errno.EIO
  assert store.trouble(PermissionError(errno.EACCES, "")) == errno.EACCES
  assert not store.trouble(FileNotFoundError(errno.ENOENT, ""))
  assert not store.trouble(ValueError("of another model"))


def test_another_error_is_raised_at_once(tmp_path):
  def wrong():
    raise ValueError("of another model")

  with pytest.raises(ValueError, match="of another model"):
    Store(tmp_path, 60).patiently("step 1", wrong)


def test_the_end_of_patience(tmp_path, capsys):
  tries = []

  def stale():
    tries.append(1)
    raise OSError(errno.ESTALE, "Stale file handle")

  with pytest.raises(OSError, match="does not answer.*step 1 was not") as found:
    Store(tmp_path, 0.7).patiently("step 1", stale)
  assert found.value.errno == errno.ESTALE
  assert len(tries) == 3  # At once, after half a second, and at the end.
  assert "step 1 waits for it, 1 s at most" in capsys.readouterr().err


def test_a_probe(tmp_path):
  own = Store(tmp_path / "run")
  with pytest.raises(OSError, match="is not there"):
    own.probe(1)
  assert not own.folder.exists()
  own.folder.mkdir()
  with pytest.raises(OSError, match="is not there"):  # Another's, perhaps.
    own.probe(1)
  own.folder.joinpath(store.MARK).touch()
  own.probe(1)
  assert len(list(own.folder.iterdir())) == 1
  with pytest.raises(OSError, match="No space left"):
    own.probe(2**60)
