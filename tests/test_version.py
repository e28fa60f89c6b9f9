"""The version, wherever it is written."""

from pathlib import Path

import jaxformers
from jaxformers.version import __version__

ROOT = Path(__file__).parents[1]


def test_all_files_have_the_same_version():
  assert jaxformers.__version__ == __version__
  citation = (ROOT / "CITATION.cff").read_text()
  assert f"\nversion: {__version__}\n" in citation
