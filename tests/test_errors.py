"""The exceptions that commands print without a traceback."""

import pytest

from jaxformers.errors import DivergedError, UserError


def test_a_mistake_of_the_user_is_a_value_error_for_callers():
  with pytest.raises(ValueError, match="choose"):
    raise UserError("choose another")


def test_a_divergence_is_told_to_the_user_and_is_a_floating_point_error():
  assert issubclass(DivergedError, UserError)
  assert issubclass(DivergedError, FloatingPointError)
