"""The exceptions that commands print without a traceback."""

import ast
from pathlib import Path

import pytest

from jaxformers.foundations import errors
from jaxformers.foundations.errors import DivergedError, UserError


def test_a_mistake_of_the_user_is_a_value_error_for_callers():
  with pytest.raises(ValueError, match="choose"):
    raise UserError("choose another")


def test_a_divergence_is_told_to_the_user_and_is_a_floating_point_error():
  assert issubclass(DivergedError, UserError)
  assert issubclass(DivergedError, FloatingPointError)


@pytest.mark.parametrize("part", ["data", "tasks"])
def test_errors_of_data_are_for_the_user(part):
  """A plain ValueError would end a command with a traceback."""
  package = Path(errors.__file__).parents[1]
  for path in (package / part).rglob("*.py"):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        assert node.func.id != "ValueError", f"{path}:{node.lineno}"
