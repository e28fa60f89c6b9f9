"""Caps on the spectral norms of matrices."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformers import models
from jaxformers.training import caps
from tests import initial, optimizers
from tests.assertions import assert_between

SIZES = {"vocab_size": 9, "max_len": 6, "num_classes": 3, "num_layers": 2}


def matrix(shape, norm, seed=0):
  """A random matrix of a given spectral norm, float32."""
  w = np.random.default_rng(seed).normal(size=shape)
  return jnp.float32(norm * w / np.linalg.norm(w, 2))


@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (8, 8)])
@pytest.mark.parametrize("norm", [0.5, 1.02, 1.25, 3.0])
def test_exact_cap_clips_singular_values(shape, norm):
  w = matrix(shape, norm)
  u, s, v = np.linalg.svd(np.float64(w), full_matrices=False)
  want = (u * np.minimum(s, 1)) @ v
  chex.assert_trees_all_close(
    np.float64(caps.exact_cap(w, 1.0)), want, atol=1e-6
  )


@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (8, 8)])
@pytest.mark.parametrize("norm", [0.5, 1.02, 1.25, 3.0, 1e4])
def test_soft_cap_keeps_the_norm_and_the_order_of_singular_values(shape, norm):
  w = matrix(shape, norm)
  got = np.float64(caps.soft_cap(w, 1.0))
  u, _, v = np.linalg.svd(np.float64(w), full_matrices=False)
  inner = u.T @ got @ v.T
  after = np.diag(inner)
  assert_between(after, 0, 1 + 2e-6)
  assert (np.diff(after) <= 1e-6).all()
  # The singular vectors stay, and matrices below the cap stay as they are.
  chex.assert_trees_all_close(inner, np.diag(after), atol=3e-6)
  if norm < 1:
    chex.assert_trees_all_equal(jnp.float32(got), w)
  else:
    assert after[0] > 0.95


def test_norm_bound_is_an_upper_bound():
  """Also for equal singular values, for which it is farthest off."""
  for shape in ((64, 256), (256, 64), (1, 5)):
    for norm in (1e-6, 1.0, 1e6):
      bound = float(caps.norm_bound(matrix(shape, norm)))
      assert norm * (1 - 1e-5) <= bound <= 1.035 * norm
  assert float(caps.norm_bound(jnp.eye(64))) == pytest.approx(64 ** (1 / 128))
  assert float(caps.norm_bound(jnp.zeros((3, 4)))) == 0


def make(cap, most, optimizer="muon", **options):
  shared = {"name": optimizer, **options}
  shared |= {"cap": cap, "cap_max": most} if cap else {}
  schedule = {"name": "constant", "learning_rate": 0.3}
  return optimizers.build(shared, schedule, 10)[0]


@pytest.mark.parametrize("cap", ["soft", "exact"])
@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_training_keeps_every_matrix_below_its_cap(cap, optimizer):
  model = models.build("capped_transformer", d_model=8, pool="cls", **SIZES)
  params = initial.params(model, model.example())
  tx = make(cap, 0.7, optimizer)
  state = tx.init(params)
  rng = np.random.default_rng(0)

  @jax.jit
  def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  for _ in range(3):
    grads = jax.tree.map(
      lambda x: jnp.float32(rng.normal(size=x.shape)), params
    )
    params, state = step(params, state, grads)
  encoder = params["encoder"]
  for i in range(2):
    layer = encoder[f"layer_{i}"]
    kernels = [layer[name]["kernel"] for name in ("up", "down")]
    kernels += [
      layer["mixer"][name]["kernel"].reshape(8, 8)
      for name in ("query", "key", "value", "out")
    ]
    for kernel in kernels:
      limit = 0.7 * np.sqrt(kernel.shape[1] / kernel.shape[0])
      norm = np.linalg.norm(np.float64(kernel), 2)
      # Without a cap, three steps of Adam lead to norms of 1.5 and more.
      assert_between(norm, 0.8 * limit, limit, rtol=1e-5)
  table = encoder["embedding"]["tokens"]["embedding"]
  for rows in (table, encoder["embedding"]["cls"]):
    sizes = np.sqrt(np.square(rows).mean(-1))
    assert_between(sizes, 0, 1 + 1e-6)
  # The head has no cap.
  assert np.linalg.norm(params["head"]["logits"]["kernel"], 2) > 1.2


def test_caps_leave_rotations_and_frozen_parts():
  model = models.build("transformer_orthogonal", d_model=8, **SIZES)
  params = initial.params(model, model.example())
  grads = jax.tree.map(jnp.ones_like, params)
  results = []
  for cap in ("exact", ""):
    tx = make(cap, 0.01, "adam", frozen="encoder/embedding")
    updates, _ = tx.update(grads, tx.init(params), params)
    mixer = updates["encoder"]["layer_0"]["mixer"]
    results.append({k: v for k, v in mixer.items() if k.endswith("_skew")})
    table = updates["encoder"]["embedding"]["tokens"]["embedding"]
    assert not table.any()
  assert len(results[0]) == 3
  chex.assert_trees_all_close(*results, atol=1e-6)


def test_models_without_kernels_have_nothing_to_cap():
  model = models.build("isometric", d_model=8, **SIZES)
  with pytest.raises(ValueError, match="cap=soft has nothing to cap"):
    make("soft", 1.0).init(initial.params(model, model.example()))


def test_unknown_caps_are_refused():
  with pytest.raises(ValueError, match=r"cap.*'hard'.*exact, soft"):
    make("hard", 1.0)
  with pytest.raises(ValueError, match=r"cap_max=2.*soft or exact"):
    optimizers.build(
      {"name": "adam", "cap_max": 2.0},
      {"name": "constant", "learning_rate": 0.3},
      10,
    )
