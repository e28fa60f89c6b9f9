import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models.mixers.nystromformer import nystromformer
from tests.models.mixers.oracle import (
  B,
  E,
  H,
  N,
  agree,
  dense,
  given,
  heads,
  tokens,
  weigh,
)

pytestmark = pytest.mark.slow  # Not in REPRESENTATIVES.

SMALL = {"num_landmarks": 4, "conv_size": 3}


def inverse(a, steps, scale):
  z, eye = a.T / scale, np.eye(len(a))
  for _ in range(steps):
    az = a @ z
    z = z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az))) / 4
  return z


def formula(q, k, v, mask, count, released=False):
  """Every sample and head on its own, with its tokens alone."""
  want, columns = np.zeros_like(v), 0
  for again in (False, True):
    for b in range(B):
      at = mask[b]
      runs = np.array_split(np.flatnonzero(at), count)
      for h in range(H):
        means = [[a[b, h, run].mean(0) for run in runs] for a in (q, k)]
        left, square, right = (
          weigh(x @ np.transpose(y) / E**0.5, True)
          for x, y in (
            (q[b, h], means[1]),
            (np.array(means[0]), means[1]),
            (np.array(means[0]), k[b, h, at]),
          )
        )
        columns = max(columns, square.sum(0).max())
        scale = (
          columns if released else square.sum(0).max() * square.sum(1).max()
        )
        if again:
          z = inverse(square, 6, scale)
          want[b, h] = left @ z @ right @ v[b, h, at]
  return want


@pytest.mark.parametrize("init", ["sample", "batch"])
def test_nystromformer_is_its_formula(init):
  q, k, v = heads()
  want = formula(q, k, v, tokens(), 4, released=init == "batch")
  agree(
    nystromformer,
    (q, k, v),
    want,
    param=None,
    max_len=12,
    num_landmarks=4,
    inverse_init=init,
    atol=2e-5,  # The inverse amplifies float32's rounding of a 4 x 4 kernel.
  )


def test_nystromformer_with_all_landmarks_is_softmax():
  q, k, v = heads()
  want = dense(q, k, v, tokens()[:, None])
  options = {
    "num_landmarks": 12,
    "inverse_steps": 30,
    "param": None,
    "max_len": 12,
  }
  agree(nystromformer, (q, k, v), want, atol=2e-4, **options)


def test_nystromformer_convolves_values_of_tokens_only():
  q, k, v = heads()
  mask, kernel = tokens(), np.random.default_rng(3).normal(size=(3, H))
  plain = formula(q, k, v, mask, 4)
  padded = np.pad(v * mask[:, None, :, None], ((0, 0), (0, 0), (1, 1), (0, 0)))
  for i in range(3):
    plain = plain + padded[:, :, i : i + 12] * kernel[i][None, :, None, None]
  options = {
    "param": given(conv=kernel),
    "num_landmarks": 4,
    "conv_size": 3,
    "max_len": 12,
  }
  agree(nystromformer, (q, k, v), plain, atol=2e-5, **options)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"num_landmarks": 0}, "num_landmarks=0"),
    ({"num_landmarks": 5}, "num_landmarks=5.*max_len=4"),
    ({"conv_size": 4}, "conv_size=4.*odd"),
    ({"inverse_init": "original"}, "inverse_init.*'original'"),
  ],
)
def test_nystromformer_refuses_wrong_options(options, message):
  x = jnp.ones((1, 1, 4, 2))
  call = functools.partial(nystromformer, x, x, x, param=None, max_len=4)
  options = {"num_landmarks": 4} | options
  with pytest.raises(ValueError, match=message):
    call(mask=jnp.ones((1, 4), bool), **options)


@pytest.mark.long
def test_nystromformer_of_six_steps_with_all_landmarks_is_not_softmax():
  """As the docstring says: the authors' code takes softmax attention there."""
  q, k, v = heads()
  mask = np.ones((B, N), bool)
  want = dense(q, k, v, mask[:, None])
  call = functools.partial(
    nystromformer, mask=mask, param=None, max_len=N, num_landmarks=N
  )
  arrays = [jnp.asarray(a, jnp.float32) for a in (q, k, v)]
  six, many = (
    np.abs(call(*arrays, inverse_steps=steps) - want).max() for steps in (6, 30)
  )
  assert six > 0.01
  assert many < 1e-3
