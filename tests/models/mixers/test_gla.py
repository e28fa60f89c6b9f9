"""Gated linear attention, RetNet and HGRN2 against their recurrences."""

import functools

import numpy as np
import pytest

from jaxformers.models.mixer import MIXERS
from tests.models.mixers import sequential

pytestmark = pytest.mark.slow  # Not in REPRESENTATIVES.

SMALL = {"num_heads": 2}


def both(causal, *args, **options):
  """The outputs of one direction, or their sum over both."""
  y = sequential.read(*args, **options)
  return y if causal else y + sequential.read(*args, reverse=True, **options)


def mapped(params, x, name, h=2):
  return sequential.by_heads(sequential.linear(params[name], x), h)


def finish(params, y, x):
  """Normalises each head, and applies the gate and the last map."""
  y = sequential.rms(y, params["norm"]["scale"]).reshape(len(x), -1)
  y = y * sequential.silu(sequential.linear(params["gate"], x))
  return sequential.linear(params["output"], y)


def gla(params, x, causal):
  """Equation 3 of Yang et al. 2023, with the decays of their section 4.4."""
  q, k, v = (mapped(params, x, name) for name in ("query", "key", "value"))
  assert k.shape[-1] == 1 and v.shape[-1] == 3  # Half as many channels.
  logit = sequential.linear(params["decay_in"], x)
  logit = sequential.by_heads(sequential.linear(params["decay_out"], logit), 2)
  log_decay = np.log(sequential.sigmoid(logit)) / 16
  y = both(causal, q * k.shape[-1] ** -0.5, k, v, log_decay=log_decay)
  return finish(params, y, x)


def retnet(params, x, causal):
  """Equations 5 to 8 of Sun et al. 2023: decays 31/32 and 63/64."""
  q, k = (turned(mapped(params, x, name)) for name in ("query", "key"))
  v = mapped(params, x, "value")
  log_decay = np.broadcast_to(np.log([31 / 32, 63 / 64]), (len(x), 2))
  y = both(causal, q * k.shape[-1] ** -0.5, k, v, log_decay=log_decay)
  return finish(params, y, x)


def turned(x):
  """Rotates the pairs (i, i + e / 2) of each head by their positions."""
  half = x.shape[-1] // 2
  angles = np.arange(len(x))[:, None] * 10_000.0 ** (-np.arange(half) / half)
  pairs = x[..., :half] + 1j * x[..., half:]
  pairs = pairs * np.exp(1j * angles)[:, None]
  return np.concatenate([pairs.real, pairs.imag], -1)


def hgrn2(params, x, causal):
  """Section 3 of Qin et al. 2024."""
  bound = sequential.sigmoid(params["lower_bound"])
  forget = sequential.sigmoid(sequential.linear(params["forget"], x))
  forget = sequential.by_heads(bound + (1 - bound) * forget, 2)
  q = sequential.by_heads(
    sequential.silu(sequential.linear(params["query"], x)), 2
  )
  v = mapped(params, x, "value")
  y = both(causal, q, 1 - forget, v, log_decay=np.log(forget))
  y = sequential.rms(y.reshape(len(x), -1), params["norm"]["scale"])
  return sequential.linear(params["output"], y)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("want", [gla, retnet, hgrn2])
def test_each_mixer_is_its_recurrence(want, causal):
  options = SMALL | {"causal": causal}
  run = functools.partial(want, causal=causal)
  sequential.check(want.__name__, run, options)


def test_bounds_of_hgrn2_start_at_012():
  params = sequential.init(MIXERS["hgrn2"](), 8)
  bounds = sequential.sigmoid(np.asarray(params["lower_bound"]))
  np.testing.assert_allclose(bounds, 0.1192, atol=1e-4)
