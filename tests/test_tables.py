"""Tables in Markdown."""

from jaxformers.tables import markdown_table


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
