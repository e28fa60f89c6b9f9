"""Mega against its equations, token by token."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erf

from jaxformers.models.mixer import MIXERS
from jaxformers.models.mixers import mega
from tests.marks import long_except
from tests.models.mixers import sequential

SMALL = {"state_size": 4, "query_dim": 8}
MAX_LEN = 23


def average(params, x, options):
  """The damped moving average of Ma et al. 2023, equations 3 and 4."""
  d = x.shape[1]
  p = sequential.sigmoid(params["delta"])
  factor = 1 - p * sequential.sigmoid(params["alpha"])
  eta = params["eta"] / np.sqrt(params["eta"].shape[1])
  gain = p * params["ema_beta"]

  def read(rows, x):
    drive = gain[rows] * x[..., None]
    h = sequential.states(factor[rows], drive)
    if lags := options.get("truncation"):
      # A state without what is older.
      older = np.concatenate([np.zeros_like(h[:lags]), h])[: len(h)]
      h = h - factor[rows] ** lags * older
    return (h * eta[rows]).sum(-1)

  y = read(slice(0, d), x)
  if not options.get("causal"):
    y = y + read(slice(d, None), x[::-1])[::-1]
  return sequential.silu(y + params["omega"] * x)


def weights(params, q, k, places, options):
  """Equations 9 and 17; `places` are where the tokens stand in the row."""
  distance = places[None] - places[:, None]
  if "distance" in params:
    middle = len(params["distance"]) // 2
    near = np.clip(distance, -middle, middle)  # Others are not in the chunk.
    bias = params["distance"][near + middle]
  else:
    half = q.shape[1] // 2
    rates = 10_000.0 ** (-np.arange(half) / half)
    turned = []
    for name in ("rotary_query", "rotary_key"):
      a, b = params[name]
      cos, sin = (
        np.cos(places[:, None] * rates),
        np.sin(places[:, None] * rates),
      )
      turned.append(np.concatenate([a * cos - b * sin, b * cos + a * sin], 1))
    bias = turned[0] @ turned[1].T
  seen = np.ones_like(distance, bool)
  if options.get("causal"):
    seen &= distance <= 0
  if chunk := options.get("attention_chunk"):
    seen &= (places // chunk)[None] == (places // chunk)[:, None]
  if options.get("weights", "softmax") == "softmax":
    scores = q @ k.T / np.sqrt(q.shape[1]) + bias
    weights = np.exp(np.where(seen, scores, -np.inf))
    return weights / weights.sum(1, keepdims=True)
  scores = q @ k.T / seen.sum(1, keepdims=True) + bias
  deviation = math.sqrt(1 / (4 * math.pi))
  standard = (scores - math.sqrt(0.5)) / (deviation * math.sqrt(2))
  return np.where(seen, (1 + erf(standard)) / 2, 0)


def outputs(params, x, places, options):
  d = x.shape[1]
  z, v = params["gamma"].shape[1], params["v_proj"]["kernel"].shape[1]
  values = sequential.silu(sequential.linear(params["v_proj"], x))
  base = sequential.linear(params["mx_proj"], average(params, x, options))
  update, shared, reset, candidate = np.split(base, [d, d + z, d + z + v], 1)
  shared = sequential.silu(shared)
  q, k = shared * params["gamma"][:, None] + params["beta"][:, None]
  o = weights(params, q, k, places, options) @ values
  h = sequential.linear(params["h_proj"], sequential.silu(reset) * o)
  h = sequential.silu(candidate + h)
  return sequential.sigmoid(update) * (h - x[:, ::-1])


def test_an_average_of_the_present_token_only_is_finite():
  mixer = MIXERS["mega"](**SMALL, max_len=MAX_LEN)
  x, mask = map(jnp.asarray, sequential.inputs())
  x = x.astype(jnp.float32)
  options = {"mask": mask, "carry": None, "train": False}
  params = mixer.init(jax.random.key(0), x, **options)["params"]
  for name in ("delta", "alpha"):
    params[name] = params[name].at[0, 0].set(30.0)
  y, _ = mixer.apply({"params": params}, x, **options)
  assert np.isfinite(np.asarray(y)[mask]).all()


@pytest.mark.parametrize("block", long_except([4], [4, 256]))
@pytest.mark.parametrize(
  "options",
  [
    {},
    {"causal": True, "weights": "laplace"},
    {"bias": "rotary", "attention_chunk": 5, "value_dim": 7},
    {"causal": True, "attention_chunk": 6, "truncation": 3},
    {"weights": "laplace", "bias": "rotary", "truncation": 4},
  ],
)
@pytest.mark.slow
def test_mega_is_its_equations(monkeypatch, block, options):
  monkeypatch.setattr(mega, "BLOCK", block)
  _, mask = sequential.inputs()
  places = iter([np.flatnonzero(row) for row in mask] * 2)

  def want(params, x):
    return outputs(params, x, next(places), options)

  sequential.check(
    "mega",
    want,
    SMALL | options | {"max_len": MAX_LEN},
    shift=0.2,
    residual=True,
  )


def test_toeplitz_bias_by_hand():
  values = jnp.arange(6.0)
  want = [[2, 3, 4, 5], [1, 2, 3, 4], [0, 1, 2, 3]]
  np.testing.assert_array_equal(mega._toeplitz(values, 3, 4), want)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"weights": "relu2"}, "weights.*'relu2'.*laplace, softmax"),
    ({"bias": "rotary", "query_dim": 7}, 'query_dim=7.*bias="rotary"'),
    ({"max_len": 3}, "4 tokens.*max_len=3"),
    ({}, "mega.*max_len"),
  ],
)
def test_mega_refuses_wrong_options(options, message):
  with pytest.raises(ValueError, match=message):
    sequential.init(MIXERS["mega"](**options), 4)
