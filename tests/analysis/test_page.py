"""What comes onto the page."""

from jaxformers.analysis import plots
from jaxformers.analysis.page import Page


def test_a_figure_without_numbers_is_noted():
  page = Page()
  rows = [("a", 0, 1, 0, float("nan"))]
  page.add("S", plots.over_layers("n", "Title", "c", rows, "q"))
  assert page.figures == {}
  assert page.notes == ["Title: there is no number to draw."]
