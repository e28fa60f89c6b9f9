"""Muon, against optax and against singular vectors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from jaxformers import models, orthogonal
from jaxformers.training import muon
from jaxformers.training.riemannian import riemannian
from tests import draws, initial, optimizers
from tests.marks import slow_except

OPTIONS = {"beta": 0.95, "adam_factor": 1.0, "adam_b1": 0.9, "adam_b2": 0.999}


def scaled(rms=0.0):
  return muon.scale_by_muon(consistent_rms=rms, **OPTIONS)


def in_layer(**leaves):
  return {"encoder": {"layer_0": leaves}}


def run(tx, params, steps, seed=0):
  """Returns the parameters after steps with random gradients."""
  state = tx.init(params)
  for step in range(steps):
    leaves, tree = jax.tree.flatten(params)
    grads = tree.unflatten(
      draws.normal(seed + 100 * step + i, x.shape) for i, x in enumerate(leaves)
    )
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
  return params


@pytest.mark.parametrize("rms", [0.0, 0.2])
def test_muon_of_matrices_is_that_of_optax(rms):
  start = in_layer(
    up={"kernel": draws.normal(1, (6, 10)), "bias": jnp.ones(10)},
    down={"kernel": draws.normal(2, (10, 6))},
  )
  options = {"weight_decay": 0.1, "consistent_rms": rms or None}
  want = optax.contrib.muon(
    0.05,
    **options,
    weight_decay_mask={
      "encoder": {
        "layer_0": {
          "up": {"kernel": True, "bias": False},
          "down": {"kernel": True},
        }
      }
    },
  )
  section = {"name": "muon", "weight_decay": 0.1, "consistent_rms": rms}
  schedule = {"name": "constant", "learning_rate": 0.05}
  tx, _ = optimizers.build(section, schedule, 20)
  got, want = (run(each, start, 20) for each in (tx, want))
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-6)


def test_kernels_of_heads_are_the_matrices_of_all_heads():
  query, out = draws.normal(1, (12, 3, 5)), draws.normal(2, (3, 5, 12))
  heads = in_layer(mixer={"query": {"kernel": query}, "out": {"kernel": out}})
  flat = in_layer(
    mixer={
      "query": {"kernel": query.reshape(12, 15)},
      "out": {"kernel": out.reshape(15, 12)},
    }
  )
  got, want = (
    scaled().update(x, scaled().init(x), x)[0] for x in (heads, flat)
  )
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a.reshape(b.shape), b, atol=1e-6)
    # All singular values of a step are near 1, up to the width's factor.
    values = np.linalg.svd(b * np.sqrt(min(1, b.shape[0] / b.shape[1])))[1]
    assert values.min() > 0.6 and values.max() < 1.21


def test_adam_takes_what_is_no_kernel_of_a_layer():
  model = models.build(
    "rglru", vocab_size=9, max_len=8, num_classes=3, d_model=8, num_layers=1
  )
  params = model.init(jax.random.key(0), model.example(), train=False)["params"]
  found = {
    jax.tree_util.keystr(path, simple=True, separator="/")
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    if muon.axes(path, leaf)
  }
  names = ("mixer/input", "mixer/gate", "mixer/output", "up", "down")
  assert found == {f"encoder/layer_0/{name}/kernel" for name in names}
  # The learning rate of Adam is `adam_factor` times that of Muon.
  grads = jax.tree.map(jnp.ones_like, params)
  half = muon.scale_by_muon(consistent_rms=0.2, **{**OPTIONS, "adam_factor": 2})
  one, two = (
    tx.update(grads, tx.init(params), params)[0] for tx in (scaled(0.2), half)
  )
  ratios = jax.tree.map(lambda a, b: float((b / a).mean()), one, two)
  for path, ratio in jax.tree_util.tree_leaves_with_path(ratios):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    assert ratio == pytest.approx(1 if name in found else 2, rel=1e-5)


@pytest.mark.parametrize(
  ("name", "options"),
  [
    ("sinkhorn", {"mixer": {"block_size": 4}}),
    ("synthesizer", {"mixer": {"kind": "dense"}}),
  ],
)
def test_matrices_of_single_heads_are_left_to_adam(name, options):
  sizes = {"vocab_size": 9, "max_len": 8, "d_model": 8, "num_layers": 1}
  model = models.build(name, num_classes=3, **sizes, **options)
  params = initial.params(model, model.example())
  found = {
    jax.tree_util.keystr(path, simple=True, separator="/")
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    if leaf.ndim == 3 and not muon.axes(path, leaf)
  }
  assert any(path.endswith("_kernel") for path in found)


@pytest.mark.parametrize("d", [6, 7])
@pytest.mark.parametrize("name", ["u_skew", "u_orthogonal"])
def test_muon_of_rotations_turns_all_planes_by_one_angle(name, d):
  """The step is the sign of the skew gradient, so that Q A gains the most."""
  q = orthogonal.expm(draws.normal(1, (2, d, d)))
  gradient = draws.normal(2, (2, d, d))
  product = jnp.swapaxes(q, 1, 2) @ gradient
  skew = product - jnp.swapaxes(product, 1, 2)
  u, _, vt = np.linalg.svd(skew)
  # With odd d one singular value is 0, and stays 0.
  u = u[..., : d // 2 * 2]
  sign = u @ vt[:, : d // 2 * 2]
  if name == "u_skew":
    params, grads = {name: jnp.zeros_like(q)}, {name: jnp.tril(skew, -1)}
    updates, _ = scaled().update(grads, scaled().init(params), params)
    step = orthogonal.skew(updates[name])
  else:
    tx = riemannian(optax.chain(scaled(), optax.scale(0.1)))
    updates, _ = tx.update({name: gradient}, tx.init({name: q}), {name: q})
    turn = jnp.swapaxes(q, 1, 2) @ (q + updates[name])
    # The inverse of the Cayley map.
    eye = np.eye(d)
    step = 10 * 2 * (turn - eye) @ np.linalg.inv(turn + eye)
  np.testing.assert_allclose(step, -np.swapaxes(step, 1, 2), atol=1e-4)
  # Newton-Schulz with optax's factors ends between 0.68 and 1.21.
  values = np.linalg.svd(step)[1][:, : d // 2 * 2]
  assert values.min() > 0.4 and values.max() < 1.21
  gain = np.einsum("bij,bij->b", step, skew) / np.linalg.svd(skew)[1].sum(1)
  best = np.einsum("bij,bij->b", sign, skew) / np.linalg.svd(skew)[1].sum(1)
  np.testing.assert_allclose(best, 1, atol=1e-5)
  assert gain.min() > 0.7


@pytest.mark.parametrize("steps", slow_except([200], [200, 10_000]))
def test_orthogonal_muon_keeps_matrices_orthogonal(steps):
  q = {"u_orthogonal": orthogonal.expm(draws.normal(1, (8, 8)))}
  target = orthogonal.expm(draws.normal(2, (8, 8)))
  tx = riemannian(optax.chain(scaled(0.2), optax.scale(0.05)))

  def step(both, _):
    q, state = both
    grads = jax.grad(lambda q: -jnp.sum(q["u_orthogonal"] * target))(q)
    updates, state = tx.update(grads, state, q)
    return (optax.apply_updates(q, updates), state), None

  (q, _), _ = jax.lax.scan(step, (q, tx.init(q)), None, steps)
  assert orthogonal.orthogonality_defect(q["u_orthogonal"]) < 5e-6
