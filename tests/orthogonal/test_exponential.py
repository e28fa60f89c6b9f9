import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from jaxformers import orthogonal
from jaxformers.orthogonal import exponential


def test_expm_polynomial_has_the_taylor_coefficients():
  b1, b2, b3, b4 = (np.polynomial.Polynomial(c) for c in exponential.TAYLOR)
  a = b3 + b4 * b4
  found = ((b2 + a) * a + b1).coef
  want = [1 / math.factorial(j) for j in range(13)]
  np.testing.assert_allclose(
    found * [math.factorial(j) for j in range(13)], 1, rtol=1e-12
  )
  assert len(found) == len(want)


@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0, 30.0])
@pytest.mark.slow
def test_expm_is_that_of_scipy(scale):
  a = np.random.default_rng(0).normal(size=(2, 9, 9)) * scale
  s = np.tril(a, -1) - np.tril(a, -1).swapaxes(1, 2)
  with jax.enable_x64(True):
    found = orthogonal.expm(jnp.asarray(a))
    np.testing.assert_allclose(
      found, scipy.linalg.expm(s), atol=1e-12 * (1 + scale)
    )
  single = orthogonal.expm(jnp.asarray(a, jnp.float32))
  np.testing.assert_allclose(
    single, scipy.linalg.expm(s), atol=1e-5 * (1 + scale)
  )
