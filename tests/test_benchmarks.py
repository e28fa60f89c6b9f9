"""Benchmarks are not run as tests; that they can be is."""

from benchmarks import data


def test_the_loader_and_its_table(monkeypatch):
  monkeypatch.setattr(data, "ROUNDS", 1)
  rows = data.loader_speed(batches=20)
  assert [row["what"] for row in rows] == ["loader", "NumPy, a matrix"]
  assert all(row["batches/s"] > 0 for row in rows)
  text = data.table(rows).splitlines()
  assert text[0].startswith("| what | batches/s |")
  assert len(text) == 4
