"""Paths as users write them."""

import pwd
from pathlib import Path

import pytest

from jaxformers.foundations import paths


def test_expand_replaces_the_home_directory(monkeypatch):
  monkeypatch.setenv("HOME", "/home/of")
  assert paths.expand("~/a") == Path("/home/of/a")
  assert paths.expand(Path("b/~")) == Path("b/~")


def test_expand_without_home_is_refused(monkeypatch):
  def unknown(_):
    raise KeyError

  monkeypatch.delenv("HOME")
  monkeypatch.setattr(pwd, "getpwuid", unknown)
  assert paths.expand("/a/b") == Path("/a/b")
  with pytest.raises(ValueError, match="'~/a'.*HOME"):
    paths.expand("~/a")
