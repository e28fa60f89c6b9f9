"""The command that compiles a config for TPUs."""

import dataclasses
import importlib.util
import json

import pytest

from jaxformers.commands import compile as compile_command
from jaxformers.foundations.errors import UserError
from jaxformers.training import topologies
from jaxformers.training.ahead import Report
from jaxformers.training.programs import Collective

SIZES = "--sizes=vocab_size=18,max_len=64,num_classes=10"
CONFIG = "lra/listops:size=tiny,model=s5"
REPORT = Report(
  "train", 2, 4, 0.5, 1.0, 1.5, 16, 0.4, 0.2, 0.0, 12.6, 19.65, 2.1, 15.4,
  "memory", (2, 16), (Collective("all-reduce", 4, True, 1, 2_000_000),), 50.0,
)  # fmt: skip


def test_table_has_memory_times_and_communication():
  text = compile_command.table([REPORT])
  assert "| train | 2 | 0.500 | 1.000 | 1.500 | 16 |" in text
  assert "| 19.65 | 2.10 | 15.40 | memory | 50 |" in text
  assert "| train | all-reduce | 4 | yes | 1 | 2.0 |" in text
  assert "counted once" not in text
  unknown = dataclasses.replace(REPORT, loops=(2, 0))
  assert "train: a loop" in compile_command.table([unknown])


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--device=v9:2x2"], "device 'v9'"),
    (["--slices=0"], "--slices=0"),
    (["--out=f", "--config.parallel=pmap"], "program='f'.*'pmap'"),
    (["--out=f", "--config.imports=json"], "program='f'.*config.imports"),
    (["--steps=test"], "--steps 'test'.*evaluation"),
    (["--steps=evaluation", "--out=f"], "add it to --steps"),
  ],
)
def test_compile_refuses_wrong_arguments(arguments, message, monkeypatch):
  monkeypatch.setattr(topologies, "describe_devices", lambda *_: [])
  with pytest.raises(SystemExit, match=message):
    compile_command.main([CONFIG, SIZES, *arguments])


def test_compile_keeps_a_train_step_whose_evaluation_does_not_fit(
  monkeypatch, capsys
):
  class Steps:
    def __init__(self, *_):
      pass

    def train(self):
      return REPORT

    def save(self, path):
      saved.append(path)

    def evaluation(self):
      raise UserError("An evaluation needs 99 GiB")

  saved = []
  monkeypatch.setattr(topologies, "describe_devices", lambda *_: [])
  monkeypatch.setattr(compile_command, "Ahead", Steps)
  with pytest.raises(SystemExit, match="99 GiB"):
    compile_command.main([CONFIG, SIZES, "--out=file"])
  assert saved == ["file"]
  assert "| train | 2 |" in capsys.readouterr().out


def test_compile_takes_the_sizes_of_pretrained_weights(monkeypatch, tmp_path):
  class Steps:
    def __init__(self, config, *_):
      built.append(config.model)

    def train(self):
      return REPORT

  built = []
  fields = {"model.d_model": 24, "model.num_layers": 5}
  monkeypatch.setattr(topologies, "describe_devices", lambda *_: [])
  monkeypatch.setattr(compile_command, "Ahead", Steps)
  monkeypatch.setattr(compile_command.origin, "read_fields", lambda _: fields)
  pretrained = f"--config.pretrained={tmp_path}"
  compile_command.main([CONFIG, SIZES, "--steps=train", pretrained])
  assert (built[0].d_model, built[0].num_layers) == (24, 5)
  # Fields that the command line sets keep their values.
  chosen = [pretrained, "--config.model.d_model=16"]
  compile_command.main([CONFIG, SIZES, "--steps=train", *chosen])
  assert (built[1].d_model, built[1].num_layers) == (16, 5)


@pytest.mark.slow
@pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None, reason="no libtpu"
)
def test_compile_prints_both_steps_as_json(capsys):
  tiny = ["--config.model.d_model=16", "--config.model.num_layers=1"]
  compile_command.main(
    [
      CONFIG,
      SIZES,
      *tiny,
      "--config.batch_size=8",
      "--device=v5e:2x2",
      "--json",
    ]
  )
  train, evaluation = json.loads(capsys.readouterr().out)
  assert (train["step"], evaluation["step"]) == ("train", "evaluation")
  assert train["devices"] == 4
