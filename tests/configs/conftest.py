"""What all tests of configs share."""

import pytest


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch, request):
  """Runs a test where paths such as configs/lra/text.py are found."""
  monkeypatch.chdir(request.config.rootpath)
