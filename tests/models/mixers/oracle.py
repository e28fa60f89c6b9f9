"""Inputs for mixers, and comparisons of mixers with NumPy in float64."""

import functools
import importlib
import importlib.util
import inspect
import sys

import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.models.dropout import Dropout
from jaxformers.models.mixer import MIXERS

B, H, N, E = 2, 2, 12, 4


def small_sizes(mixer):
  """Returns options with which a mixer approximates at 17 tokens.

  They are the constant `SMALL` of the mixer's tests, or of the user's module
  that registers the mixer. The result is {} without this constant, and for
  blocks without a mixer.
  """
  if not mixer:
    return {}
  module = sys.modules[MIXERS[mixer].__module__]
  if hasattr(module, "SMALL"):  # A user's module has no test file here.
    return module.SMALL
  package, _, name = module.__name__.rpartition(".")
  if not package.startswith("jaxformers"):
    return {}
  name = f"{package.replace('jaxformers', 'tests', 1)}.test_{name}"
  if importlib.util.find_spec(name) is None:
    return {}
  return getattr(importlib.import_module(name), "SMALL", {})


def heads(count=3, n=N, seed=0, e=E):
  """Returns `count` arrays [B, H, n, e], float64."""
  rng = np.random.default_rng(seed)
  return [rng.normal(size=(B, H, n, e)) for _ in range(count)]


def tokens(n=N):
  """Returns a mask [B, n]; the second sample has a gap and padding."""
  mask = np.ones((B, n), bool)
  mask[1, 3] = mask[1, 9:] = False
  return mask


def weigh(scores, seen):
  """Returns the softmax of the scores where `seen` is True."""
  scores = np.where(seen, scores, -np.inf)
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  return weights / weights.sum(-1, keepdims=True)


def dense(q, k, v, seen):
  """Returns softmax attention [B, H, n, e] where `seen` [B, n, n] is True."""
  seen = np.broadcast_to(seen, (B, q.shape[2], k.shape[2]))[:, None]
  scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
  return weigh(scores, seen) @ v


def given(**arrays):
  """Returns a `draw` or `param` function that returns arrays by name."""
  return lambda name, *_: jnp.asarray(arrays[name], jnp.result_type(float))


def close(y, want, mask, atol):
  """Compares arrays [B, H, n, e] at the tokens."""
  at = np.broadcast_to(mask[:, None, :, None], want.shape)
  np.testing.assert_allclose(np.asarray(y)[at], want[at], atol=atol, rtol=0)


def agree(attend, arrays, want, mask=None, atol=5e-6, **arguments):
  """Checks that `attend(*arrays)` equals `want`.

  The tolerance is 1e-10 in float64, and `atol` in float32. `dropout` is the
  identity unless it is given.
  """
  mask = tokens(arrays[0].shape[2]) if mask is None else mask
  if "dropout" in inspect.signature(attend).parameters:
    arguments.setdefault("dropout", Dropout())
  run = jax.jit(functools.partial(attend, mask=jnp.asarray(mask), **arguments))
  for dtype, tolerance in ((np.float64, 1e-10), (np.float32, atol)):
    with jax.enable_x64(dtype == np.float64):
      y = run(*(jnp.asarray(a, dtype) for a in arrays))
      assert y.dtype == dtype
    close(y, want, mask, tolerance)
