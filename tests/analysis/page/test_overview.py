"""Figures and tables of runs without their models."""

from pathlib import Path

import pytest

from jaxformers.analysis.page import overview
from jaxformers.analysis.tables.runs import RunRecord, group_by_recipe
from jaxformers.foundations import workdirs


def test_sizes_figure_draws_scores_against_varied_sizes():
  def one(seed, d_model, accuracy):
    config = {
      "seed": seed,
      "task": {"name": "text"},
      "model": {"name": "local", "num_layers": 2, "d_model": d_model},
    }
    results = {"accuracy": accuracy, "config": config}
    return RunRecord(Path("run"), config, results)

  runs = [one(0, 8, 0.5), one(1, 8, 0.6), one(0, 16, 0.7)]
  figure = overview.sizes(group_by_recipe(runs))
  assert {row[0] for row in figure.rows} == {"text local (num_layers=2)"}
  assert [row[2:] for row in figure.rows] == [
    ("d_model", 8, 50.0),
    ("d_model", 8, 60.0),
    ("d_model", 16, 70.0),
  ]
  assert overview.sizes(group_by_recipe(runs[:2])) is None
  # Another learning rate is another line.
  other = one(0, 16, 0.9)
  changed = {**other.config, "schedule": {"learning_rate": 2}}
  runs = [
    *(
      RunRecord(
        r.folder, {**r.config, "schedule": {"learning_rate": 1}}, r.results
      )
      for r in runs
    ),
    RunRecord(other.folder, changed, other.results),
  ]
  figure = overview.sizes(group_by_recipe(runs))
  assert {row[0] for row in figure.rows} == {
    "text local (num_layers=2), learning_rate=1"
  }
  assert overview.depth_against_width(group_by_recipe(runs)) is None


def test_scores_over_the_state_have_a_line_for_each_encoder():
  def one(model, width, state, accuracy, rate=0.1):
    config = {
      "seed": 0,
      "schedule": {"learning_rate": rate},
      "task": {"name": "recall", "problem": "mqar"},
      "model": {"name": model, "num_layers": 2, "d_model": width},
    }
    results = {"model": model, "accuracy": accuracy, "config": config}
    results |= {"task": "recall"}
    results |= {"sequence_accuracy": 0.0, "state_bytes": state}
    return RunRecord(Path("run"), config, results)

  made = [
    one("mamba", 32, 2_048, 0.75),
    one("mamba", 16, 1_024, 0.5),
    one("s5", 16, 512, 0.25),
  ]
  figure = overview.by_state(group_by_recipe(made))
  rows = [(row[0], *row[3:]) for row in figure.rows if row[2] == "accuracy"]
  assert rows == [
    ("s5, mqar", 512, 25.0),
    ("mamba, mqar", 1_024, 50.0),
    ("mamba, mqar", 2_048, 75.0),
  ]
  assert overview.by_state(group_by_recipe(made[:1])) is None
  # Learning rates are no seeds.
  made.append(one("mamba", 16, 1_024, 0.0, rate=10.0))
  figure = overview.by_state(group_by_recipe(made))
  rows = {(row[0], *row[3:]) for row in figure.rows if row[2] == "accuracy"}
  assert rows == {
    ("s5, mqar", 512, 25.0),
    ("mamba, mqar, learning_rate=0.1", 1_024, 50.0),
    ("mamba, mqar, learning_rate=10.0", 1_024, 0.0),
    ("mamba, mqar, learning_rate=0.1", 2_048, 75.0),
  }


def test_scores_over_minutes_have_the_mean_time_of_the_seeds(tmp_path):
  def one(seed, seconds, accuracy):
    folder = tmp_path / f"{seed}"
    folder.mkdir()
    scores = {"validation/accuracy": accuracy, "wall_seconds": seconds}
    lines = [{"train/loss": 1.0, "examples_per_second": 2.0}, scores]
    text = "".join(workdirs.metrics_line(5, line) for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    config = {"seed": seed, "task": {"name": "t"}, "model": {"name": "m"}}
    return RunRecord(folder, config, {})

  groups = group_by_recipe([one(0, 60.0, 0.5), one(1, 180.0, 0.75)])
  rows = overview.over_minutes(groups).rows
  assert [row[1:] for row in rows] == [
    (0, "validation/accuracy", 2.0, 0.5),
    (1, "validation/accuracy", 2.0, 0.75),
  ]
  # Runs of earlier versions have no times.
  (tmp_path / "old").mkdir()
  old = RunRecord(tmp_path / "old", {**groups[0].runs[0].config}, {})
  assert overview.over_minutes(group_by_recipe([old])) is None


@pytest.mark.slow
def test_speeds_are_medians_of_logged_steps(tmp_path):
  runs = []
  # The last run is on other hardware.
  for seed, rates in enumerate(((1.0, 9.0), (5.0,), (1e6,))):
    folder = tmp_path / f"{seed}"
    folder.mkdir()
    scalars = [{"validation/loss": 2.0}]
    scalars += [{"examples_per_second": rate} for rate in rates]
    text = "".join(workdirs.metrics_line(1, line) for line in scalars)
    (folder / "metrics.jsonl").write_text(text + '{"cut sh')
    config = {"seed": seed, "task": {"name": "t"}, "model": {"name": "m"}}
    hardware = {"devices": 2, "device_kind": "gpu" if seed == 2 else "cpu"}
    ended = {"parameters": 1_234, "parameter_ratio": 0.5, "hardware": hardware}
    runs.append(RunRecord(folder, config, ended))
  (group,) = group_by_recipe(runs)
  text = overview.speeds([group])
  assert text.endswith("| m | 1,234 | 0.50 | 5 | 2 cpu |")
  assert overview.speeds([]) == ""
