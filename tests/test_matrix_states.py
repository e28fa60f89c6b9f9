"""matrix_scan against loops over tokens and heads in NumPy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import matrix_scan
from tests.marks import slow_except

B, N, H, K, V = 2, 11, 2, 5, 3
CASES = list(itertools.product((1, 3), ("", "head", "channel"), (True, False)))


def loop(q, k, v, beta, log_decay, mask, resets, initial, reverse):
  """The recurrence of the docstring, one write at a time, in float64."""
  state, outputs = np.array(initial), np.zeros((*q.shape[:3], v.shape[-1]))
  tokens = range(q.shape[1])
  for b, t, h in itertools.product(
    range(len(q)), reversed(tokens) if reverse else tokens, range(q.shape[2])
  ):
    s = state[b, h]
    if resets is not None and resets[b, t]:
      s[:] = 0
    if mask is not None and not mask[b, t]:
      continue
    if log_decay is not None:
      rows = log_decay[b if len(log_decay) > 1 else 0, t, h]
      s *= np.exp(rows).reshape(-1, 1)
    for key, value, strength in zip(
      k[b, t, :, h],
      v[b, t, :, h],
      beta[b, t, :, h] if beta is not None else np.zeros(k.shape[2]),
      strict=True,
    ):
      if beta is None:
        s += np.outer(key, value)
      else:
        eye = np.eye(len(key))
        s[:] = (eye - strength * np.outer(key, key)) @ s
        s += strength * np.outer(key, value)
    outputs[b, t, h] = s.T @ q[b, t, h]
  return outputs, state


def draw(writes, decay, *, erases, shape=(B, N, H, K, V), seed=0):
  """Arguments of matrix_scan, with keys of norm 1, in float64."""
  b, n, h, size, width = shape
  rng = np.random.default_rng(seed)
  k = rng.normal(size=(b, n, writes, h, size))
  decays = {"head": (b, n, h), "channel": (1, n, h, size)}
  return {
    "q": rng.normal(size=(b, n, h, size)),
    "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
    "v": rng.normal(size=(b, n, writes, h, width)),
    "beta": 2 * rng.uniform(size=(b, n, writes, h)) if erases else None,
    "log_decay": -rng.exponential(size=decays[decay]) if decay else None,
    "initial": rng.normal(size=(b, h, size, width)),
  }


def run(arguments, dtype=jnp.float64, **options):
  with jax.enable_x64(dtype == jnp.float64):
    arrays = {
      name: None
      if x is None
      else jnp.asarray(x, x.dtype if x.dtype == bool else dtype)
      for name, x in arguments.items()
    }

    @jax.jit
    def apply(arrays):
      q, k, v = (arrays[name] for name in "qkv")
      rest = {name: x for name, x in arrays.items() if name not in "qkv"}
      return matrix_scan(q, k, v, **rest, **options)

    return jax.device_get(apply(arrays))


def gaps():
  """A mask with holes and a row without tokens, and resets, one at a hole."""
  mask = np.random.default_rng(1).uniform(size=(B, N)) < 0.7
  resets = np.random.default_rng(2).uniform(size=(B, N)) < 0.3
  mask[0, 4], resets[0, 4] = False, True
  return {"mask": mask, "resets": resets}


@pytest.mark.parametrize(
  ("writes", "decay", "erases"),
  [
    pytest.param(*case.values[0], marks=case.marks)
    for case in slow_except([(1, "head", True), (3, "channel", True)], CASES)
  ],
)
def test_every_form_equals_a_loop(writes, decay, erases):
  arguments = draw(writes, decay, erases=erases)
  for reverse, extra in ((False, {}), (True, gaps()), (False, gaps())):
    wanted = loop(
      **arguments,
      mask=extra.get("mask"),
      resets=extra.get("resets"),
      reverse=reverse,
    )
    # Chunks of one token, chunks that do not divide 11 tokens, and one chunk.
    for form, chunk in (
      ("loop", 0),
      ("chunked", 1),
      ("chunked", 7),
      ("chunked", 0),
    ):
      found = run(arguments | extra, form=form, chunk=chunk, reverse=reverse)
      for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-10, rtol=0)
