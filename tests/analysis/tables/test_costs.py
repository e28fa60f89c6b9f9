"""The table of what every model costs."""

import json
import pathlib

import pytest

from jaxformers import config as configs
from jaxformers import models
from jaxformers.analysis.tables import costs as command
from jaxformers.commands import models as models_command

pytestmark = pytest.mark.slow

SIZES = "vocab_size=257,max_len=1024,num_classes=10"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch, request):
  monkeypatch.chdir(request.config.rootpath)


def test_costs_marks_models_with_more_parameters_than_the_reference(capsys):
  config = "configs/lra/image.py"
  models_command.main(
    ["--config", config, "--sizes", SIZES, "--models", "transformer,transject"]
  )
  lines = capsys.readouterr().out.splitlines()
  first, second = (line.split("|") for line in lines[-2:])
  assert first[1:5] == [" transformer ", " 158,666 ", " 1.00 ", " yes "]
  assert second[1:5] == [" transject ", " 5,640,844 ", " 35.55 ", " NO "]


def test_costs_are_those_of_the_mixers_page(capsys):
  """For two models; the page has a row for each."""
  models_command.main(
    [
      "--config",
      "lra/text:size=tiny",
      "--models",
      "transformer,isometric",
      "--sizes",
      "vocab_size=257,max_len=1024,num_classes=2",
    ]
  )
  page = pathlib.Path("docs/mixers.md").read_text(encoding="utf-8")
  for line in capsys.readouterr().out.splitlines()[-2:]:
    name, rest = line.removeprefix("| ").split(" ", 1)
    assert f"| `{name}` {rest}" in page
  columns = "| ".join(
    ("| model ", *(f"{name} " for name in command.COLUMNS[1:]))
  )
  _, _, table = page.partition(f"{columns}|\n")
  rows = table.partition("\n\n")[0].splitlines()[1:]
  assert [row.split("`")[1] for row in rows] == sorted(models.MODELS)


def test_models_command_without_config_lists_all_models(capsys):
  models_command.main([])
  lines = capsys.readouterr().out.splitlines()
  named = [line.split("|")[1].strip() for line in lines[2:]]
  assert named == sorted(models.MODELS)
  start = "| neutreno | softmax (fidelity=0.6) | pre_norm | Softmax attention: "
  assert any(line.startswith(f"{start}softmax(") for line in lines)
  with pytest.raises(SystemExit, match="need a --config"):
    models_command.main(["--json"])


def test_costs_of_matched_transject_are_below_the_reference(capsys):
  config = "configs/lra/image.py:size=matched"
  models_command.main(
    ["--config", config, "--sizes", SIZES, "--models", "transject", "--json"]
  )
  (row,) = json.loads(capsys.readouterr().out)
  assert 0.85 < row["relative"] <= 1.0


def test_costs_take_sizes_from_the_prepared_task(tmp_path, capsys, monkeypatch):
  monkeypatch.setenv("JAXFORMERS_DATA_DIR", str(tmp_path))
  task = tmp_path / "config.py"
  task.write_text(
    "from pathlib import Path\n"
    "from jaxformers import config as c\n"
    "def get_config(arg=None):\n"
    "  config = c.load('configs/lra/listops.py:size=tiny,' + (arg or ''))\n"
    "  config.task.update(num_train=50, num_validation=10, num_test=10)\n"
    "  config.task.update(min_length=20, max_length=60)\n"
    "  return config\n"
  )
  models_command.main(["--config", str(task), "--models", "local,linformer"])
  out = capsys.readouterr().out
  assert "| local |" in out
  assert "| linformer | rank=128 is not in 1 to max_len=" in out
  assert int(out.split("example of ")[1].split()[0]) <= 60


@pytest.mark.slow
def test_costs_of_images_and_language_models(capsys):
  models_command.main(
    [
      "--config",
      "configs/vision/imagenet.py",
      "--models",
      "neutreno",
      "--sizes",
      "image=32x32x3,num_classes=10",
    ]
  )
  out = capsys.readouterr().out
  assert "One image of 32 x 32 pixels" in out
  assert "| 1.00 | yes |" in out
  models_command.main(
    [
      "--config",
      "configs/lm/text.py:size=tiny",
      "--models",
      "local",
      "--sizes",
      "vocab_size=20,max_len=64,objective=language_model",
    ]
  )
  assert "| local | 305,428 |" in capsys.readouterr().out


def test_costs_obey_config_overrides(capsys):
  arguments = ["--config", "configs/lra/image.py", "--sizes", SIZES]
  arguments += ["--models", "transject", "--json"]
  fields = ["--config.model.num_layers=1", "--config.model.mixer.num_experts=1"]
  models_command.main([*arguments, *fields])
  (row,) = json.loads(capsys.readouterr().out)
  config = configs.load("configs/lra/image.py:model=transject")
  options = configs.plain(config)["model"] | {"num_layers": 1}
  options["mixer"] = options["mixer"] | {"num_experts": 1}
  model = models.build(**options, **command.parse_sizes(SIZES))
  assert row["parameters"] == models.size(model)
  with pytest.raises(SystemExit, match="Unknown key of config.model: 'depth'"):
    models_command.main([*arguments, "--config.model.depth=1"])
  with pytest.raises(SystemExit, match="give --models"):
    models_command.main([*arguments, "--config.model.name=local"])
  with pytest.raises(SystemExit, match="2"):
    models_command.main([*arguments, "--depth=1"])


def test_costs_speed_table_has_the_counts_of_table_3(capsys):
  models_command.main(["--published"])
  lines = capsys.readouterr().out.splitlines()
  assert lines[2:] == [
    "| Transformer | 190.1 | 19.01 |",
    "| Transformer, d_ff = 512 | 95.6 | 9.56 |",
    "| TransJect, E = 1 | 66.2 | 6.61 |",
    "| TransJect, E = 8 | 286.8 | 28.63 |",
  ]
  with pytest.raises(SystemExit, match="leave --config out"):
    models_command.main(["--published", "--config", "configs/lra/image.py"])


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--models", "bert"], "model.*'bert'.*transject"),
    (["s5", "--models", "lru"], "s5 and --models=lru: give one"),
    (["s5", "--published"], "s5 and --published: give one"),
    (["--sizes", "vocab_size=9"], "--sizes vocab_size=9.*max_len, num_classes"),
    (
      ["--sizes", f"{SIZES},objective=token_classification"],
      "token_classification lacks causal",
    ),
    (["--sizes", "vocab_size=x"], "vocab_size=x.*vocab_size=NUMBER"),
    (["--sizes", "depth=1"], "size.*'depth'.*vocab_size"),
    (["--sizes", "image=32x32"], "image=32x32.*image=224x224x3"),
  ],
)
def test_costs_refuses_wrong_arguments(arguments, message):
  arguments = ["--config", "configs/lra/image.py", *arguments]
  with pytest.raises(SystemExit, match=message):
    models_command.main(arguments)


def test_costs_lists_only_the_named_models(capsys):
  models_command.main(["lru", "s5"])
  lines = capsys.readouterr().out.splitlines()
  assert [line.split("|")[1].strip() for line in lines[2:]] == ["lru", "s5"]
  with pytest.raises(SystemExit, match="'lruu'. Did you mean 'lru'"):
    models_command.main(["lruu"])
