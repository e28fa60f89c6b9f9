import numpy as np
import pytest

from tests.assertions import assert_between


def test_bounds_count_and_rounding_may_pass_them():
  assert_between({"a": [1, 2.0], "b": np.arange(3)}, 0, 2)
  assert_between(np.array([-1.0, 3.0]), [-1.0, -np.inf], [np.inf, 3.0])
  assert_between((0.9999, -2.0002), -2, 0.9999, rtol=1e-3)
  assert_between(np.float32([0, 2.01]), 0, 2, atol=0.02)


@pytest.mark.parametrize(
  ("value", "low", "high"),
  [(3, 0, 2), (-1, 0, 2), (np.nan, 0, 2), (np.inf, 0, np.inf)],
)
def test_what_is_outside_fails(value, low, high):
  with pytest.raises(AssertionError):
    assert_between({"a": np.array([1.0, value])}, low, high)
  with pytest.raises(AssertionError):
    assert_between(2.1, 0, 2, rtol=0.01, atol=0.01)
