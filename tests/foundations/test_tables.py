"""Tables in Markdown."""

from jaxformers.foundations import tables
from jaxformers.foundations.tables import markdown_table


def test_cells_stand_under_their_titles():
  text = markdown_table(["name", "count"], [("a", 1), ("b", 22)], right=[1])
  assert text.splitlines() == [
    "| name | count |",
    "| --- | ---: |",
    "| a | 1 |",
    "| b | 22 |",
  ]


def test_a_table_without_rows_is_its_header():
  assert markdown_table(["a"], []) == "| a |\n| --- |"


def test_text_in_a_cell_stays_in_it():
  cells = [
    "<script>alert(1)</script>",
    "a | b",
    "",
    "two\r\u2028lines",
    "&lt; < 2",
  ]
  head, _, line = tables.markdown_table(list("abcde"), [cells]).splitlines()
  assert "<" not in line
  assert tables.split_cells(head) == list("abcde")
  want = [" ".join(cell.splitlines()) for cell in cells]
  assert tables.split_cells(line) == want
