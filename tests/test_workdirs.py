"""What commands say of files that another program wrote."""

import importlib

import pytest

from jaxformers.analysis import depth, published, results

COMMANDS = (
  *("smoothness", "lipschitz", "inverse", "perplexity", "segmentation"),
  *("robustness", "export", "report"),
)


@pytest.mark.parametrize(
  ("content", "problem"),
  [
    ('{"model_type": "bert"}', "the field 'seed' of config.json is missing"),
    ("[1]", "config.json holds no JSON object"),
    ('{"seed": ', "config.json cannot be read as JSON"),
  ],
)
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_refuse_the_config_of_another_program(
  name, content, problem, tmp_path
):
  (tmp_path / "config.json").write_text(content)
  command = importlib.import_module(f"jaxformers.analysis.{name}")
  more = {"export": ["--out", "out"]}
  with pytest.raises(SystemExit) as stopped:
    command.main([str(tmp_path), *more.get(name, ())])
  message = str(stopped.value)
  assert f"{tmp_path} is no run of this package" in message
  assert problem in message
  assert "Give the --workdir" in message


@pytest.mark.parametrize("content", ['{"accuracy": 0.5}', "[1]", "{"])
@pytest.mark.parametrize("command", [results, published, depth])
def test_results_of_another_program_are_refused(command, content, tmp_path):
  (tmp_path / "results.json").write_text(content)
  with pytest.raises(
    SystemExit, match=r"no run of this package:.* results\.json"
  ):
    command.main([str(tmp_path)])
