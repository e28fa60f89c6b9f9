"""Assertions of trees of numbers, made of chex's."""

from typing import Any

import chex
import jax
import numpy as np


def assert_between(
  tree: Any, low: Any, high: Any, *, rtol: float = 0.0, atol: float = 0.0
) -> None:
  """Fails unless all leaves are finite and between low and high.

  Args:
    tree: tree of numbers.
    low, high: bounds, broadcast to every leaf; included, and infinite for none.
    rtol, atol: share of a bound, and distance, that rounding may go beyond it.
  """
  chex.assert_tree_all_finite(tree)
  low, high = np.asarray(low, np.float64), np.asarray(high, np.float64)
  finite = (
    np.where(np.isfinite(low), low, 0),
    np.where(np.isfinite(high), high, 0),
  )
  low = low - rtol * np.abs(finite[0]) - atol
  high = high + rtol * np.abs(finite[1]) + atol
  tree = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)
  # A number between two bounds is what they cut it to.
  inside = jax.tree.map(lambda leaf: np.clip(leaf, low, high), tree)
  chex.assert_trees_all_close(tree, inside, rtol=0.0, atol=0.0)
