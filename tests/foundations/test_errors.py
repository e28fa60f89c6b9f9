"""The exceptions that commands print without a traceback."""

import ast
from pathlib import Path

import pytest

from jaxformers.foundations import errors
from jaxformers.foundations.errors import DivergedError, UserError


def test_user_error_is_a_value_error():
  with pytest.raises(ValueError, match="choose another"):
    raise UserError("choose another")


def test_diverged_error_is_a_user_error_and_a_floating_point_error():
  assert issubclass(DivergedError, UserError)
  assert issubclass(DivergedError, FloatingPointError)


@pytest.mark.parametrize("part", ["data", "tasks"])
def test_data_modules_raise_user_errors_not_value_errors(part):
  """A plain ValueError would end a command with a traceback."""
  package = Path(errors.__file__).parents[1]
  for path in (package / part).rglob("*.py"):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        assert node.func.id != "ValueError", f"{path}:{node.lineno}"
