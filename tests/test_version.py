"""The version, wherever it is written."""

import re
from pathlib import Path

import jaxformers
from jaxformers.version import __version__

ROOT = Path(__file__).parents[1]


def test_all_files_have_the_same_version():
  assert jaxformers.__version__ == __version__
  citation = (ROOT / "CITATION.cff").read_text()
  assert f"\nversion: {__version__}\n" in citation
  (date,) = re.findall(r"^date-released: (\d{4}-\d\d-\d\d)$", citation, re.M)
  changelog = (ROOT / "CHANGELOG.md").read_text()
  versions = re.findall(r"^## (.+)$", changelog, re.M)
  released = [name for name in versions if name != "Unreleased"]
  assert released[0] == f"{__version__} ({date})"
