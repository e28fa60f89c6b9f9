import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from jaxformers import orthogonal
from jaxformers.commands import states
from jaxformers.training import loop
from jaxformers.training.riemannian import riemannian
from tests import draws


def rotations(seed, d, count=2):
  a = draws.normal(seed, (count, d, d))
  return orthogonal.expm(a)


def test_riemannian_gradient_is_that_of_the_cayley_map_at_the_matrix():
  q, w = rotations(0, 5), draws.normal(1, (2, 5, 5))
  seen = []
  inner = optax.GradientTransformation(
    lambda p: (), lambda g, s, p: (seen.append(g) or g, s)
  )
  tx = riemannian(inner)

  def f(q):
    return jnp.sum(jnp.sin(q) * w)

  tx.update({"u_orthogonal": jax.grad(f)(q)}, tx.init({}), {"u_orthogonal": q})
  want = jax.grad(lambda a: f(orthogonal.cayley(a, q)))(jnp.zeros_like(q))
  chex.assert_trees_all_close(seen[0]["u_orthogonal"], want, atol=1e-5)


def test_riemannian_step_stays_on_the_group():
  q, w = rotations(0, 5), draws.normal(1, (2, 5, 5))
  params = {"u_orthogonal": q, "bias": jnp.ones(3)}
  grads = {"u_orthogonal": w, "bias": jnp.full(3, 2.0)}
  tx = riemannian(optax.sgd(0.1))
  updates, _ = tx.update(grads, tx.init(params), params)
  after = optax.apply_updates(params, updates)
  slope = jnp.swapaxes(q, 1, 2) @ w
  a = -0.1 * jnp.tril(slope - jnp.swapaxes(slope, 1, 2), -1)
  chex.assert_trees_all_close(
    after,
    {"u_orthogonal": orthogonal.cayley(a, q), "bias": 0.8 * jnp.ones(3)},
    atol=1e-6,
  )


def test_riemannian_adam_finds_the_nearest_rotation():
  target = rotations(3, 6)
  params = {"u_orthogonal": rotations(4, 6)}
  tx = riemannian(optax.adam(optax.cosine_decay_schedule(0.1, 400)))

  def step(both, _):
    params, state = both
    grads = jax.grad(lambda p: jnp.sum((p["u_orthogonal"] - target) ** 2))(
      params
    )
    updates, state = tx.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), None

  (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), None, 400)
  np.testing.assert_allclose(params["u_orthogonal"], target, atol=1e-3)


def test_riemannian_passes_other_leaves_unchanged():
  params = {"w": jnp.arange(4.0), "u_skew": jnp.ones((2, 2))}
  grads = jax.tree.map(jnp.ones_like, params)
  plain, wrapped = optax.adamw(0.1), riemannian(optax.adamw(0.1))
  chex.assert_trees_all_equal(wrapped.init(params), plain.init(params))
  chex.assert_trees_all_equal(
    wrapped.update(grads, wrapped.init(params), params),
    plain.update(grads, plain.init(params), params),
  )


def test_riemannian_passes_extra_arguments():
  tx = riemannian(optax.contrib.reduce_on_plateau())
  params = {"u_orthogonal": rotations(0, 4)}
  grads = jax.tree.map(jnp.ones_like, params)
  value = jnp.float32(0.5)
  _, state = tx.update(grads, tx.init(params), params, value=value)
  assert state.best_value == value


def test_riemannian_refuses_updates_without_parameters():
  tx = riemannian(optax.sgd(0.1))
  with pytest.raises(ValueError, match="riemannian.*update.*parameters"):
    tx.update({}, tx.init({}))


@pytest.mark.long
def test_riemannian_run_in_bfloat16_keeps_matrices_orthogonal(smoke, tmp_path):
  fields = {
    "model.dtype": "bfloat16",
    "model.orthogonal_map": "matrix",
    "model.memory": "reversible",
    "schedule.learning_rate": 1e-2,
  }
  results = loop.run(smoke(total_steps=5, **fields), tmp_path)
  assert np.isfinite(results["loss"])
  run = states.load(tmp_path)
  found = jax.tree_util.tree_flatten_with_path(run.params)[0]
  kept = [(path, q) for path, q in found if orthogonal.is_orthogonal(path)]
  assert len(kept) == 2 * 3 + 1
  for _, q in kept:
    assert q.dtype == jnp.float32
    assert float(orthogonal.orthogonality_defect(q).max()) <= 5e-6
  u = run.params["encoder"]["layer_0"]["mixer"]["u_orthogonal"]
  before = run.start["encoder"]["layer_0"]["mixer"]["u_orthogonal"]
  assert float(jnp.abs(u - before).max()) > 1e-3
