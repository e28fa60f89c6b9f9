import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformers import orthogonal
from jaxformers.training import optim
from tests import optimizers


def values(schedule, steps):
  return [float(schedule(jnp.int32(step))) for step in steps]


def test_rsqrt_is_lras_schedule_for_text():
  """Peaks of LRA's configs: 1.58e-3 at step 1000, 5.6e-4 at step 8000."""
  listops = optim.rsqrt(0.05, 1_000)
  want = [0, 0.05 * 0.5 / math.sqrt(1_000), 0.05 / math.sqrt(1_000), 7.07107e-4]
  np.testing.assert_allclose(
    values(listops, [0, 500, 1_000, 5_000]), want, rtol=1e-5
  )
  text = optim.rsqrt(0.05, 8_000)
  np.testing.assert_allclose(
    values(text, [8_000, 20_000]), [5.59017e-4, 3.53553e-4], rtol=1e-5
  )


def test_cosine_is_lras_schedule_for_images():
  schedule = optim.cosine(5e-4, 175, 35_000)
  halfway = 175 + (35_000 - 175) // 2
  np.testing.assert_allclose(
    values(schedule, [0, 175, halfway, 35_000, 40_000]),
    [0, 5e-4, 2.5e-4, 0, 0],
    atol=3e-8,
  )


def test_linear_is_berts_schedule():
  schedule = optim.linear(2e-5, 100, 1_000)
  np.testing.assert_allclose(
    values(schedule, [0, 50, 100, 550, 1_000, 1_100]),
    [0, 1e-5, 2e-5, 1e-5, 0, 0],
    atol=1e-11,
  )
  assert values(optim.linear(2e-5, 0, 10), [0, 5]) == pytest.approx(
    [2e-5, 1e-5]
  )
  _, built = optimizers.build(
    {"name": "adam"},
    {"name": "linear", "learning_rate": 2e-5, "warmup_steps": 100},
    1_000,
  )
  assert values(built, [550]) == pytest.approx([1e-5])


def test_onecycle_is_skyformers_schedule():
  """PyTorch's OneCycleLR(max_lr=1e-4, total_steps=1000, pct_start=0.1).

  Its phases end at steps pct_start * total - 1 = 99 and total - 1 = 999.
  """
  schedule = optim.onecycle(1e-4, 100, 1_000)
  steps = [0, 50, 99, 100, 549, 999]
  low, high, end = 1e-4 / 25, 1e-4, 1e-4 / 25 / 1e4
  want = [
    low,
    low + (high - low) * 50 / 99,
    high,
    high + (end - high) * 1 / 900,
    high + (end - high) * 450 / 900,
    end,
  ]
  np.testing.assert_allclose(
    values(schedule, steps), want, rtol=1e-5, atol=1e-12
  )
  momentum = optim.onecycle_momentum(100, 1_000)
  want = [0.95, 0.95 - 0.1 * 50 / 99, 0.85, 0.85 + 0.1 / 900, 0.9, 0.95]
  np.testing.assert_allclose(values(momentum, steps), want, rtol=1e-5)


def test_constant_with_warmup():
  schedule = optim.constant(2e-3, 4)
  np.testing.assert_allclose(
    values(schedule, [0, 2, 4, 9]), [0, 1e-3, 2e-3, 2e-3]
  )
  assert values(optim.constant(2e-3), [0]) == pytest.approx([2e-3])


PARAMS = {
  "kernel": jnp.ones((3, 2)),
  "bias": jnp.ones((2, 2)),
  "u_skew": jnp.ones((2, 3, 3)),
  "gate": jnp.ones((2, 3)),
  "cls": jnp.ones((2, 3)),
  "alpha": jnp.ones(()),
}


@pytest.mark.parametrize("name", ["adam", "muon", "sgd"])
def test_optimizers_with_zero_gradient_shrink_decayed_parameters_only(name):
  tx, _ = optimizers.build(
    {"name": name, "weight_decay": 0.1},
    {"name": "constant", "learning_rate": 0.5},
    10,
  )
  zero = jax.tree.map(jnp.zeros_like, PARAMS)
  updates, _ = tx.update(zero, tx.init(PARAMS), PARAMS)
  after = optax.apply_updates(PARAMS, updates)
  np.testing.assert_allclose(after["kernel"], 1 - 0.5 * 0.1, rtol=1e-6)
  for key in ("bias", "u_skew", "alpha", "gate", "cls"):
    np.testing.assert_array_equal(after[key], PARAMS[key])


def test_groups_need_sections():
  groups = {"eigenvalues": 0.1}
  with pytest.raises(ValueError, match="groups.eigenvalues=0.1.*section"):
    optimizers.build(
      {"name": "adam", "groups": groups}, {"name": "constant"}, 10
    )


@pytest.mark.parametrize("name", ["muon", "sgd"])
def test_cycled_momentum_needs_an_optimizer_with_b1(name):
  schedule = {"name": "onecycle", "learning_rate": 1e-2, "warmup_steps": 3}
  with pytest.raises(ValueError, match=f"varies b1.*'{name}'.*choose adam"):
    optimizers.build({"name": name, "cycle_momentum": True}, schedule, 10)


def test_adam_with_cycled_beta_uses_the_beta_of_each_step():
  kw = {"name": "onecycle", "learning_rate": 1e-2, "warmup_steps": 3}
  tx, rate = optimizers.build(
    {"name": "adam", "eps": 1e-6, "cycle_momentum": True}, kw, 9
  )
  beta = optim.onecycle_momentum(3, 9)
  p, state, m, v = jnp.ones(()), None, 0.0, 0.0
  state = tx.init({"w": p})
  want = 1.0
  for step in range(6):
    g = math.sin(step + 1.0)
    updates, state = tx.update({"w": jnp.float32(g)}, state, {"w": p})
    p = p + updates["w"]
    b1, b2 = float(beta(step)), 0.999
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    m_hat, v_hat = m / (1 - b1 ** (step + 1)), v / (1 - b2 ** (step + 1))
    want -= float(rate(step)) * m_hat / (math.sqrt(v_hat) + 1e-6)
  np.testing.assert_allclose(p, want, rtol=1e-5)


def test_clipping_by_value_and_by_norm():
  schedule = {"name": "constant", "learning_rate": 1.0}
  grads = {"w": jnp.array([3.0, 0.5])}
  tx, _ = optimizers.build({"name": "sgd", "clip_value": 1.0}, schedule, 1)
  updates, _ = tx.update(grads, tx.init(grads), grads)
  np.testing.assert_allclose(updates["w"], [-1.0, -0.5])
  tx, _ = optimizers.build({"name": "sgd", "clip_norm": 1.0}, schedule, 1)
  updates, _ = tx.update(grads, tx.init(grads), grads)
  np.testing.assert_allclose(jnp.linalg.norm(updates["w"]), 1.0, rtol=1e-6)


@pytest.mark.parametrize(
  ("optimizer", "schedule", "message"),
  [
    ({"name": "adan"}, {}, "optimizer.*'adan'.*adam, adamw, muon, sgd"),
    ({"name": "adam", "beta": 1}, {}, "optimizer.*'adam'.*'beta'"),
    ({"name": "sgd"}, {"name": "step"}, "schedule.*'step'.*constant, cosine"),
    ({"name": "sgd"}, {"warmup": 3}, "schedule.*'constant'.*'warmup'"),
    (
      {"name": "adam", "cycle_momentum": True},
      {},
      "cycle_momentum=true.*'onecycle'.*'constant'",
    ),
  ],
)
def test_build_refuses_wrong_optimizers_and_schedules(
  optimizer, schedule, message
):
  schedule = {"name": "constant", "learning_rate": 1e-3} | schedule
  with pytest.raises(ValueError, match=message):
    optimizers.build(optimizer, schedule, 10)


def tuned(params, grads=None, optimizer="sgd", **options):
  """Updates of one step at a rate of 1, from gradients of one."""
  tx, _ = optimizers.build(
    {"name": optimizer, **options},
    {"name": "constant", "learning_rate": 1.0},
    10,
  )
  grads = jax.tree.map(jnp.ones_like, params) if grads is None else grads
  return tx.update(grads, tx.init(params), params)[0]


def parts():
  """A tree like that of a model with two layers, and one orthogonal matrix."""
  return {
    "encoder": {
      "embedding": {"tokens": {"embedding": jnp.ones((3, 2))}},
      "layer_0": {"up": {"kernel": jnp.ones((2, 2))}},
      "layer_1": {
        "up": {"kernel": jnp.ones((2, 2))},
        "u_orthogonal": jnp.eye(3)[None],
      },
      "norm": {"scale": jnp.ones(2)},
    },
    "head": {"logits": {"kernel": jnp.ones((2, 2))}},
  }


def test_layer_decay_slows_lower_layers():
  updates = tuned(parts(), layer_decay=0.5)
  encoder = updates["encoder"]
  for leaf, want in (
    (encoder["embedding"]["tokens"]["embedding"], 0.125),
    (encoder["layer_0"]["up"]["kernel"], 0.25),
    (encoder["layer_1"]["up"]["kernel"], 0.5),
    (encoder["norm"]["scale"], 1),
    (updates["head"]["logits"]["kernel"], 1),
  ):
    np.testing.assert_allclose(leaf, -want, rtol=1e-6)


def test_layer_decay_keeps_matrices_orthogonal():
  rate = {"name": "constant", "learning_rate": 1e-2}
  tx, _ = optimizers.build({"name": "adam", "layer_decay": 0.5}, rate, 50)
  params = parts()
  state = tx.init(params)
  update = jax.jit(tx.update)
  rng = np.random.default_rng(0)
  for _ in range(50):
    grads = jax.tree.map(lambda x: jnp.array(rng.normal(size=x.shape)), params)
    updates, state = update(grads, state, params)
    params = jax.tree.map(jnp.add, params, updates)
  q = params["encoder"]["layer_1"]["u_orthogonal"]
  assert orthogonal.orthogonality_defect(q).max() < 5e-6
  assert np.abs(q - jnp.eye(3)).max() > 0.01


@pytest.mark.parametrize("optimizer", ["adam", "muon", "sgd"])
def test_frozen_parts_stay_bit_for_bit(optimizer):
  params = parts()
  # Slightly off: reorthogonalisation would move it.
  q = params["encoder"]["layer_1"]["u_orthogonal"]
  params["encoder"]["layer_1"]["u_orthogonal"] = q + 1e-4
  options = {"frozen": "encoder/embedding,encoder/layer_1", "weight_decay": 0.1}
  updates = tuned(params, optimizer=optimizer, **options)
  for name, part in updates["encoder"].items():
    is_frozen = name in ("embedding", "layer_1")
    for leaf in jax.tree.leaves(part):
      assert bool((leaf == 0).all()) == is_frozen, name
  # All of the encoder, for a head alone.
  updates = tuned(params, optimizer=optimizer, frozen="encoder/")
  assert not any(leaf.any() for leaf in jax.tree.leaves(updates["encoder"]))
  assert updates["head"]["logits"]["kernel"].all()


def test_frozen_parts_are_not_in_the_norm_that_is_clipped():
  params = {"encoder": {"norm": {"scale": jnp.ones(3)}}, "head": jnp.ones(4)}
  alone = tuned({"head": params["head"]}, clip_norm=1.0)["head"]
  updates = tuned(params, clip_norm=1.0, frozen="encoder")
  np.testing.assert_allclose(updates["head"], alone, rtol=1e-6)
  assert np.abs(tuned(params, clip_norm=1.0)["head"]).max() < 0.4


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (
      {"frozen": "encoder/layer_7"},
      "config.optimizer.frozen.*encoder/layer_7.*encoder/layer_1",
    ),
    ({"frozen": "encoder/layer"}, "config.optimizer.frozen.*'encoder/layer'"),
    ({"layer_decay": 1.5}, r"layer_decay=1.5.*\(0, 1\]"),
  ],
)
def test_build_refuses_wrong_layer_decay_and_freeze(options, message):
  with pytest.raises(ValueError, match=message):
    tuned(parts(), **options)


def test_build_lists_user_options_for_an_unknown_option():
  rate = {"name": "constant", "learning_rate": 1e-3}
  with pytest.raises(ValueError) as error:
    optimizers.build({"name": "sgd", "b2": 0.9}, rate, 10)
  text = str(error.value)
  assert "option of optimizer 'sgd' 'b2'" in text
  assert "momentum" in text and "clip_norm" in text
  assert "decays" not in text and " schedule" not in text
  with pytest.raises(
    ValueError, match="config.optimizer.lr=0.1.*config.schedule"
  ):
    optimizers.build({"name": "adam", "lr": 0.1}, rate, 10)
  with pytest.raises(ValueError, match="'total_steps'.*learning_rate"):
    optimizers.build({"name": "adam"}, rate | {"total_steps": 3}, 10)


def test_adamw_is_adam_with_weight_decay():
  rate = {"name": "constant", "learning_rate": 0.5}
  params = {"kernel": jnp.ones((2, 2))}
  grads = jax.tree.map(jnp.zeros_like, params)

  def update(**options):
    tx, _ = optimizers.build(options, rate, 10)
    return tx.update(grads, tx.init(params), params)[0]["kernel"]

  assert update(name="adam").max() == 0
  chex.assert_trees_all_close(
    update(name="adamw"), update(name="adam", weight_decay=0.01)
  )
  assert update(name="adamw").max() == pytest.approx(-0.005)
