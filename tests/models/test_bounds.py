"""Bounds of logits for training: above those of certificates, and smooth."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import models
from jaxformers.models import bounds
from jaxformers.models.blocks.invertible import Change
from jaxformers.models.variables import make_variables
from jaxformers.models.variants import ALWAYS
from tests import initial
from tests.assertions import assert_between
from tests.marks import long_except
from tests.models.mixers.oracle import small_sizes

VOCAB, LENGTH = 8, 6
IDS = np.array([[3, 1, 4, 1, 5, 2], [2, 6, 5, 0, 0, 0]], np.int32)


def build(name="isometric", **options):
  model = models.build(
    name,
    vocab_size=VOCAB,
    max_len=LENGTH,
    num_classes=3,
    d_model=8,
    num_layers=2,
    **{"embedding": {"init_std": 1.0}} | options,
  )
  params = initial.params(model, jnp.asarray(IDS))
  for i in range(2):
    layer = params["encoder"][f"layer_{i}"]
    if "residual" in layer:
      layer["residual"]["alpha"] = jnp.float32(0.8)
  if norm := params["head"].get("norm"):
    norm["running_variance"] = 0.01 * (1 + jnp.arange(8.0)) ** 2
  return model, params


CASES = [
  ("isometric", {"pool_norm": "running"}),
  ("isometric", {"block": {"form": "feed_forward"}, "pool": "max"}),
  ("allpass", {"head_dim": 6, "pool": "root_mean"}),
  ("certified_s4d", {"head_dim": 6}),
  ("injective_transformer", {"pool": "first"}),
  ("l2_transformer", {"head_dim": 6}),
  ("random_transject", {"mixer": {"num_experts": 1}}),
  ("random_transject", {"mixer": {"gating": "certified"}}),
]
cases = pytest.mark.parametrize("case", long_except(CASES[::2], CASES), ids=str)


@cases
def test_the_bound_for_gradients_is_that_of_certificates(case):
  """But for the rounding of rotations."""
  name, options = case
  model, params = build(name, **options)
  variables = make_variables(model, params)
  n = np.array([6, 3])
  change = Change(*([0.5, 2.0], [0.8, 2.5], [0.1, 1], [0.4, 1.5]))
  change = Change(*map(np.array, change))
  want = bounds.find_bound(model, variables)(change, n)
  assert want.dtype == np.float64
  smooth = bounds.find_bound(model, variables, exact=False)
  got = smooth(Change(*map(jnp.float32, change)), jnp.float32(n))
  chex.assert_trees_all_close(got, want, rtol=2e-4)


@pytest.mark.parametrize("case", long_except(CASES[:1], CASES), ids=str)
@pytest.mark.slow
def test_no_replacement_makes_a_wrong_logit_greater_than_promised(case):
  name, options = case
  model, params = build(name, **options)
  variables = make_variables(model, params)
  forward = jax.jit(functools.partial(model.apply, variables, train=False))
  targets = np.array([2, 0])
  for k in (1, 2):
    raised = bounds.nearest_wrong(
      model, variables, forward(IDS), IDS, targets, k
    )
    promised = np.asarray(raised) - np.asarray(raised)[[0, 1], targets][:, None]
    for row, target in enumerate(targets):
      places = np.nonzero(IDS[row])[0]
      trials = []
      for chosen in itertools.combinations(places, k):
        for new in itertools.product(range(1, VOCAB), repeat=k):
          trials.append(IDS[row].copy())
          trials[-1][list(chosen)] = new
      logits = np.asarray(forward(np.stack(trials)))
      found = (logits - logits[:, [target]]).max(0)
      assert_between(found, -np.inf, promised[row], atol=1e-4)
      # The promise is no empty one.
      others = np.arange(3) != target
      rise = found - np.asarray(forward(IDS))[row] + forward(IDS)[row, target]
      room = promised[row] - found
      assert_between((rise / (room + rise))[others], 0.01, np.inf)


@pytest.mark.slow
def test_nearest_wrong_has_finite_gradients_for_empty_sequences():
  """For an empty sequence, and the label's own logit."""
  model, params = build(pool_norm="running")
  ids = np.stack([IDS[0], np.zeros(LENGTH, np.int32)])

  def total(params):
    variables = make_variables(model, params)
    logits = model.apply(variables, ids, train=False)
    raised = bounds.nearest_wrong(
      model, variables, logits, ids, jnp.array([1, 2]), 3
    )
    return jax.nn.logsumexp(raised, -1).sum(), raised - logits

  value_and_grad = jax.jit(jax.value_and_grad(total, has_aux=True))
  (_, raise_by), grads = value_and_grad(params)
  chex.assert_tree_all_finite(grads)
  chex.assert_trees_all_close(raise_by[1], 0, atol=1e-4, rtol=0)
  assert raise_by[0, 1] == 0
  assert_between(raise_by[0, ::2], 0.1, np.inf)
  # A token of which nothing is left.
  table = params["encoder"]["embedding"]["tokens"]["embedding"]
  params["encoder"]["embedding"]["tokens"]["embedding"] = table.at[7].set(0)
  chex.assert_tree_all_finite(value_and_grad(params)[1])
  # Averages are made of batches alone.
  for name in ("running_mean", "running_variance"):
    assert not grads["head"]["norm"][name].any()
  # The bound wants weaker layers and smaller vectors.
  assert grads["encoder"]["layer_0"]["alpha"] > 0


@pytest.mark.parametrize(
  "name", long_except(("allpass", "lru"), sorted(models.MODELS))
)
def test_a_bound_is_declared_where_there_is_one(name):
  sizes = dict(vocab_size=VOCAB, max_len=LENGTH, num_classes=3, d_model=8)
  variant = models.MODELS[name]
  mixer = small_sizes(variant.mixer)
  model = models.build(name, num_layers=2, mixer=mixer, **sizes)
  is_declared = variant.bounded == ALWAYS
  assert bounds._has_bound(model) == is_declared


@pytest.mark.slow
def test_check_bound_refuses_models_without_bound():
  bounds.check_bound(build()[0], 1)
  bounds.check_bound(build("transformer", embedding={})[0], 0)
  for name, options, message in (
    ("transformer", {}, "layers of 'transformer'.*allpass, .*isometric"),
    ("transject", {}, "layers of 'transject'.*num_experts=1"),
    ("isometric", {"pool_norm": "layer"}, "pool_norm='layer'.*'running'"),
    ("isometric", {"num_inputs": 2, "interaction": "nli"}, "pairs"),
    ("isometric", {"vocab_size": 0}, "classifiers"),
    ("isometric", {"pool_norm": "batch"}, "pool_norm='batch'.*'running'"),
    ("isometric", {"embedding": {"norm_epsilon": 1e-5}}, "adaptive"),
    ("isometric", {"embedding": {"cutoffs": (4,)}}, "adaptive"),
    ("allpass", {"coupled": True}, "coupled=False"),
  ):
    options = {"vocab_size": VOCAB} | options
    model = models.build(
      name, max_len=LENGTH, num_classes=3, d_model=8, num_layers=2, **options
    )
    with pytest.raises(ValueError, match=f"margin_tokens=2.*{message}"):
      bounds.check_bound(model, 2)
