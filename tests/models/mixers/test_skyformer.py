import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models.mixers.skyformer import skyformer
from tests.models.mixers.oracle import B, E, H, N, agree, given, heads, tokens
from tests.models.mixers.test_nystromformer import inverse

pytestmark = pytest.mark.slow  # Not in REPRESENTATIVES.

SMALL = {"num_landmarks": 6}


def kernel(x, y):
  return np.exp(-np.square(x[:, None] - y[None]).sum(-1) / 2)


def formula(q, k, v, mask, place, released=False):
  want, columns = np.zeros_like(v), 0
  half = len(place) // 2
  for again in (False, True):
    for b in range(B):
      at = np.flatnonzero(mask[b])
      picks = at[np.floor(place * len(at)).astype(int)]
      for h in range(H):
        left, right = q[b, h] * E**-0.25, k[b, h] * E**-0.25
        s = np.concatenate([left[picks[:half]], right[picks[half:]]])
        m = kernel(s, s) + 0.1 * np.eye(len(s))
        d = np.diag(m.sum(1) ** -0.5)
        m = d @ m @ d
        columns = max(columns, m.sum(0).max())
        if again:
          scale = columns if released else m.sum(0).max() * m.sum(1).max()
          z = d @ inverse(m, 6, scale) @ d
          want[b, h] = kernel(left, s) @ z @ kernel(s, right[at]) @ v[b, h, at]
  return want


@pytest.mark.parametrize("init", ["sample", "batch"])
def test_skyformer_is_its_formula(init):
  q, k, v = heads()
  place = np.random.default_rng(2).uniform(size=6)
  want = formula(q, k, v, tokens(), place, released=init == "batch")
  agree(
    skyformer,
    (q, k, v),
    want,
    draw=given(landmarks=place),
    max_len=N,
    num_landmarks=6,
    inverse_init=init,
    atol=1e-5,
  )


def test_skyformer_with_all_landmarks_is_kernelized_attention():
  q, k, v = heads()
  mask = np.ones((B, N), bool)
  far = np.square(q[..., :, None, :] - k[..., None, :, :]).sum(-1)
  want = np.exp(-far / 2 / E**0.5) @ v
  place = (np.arange(2 * N) % N + 0.5) / N
  agree(
    skyformer,
    (q, k, v),
    want,
    mask,
    draw=given(landmarks=place),
    max_len=N,
    num_landmarks=2 * N,
    gamma=0.0,
    inverse_steps=40,
    atol=5e-3,  # A kernel of 24 points in float32 is nearly singular.
  )


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"num_landmarks": 7}, "num_landmarks=7.*even"),
    ({"num_landmarks": 10}, "num_landmarks=10.*2.*8"),
    ({"gamma": -0.1}, "gamma=-0.1"),
    ({"inverse_steps": 0}, "inverse_steps=0"),
  ],
)
def test_skyformer_refuses_wrong_options(options, message):
  x = jnp.ones((1, 1, 4, 2))
  options = {"num_landmarks": 4} | options
  draw = given(landmarks=np.linspace(0, 0.9, options["num_landmarks"]))
  call = functools.partial(skyformer, x, x, x, draw=draw, max_len=4)
  with pytest.raises(ValueError, match=message):
    call(mask=jnp.ones((1, 4), bool), **options)
