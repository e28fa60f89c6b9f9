"""Assertions for trees of numbers, based on chex, and for lists of cases."""

from collections.abc import Callable, Iterable
from typing import Any

import chex
import jax
import numpy as np
import pytest


def assert_all(check: Callable, cases: Iterable[tuple], least: int = 1) -> None:
  """Fails with a list of all cases for which a check fails.

  Use it instead of many tests for a quick check of hundreds of files or
  options.

  Args:
    check: function that fails an assertion or raises an error.
    cases: tuples of arguments of `check`.
    least: minimum number of cases.
  """
  cases, offenders = list(cases), []
  for case in cases:
    try:
      check(*case)
    except (Exception, pytest.fail.Exception) as error:
      name = ", ".join(map(str, case))
      offenders.append(f"{name}: {type(error).__name__}: {error}")
  title = f"{len(offenders)} of {len(cases)}:"
  assert not offenders, "\n".join([title, *offenders])
  assert len(cases) >= least, f"{len(cases)} cases, not {least} or more"


def assert_between(
  tree: Any, low: Any, high: Any, *, rtol: float = 0.0, atol: float = 0.0
) -> None:
  """Fails unless all leaves are finite and between low and high.

  Args:
    tree: tree of numbers.
    low, high: inclusive bounds, broadcast to every leaf; infinite for no bound.
    rtol, atol: relative and absolute tolerance of the bounds, for rounding.
  """
  chex.assert_tree_all_finite(tree)
  low, high = np.asarray(low, np.float64), np.asarray(high, np.float64)
  # Widen the bounds by the tolerances.
  finite = (
    np.where(np.isfinite(low), low, 0),
    np.where(np.isfinite(high), high, 0),
  )
  low = low - rtol * np.abs(finite[0]) - atol
  high = high + rtol * np.abs(finite[1]) + atol
  tree = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)
  # A number between the bounds is equal to its clipped value.
  inside = jax.tree.map(lambda leaf: np.clip(leaf, low, high), tree)
  chex.assert_trees_all_close(tree, inside, rtol=0.0, atol=0.0)
