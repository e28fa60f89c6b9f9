"""The papers' tables with our runs beside them."""

import json
import math

import pytest

from jaxformers import models
from jaxformers.analysis.tables import published as p


def run(task, model, seed, accuracy, d_model=64, **config):
  sizes = {"num_layers": 2, "d_model": d_model, "name": model}
  return {
    "task": task,
    "model": model,
    "protocol": "jaxformers",
    "max_len": p.TEST_SETS[task].length if task in p.TEST_SETS else 0,
    "data": {},
    "parameters": 1_000,
    "parameter_ratio": 1.0,
    "baselines": {},
    "selection": "validation",
    "train_seconds": 1.0,
    "seed": seed,
    "accuracy": accuracy,
    "examples": p.TEST_SETS[task].examples if task in p.TEST_SETS else 2_000,
    "config": {"seed": seed, "task": {}, "model": sizes} | config,
  }


def test_the_tables_are_of_our_models():
  assert {*p.TABLE_1, *p.TABLE_2} <= {*models.MODELS}
  assert {len(row) for row in p.TABLE_1.values()} == {len(p.SHORT)}
  assert {len(row) for row in p.TABLE_2.values()} == {len(p.LONG)}
  # As the paper's own averages have it.
  for model, mean in (("transject", 59.6), ("skyformer", 59.4)):
    assert sum(p.TABLE_2[model]) / 5 == pytest.approx(mean, abs=0.051)


def test_a_difference_is_in_standard_errors_of_seeds_and_examples():
  score = p.Score(40.0, 1.2, 3, 2_000)
  gap, errors = score.difference(38.0)
  assert gap == 2
  want = math.sqrt(1.2**2 / 3 + (40 * 60 + 38 * 62) / 2_000)
  assert errors == pytest.approx(2 / want)
  one_seed = p.Score(40.0, math.nan, 1, 2_000)
  assert one_seed.difference(42.0)[1] == pytest.approx(
    -2 / math.sqrt((40 * 60 + 42 * 58) / 2_000)
  )


def test_rows_are_theirs_with_ours_beside_them():
  runs = [
    *(run("listops", "transject", s, a) for s, a in enumerate((0.4, 0.42))),
    run("text", "transject", 0, 0.65),
    run("listops", "transject", 0, 0.2, batch_size=4),
    run("listops", "transject", 0, 0.3, d_model=512),
    run("listops", "local", 0, 0.35),
    run("imdb", "local", 0, 0.8),
    run("listops", "transject", 5, 9.0) | {"metric": "perplexity"},
  ]
  table_rows = p.rows(runs, p.LONG, p.TABLE_2)
  assert [row.model for row in table_rows[:3]] == [*p.TABLE_2][:3]
  assert all(not row.ours for row in table_rows[:3])
  ours = [row for row in table_rows if row.model == "transject"]
  assert [row.label for row in ours] == [
    "L=2 d=64, jaxformers",
    "L=2 d=64, jaxformers",
    "L=2 d=512, jaxformers",
  ]
  assert ours[0].ours["listops"].mean == pytest.approx(41)
  assert ours[0].ours["listops"].deviation == pytest.approx(2**0.5)
  assert {*ours[0].ours} == {"listops", "text"}
  assert ours[1].ours["listops"].mean == pytest.approx(20)
  assert table_rows[-1].model == "local"
  assert table_rows[-1].theirs == {}
  text = p.markdown(table_rows, p.LONG)
  assert "| transject | L=2 d=64, jaxformers | 42.2 | 41.0 +- 1.4 (-1." in text
  assert "| 35.0 |" in text
  assert {line.count("|") for line in text.splitlines()} == {13}
  alone = run("listops", "transject", 0, 0.4) | {"protocol": "test_only"}
  shown = p.markdown(p.rows([alone], p.LONG, p.TABLE_2), p.LONG)
  assert "| L=2 d=64, test_only | 42.2 | 40.0 (-2.2" in shown
  table = p.latex(table_rows, p.LONG)
  assert r"random\_transject &" in table
  assert r"41.0 $\pm$ 1.4 (-1.2" in table
  assert {line.count("&") for line in table.splitlines()[4:-2]} == {11}
  assert [*p.tables(runs)] == [*p.TABLES]
  assert [*p.tables(runs[:3])] == ["Table 2, Long Range Arena"]


@pytest.mark.parametrize(
  ("task", "options", "fields", "reason"),
  [
    ("retrieval", {}, {"examples": 1_000}, "1,000 test examples, not 17,437"),
    ("ag_news", {}, {"examples": 1_000}, "1,000 test examples, not 7,600"),
    ("pathfinder", {"difficulty": "easy"}, {}, "difficulty=easy, not hard"),
    ("pathfinder", {"resolution": 64}, {}, "resolution=64, not 32"),
    ("listops", {"max_length": 400}, {}, "max_length=400, not 2000"),
    ("listops", {"test_max_length": 4_000}, {}, "test_max_length=4000"),
    ("listops", {}, {"protocol": "skyformer"}, "without closing brackets"),
    ("text", {}, {"max_len": 2_000}, "cut to 2,000 tokens, not 4,000"),
  ],
)
def test_scores_on_other_test_examples_have_no_difference(
  task, options, fields, reason
):
  other = run(task, "transject", 0, 0.8) | fields
  other["config"] = other["config"] | {"task": options}
  tasks, theirs = (
    (p.SHORT, p.TABLE_1) if task in p.SHORT else (p.LONG, p.TABLE_2)
  )
  table = p.rows([other], tasks, theirs)
  text = p.markdown(table, tasks)
  assert "80.0 *" in text
  assert "s.e." not in text
  (note,) = p.notes(table)
  assert note.startswith(f"* {p.TEST_SETS[task].title} (transject): ")
  assert reason in note


def test_lengths_of_tasks_do_not_split_a_row():
  runs = [
    run(task, "transject", 0, 0.4) | {"max_len": length, "data": data}
    for task, length, data in (
      ("listops", 1_999, {}),
      ("text", 4_096, {"authors_checksum": False}),
      ("image", 1_024, {}),
    )
  ]
  table = p.rows(runs, p.LONG, p.TABLE_2)
  (row_of_ours,) = [row for row in table if row.model == "transject"]
  assert {*row_of_ours.ours} == {"listops", "text", "image"}
  assert p.notes(table) == []


def test_the_command(tmp_path, capsys):
  folder = tmp_path / "run"
  folder.mkdir()
  path = folder / "results.json"
  path.write_text(json.dumps(run("imdb", "transject", 0, 0.876)))
  p.main([str(folder)])
  assert "87.6 (-0.5, 1.7 s.e.)" in capsys.readouterr().out
  p.main([str(folder), "--latex"])
  assert r"\toprule" in capsys.readouterr().out
  path.write_text(json.dumps(run("cifar10", "transject", 0, 0.5)))
  with pytest.raises(SystemExit, match="no run is of a task.*imdb"):
    p.main([str(folder)])
  with pytest.raises(SystemExit, match=r"no results\.json"):
    p.main([str(tmp_path / "nothing")])
