"""Tables in Markdown."""

from jaxformers.foundations import tables
from jaxformers.foundations.tables import markdown_table


def test_markdown_table_aligns_titles_and_cells():
  text = markdown_table(["name", "count"], [("a", 1), ("b", 22)], right=[1])
  assert text.splitlines() == [
    "| name | count |",
    "| --- | ---: |",
    "| a | 1 |",
    "| b | 22 |",
  ]


def test_markdown_table_without_rows_is_a_header():
  assert markdown_table(["a"], []) == "| a |\n| --- |"


def test_markdown_table_escapes_cells():
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
