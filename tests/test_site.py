"""The site is built without a warning, and has every public name."""

import re
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

import jaxformers as jf
from jaxformers.models import MODELS

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
  """The folder of the built site; a warning is an error."""
  folder = tmp_path_factory.mktemp("site")
  config = load_config(
    str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True
  )
  config.plugins.on_startup(command="build", dirty=False)
  try:
    build(config)
  finally:
    config.plugins.on_shutdown()
  return folder


def test_every_page_is_there(site):
  for path in (ROOT / "docs").glob("*.md"):
    name = "" if path.stem == "index" else path.stem
    assert (site / name / "index.html").exists(), path
  for name in MODELS:
    text = (site / "models" / name / "index.html").read_text()
    assert f"model={name}" in text
  assert "Published numbers" in (site / "models/s5/index.html").read_text()


def test_every_public_name_is_in_the_reference(site):
  text = (site / "reference" / "index.html").read_text()
  for name in dir(jf):
    if not name.startswith("__"):
      assert re.search(rf"(\.|jf\.|\"){name}\b", text), name


def test_no_page_asks_another_host(site):
  """Neither for fonts nor for scripts."""
  for path in site.rglob("*.html"):
    loaded = re.findall(
      r"<(?:script|link|img)[^>]+(?:src|href)=\"(https?://[^\"]+)",
      path.read_text(),
    )
    assert not loaded, path
