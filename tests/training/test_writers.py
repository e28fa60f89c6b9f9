import dataclasses
import json
import shutil
import sys
import types

import pytest

from jaxformers.config import RunConfig
from jaxformers.training.writers import Writers

MODEL = {"name": "s5", "d_model": 8, "num_layers": 1}
OFF = RunConfig.from_dict(
  {"task": {"name": "listops"}, "model": MODEL, "reference": MODEL}
)


def steps(folder):
  text = (folder / "metrics.jsonl").read_text()
  return [json.loads(line)["step"] for line in text.splitlines()]


def test_writers_write_a_line_a_step(tmp_path):
  with Writers(tmp_path, 0, OFF) as writers:
    writers.write(1, {"train/loss": 0.1})
    writers.write(2, {"train/loss": 0.2})
    assert steps(tmp_path) == [1, 2]  # Flushed: a killed run keeps them.


def test_writers_cut_back_to_the_checkpoint_when_resuming(tmp_path):
  with Writers(tmp_path, 0, OFF) as writers:
    for step in (1, 2, 3):
      writers.write(step, {"x": 1.0})
  with (tmp_path / "metrics.jsonl").open("a") as file:
    file.write('{"step": 4, "x')  # Killed while it wrote.
  with Writers(tmp_path, 2, OFF) as writers:
    writers.write(3, {"x": 2.0})
  assert steps(tmp_path) == [1, 2, 3]


def test_writers_leave_out_damaged_lines_with_a_warning(tmp_path, capsys):
  with Writers(tmp_path, 0, OFF) as writers:
    for step in (1, 2, 3, 4, 5):
      writers.write(step, {"x": 0.25})
  path = tmp_path / "metrics.jsonl"
  lines = path.read_bytes().splitlines(keepends=True)
  lines[1] = lines[1].replace(b"0.25", b"0.35")
  lines[2] = b"[3]\n"
  lines[3] = b"\xff\n"
  path.write_bytes(b"".join(lines))
  with Writers(tmp_path, 5, OFF) as writers:
    writers.write(6, {"x": 2.0})
  assert steps(tmp_path) == [1, 5, 6]
  assert "(2, 3, 4)" in capsys.readouterr().err


def test_writers_warn_of_lost_metrics(tmp_path, capsys):
  with Writers(tmp_path, 5, OFF) as writers:
    writers.write(6, {"x": 2.0})
  assert steps(tmp_path) == [6]
  assert "step 5" in capsys.readouterr().err


def test_tensorboard_reads_the_written_scalars(tmp_path):
  pytest.importorskip("tensorboardX")
  loader = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator"
  )
  with Writers(
    tmp_path, 0, dataclasses.replace(OFF, tensorboard=True)
  ) as writers:
    writers.write(3, {"train/loss": 0.5})
  events = loader.EventAccumulator(str(tmp_path / "tensorboard"))
  events.Reload()
  (event,) = events.Scalars("train/loss")
  assert (event.step, event.value) == (3, 0.5)


@pytest.fixture
def wandb_runs(monkeypatch):
  """What a stand-in for W&B is called with, in order."""
  calls = []

  def init(**kwargs):
    calls.append(("init", kwargs))
    return types.SimpleNamespace(
      log=lambda scalars, step: calls.append((step, scalars)),
      finish=lambda: calls.append("finish"),
      summary={},
    )

  def update(**kwargs):
    run = init(**kwargs)
    run.summary = types.SimpleNamespace(
      update=lambda scores: calls.append(("summary", scores))
    )
    return run

  wandb = types.SimpleNamespace(init=update)
  monkeypatch.setitem(sys.modules, "wandb", wandb)
  for name in ("PROJECT", "NAME", "RUN_GROUP", "TAGS"):
    monkeypatch.delenv(f"WANDB_{name}", raising=False)
  return calls


RUN = dataclasses.replace(OFF, wandb=True, seed=3)


def test_wandb_writer_sends_the_scalars_of_one_run(tmp_path, wandb_runs):
  for step in (1, 2):
    with Writers(tmp_path, step - 1, RUN, "lra") as writers:
      writers.write(step, {"train/loss": 0.5})
  first, second = (call for call in wandb_runs if call[0] == "init")
  assert first == second  # Taken up again, not begun anew.
  wandb_runs = [call for call in wandb_runs if call[0] != "init"]
  assert wandb_runs == [
    (1, {"train/loss": 0.5}),
    "finish",
    (2, {"train/loss": 0.5}),
    "finish",
  ]


def test_wandb_run_has_names_and_its_score(tmp_path, wandb_runs, monkeypatch):
  results = {"metric": "accuracy", "accuracy": 0.4, "parameters": 7}
  results |= {"best_step": 5, "seed": 3}
  with Writers(tmp_path, 0, RUN, "lra") as writers:
    writers.write_results(results)
  (_, options), (_, scores), _ = wandb_runs
  assert options["project"] == "jaxformers"
  assert options["name"] == "listops-s5-3"
  assert options["group"] == "listops/lra"
  assert options["tags"] == ["listops", "s5"]
  assert scores == {"test/accuracy": 0.4, "parameters": 7, "best_step": 5}
  # W&B reads its own variables where they are set.
  monkeypatch.setenv("WANDB_PROJECT", "mine")
  with Writers(tmp_path, 0, RUN, "lra"):
    pass
  assert "project" not in wandb_runs[3][1]
  assert wandb_runs[3][1]["name"] == "listops-s5-3"


def test_wandb_run_of_a_deleted_folder_is_new(tmp_path, wandb_runs):
  for _ in range(2):
    folder = tmp_path / "run"
    folder.mkdir()
    with Writers(folder, 0, RUN):
      pass
    shutil.rmtree(folder)
  first, second = (call[1]["id"] for call in wandb_runs if call != "finish")
  assert first != second


@pytest.mark.parametrize(
  ("extra", "module"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")]
)
def test_writers_refuse_a_log_that_is_not_installed(
  tmp_path, monkeypatch, extra, module
):
  monkeypatch.setitem(sys.modules, module, None)
  message = rf"config.{extra}=True .*{module}.*\[{extra}\]"
  with pytest.raises(ValueError, match=message):
    Writers(tmp_path, 0, dataclasses.replace(OFF, **{extra: True}))
  assert not [*tmp_path.iterdir()]
