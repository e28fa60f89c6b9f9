"""Runs in folders, and their labels."""

import json
import re
import shutil
from pathlib import Path

import pytest

from jaxformers import config as configs
from jaxformers.analysis.tables import runs
from jaxformers.foundations import workdirs
from jaxformers.foundations.errors import UserError
from tests import results as made


def test_group_by_recipe_labels_say_what_differs():
  def record(name, seed=0, **config):
    model = {"name": "local", "num_layers": 2} | config
    content = {"seed": seed, "task": {"name": name}, "model": model}
    return runs.RunRecord(Path(f"runs/{len(config)}"), content, {})

  records = [record("text"), record("text", 1), record("text", num_layers=4)]
  groups = runs.group_by_recipe(records)
  labels = [g.label for g in groups]
  assert labels == ["local, num_layers=2", "local, num_layers=4"]
  assert [len(g.runs) for g in groups] == [2, 1]
  labels = [
    g.label for g in runs.group_by_recipe([record("text"), record("image")])
  ]
  assert labels == ["text local", "image local"]


def test_results_may_lack_an_option_that_their_task_got_later():
  config = configs.plain(configs.load("lra/listops:size=tiny"))
  task = {k: v for k, v in config["task"].items() if k != "num_short"}
  runs._check_same_config(Path("run"), config, config | {"task": task})
  other = config | {"task": task | {"num_short": 5}}
  with pytest.raises(UserError, match="differ in task.num_short: 5 -> 0"):
    runs._check_same_config(Path("run"), config, other)


def test_group_by_recipe_labels_are_unique():
  """Also those that differ in more than three fields, all of seed_0."""

  def record(rate, depth, width, mlp_dim, folder="seed_0"):
    model = {"name": "local", "num_layers": depth, "d_model": width}
    model["block"] = {"mlp_dim": mlp_dim}
    config = {"seed": 0, "task": {"name": "text"}, "model": model}
    config["schedule"] = {"learning_rate": rate}
    return runs.RunRecord(Path(folder), config, {})

  records = [
    record(rate, depth, width, 4 * width)
    for rate in (1, 2)
    for depth in (2, 4)
    for width in (8, 16)
  ]
  labels = [group.label for group in runs.group_by_recipe(records)]
  assert len({*labels}) == 8
  assert "local, mlp_dim=32, d_model=8, num_layers=2, learning_rate=1" in labels
  # Of other data, which only the results know.
  data = [{"task_description": {"data": k}} for k in (1, 2)]
  first = record(1, 2, 8, 32)
  records = [
    runs.RunRecord(Path(f"run_{k}"), first.config, groups)
    for k, groups in enumerate(data)
  ]
  labels = [group.label for group in runs.group_by_recipe(records)]
  assert labels == ["local (run_0)", "local (run_1)"]
  # What has not ended counts to the others of its config.
  begun = runs.RunRecord(Path("run_2"), {**first.config, "seed": 2}, {})
  twice = runs.RunRecord(Path("run_3"), first.config, {})
  groups = runs.group_by_recipe([begun, twice, records[0]])
  assert [[record.folder.name for record in g.runs] for g in groups] == [
    ["run_0", "run_2"]
  ]


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("config", '{"seed": 0, "task": "x", "model": "bert"}', "'task.name'"),
    ("config", '{"seed": 0, "task": {}, "model": {}}', "'task.name'"),
    ("config", '{"seed": "one"}', "'seed' of config.json is 'one'"),
    ("results", "[1]", "results.json holds no JSON object"),
    ("results", '{"accuracy": 0.5}', "'task' of results.json is missing"),
    ("config", "{", "config.json cannot be read as JSON"),
  ],
)
def test_discover_notes_folders_that_are_no_runs(
  name, content, message, tmp_path
):
  (tmp_path / "checkpoints" / "one").mkdir(parents=True)
  if content.startswith("{") and len(content) > 1:  # As if written here.
    content = json.dumps(workdirs.with_digest(json.loads(content)))
  (tmp_path / "checkpoints" / "one" / f"{name}.json").write_text(content)
  records, notes = runs.discover([tmp_path / "checkpoints"])
  assert not records
  assert message in "\n".join(notes)
  assert "is not a run of this package" in "\n".join(notes)
  # Beside a checkpoint of a run there may be files of these names.
  (note,) = runs.discover([tmp_path])[1]
  assert str(tmp_path) in note


def test_run_record_reports_an_incomplete_curve(tmp_path):
  path = tmp_path / "metrics.jsonl"
  lines = [workdirs.metrics_line(step, {"x": 0.5}) for step in (1, 2)]
  path.write_text("".join(lines))

  def record():
    return runs.RunRecord(tmp_path, {}, {"metrics_records": 2})

  assert record().metrics_problem == ""
  path.write_text(lines[0])
  assert re.search(f"{path} .*1 .*2", record().metrics_problem)
  path.write_text(lines[0] + lines[1].replace("0.5", "0.6"))
  assert f"{path}: lines [2]" in record().metrics_problem
  path.unlink()
  assert re.search(f"{path} .*0 .*2", record().metrics_problem)
  path.mkdir()
  assert f"{path} cannot be read" in record().metrics_problem
  assert record().metrics == []


def test_run_record_reads_curves_once(tmp_path, monkeypatch):
  reads = []
  read = workdirs.read_metrics
  monkeypatch.setattr(
    workdirs, "read_metrics", lambda path: reads.append(path) or read(path)
  )
  record = runs.RunRecord(tmp_path, {}, {})
  assert (record.metrics, record.metrics_problem) == ([], "")
  assert record.metrics == []
  assert reads == [tmp_path]


def test_discover_leaves_out_results_of_another_config(tmp_path):
  """The others of their page stay."""
  for name in "ab":
    config = {"seed": 0, "task": {"name": name}, "model": {"name": "local"}}
    config["model"] |= {"num_layers": 2, "d_model": 8}
    config |= {"reference": {}, "optimizer": {}, "schedule": {}}
    (tmp_path / name).mkdir()
    workdirs.write(tmp_path / name, "config.json", config)
    workdirs.write(tmp_path / name, "results.json", result(name, config))
  shutil.copy(tmp_path / "b" / "config.json", tmp_path / "a")
  records, notes = runs.discover([tmp_path])
  assert [record.folder.name for record in records] == ["b"]
  assert "results.json" in notes[0] and "task.name" in notes[0]


def result(task, config):
  return made.make(config, task=task, model="local")


def test_by_size_separates_tasks_in_memory_of_one_name():
  def record(data, depth):
    model = {"name": "local", "num_layers": depth}
    config = {"seed": 0, "task": {"name": "arrays"}, "model": model}
    results = {"task_description": {"data": {"test": data}}}
    return runs.RunRecord(Path(f"runs/{data}{depth}"), config, results)

  records = [record(data, depth) for data in "ab" for depth in (1, 2)]
  points = list(runs.by_size(runs.group_by_recipe(records)))
  lines = {line for line, *_ in points}
  assert len(points) == 4 and len(lines) == 2
  assert all(line.startswith("arrays local, data ") for line in lines)


def test_by_size_separates_options_that_do_not_follow_the_size():
  def record(width, mlp_dim):
    model = {"name": "transformer", "d_model": width}
    model["block"] = {"mlp_dim": mlp_dim}
    config = {"seed": 0, "task": {"name": "listops"}, "model": model}
    return runs.RunRecord(Path(f"{width}_{mlp_dim}"), config, {})

  def lines(*records):
    points = runs.by_size(runs.group_by_recipe(records))
    return [(line, value) for line, _, value, _ in points]

  assert lines(record(64, 128), record(128, 256)) == [
    ("listops transformer ()", 64),
    ("listops transformer ()", 128),
  ]
  assert lines(record(64, 64), record(64, 512), record(128, 512)) == [
    ("listops transformer (), mlp_dim=512", 64),
    ("listops transformer (), mlp_dim=512", 128),
  ]


def test_by_size_treats_heads_and_dropout_as_sizes():
  """Rates that differ together are a size; those that differ apart are not."""

  def record(num_heads=2, rate=0.1, attention=None):
    rates = {"num_heads": num_heads}
    rates["dropout_rate"] = rate if attention is None else attention
    model = {"name": "transformer", "d_model": 8, "dropout_rate": rate}
    model |= {"mixer_defaults": rates, "block": {"dropout_rate": rate}}
    model |= {"head_dropout_rate": 0.1}
    config = {"seed": 0, "task": {"name": "imdb"}, "model": model}
    return runs.RunRecord(Path("run"), config, {})

  def sizes(*records):
    points = runs.by_size(runs.group_by_recipe(records))
    return [(line, size, value) for line, size, value, _ in points]

  heads = "imdb transformer (d_model=8)"
  assert sizes(record(2), record(4)) == [
    (heads, "num_heads", 2),
    (heads, "num_heads", 4),
  ]
  dropout = "imdb transformer (d_model=8, num_heads=2)"
  assert sizes(record(rate=0.1), record(rate=0.3)) == [
    (dropout, "dropout_rate", 0.1),
    (dropout, "dropout_rate", 0.3),
  ]
  # Only the rate of attention weights.
  assert sizes(record(attention=0.2), record(attention=0.5)) == [
    (dropout, "dropout_rate", 0.2),
    (dropout, "dropout_rate", 0.5),
  ]
  apart = sizes(record(rate=0.2), record(rate=0.3, attention=0.2), record(4))
  assert {size for _, size, _ in apart} <= {"num_heads"}
