"""The list of the configs of the package."""

from pathlib import Path

import pytest

from jaxformers import config as configs
from jaxformers.commands import configs as list_configs

ROOT = Path(__file__).parents[2]


def test_list_configs_has_a_line_for_every_config(capsys):
  list_configs.main([])
  printed = capsys.readouterr().out
  files = sorted((ROOT / "configs").rglob("*.py"))
  assert len(printed.splitlines()) == 2 + len(files)
  for path in files:
    name = path.relative_to(ROOT / "configs").with_suffix("").as_posix()
    assert f"| {name} | " in printed
    assert configs.find_file(name).samefile(path)


def test_list_configs_describes_one_config(capsys):
  list_configs.main(["lra/text"])
  assert "Arguments: model=NAME" in capsys.readouterr().out
  with pytest.raises(SystemExit, match="'lra/txt'.*lra/text"):
    list_configs.main(["lra/txt"])


def test_list_configs_names_a_file_that_is_no_python(tmp_path):
  path = tmp_path / "broken.py"
  path.write_text("def (")
  with pytest.raises(SystemExit, match="broken.py is no Python file"):
    list_configs.main([str(path)])


@pytest.mark.parametrize(
  "name", ["lra/listops", "lra/listops.py", "configs/lra/listops.py"]
)
def test_find_file_finds_a_config_from_any_folder(name, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert configs.load(f"{name}:size=tiny").total_steps == 1_500
  # A file of the user's goes first.
  path = tmp_path / "lra" / "listops.py"
  path.parent.mkdir()
  path.write_text("")
  found = configs.find_file("lra/listops.py")
  assert found.read_text() == ""
