"""Files of a workdir: what is written is read, and damage is told."""

import importlib
import json
import math

import pytest

from jaxformers.commands import console, depth, published, results
from jaxformers.foundations import workdirs
from tests import results as made
from tests.assertions import assert_all

COMMANDS = (
  "smoothness",
  "lipschitz",
  "inverse",
  "perplexity",
  "segmentation",
  "robustness",
  "export",
  "report",
)


@pytest.mark.parametrize(
  ("content", "problem"),
  [
    ('{"model_type": "bert"}', "digest of config.json"),
    ("[1]", "config.json holds no JSON object"),
    ('{"seed": ', "config.json cannot be read as JSON"),
  ],
)
def test_commands_refuse_the_config_of_another_program(
  content, problem, tmp_path
):
  (tmp_path / "config.json").write_text(content)

  def check(name):
    command = importlib.import_module(console.COMMANDS[name])
    more = {"export": ["--out", "out"]}
    with pytest.raises(SystemExit) as stopped:
      command.main([str(tmp_path), *more.get(name, ())])
    message = str(stopped.value)
    assert str(tmp_path) in message
    assert problem in message
    assert "--workdir" in message

  assert_all(check, zip(COMMANDS))


def test_commands_refuse_a_folder_of_published_weights(tmp_path):
  (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
  (tmp_path / "model.safetensors").write_bytes(b"")
  command = importlib.import_module(console.COMMANDS["smoothness"])
  with pytest.raises(SystemExit, match="is no run.*config.pretrained="):
    command.main([str(tmp_path)])


@pytest.mark.parametrize("content", ['{"accuracy": 0.5}', "[1]", "{"])
@pytest.mark.parametrize("command", [results, published, depth])
def test_table_commands_refuse_results_of_another_program(
  command, content, tmp_path
):
  (tmp_path / "results.json").write_text(content)
  with pytest.raises(SystemExit, match=r"not a run.*results\.json"):
    command.main([str(tmp_path)])


def test_read_metrics_returns_the_written_records(tmp_path):
  records = [
    (1, {"train/loss": 0.1, "ü": 1e-30}),
    (2, {"train/loss": math.inf}),
  ]
  lines = [workdirs.metrics_line(*record) for record in records]
  path = tmp_path / "metrics.jsonl"
  path.write_text("".join([*lines, lines[0][:-9]]))  # Killed while it wrote.
  assert workdirs.read_metrics(tmp_path) == (
    [{"step": step, **scalars} for step, scalars in records],
    [],
  )


def test_read_metrics_detects_every_flipped_bit(tmp_path):
  """Or its record is the same, or it is told."""
  path = tmp_path / "metrics.jsonl"
  line = workdirs.metrics_line(7, {"train/loss": 0.25}).encode()
  path.write_bytes(line)
  want, _ = workdirs.read_metrics(tmp_path)
  for place in range(len(line) - 1):
    for bit in range(8):
      changed = bytearray(line)
      changed[place] ^= 1 << bit
      path.write_bytes(changed)
      records, damaged = workdirs.read_metrics(tmp_path)
      if records:
        assert {key: records[0].get(key) for key in want[0]} == want[0]
      else:
        assert damaged


@pytest.mark.slow
def test_read_config_detects_every_flipped_bit(tmp_path):
  """The field that holds the digest may be lost, but nothing else."""
  path = tmp_path / "config.json"
  content = {"seed": 3, "task": {"name": "a"}, "model": {"name": "b"}, "x": 0.5}
  content |= {"reference": {}, "optimizer": {}, "schedule": {}}
  workdirs.write(tmp_path, "config.json", content)
  assert workdirs.read_config(tmp_path) == content
  before = path.read_bytes()
  assert "digest" in json.loads(before)
  for place in range(len(before)):
    for bit in range(8):
      changed = bytearray(before)
      changed[place] ^= 1 << bit
      path.write_bytes(changed)
      try:
        restored = workdirs.read_config(tmp_path)
      except ValueError as error:
        assert str(tmp_path) in str(error)
        assert "config.json" in str(error)
      else:
        assert {key: restored.get(key) for key in content} == content


def test_results_command_leaves_out_and_names_bad_runs(tmp_path, capsys):
  """The bad run is left out and named; the others are in the table."""
  for seed in (0, 1, 2):
    folder = tmp_path / str(seed)
    folder.mkdir()
    workdirs.write(folder, "results.json", result("listops", seed))
  path = tmp_path / "1" / "results.json"
  path.write_text(
    path.read_text().replace('"accuracy": 0.5', '"accuracy": 0.6')
  )
  (tmp_path / "empty").mkdir()
  results.main([str(tmp_path), str(tmp_path / "empty")])
  told = capsys.readouterr()
  assert "50.0" in told.out
  assert "60.0" not in told.out
  assert told.err.count("Left out: ") == 2
  assert "digest of results.json" in told.err
  assert f"no results.json in {tmp_path / 'empty'}" in told.err


def result(task, seed):
  """The least that tables need of a run."""
  sizes = {"name": "transject", "num_layers": 2, "d_model": 8}
  config = {"task": {"name": task}, "model": sizes, "seed": seed}
  return made.make(config, task=task, task_description={})


def test_add_score_replaces_a_score_of_the_same_settings(tmp_path):
  made = {"command": "perplexity", "step": 3, "examples": 9}
  first = {**made, "how": {"stride": 1}, "scores": {"perplexity": 2.0}}
  again = {**first, "scores": {"perplexity": 3.0}}
  other = {**first, "how": {"stride": 4}}
  for record in (first, other, again):
    workdirs.add_score(tmp_path, record)
  assert workdirs.read_scores(tmp_path) == [other, again]
  for content in ('{"scores": [1]}', "[]", "{"):
    (tmp_path / "scores.json").write_text(content)
    with pytest.raises(ValueError, match=r"scores\.json"):
      workdirs.read_scores(tmp_path)
