"""Fixtures that all tests of configs share."""

import pytest


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch, request):
  """Runs a test in the root folder, for paths such as configs/lra/text.py."""
  monkeypatch.chdir(request.config.rootpath)
