"""Inputs for mixers, and their comparison with plain NumPy in float64."""

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
  """Returns options at which a mixer approximates with 17 tokens.

  They are `SMALL` of the mixer's own tests, or of a user's module that
  registers it; {} if these have none, and for blocks without a mixer.
  """
  if not mixer:
    return {}
  module = sys.modules[MIXERS[mixer].__module__]
  if hasattr(module, "SMALL"):  # A user's module has no file of tests here.
    return module.SMALL
  package, _, name = module.__name__.rpartition(".")
  if not package.startswith("jaxformers"):
    return {}
  name = f"{package.replace('jaxformers', 'tests', 1)}.test_{name}"
  if importlib.util.find_spec(name) is None:
    return {}
  return getattr(importlib.import_module(name), "SMALL", {})


def heads(count=3, n=N, seed=0, e=E):
  """`count` arrays [B, H, n, e], float64."""
  rng = np.random.default_rng(seed)
  return [rng.normal(size=(B, H, n, e)) for _ in range(count)]


def tokens(n=N):
  """A mask [B, n]: all of the first sample; a hole and an end in the second."""
  mask = np.ones((B, n), bool)
  mask[1, 3] = mask[1, 9:] = False
  return mask


def weigh(scores, seen):
  """The softmax of scores over what is seen."""
  scores = np.where(seen, scores, -np.inf)
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  return weights / weights.sum(-1, keepdims=True)


def dense(q, k, v, seen):
  """Softmax attention [B, H, n, e] over what is seen, [B, n, n] or alike."""
  seen = np.broadcast_to(seen, (B, q.shape[2], k.shape[2]))[:, None]
  scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
  return weigh(scores, seen) @ v


def given(**arrays):
  """A `draw` or `param` that hands out these arrays by name."""
  return lambda name, *_: jnp.asarray(arrays[name], jnp.result_type(float))


def close(y, want, mask, atol):
  """Compares [B, H, n, e] at the tokens."""
  at = np.broadcast_to(mask[:, None, :, None], want.shape)
  np.testing.assert_allclose(np.asarray(y)[at], want[at], atol=atol, rtol=0)


def agree(attend, arrays, want, mask=None, atol=5e-6, **arguments):
  """`attend(*arrays)` is `want`: 1e-10 in float64, `atol` in float32.

  Functions among the arguments are tools; `dropout` is the identity.
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
