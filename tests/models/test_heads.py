import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models import heads
from jaxformers.models.heads import POOLS, ClassifierHead
from tests import draws, initial


@pytest.mark.parametrize("pool", sorted(POOLS.keys() - {"all_mean"}))
def test_pools_read_tokens_only(pool, strict):
  x = draws.normal(0, (2, 5, 3))
  mask = jnp.array([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]], bool)
  a, b = (
    POOLS[pool](jnp.where(mask[..., None], x, pad), mask, 9)
    for pad in (-9.0, 9.0)
  )
  chex.assert_trees_all_equal(a, b)
  chex.assert_trees_all_equal(a[1], jnp.zeros_like(a[1]))
  want = {
    "max": x[0, :3].max(0),
    "mean": x[0, :3].mean(0),
    "padded_mean": x[0, :3].sum(0) / 9,
    "root_mean": x[0, :3].sum(0) / np.sqrt(3),
    "first": x[0, 0],
    "cls": x[0, 0],
    "distilled": x[0, :2].ravel(),
  }
  chex.assert_trees_all_close(a[0], want[pool], atol=1e-6)
  # However far a batch is padded.
  wide, more = (
    jnp.pad(z, [(0, 0), (0, 4)] + [(0, 0)] * (z.ndim - 2)) for z in (x, mask)
  )
  chex.assert_trees_all_close(POOLS[pool](wide, more, 9)[0], a[0], atol=1e-6)


def test_all_mean_pool_counts_padding():
  x = draws.normal(0, (2, 5, 3))
  nothing = jnp.zeros((2, 5), bool)
  found = POOLS["all_mean"](x, nothing, 9)
  chex.assert_trees_all_close(found, x.mean(1), atol=1e-6)


@pytest.mark.parametrize("head_dim", [0, 7])
def test_classifier_head_logits_are_float32(head_dim, strict):
  head = ClassifierHead(num_classes=4, pool="mean", head_dim=head_dim)
  x, mask = jnp.ones((2, 5, 3), jnp.bfloat16), jnp.ones((2, 5), bool)
  logits, variables = head.init_with_output(
    jax.random.key(0), x, mask, train=False
  )
  chex.assert_shape(logits, (2, 4))
  assert logits.dtype == np.float32
  assert ("hidden" in variables["params"]) == bool(head_dim)


@pytest.mark.slow
def test_classifier_head_batch_norm_skips_empty_samples(strict):
  head = ClassifierHead(num_classes=3, pool_norm="batch")
  x = draws.normal(0, (6, 5, 4))
  mask = jnp.ones((6, 5), bool)
  variables = head.init(jax.random.key(1), x, mask, train=False)

  def logits(x, mask, train):
    return head.apply(variables, x, mask, train=train, mutable=["statistics"])

  # In evaluation other samples do not matter, and in training they do.
  moved = x.at[0].add(1.0)
  still, other = (logits(z, mask, False)[0][1:] for z in (x, moved))
  chex.assert_trees_all_equal(still, other)
  one, other = (logits(z, mask, True)[0][1:] for z in (x, moved))
  assert np.abs(one - other).max() > 1e-2
  # The kernel sees vectors of mean 0; a sample without tokens has no part.
  bias = variables["params"]["logits"]["bias"]
  np.testing.assert_allclose(logits(x, mask, True)[0].mean(0), bias, atol=1e-5)
  gone, sown = logits(x, mask.at[0].set(False), True)
  np.testing.assert_allclose(gone[1:].mean(0), bias, atol=1e-5)
  assert sown["statistics"]["norm"]["sums"][0] == 5


def test_classifier_head_hidden_layers_halve():
  head = ClassifierHead(num_classes=2, head_dim=12, head_layers=2)
  x, mask = jnp.ones((1, 2, 5)), jnp.ones((1, 2), bool)
  params = initial.params(head, x, mask)
  shapes = {name: layer["kernel"].shape for name, layer in params.items()}
  assert shapes == {"hidden": (5, 12), "hidden_1": (12, 6), "logits": (6, 2)}


def test_classifier_head_init_std_is_obeyed():
  x, mask = jnp.ones((1, 2, 64)), jnp.ones((1, 2), bool)

  def deviations(**options):
    head = ClassifierHead(num_classes=200, head_dim=100, **options)
    params = initial.params(head, x, mask)
    assert not params["logits"]["bias"].any()
    return [params[name]["kernel"].std() for name in ("hidden", "logits")]

  np.testing.assert_allclose(deviations(init_std=0.02), 0.02, rtol=0.05)
  np.testing.assert_allclose(deviations(), [1 / 8, 1 / 10], rtol=0.05)
  with pytest.raises(ValueError, match="init_std=-1.0"):
    deviations(init_std=-1.0)


@pytest.mark.parametrize("head_dim", [0, 50])
@pytest.mark.slow
def test_classifier_head_dropout_acts_in_training(head_dim):
  x, mask = jnp.ones((3, 2, 50)), jnp.ones((3, 2), bool)
  head = ClassifierHead(50, head_dim=head_dim, dropout_rate=0.25)
  params = initial.params(head, x, mask)
  eye = {"kernel": jnp.eye(50), "bias": jnp.zeros(50)}
  params = {name: eye for name in params}  # What is dropped is 0.

  def run(**options):
    return head.apply({"params": params}, x, mask, **options)

  np.testing.assert_allclose(run(train=False), 1)
  dropped = run(train=True, rngs={"dropout": jax.random.key(1)})
  assert 0.15 < (dropped == 0).mean() < 0.35
  np.testing.assert_allclose(dropped[dropped != 0], 4 / 3, rtol=1e-6)
  with pytest.raises(ValueError, match="dropout_rate=-0.1"):
    head.clone(dropout_rate=-0.1).init(jax.random.key(0), x, mask, train=False)


@pytest.mark.parametrize("name", sorted(heads.INTERACTIONS))
def test_classifier_head_combines_pairs_by_interaction(name, strict):
  x = draws.normal(0, (6, 1, 3))  # Three pairs.
  mask = jnp.ones((6, 1), bool)
  head = ClassifierHead(num_classes=4, interaction=name)
  logits, variables = head.init_with_output(
    jax.random.key(1), x, mask, train=False
  )
  a, b = x[0::2, 0], x[1::2, 0]
  features = {
    "concat": jnp.concatenate([a, b], 1),
    "nli": jnp.concatenate([a, b, a * b, a - b], 1),
    "symmetric": jnp.concatenate([jnp.abs(a - b), a * b], 1),
  }[name]
  dense = variables["params"]["logits"]
  want = features @ dense["kernel"] + dense["bias"][None]
  chex.assert_trees_all_close(logits, want, atol=1e-5)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (("median", "relu", "", 1, (0, 1)), "pool.*'median'"),
    (("mean", "sine", "", 1, (0, 1)), "activation.*'sine'"),
    (("mean", "relu", "", 1, (0, 2)), "head_layers=2.*head_dim=0"),
    (("mean", "relu", "", 2, (4, 1)), "pair.*''.*concat, nli, symmetric"),
    (("mean", "relu", "nli", 1, (4, 1)), "interaction='nli'.*pairs"),
  ],
)
@pytest.mark.slow
def test_heads_check_refuses_wrong_options(options, message):
  with pytest.raises(ValueError, match=message):
    heads.check(*options)
