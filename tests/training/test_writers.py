import builtins
import json
import sys
import types

import pytest

from jaxformers.training.writers import Writers

OFF = {"tensorboard": False, "wandb": False}


def steps(folder):
  text = (folder / "metrics.jsonl").read_text()
  return [json.loads(line)["step"] for line in text.splitlines()]


def test_a_line_a_step(tmp_path):
  with Writers(tmp_path, 0, OFF) as writers:
    writers.write(1, {"train/loss": 0.1})
    writers.write(2, {"train/loss": 0.2})
    assert steps(tmp_path) == [1, 2]  # Flushed: a killed run keeps them.


def test_going_on_cuts_back_to_the_checkpoint(tmp_path):
  with Writers(tmp_path, 0, OFF) as writers:
    for step in (1, 2, 3):
      writers.write(step, {"x": 1.0})
  with (tmp_path / "metrics.jsonl").open("a") as file:
    file.write('{"step": 4, "x')  # Killed while it wrote.
  with Writers(tmp_path, 2, OFF) as writers:
    writers.write(3, {"x": 2.0})
  assert steps(tmp_path) == [1, 2, 3]


def test_damaged_lines_are_left_out_and_told(tmp_path, capsys):
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
  assert "damaged lines were left out (2, 3, 4)" in capsys.readouterr().err


def test_metrics_that_are_gone_are_told(tmp_path, capsys):
  with Writers(tmp_path, 5, OFF) as writers:
    writers.write(6, {"x": 2.0})
  assert steps(tmp_path) == [6]
  assert "the metrics up to step 5 are lost" in capsys.readouterr().err


def test_tensorboard_reads_what_is_written(tmp_path):
  pytest.importorskip("tensorboardX")
  loader = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator"
  )
  with Writers(tmp_path, 0, OFF | {"tensorboard": True}) as writers:
    writers.write(3, {"train/loss": 0.5})
  events = loader.EventAccumulator(str(tmp_path / "tensorboard"))
  events.Reload()
  (event,) = events.Scalars("train/loss")
  assert (event.step, event.value) == (3, 0.5)


def test_wandb_gets_the_scalars_of_one_run(tmp_path, monkeypatch):
  calls = []
  run = types.SimpleNamespace(
    log=lambda scalars, step: calls.append((step, scalars)),
    finish=lambda: calls.append("finish"),
  )
  identities = []

  def init(**kwargs):
    identities.append(kwargs["id"])
    return run

  wandb = types.SimpleNamespace(init=init)
  monkeypatch.setitem(sys.modules, "wandb", wandb)
  for step in (1, 2):
    with Writers(tmp_path, step - 1, OFF | {"wandb": True}) as writers:
      writers.write(step, {"train/loss": 0.5})
  assert calls == [
    *((1, {"train/loss": 0.5}), "finish"),
    *((2, {"train/loss": 0.5}), "finish"),
  ]
  assert identities[0] == identities[1]  # Taken up again, not begun anew.


@pytest.mark.parametrize(
  ("extra", "module"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")]
)
def test_a_writer_that_is_not_installed(tmp_path, monkeypatch, extra, module):
  real = builtins.__import__

  def without(name, *args, **kwargs):
    if name == module:
      raise ImportError(name)
    return real(name, *args, **kwargs)

  monkeypatch.setattr("importlib.import_module", lambda name: without(name))
  message = rf"config.{extra} is on.*jaxformers\[{extra}\]"
  with pytest.raises(ValueError, match=message):
    Writers(tmp_path, 0, OFF | {extra: True})
