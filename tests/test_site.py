"""The site is built without a warning, and has every public name."""

import functools
import http.server
import re
import subprocess
import threading
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

import jaxformers as jf
from jaxformers.models import MODELS
from tests.marks import BROWSER

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


class Quiet(http.server.SimpleHTTPRequestHandler):
  """A server that logs nothing."""

  def log_message(self, *_):
    pass


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


def test_site_has_every_page_and_model(site):
  for path in (ROOT / "docs").glob("*.md"):
    name = "" if path.stem == "index" else path.stem
    assert (site / name / "index.html").exists(), path
  for name in MODELS:
    text = (site / "models" / name / "index.html").read_text()
    assert f"model={name}" in text
  assert "Published numbers" in (site / "models/s5/index.html").read_text()


def test_site_reference_has_every_public_name(site):
  text = (site / "reference" / "index.html").read_text()
  for name in dir(jf):
    if not name.startswith("__"):
      assert re.search(rf"(\.|jf\.|\"){name}\b", text), name


def test_site_loads_nothing_from_other_hosts(site):
  """Neither for fonts nor for scripts."""
  for path in site.rglob("*.html"):
    loaded = re.findall(
      r"<(?:script|link|img)[^>]+(?:src|href)=\"(https?://[^\"]+)",
      path.read_text(),
    )
    assert not loaded, path


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("page", ["", "reference/", "models/transject/"])
def test_site_fits_the_window_of_a_browser(site, tmp_path, page, width):
  """Nothing is wider than the window, and the console is empty."""
  path = site / page / "index.html"
  before = path.read_text()
  script = """<script>addEventListener("load", () => {
    document.title = document.documentElement.scrollWidth <= innerWidth;
  });</script>"""
  path.write_text(before.replace("</body>", script + "</body>"))
  handler = functools.partial(Quiet, directory=str(site))
  server = http.server.ThreadingHTTPServer(("localhost", 0), handler)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  try:
    ran = subprocess.run(
      [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--dump-dom",
        f"--user-data-dir={tmp_path}",
        "--enable-logging=stderr",
        f"--window-size={width},900",
        f"http://localhost:{server.server_port}/{page}",
      ],
      capture_output=True,
      text=True,
      timeout=120,
      check=True,
    )
  finally:
    server.shutdown()
    server.server_close()
    path.write_text(before)
  assert "CONSOLE" not in ran.stderr
  assert "<title>true</title>" in ran.stdout
