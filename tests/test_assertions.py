import numpy as np
import pytest

from tests.assertions import assert_all, assert_between


def test_assert_all_lists_every_offender():
  def check(x, y):
    assert x < y, "too large"

  def raise_nothing():
    with pytest.raises(ValueError, match="never"):
      pass

  assert_all(check, [(1, 2), (2, 3)], least=2)
  with pytest.raises(AssertionError, match=r"(?s)2 of 3:\n5, 4: .*\n7, 1: "):
    assert_all(check, [(5, 4), (1, 2), (7, 1)])
  with pytest.raises(AssertionError, match="2, x: TypeError: "):
    assert_all(check, [(2, "x")])
  with pytest.raises(AssertionError, match="0 cases.*1"):
    assert_all(check, [])
  with pytest.raises(AssertionError, match="ValueError"):
    assert_all(raise_nothing, [()])


def test_assert_between_includes_bounds_and_tolerance():
  assert_between({"a": [1, 2.0], "b": np.arange(3)}, 0, 2)
  assert_between(np.array([-1.0, 3.0]), [-1.0, -np.inf], [np.inf, 3.0])
  assert_between((0.9999, -2.0002), -2, 0.9999, rtol=1e-3)
  assert_between(np.float32([0, 2.01]), 0, 2, atol=0.02)


@pytest.mark.parametrize(
  ("value", "low", "high"),
  [(3, 0, 2), (-1, 0, 2), (np.nan, 0, 2), (np.inf, 0, np.inf)],
)
def test_assert_between_fails_outside_the_bounds(value, low, high):
  with pytest.raises(AssertionError):
    assert_between({"a": np.array([1.0, value])}, low, high)
  with pytest.raises(AssertionError):
    assert_between(2.1, 0, 2, rtol=0.01, atol=0.01)
