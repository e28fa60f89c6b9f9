"""Norms, beside Linen's and beside NumPy."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models import norm, parallel
from jaxformers.models.norm import (
  BatchNorm,
  LayerNorm,
  RunningNorm,
  ScaleNorm,
)
from tests import draws


@pytest.mark.parametrize("is_cpu", [True, False])
@pytest.mark.slow
def test_layer_norm_has_value_and_gradient_of_linen(monkeypatch, is_cpu):
  monkeypatch.setattr(parallel, "on_one_cpu", lambda: is_cpu)
  keys = jax.random.split(jax.random.key(0), 4)
  x = 3 + 2 * jax.random.normal(keys[0], (2, 5, 6))
  params = {"scale": jax.random.normal(keys[1], (6,))}
  params["bias"] = jax.random.normal(keys[2], (6,))
  slope = jax.random.normal(keys[3], x.shape)

  def loss(norm, params, x):
    return (norm.apply({"params": params}, x) * slope).sum()

  ours, linens = LayerNorm(1e-5), nn.LayerNorm(1e-5)
  chex.assert_trees_all_equal(*(n.init(keys[0], x) for n in (ours, linens)))
  got, want = (
    jax.value_and_grad(loss, (1, 2))(n, params, x) for n in (ours, linens)
  )
  chex.assert_trees_all_close(got, want, rtol=2e-5, atol=2e-5)


def test_layer_norm_computes_half_precision_in_float32():
  x = draws.normal(0, (2, 4), jnp.bfloat16)
  y, _ = LayerNorm().init_with_output(jax.random.key(0), x)
  assert y.dtype == jnp.float32
  g = jax.grad(
    lambda x: LayerNorm().init_with_output(jax.random.key(0), x)[0].sum()
  )(x)
  assert g.dtype == x.dtype


def test_scale_norm_divides_by_the_root_mean_square():
  x = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32)
  y = ScaleNorm(1e-3).apply({"params": {"scale": jnp.float32(2.0)}}, x)
  root = np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3)
  np.testing.assert_allclose(y, 2 * x / root, rtol=1e-5)


def batch():
  """x [3, 4, 5], its mask, and parameters of a BatchNorm that has run."""
  rng = np.random.default_rng(0)
  x = (2 + 3 * rng.normal(size=(3, 4, 5))).astype(np.float32)
  mask = np.arange(4)[None] < np.array([[4], [2], [0]])
  params = {
    name: (rng.uniform(0.5, 2, 5)).astype(np.float32)
    for name in ("scale", "bias", "running_mean", "running_variance")
  }
  return x, mask, params


def test_batch_norm_has_the_moments_of_the_tokens():
  x, mask, params = batch()
  apply = jax.jit(
    lambda params, x: BatchNorm(1e-5).apply(
      {"params": params}, x, mask=mask, train=True, mutable=[norm.STATISTICS]
    )
  )
  y, sown = apply(params, x)
  tokens = x[mask].astype(np.float64)
  mean, variance = tokens.mean(0), tokens.var(0)
  want = (x - mean) / np.sqrt(variance + 1e-5) * params["scale"]
  want = want + params["bias"]
  np.testing.assert_allclose(np.asarray(y)[mask], want[mask], atol=1e-5)
  # What is at padding moves nothing.
  z, others = apply(params, np.where(mask[..., None], x, 1e4))
  np.testing.assert_allclose(np.asarray(z)[mask], want[mask], atol=1e-4)
  # An optimiser may have changed the averages before.
  changed = jax.tree.map(lambda p: p + 7, params)
  moved = norm.move_averages(
    {"norm": changed}, {"norm": dict(others)["statistics"]}, {"norm": params}
  )
  assert (moved["norm"]["scale"] == changed["scale"]).all()
  for name, new in (("mean", mean), ("variance", variance)):
    old = params[f"running_{name}"]
    np.testing.assert_allclose(
      moved["norm"][f"running_{name}"], 0.95 * old + 0.05 * new, rtol=1e-5
    )
  assert dict(sown).keys() == {norm.STATISTICS}


def test_batch_norm_running_averages_have_no_gradient():
  x, mask, params = batch()
  for train in (True, False):
    grads = jax.grad(
      lambda params, train=train: (
        BatchNorm()
        .apply(
          {"params": params},
          x,
          mask=mask,
          train=train,
          mutable=[norm.STATISTICS],
        )[0][..., 0]
        .sum()
      )
    )(params)
    for name, grad in grads.items():
      assert bool(jnp.abs(grad).max() > 0) == (not name.startswith("running_"))


def test_batch_norm_evaluation_does_not_depend_on_batch_mates():
  x, mask, params = batch()
  apply = jax.jit(
    lambda x, mask: BatchNorm().apply(
      {"params": params}, x, mask=mask, train=False
    )
  )
  np.testing.assert_allclose(
    apply(x, mask)[:1], apply(x[:1], mask[:1]), rtol=1e-6
  )
  want = (x - params["running_mean"]) / np.sqrt(
    params["running_variance"] + 1e-5
  )
  want = want * params["scale"] + params["bias"]
  np.testing.assert_allclose(apply(x, mask), want, atol=1e-5)


def test_running_norms_train_as_they_evaluate_and_move_averages():
  x, mask, params = batch()

  def apply(kind, train):
    return kind().apply(
      {"params": params}, x, mask=mask, train=train, mutable=[norm.STATISTICS]
    )

  y, sown = apply(RunningNorm, True)
  chex.assert_trees_all_equal(y, apply(RunningNorm, False)[0])
  chex.assert_trees_all_equal(y, apply(BatchNorm, False)[0])
  chex.assert_trees_all_close(sown, apply(BatchNorm, True)[1])
