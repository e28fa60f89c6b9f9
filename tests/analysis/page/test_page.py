"""The page and its tables."""

import re
import subprocess

import pytest

from jaxformers.analysis.page import page as pages
from jaxformers.analysis.page.page import Page
from jaxformers.analysis.plotting import plots
from jaxformers.analysis.plotting.figures import Texts
from jaxformers.analysis.tables import papers, published
from tests.marks import BROWSER


def test_page_notes_a_figure_without_numbers():
  page = Page()
  rows = [("a", 0, 1, 0, float("nan"))]
  page.add("S", plots.over_layers(Texts("n", "Title", "c"), rows, "q"))
  assert page.figures == {}
  (note,) = page.notes
  assert note.startswith("Title: ")


def widest_table():
  """TransJect's table 2 with deviations and differences in all its columns."""
  table = papers.TRANSJECT_2
  titles = [column.title for column in table.columns]
  rows = [
    published.Row(
      model,
      "L=2 d=64, jaxformers, 2000 long",
      dict(zip(titles, theirs, strict=True)),
      {title: published.Score(41.7, 0.7, 2, 2_000) for title in titles},
    )
    for model, theirs in table.scores.items()
  ]
  return Page(papers={table.title: published.Filled(table, rows)})


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
@pytest.mark.parametrize(("width", "fits"), [(1600, True), (400, False)])
@pytest.mark.slow
def test_page_shows_wide_tables_in_full(width, fits, tmp_path):
  """A table takes the width of the window, and scrolls in a smaller one."""
  path = pages.write(widest_table(), tmp_path)
  script = """<script>addEventListener("load", () => {
    const box = document.querySelector(".scroll");
    document.title = [
      box.scrollWidth <= box.clientWidth,
      document.documentElement.scrollWidth <= innerWidth,
    ];
  });</script>"""
  path.write_text(path.read_text().replace("</body>", script + "</body>"))
  ran = subprocess.run(
    [
      BROWSER,
      "--headless",
      "--no-sandbox",
      "--disable-gpu",
      "--dump-dom",
      f"--user-data-dir={tmp_path / 'profile'}",
      f"file://{path}",
      f"--window-size={width},900",
    ],
    capture_output=True,
    text=True,
    timeout=120,
    check=True,
  )
  title = re.search("<title>(.*?)</title>", ran.stdout)[1]
  assert title == f"{str(fits).lower()},true"


def test_style_sheet_lets_tables_scroll():
  """Checks the style sheet, where there is no browser."""
  assert "body > * { max-width: 64rem;" in pages.CSS
  (rule,) = re.findall(r"\.scroll \{(.*?)\}", pages.CSS, re.S)
  assert "overflow-x: auto" in rule
  assert "max-width: 100%" in rule


@pytest.mark.slow
def test_tables_html_makes_a_line_below_a_table_a_paragraph():
  table = "| a |\n| --- |\n| 1 |"
  first, second = pages._tables_html(f"{table}\n\nRows of x differ in steps.")
  assert "<td>1</td>" in first
  assert second == "<p>Rows of x differ in steps.</p>"
