"""Long convolutions against sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models.mixers import convolution
from jaxformers.scan import Pair


@pytest.mark.parametrize("n", [1, 2, 7, 64, 100])
@pytest.mark.slow
def test_sum_powers_is_the_direct_sum(n):
  rng = np.random.default_rng(0)
  log = -rng.uniform(0, 0.3, (3, 4)) + 1j * rng.uniform(-2, 2, (3, 4))
  weight = rng.normal(size=(3, 4)) + 1j * rng.normal(size=(3, 4))
  with jax.enable_x64(True):
    kernel = convolution.sum_powers(
      Pair(jnp.asarray(log.real), jnp.asarray(log.imag)),
      Pair(jnp.asarray(weight.real), jnp.asarray(weight.imag)),
      n,
    )
  powers = np.exp(log[..., None] * np.arange(n))
  want = (weight[..., None] * powers).sum(1).real
  np.testing.assert_allclose(kernel, want, atol=1e-12)


@pytest.mark.parametrize("on_tpu", [False, True])
@pytest.mark.parametrize("n", [1, 6, 33, 67])
def test_convolve_is_the_direct_sum_in_both_directions(n, on_tpu, monkeypatch):
  monkeypatch.setattr(convolution.platforms, "on_tpu", lambda: on_tpu)
  rng = np.random.default_rng(1)
  x, forward, back = (
    rng.normal(size=shape) for shape in [(2, n, 3), (3, n), (3, n)]
  )
  want = np.zeros_like(x)
  for t in range(n):
    for s in range(n):
      kernel = forward[:, t - s] if s <= t else 0
      want[:, t] += kernel * x[:, s]
      want[:, t] += (back[:, s - t] if s >= t else 0) * x[:, s]
  with jax.enable_x64(True):
    y = convolution.convolve(*map(jnp.asarray, (x, forward, back)))
  np.testing.assert_allclose(y, want, atol=1e-12)


def test_move_back_undoes_to_front():
  x = jnp.arange(12.0).reshape(2, 6, 1)
  mask = jnp.array([[1, 1, 1, 1, 0, 0], [0, 1, 0, 1, 1, 0]], bool)
  front = convolution.to_front(x, mask)
  np.testing.assert_array_equal(front[0, :, 0], [0, 1, 2, 3, 0, 0])
  np.testing.assert_array_equal(front[1, :, 0], [7, 9, 10, 0, 0, 0])
  back = convolution.move_back(front, mask)
  np.testing.assert_array_equal(back, jnp.where(mask[..., None], x, 0))


@pytest.mark.parametrize("n", [998, 1_999, 2_016])
def test_transform_real_is_the_transform_of_any_number_of_points(
  n, monkeypatch
):
  x = np.random.default_rng(n).normal(size=(3, n)).astype(np.float32)
  want = np.fft.rfft(x)
  for on_tpu in (False, True):
    monkeypatch.setattr(convolution.platforms, "on_tpu", lambda is_=on_tpu: is_)
    with monkeypatch.context() as context:
      if on_tpu and n != 2_016:
        context.delattr(jnp.fft, "rfft")  # A slow transform there.
      found = convolution.transform_real(jnp.asarray(x))
    assert found.shape == want.shape
    assert abs(found - want).max() < 1e-6 * abs(want).max()
