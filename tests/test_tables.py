"""Tables of the documentation are made of results/*.jsonl."""

import json
import shlex
from pathlib import Path

import pytest

from docs import tables
from jaxformers.models import MODELS
from jaxformers.sweep.grid import Cell
from jaxformers.sweep.runs import Sweep

ROOT = Path(__file__).parents[1]
KEYS = {
  "table": str,
  "row": str,
  "model": str | None,
  "config": str | None,
  "protocol": str | None,
  "seeds": list,
  "commit": str,
  "hardware": str,
  "minutes": float | int | str | list | None,
  "values": dict,
}
FILES = sorted((ROOT / "results").glob("*.jsonl"))


def records():
  """Yields the file and the record of every line."""
  for path in FILES:
    for line in path.read_text().splitlines():
      yield path.name, json.loads(line)


def test_pages_have_the_tables_of_the_results():
  assert not [path.name for path, _ in tables.stale_pages()]


def test_fill_replaces_a_changed_number():
  page = "<!-- table: lra_tiny/tasks -->\n\n| old |\n\n<!-- end of table -->"
  filled = tables.fill(page)
  assert "| old |" not in filled
  assert "64.34" in filled
  assert tables.fill(filled) == filled


def test_read_names_a_table_that_does_not_exist():
  with pytest.raises(ValueError, match="no_such"):
    tables.read("lra_tiny/no_such")


def test_every_record_has_its_config_protocol_seeds_commit_and_hardware():
  wrong = []
  for file, record in records():
    kinds = [isinstance(record.get(key), KEYS[key]) for key in KEYS]
    is_known = record.get("model") is None or record["model"] in MODELS
    if record.keys() != KEYS.keys() or not all(kinds) or not is_known:
      wrong.append((file, record.get("row")))
  assert not wrong


def test_every_config_of_a_record_loads():
  configs = {record["config"] for _, record in records()} - {None}
  assert len(configs) > 50
  for config in configs:
    spec, *overrides = shlex.split(config.replace("TASK", "listops"))
    Sweep(Path(), overrides).load_config(Cell(spec), 0)


def test_every_table_of_the_results_is_on_a_page():
  names = {f"{file[:-6]}/{record['table']}" for file, record in records()}
  shown = {
    name for page in tables.PAGES for name, *_ in tables.titled_tables(page)
  }
  assert names == shown


def test_fill_joins_columns_of_tables_by_the_names_of_their_rows(monkeypatch):
  common = {"minutes": None, "seeds": [], "commit": "c", "hardware": "h"}
  made = {
    "file/one": [("a", {"x": 1, "y": 2}), ("b", {"x": 3})],
    "file/two": [("b", {"x": 5}), ("c", {"x": 6})],
  }

  def read(name):
    return [common | {"row": r, "values": v} for r, v in made[name]]

  monkeypatch.setattr(tables, "read", read)
  page = "<!-- join: file\none: y, x\ntwo (2nd): x\n-->\n<!-- end of table -->"
  filled = tables.fill(page)
  assert filled.splitlines()[4:] == [
    "",
    "|  | y | x | 2nd: x |",
    "| --- | ---: | ---: | ---: |",
    "| a | 2 | 1 |  |",
    "| b |  | 3 | 5 |",
    "| c |  |  | 6 |",
    "",
    "*`results/file.jsonl`: commit c; h.*",
    "",
    "<!-- end of table -->",
  ]
  assert tables.fill(filled) == filled


def test_markdown_prints_lists_over_seeds_means_and_transposed_rows():
  value = {"mean": 50.25, "deviation": 0.5, "by_seed": [50.0, 50.5]}
  rows = [
    {"row": "a", "minutes": None, "values": {"score": value, "steps": 1200}},
    {"row": "b", "minutes": 3, "values": {"score": 7.0}},
  ]
  assert tables.markdown(rows).splitlines()[2:] == [
    "| a | 50.00, 50.50 | 1,200 |  |",
    "| b | 7.00 |  | 3 |",
  ]
  mean = tables.markdown(rows, mean=True, transposed=True).splitlines()
  assert mean[0] == "|  | a | b |"
  assert mean[2] == "| score | 50.25 ± 0.50 | 7.00 |"
