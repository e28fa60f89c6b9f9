"""Grids are all combinations of values, and refuse what is ambiguous."""

from jaxformers.sweep import grid

SPEC = "configs/lra/listops.py:size=tiny"


def test_expand_gives_every_combination():
  axes = [("model", ("transject", "local")), ("protocol", ("lra",))]
  cells = grid.expand([SPEC, "configs/lra/text.py"], axes)
  assert [cell.spec for cell in cells] == [
    "configs/lra/listops.py:size=tiny,model=transject,protocol=lra",
    "configs/lra/listops.py:size=tiny,model=local,protocol=lra",
    "configs/lra/text.py:model=transject,protocol=lra",
    "configs/lra/text.py:model=local,protocol=lra",
  ]
  assert len({cell.folder for cell in cells}) == 4


def test_cell_names_its_config_and_folder():
  (cell,) = grid.expand(["configs/lra/text.py"], [])
  assert cell.spec == "configs/lra/text.py"
  assert cell.folder.as_posix() == "lra_text"
  cell = cell.extended("size", "tiny").extended("task.archive", "a/b")
  cell = cell.extended("model", "local").extended("batch_size", "8")
  assert cell.spec == "configs/lra/text.py:size=tiny,model=local"
  name = "size=tiny,model=local,task.archive=a_b,batch_size=8"
  assert cell.folder.as_posix() == f"lra_text/{name}"
  assert cell.title == f"{cell.spec} task.archive=a/b,batch_size=8"
  assert cell.options == ["--config.task.archive=a/b", "--config.batch_size=8"]


def test_is_field_separates_config_arguments_from_fields():
  keys = ("model", "size", "task", "batch_size", "pretrained", "model.d_model")
  assert [grid.is_field(key) for key in keys] == [False] * 3 + [True] * 3
  # What a config's file is given is its argument, whatever its name.
  (cell,) = grid.expand(["a/b.py:batch_size=3"], [("batch_size", ("4",))][:0])
  assert cell.spec == "a/b.py:batch_size=3"


def test_set_fields_changes_the_matching_cells():
  cells = grid.expand(
    ["configs/lra/text.py", "configs/lra/image.py"],
    [("model", ("transject", "local"))],
  )
  texts = ["config=text:task.archive=x", "model=local:batch_size=4,patience=1"]
  options = [cell.options for cell in grid.set_fields(cells, texts)]
  archive, local = "--config.task.archive=x", ["batch_size=4", "patience=1"]
  local = [f"--config.{field}" for field in local]
  assert options == [[archive], [archive, *local], [], local]
  # Names of runs do not change.
  named = [cell.folder for cell in grid.set_fields(cells, texts)]
  assert named == [cell.folder for cell in cells]
