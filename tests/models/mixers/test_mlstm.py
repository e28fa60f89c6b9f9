"""mLSTM against its recurrence without a running maximum."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models.mixer import MIXERS
from tests.models.mixers import sequential

pytestmark = pytest.mark.slow  # Not in REPRESENTATIVES.

SMALL = {"num_heads": 2}


def outputs(params, x, *, causal):
  """Equations 19 to 27 and figure 11 of Beck et al. 2024, unstabilised."""
  u = sequential.linear(params["read"], x)
  c = sequential.silu(sequential.convolved(params, u))
  q, k, v = (
    np.einsum("nhe,hef->nhf", a.reshape(len(x), -1, 4), params[name]).reshape(
      len(x), -1
    )
    for a, name in ((c, "query"), (c, "key"), (u, "value"))
  )
  gates = np.concatenate([q, k, v], 1) @ params["gates"] + params["gates_bias"]
  enter, forget = np.exp(gates[:, :2]), sequential.sigmoid(gates[:, 2:])
  q, k, v = (sequential.by_heads(a, 2) for a in (q, k, v))
  q = q * q.shape[-1] ** -0.5
  v = np.concatenate([v, np.ones_like(v[..., :1])], -1)

  def run(*, reverse):
    y = sequential.read(
      q, enter[..., None] * k, v, log_decay=np.log(forget), reverse=reverse
    )
    # The constant 1e-6 is added to a divisor that is relative to the maximum.
    top = tops(np.log(forget), np.log(enter), reverse=reverse)
    small = 1e-6 * np.exp(top)[..., None]
    return y[..., :-1] / (np.maximum(np.abs(y[..., -1:]), 1) + small)

  y = run(reverse=False) + (0 if causal else run(reverse=True))
  mean = y.mean(-1, keepdims=True)
  y = (y - mean) / np.sqrt(y.var(-1, keepdims=True) + 1e-5)
  y = y.reshape(len(x), -1) * params["scale"] + params["skip"] * c
  y = y * sequential.silu(sequential.linear(params["gate"], x))
  return sequential.linear(params["output"], y)


def tops(log_f, log_i, *, reverse):
  top, found = np.zeros(log_i.shape[1]), np.zeros_like(log_i)
  for t in reversed(range(len(log_i))) if reverse else range(len(log_i)):
    top = np.maximum(log_f[t] + top, log_i[t])
    found[t] = top
  return found


@pytest.mark.parametrize("causal", [True, False])
def test_mlstm_is_its_recurrence(causal):
  run = functools.partial(outputs, causal=causal)
  sequential.check("mlstm", run, SMALL | {"causal": causal}, atol=2e-5)


def test_mlstm_starts_as_published():
  params = sequential.init(MIXERS["mlstm"](num_heads=4), 16)
  np.testing.assert_array_equal(params["gates"], 0)
  enter, forget = np.split(np.asarray(params["gates_bias"]), 2)
  np.testing.assert_allclose(forget, [3, 4, 5, 6])
  assert 0 < np.abs(enter).max() < 0.5


@pytest.mark.parametrize("shift", [-200.0, 200.0])
def test_mlstm_survives_gates_of_any_size(shift):
  """Input gates of exp(200) would overflow without the running maximum."""
  mixer = MIXERS["mlstm"](num_heads=2)
  params = dict(sequential.init(mixer, 6))
  params["gates_bias"] = params["gates_bias"] + np.float32(shift)
  x, mask = sequential.inputs()

  @jax.jit
  @jax.value_and_grad
  def loss(params):
    options = {"mask": mask, "carry": None, "train": False}
    y, _ = mixer.apply({"params": params}, x.astype(np.float32), **options)
    return jnp.where(mask[..., None], y, 0).sum()

  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(loss(params)))


def test_mlstm_refuses_blocks_that_do_not_divide():
  with pytest.raises(ValueError, match=r"block_size=4 does not divide the 10"):
    sequential.init(MIXERS["mlstm"](num_heads=1), 5)
