"""Grids are all combinations of values, and refuse what is ambiguous."""

from jaxformers.sweep import grid

SPEC = "configs/lra/listops.py:size=tiny"


def test_a_grid_is_every_combination():
  axes = [("model", ("transject", "local")), ("protocol", ("lra",))]
  cells = grid.expand([SPEC, "configs/lra/text.py"], axes)
  assert [cell.spec for cell in cells] == [
    "configs/lra/listops.py:size=tiny,model=transject,protocol=lra",
    "configs/lra/listops.py:size=tiny,model=local,protocol=lra",
    "configs/lra/text.py:model=transject,protocol=lra",
    "configs/lra/text.py:model=local,protocol=lra",
  ]
  assert len({cell.folder for cell in cells}) == 4


def test_a_cell_names_its_config_and_its_folder():
  (cell,) = grid.expand(["configs/lra/text.py"], [])
  assert cell.spec == "configs/lra/text.py"
  assert cell.folder.as_posix() == "lra_text"
  cell = cell.extended("seed", "3").extended("model", "local")
  assert cell.spec == "configs/lra/text.py:seed=3,model=local"
  assert cell.folder.as_posix() == "lra_text/seed=3,model=local"
