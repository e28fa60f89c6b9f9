import pytest

from jaxformers import config as c
from jaxformers.foundations import ranges


def test_load_names_a_missing_config_file():
  with pytest.raises(ValueError, match="'configs/nil.py'"):
    c.load("configs/nil.py:a=1")


def test_describe_names_fields_values_and_ranges():
  config = c.base(task={"name": "x", "max_len": 3})
  length = ranges.Range(int, ranges.Interval("[0, 2^24]"))
  lines = c.describe(config, {"task.max_len": length}.get).splitlines()
  assert "  seed=0  # seed of parameters, order of examples and dropout" in (
    line.partition(";")[0] for line in lines
  )
  at = lines.index("  task:  # name, protocol and options of the task")
  assert lines[at + 1 : at + 3] == [
    "    task.max_len=3  # in [0, 2^24]",
    '    task.name="x"',
  ]


def test_load_suggests_the_config_that_was_meant():
  for name in ("lra/listop", "configs/lra/listop.py", "lra/listopss:size=tiny"):
    with pytest.raises(ValueError, match=r"mean lra/listops\?"):
      c.load(name)


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("training time  0:02:22", "config.py, line 1.*Python"),
    ("x = 1", r"config.py.*get_config\(arg\)"),
    (
      "def get_config(arg=None):\n  return 5",
      r"config.py.*\b5\b.*ml_collections",
    ),
    ("def get_config(arg=None):\n  pass", "config.py.*None.*ml_collections"),
  ],
)
def test_load_refuses_files_that_are_no_configs(tmp_path, text, message):
  (tmp_path / "config.py").write_text(text)
  with pytest.raises(ValueError, match=message):
    c.load(str(tmp_path / "config.py"))
