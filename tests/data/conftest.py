"""Fixtures that tests of data share."""

import pytest
from PIL import EpsImagePlugin


@pytest.fixture
def no_program(monkeypatch):
  """Fails the test at its end if Pillow starts Ghostscript."""
  started = []

  def start(*args, **kwargs):
    started.append(args)
    raise OSError("no Ghostscript")

  monkeypatch.setattr(EpsImagePlugin, "Ghostscript", start)
  yield
  assert not started
