"""The mixer contract, for every registered mixer."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import orthogonal
from jaxformers.models import attention, mixers
from jaxformers.models.attention import MIXERS

NAMES = sorted(MIXERS)
D = 16


def make(name, n=8):
  x = jax.random.normal(jax.random.key(0), (2, n, D))
  mask = jnp.arange(n)[None] < jnp.array([[n], [5]])
  mixer = MIXERS[name]()
  kw = {"mask": mask, "carry": None, "train": False}
  params = mixer.init(jax.random.key(1), x, **kw)["params"]
  # Nothing may hide behind a zero start.
  params = jax.tree.map(lambda p: p if p.ndim else p + 0.5, params)
  return mixer, {"params": params}, x, kw


@pytest.fixture(params=NAMES)
def name(request):
  return request.param


def test_the_registry_knows_them():
  assert {"softmax", "transject"} <= set(NAMES)
  assert mixers.__all__


def test_shape_is_kept_and_evaluation_repeats(name, strict):
  mixer, variables, x, kw = make(name)
  (y, carry), (z, _) = (mixer.apply(variables, x, **kw) for _ in range(2))
  chex.assert_equal_shape([x, y])
  chex.assert_trees_all_equal(y, z)
  # What it carries it also takes.
  y, _ = mixer.apply(variables, x, **(kw | {"carry": carry}))
  chex.assert_equal_shape([x, y])


def test_masked_tokens_are_never_read(name, strict):
  mixer, variables, x, kw = make(name)
  mask = kw["mask"][..., None]
  (y, a), (z, b) = (
    mixer.apply(variables, jnp.where(mask, x, pad), **kw) for pad in (0.0, 1e3)
  )
  chex.assert_trees_all_close(y[0], z[0], atol=1e-5)
  chex.assert_trees_all_close(y[1, :5], z[1, :5], atol=1e-5)
  chex.assert_trees_all_close(a, b, atol=1e-5)


def test_appending_padding_changes_nothing(name, strict):
  mixer, variables, x, kw = make(name)
  longer = jnp.pad(x, ((0, 0), (0, 12), (0, 0)), constant_values=7.0)
  mask = jnp.pad(kw["mask"], ((0, 0), (0, 12)))
  y, _ = mixer.apply(variables, x, **kw)
  z, _ = mixer.apply(variables, longer, **(kw | {"mask": mask}))
  chex.assert_trees_all_close(y[0], z[0, :8], atol=1e-5)
  chex.assert_trees_all_close(y[1, :5], z[1, :5], atol=1e-5)


def test_a_sample_does_not_depend_on_its_batch_mates(name, strict):
  mixer, variables, x, kw = make(name)
  y, _ = mixer.apply(variables, x, **kw)
  z, _ = mixer.apply(variables, x.at[1].multiply(-3), **kw)
  chex.assert_trees_all_close(y[0], z[0], atol=1e-6)
  assert not np.allclose(y[1], z[1], atol=1e-3)


def test_the_second_call_does_not_recompile(name):
  mixer, variables, x, kw = make(name)
  chex.clear_trace_counter()

  @jax.jit
  @chex.assert_max_traces(n=1)
  def apply(variables, x, mask):
    return mixer.apply(variables, x, mask=mask, carry=None, train=False)

  for scale in (1.0, 2.0):
    jax.block_until_ready(apply(variables, scale * x, kw["mask"]))


def test_half_precision_stays_near(name):
  mixer, variables, x, kw = make(name)
  y, _ = mixer.apply(variables, x, **kw)
  half = MIXERS[name](dtype=jnp.bfloat16)
  z, _ = half.apply(variables, x.astype(jnp.bfloat16), **kw)
  assert z.dtype == jnp.bfloat16
  chex.assert_trees_all_close(y[0], z[0].astype(y.dtype), atol=0.1)


def test_a_sample_without_tokens_is_finite(name):
  mixer, variables, x, kw = make(name)
  mask = jnp.zeros_like(kw["mask"])

  def f(x):
    return mixer.apply(variables, x, mask=mask, carry=None, train=False)[
      0
    ].sum()

  chex.assert_tree_all_finite(jax.value_and_grad(f)(x))


def test_heads_must_divide_the_width():
  with pytest.raises(
    ValueError, match="num_heads=3 does not divide d_model=16"
  ):
    MIXERS["softmax"](num_heads=3).init(
      jax.random.key(0),
      jnp.ones((1, 2, D)),
      mask=jnp.ones((1, 2), bool),
      carry=None,
      train=False,
    )


def test_dropout_of_the_weights_acts_in_training_only():
  mixer = MIXERS["softmax"](dropout_rate=0.5)
  _, variables, x, kw = make("softmax")

  def apply(train, seed):
    rngs = {"dropout": jax.random.key(seed)}
    kw["train"] = train
    return mixer.apply(variables, x, rngs=rngs, **kw)[0]

  chex.assert_trees_all_equal(apply(False, 0), apply(False, 1))
  assert not np.allclose(apply(True, 0), apply(True, 1))


def test_pools_of_heads_by_hand():
  x = jnp.array([[[1.0, -5.0], [3.0, -7.0], [100.0, 100.0]]])
  mask = jnp.array([[True, True, False]])
  chex.assert_trees_all_equal(
    attention.masked_max(x, mask), jnp.array([[3.0, -5.0]])
  )
  chex.assert_trees_all_equal(
    attention.masked_mean(x, mask), jnp.array([[2.0, -6.0]])
  )


def test_rotations_given_are_the_rotations_made():
  mixer, variables, x, kw = make("transject")
  rotations = orthogonal.rotations(variables["params"], "cayley")
  y, _ = mixer.apply(variables, x, **kw)
  z, _ = mixer.apply(variables | {"rotations": rotations}, x, **kw)
  chex.assert_trees_all_close(y, z, atol=1e-6)
  turned = jax.tree.map(lambda q: q, rotations)
  turned["u_skew"] = -turned["u_skew"]
  z, _ = mixer.apply(variables | {"rotations": turned}, x, **kw)
  assert not np.allclose(y, z, atol=1e-3)
