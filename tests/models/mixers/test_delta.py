"""DeltaNet, Gated DeltaNet and DeltaProduct against their recurrence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import matrix_scan
from jaxformers.models.cache import CACHE
from jaxformers.models.mixer import MIXERS
from tests.marks import slow_except
from tests.models.mixers import sequential

SMALL = {"num_heads": 2}
OPTIONS = [
  {"num_householder": 2, "forget": True, "signed": True, "output_gate": True},
  {},
  {"signed": True, "conv_width": 0, "expansion": 2, "head_dim": 4},
  {"reflect": True, "num_householder": 3},
]


def outputs(params, x, *, options, causal):
  """The layer of Yang et al. and of Siems et al., token by token."""
  h, writes = 2, options.get("num_householder", 1)
  key = h * options.get("head_dim", 3)
  value = key * options.get("expansion", 1)
  read = sequential.linear(params["read"], x)
  if options.get("conv_width", 4):
    read = sequential.convolved(params, read)
  read = sequential.silu(read)
  # Queries, then the keys of all writes, then their values.
  ends = np.cumsum([key] + [key] * writes + [value] * writes)[:-1]
  q, *rest = (sequential.by_heads(a, h) for a in np.split(read, ends, 1))
  q = unit(q)
  # Reflections divide by the exact norm.
  small = 0.0 if options.get("reflect") else 1e-6
  keys = [unit(key, small) for key in rest[:writes]]
  beta = sequential.sigmoid(
    sequential.linear(params["strength"], x) if "strength" in params else 0.0
  )
  if options.get("reflect"):
    squares = [np.square(k).sum(-1) for k in keys]
    beta = 2 / np.stack(squares, 1).reshape(len(x), -1)
  elif options.get("signed"):
    beta = 2 * beta
  log_decay = None
  if options.get("forget"):
    step = sequential.linear(params["decay"], x) + params["step_bias"]
    log_decay = -np.exp(params["A_log"]) * sequential.softplus(step)
  run = functools.partial(
    sequential.read,
    q * q.shape[-1] ** -0.5,
    np.stack(keys, 1),
    np.stack(rest[writes:], 1),
    beta=beta.reshape(len(x), writes, h),
    log_decay=log_decay,
  )
  y = run() if causal else run() + run(reverse=True)
  y = sequential.rms(y, params["norm"]["scale"]).reshape(len(x), -1)
  if options.get("output_gate"):
    y = y * sequential.silu(sequential.linear(params["gate"], x))
  return sequential.linear(params["output"], y)


def unit(x, small=1e-6):
  return x / np.sqrt(np.square(x).sum(-1, keepdims=True) + small)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("options", slow_except(OPTIONS[:1], OPTIONS))
def test_delta_is_its_recurrence(options, causal):
  want = functools.partial(outputs, options=options, causal=causal)
  # Reflections do not damp the rounding of earlier tokens.
  atol = 2e-5 if options.get("reflect") else 5e-6
  options = SMALL | options | {"causal": causal}
  sequential.check("delta", want, options, atol=atol)


def test_delta_starts_as_published():
  params = sequential.init(MIXERS["delta"](num_heads=64, forget=True), 256)
  assert abs(params["read"]["kernel"].std() - 0.02) < 1e-3
  assert "bias" not in params["read"] and "conv_bias" not in params
  assert 0.45 < np.abs(params["conv"]).max() <= 0.5
  step = sequential.softplus(np.asarray(params["step_bias"], np.float64))
  assert 1e-3 * 0.99 <= step.min() < 3e-3 and 0.03 < step.max() <= 0.101
  factor = np.exp(params["A_log"])
  assert 0 <= factor.min() < 2 and 14 < factor.max() <= 16


def test_states_of_a_mixer_turn_by_orthogonal_matrices():
  """The map from the first state in the cache to the last one, at the start."""
  mixer = MIXERS["delta"](num_heads=1, reflect=True, causal=True)
  params = sequential.init(mixer, 8)
  assert "strength" not in params
  x = jax.random.normal(jax.random.key(0), (1, 64, 8))
  mask = jnp.ones((1, 64), bool)

  @jax.jit
  def last(state):
    cache = {"state": state, "past": jnp.zeros((1, 3, 24))}
    variables = {"params": params, CACHE: cache}
    options = {"mask": mask, "carry": None, "train": False}
    _, kept = mixer.apply(variables, x, mutable=[CACHE], **options)
    return kept[CACHE]["state"]

  zero = last(jnp.zeros((1, 1, 8, 8)))
  turned = (last(jnp.eye(8)[None, None]) - zero)[0, 0]
  values = np.linalg.svd(turned, compute_uv=False)
  np.testing.assert_allclose(values, 1, atol=2e-5)


@pytest.mark.parametrize("size", [-20.0, -40.0, -55.0])
def test_reflections_by_short_keys_write_bounded_values(size):
  """SiLU makes all channels of a key short, if they are far below 0."""
  x = np.random.default_rng(0).normal(size=(1, 12, 8)).astype(np.float32)
  # The key of token 3 has the same small number in each channel of a head.
  x[..., 0] = np.arange(12) == 3
  mixer = MIXERS["delta"](causal=True, reflect=True, conv_width=0, **SMALL)
  mask = jnp.ones((1, 12), bool)
  options = {"mask": mask, "carry": None, "train": False}
  params = mixer.init(jax.random.key(0), x, **options)["params"]
  kernel = params["read"]["kernel"]
  params["read"]["kernel"] = kernel.at[0, 8:16].set(size)

  def loss(params):
    variables = {"params": params}
    (y, _), kept = mixer.apply(variables, x, mutable=[CACHE], **options)
    return y.sum(), kept[CACHE]["state"]

  slopes, state = jax.jit(jax.grad(loss, has_aux=True))(params)
  # Twelve writes of at most 2 |v|.
  assert 0 < jnp.abs(state).max() < 100
  assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes))


@pytest.mark.parametrize("writes", [1, 3])
def test_reflections_keep_the_norm_of_a_state(writes):
  """The map from the first state to the last one is orthogonal."""
  b, n, h, size = 1, 4_096 // writes, 1, 8
  keys = jax.random.normal(jax.random.key(0), (b, n, writes, h, size))
  keys = keys / jnp.linalg.norm(keys, axis=-1, keepdims=True)
  zeros = jnp.zeros((b, n, writes, h, size))

  @jax.jit
  def last(state):
    options = {"beta": jnp.full(keys.shape[:-1], 2.0), "initial": state}
    return matrix_scan(keys[:, :, 0], keys, zeros, **options)[1]

  # The images of the unit vectors are the columns of the map.
  columns = last(jnp.eye(size)[None, None])[0, 0]
  values = np.linalg.svd(columns, compute_uv=False)
  np.testing.assert_allclose(values, 1, atol=2e-5)
