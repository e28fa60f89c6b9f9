"""Certified and attacked accuracy: the bounds, and searches against them."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import models
from jaxformers.models import bounds, certificates
from jaxformers.models.variables import make_variables
from tests import initial
from tests.assertions import assert_between
from tests.marks import slow_except

VOCAB, LENGTH, CLASSES = 12, 9, 3


def ids_of(seed, count=6):
  rng = np.random.default_rng(seed)
  ids = rng.integers(1, VOCAB, (count, LENGTH)).astype(np.int32)
  lengths = rng.integers(3, LENGTH + 1, count)
  return np.where(np.arange(LENGTH)[None] < lengths[:, None], ids, 0)


def build(name="isometric", pool="mean", head_dim=0, **options):
  model = models.build(
    name,
    vocab_size=VOCAB,
    max_len=LENGTH,
    num_classes=CLASSES,
    d_model=8,
    num_layers=2,
    pool=pool,
    head_dim=head_dim,
    **{"embedding": {"init_std": 1.0}} | options,
  )
  params = initial.params(model, jnp.asarray(ids_of(0)))
  # Away from the start, where TransJect's layers do nothing.
  for i in range(2):
    layer = params["encoder"][f"layer_{i}"]
    if "residual" in layer:
      layer["residual"]["alpha"] = jnp.float32(0.8)
  # Away from a variance of 1, which would hide its root.
  if norm := params["head"].get("norm"):
    norm["running_variance"] = 0.01 * (1 + jnp.arange(8.0)) ** 2
    norm["running_mean"] = jnp.linspace(-1, 1, 8)
  return model, params


def find_bound(model, params):
  return bounds.find_bound(model, make_variables(model, params))


def test_padding_before_tokens_does_not_change_a_certificate():
  """A causal model moves its tokens to the front, with their states."""
  model, params = build("allpass", causal=True, positions="none")
  table = params["encoder"]["embedding"]["tokens"]["embedding"]
  params["encoder"]["embedding"]["tokens"]["embedding"] = table.at[0].set(0.01)
  ids = ids_of(1)
  moved = np.stack([np.roll(row, (row == 0).sum()) for row in ids])
  assert (moved != ids).any()
  labels = certificates.Evaluation(model, params).logits(ids).argmax(1)
  chex.assert_trees_all_equal(
    certificates.certify(model, params, moved, labels),
    certificates.certify(model, params, ids, labels),
  )


def test_logits_are_computed_at_full_precision(monkeypatch):
  """A product of a TPU is one pass of bfloat16 by default."""
  names = []

  def outputs(model, variables, ids):
    names.append(jax.config.jax_default_matmul_precision)
    return np.zeros((len(ids), CLASSES))

  monkeypatch.setattr(certificates, "outputs", outputs)
  certificates.Evaluation(*build()).logits(ids_of(0))
  assert names == ["highest"]


CASES = [
  ("isometric", "mean", {}),
  ("isometric", "max", {"block": {"form": "feed_forward", "a": "budget"}}),
  ("isometric", "root_mean", {"head_dim": 6}),
  ("isometric", "mean", {"pool_norm": "running"}),
  ("allpass", "mean", {}),
  ("random_transject", "mean", {"mixer": {"num_experts": 1}}),
  ("random_transject", "mean", {"mixer": {"gating": "certified"}}),
  (
    "certified_s4d",
    "mean",
    {"embedding": {"init_std": 1.0, "scale": 3.0}, "positions": "learned"},
  ),
]


@pytest.mark.parametrize(
  "case", slow_except(CASES[3:4], CASES, CASES[1:6:2]), ids=str
)
def test_no_replacement_moves_logits_beyond_the_bound(case):
  """All single tokens at all places, and random pairs of places."""
  name, pool, options = case
  model, params = build(name, pool, **options)
  ids = ids_of(1, 2)
  table = bounds.token_table(model, params)
  reach = certificates.token_reach(np.asarray(table))[ids]
  mask = ids > 0
  kernel = bounds.head_kernels(model, params)[-1]
  forward = jax.jit(functools.partial(model.apply, train=False))
  start = np.asarray(forward({"params": params}, ids), np.float64)
  rng = np.random.default_rng(0)
  for k in (1, 2):
    change = certificates.replaced(reach, mask, k)
    moved = find_bound(model, params)(change, mask.sum(1))
    for row in range(len(ids)):
      places = np.nonzero(mask[row])[0]
      sets = list(itertools.combinations(places, k))
      trials = []
      for chosen in sets:
        tokens = itertools.product(range(1, VOCAB), repeat=k)
        for new in list(tokens) if k == 1 else [rng.integers(1, VOCAB, 2)]:
          other = ids[row].copy()
          other[list(chosen)] = new
          trials.append(other)
      logits = np.asarray(forward({"params": params}, np.stack(trials)))
      for c, j in itertools.combinations(range(CLASSES), 2):
        before = start[row, c] - start[row, j]
        after = logits[:, c].astype(float) - logits[:, j]
        limit = np.linalg.norm(kernel[:, c] - kernel[:, j]) * moved[row]
        found = np.abs(after - before).max()
        # The bound is no empty one.
        assert_between(found, 0.005 * limit, limit * (1 + 1e-5))


def test_a_separator_has_no_bound_for_replaced_tokens():
  """Its replacement moves all tokens after it."""
  model, params = build(separator=3)
  assert not bounds.has_plain_tokens(model.config)
  ids, labels = ids_of(0), np.zeros(6, np.int32)
  counts = {c for c, _ in certificates.certify(model, params, ids, labels)}
  assert counts == {None}
  with pytest.raises(ValueError, match="separator"):
    bounds.check_bound(model, 1)


def test_allowance_for_rounding_grows_with_the_biases():
  model, params = build()
  ids = ids_of(0)
  embedded, allowance = certificates.Evaluation(model, params).sizes(ids)
  np.testing.assert_allclose(allowance, 1e-6 * embedded, rtol=0.5)
  bias = params["encoder"]["layer_0"]["bias"]
  params["encoder"]["layer_0"]["bias"] = bias + 1e3
  sizes, greater = certificates.Evaluation(model, params).sizes(ids)
  np.testing.assert_array_equal(sizes, embedded)
  # 1,000 in each of the 8 channels of every token.
  want = 1e-3 * np.sqrt(8 * (ids > 0).sum(1))
  assert_between(greater, 0.9 * want, 3 * want)


def test_token_reach_is_the_greatest_distance_to_a_token():
  table = np.random.default_rng(0).normal(size=(7, 3))
  apart = np.linalg.norm(table[:, None] - table[None, 1:], axis=-1)
  chex.assert_trees_all_close(
    certificates.token_reach(table), apart.max(1), rtol=1e-12
  )
