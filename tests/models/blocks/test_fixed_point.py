"""The fixed-point iteration that undoes a residual branch."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.models.blocks import fixed_point
from tests import draws


def solve(y, branch, rate, mask=None, **options):
  mask = jnp.ones(y.shape[:-1], bool) if mask is None else mask
  return fixed_point.solve(y, branch, rate, mask, **options)


def test_solve_stops_at_rounding_precision():
  y = jnp.asarray([3.0, -2.0])
  x, steps = solve(y, lambda x: 0.5 * x, 0.5)
  np.testing.assert_allclose(x, y / 1.5, rtol=1e-6)
  assert 20 <= int(steps) <= 30
  x, steps = solve(y, lambda x: 0.01 * x, 0.01)
  np.testing.assert_allclose(x, y / 1.01, rtol=1e-6)
  assert int(steps) <= 5
  _, steps = solve(y, lambda x: 0.999 * x, 0.999, max_steps=7)
  assert int(steps) == 7
  x, steps = solve(y, lambda x: jnp.nan * x, 0.5)
  assert np.isnan(x).all()
  assert int(steps) < 5


def test_solve_converges_every_token_relative_to_its_norm():
  y = jnp.asarray([[1e5, 0.0], [1.0, 1.0], [jnp.nan, 1.0]])
  # The first is done at once, for its branch is constant there.
  x, _ = solve(y, lambda x: 0.49 * jnp.minimum(x, 2.0), 0.49)
  np.testing.assert_allclose(x[1], 1 / 1.49, rtol=1e-6)
  np.testing.assert_allclose(x[0, 0], 1e5 - 0.98, rtol=1e-6)
  # Padding is not waited for.
  _, steps = solve(
    y,
    lambda x: 0.49 * jnp.minimum(x, 2.0),
    0.49,
    jnp.array([True, False, False]),
  )
  assert int(steps) <= 2


def test_solve_ends_for_branches_of_low_precision():
  """As on accelerators at lower precision: a step function."""
  y = draws.normal(0, (50, 8))

  def branch(x):
    return 0.49 * jax.lax.reduce_precision(x, 8, 10)

  x, steps = solve(y, branch, 0.49)
  np.testing.assert_allclose(x, y / 1.49, atol=4e-3)
  assert int(steps) < 40
