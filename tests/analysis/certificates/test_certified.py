"""Certified and attacked accuracy: the bounds, and searches against them."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import models
from jaxformers.analysis.certificates import certified
from jaxformers.data.engine.packed import pack
from jaxformers.models import bounds
from jaxformers.models.variables import make_variables
from tests import initial
from tests.assertions import assert_between
from tests.marks import long_except, slow_except

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
@pytest.mark.slow
def test_no_replacement_moves_logits_beyond_the_bound(case):
  """All single tokens at all places, and random pairs of places."""
  name, pool, options = case
  model, params = build(name, pool, **options)
  ids = ids_of(1, 2)
  table = bounds.token_table(model, params)
  reach = certified.token_reach(np.asarray(table))[ids]
  mask = ids > 0
  kernel = bounds.head_kernels(model, params)[-1]
  forward = jax.jit(functools.partial(model.apply, train=False))
  start = np.asarray(forward({"params": params}, ids), np.float64)
  rng = np.random.default_rng(0)
  for k in (1, 2):
    change = certified.replaced(reach, mask, k)
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


@pytest.mark.parametrize("case", long_except(CASES[:1], CASES), ids=str)
@pytest.mark.slow
def test_no_perturbation_of_the_embedding_crosses_a_certified_radius(case):
  """Ascent over a radius that is certified leaves every example right."""
  name, pool, options = case
  model, params = build(name, pool, **options)
  ids = ids_of(2, 20)
  attack = certified.Attack(model, params)
  logits = attack.logits(ids)
  labels = logits.argmax(1)
  n = (ids > 0).sum(1)
  kernel = bounds.head_kernels(model, params)[-1]
  sizes = attack.sizes(ids)
  is_tight = []
  for share in (0.003, 0.03, 0.3):
    change = certified.perturbed(share * sizes, n)
    moved = find_bound(model, params)(change, n)
    sure = certified.is_certified(logits, labels, kernel, moved)
    right = attack.perturb(ids, labels, share * sizes, steps=30)
    assert right[sure].all()
    is_tight += [sure.any(), (~right).any()]
  assert any(is_tight[::2])
  assert any(is_tight[1::2])


@pytest.mark.slow
def test_the_search_finds_what_all_replacements_of_one_token_find():
  """Greedy, but for one token it tries the steepest at eight of nine places."""
  model, params = build()
  ids = ids_of(3, 12)
  attack = certified.Attack(model, params)
  labels = attack.logits(ids).argmax(1)
  right = attack.replace(ids, labels, [0, 1, 3])
  assert right[0].all()
  assert_between(right[3], 0, right[1])
  forward = jax.jit(functools.partial(model.apply, train=False))
  for row, label in zip(ids, labels, strict=True):
    trials = []
    for place in np.nonzero(row)[0]:
      for token in range(1, VOCAB):
        trials.append(row.copy())
        trials[-1][place] = token
    predicted = np.asarray(forward({"params": params}, np.stack(trials)))
    is_safe = (predicted.argmax(1) == label).all()
    i = [r.tolist() for r in ids].index(row.tolist())
    # What survives all replacements survives the search.
    assert right[1][i] or not is_safe
  lost = (~right[1]).mean()
  assert lost > 0


@pytest.mark.slow
def test_certificates_and_attacks_never_cross():
  model, params = build(block={"a": "budget"})
  ids = ids_of(4, 40)
  labels = certified.Attack(model, params).logits(ids).argmax(1)
  batches = [{"inputs": ids, "targets": labels}]
  counts, radii = [0, 1, 2], [0.01, 0.2]
  sure = certified.certified_accuracy(model, params, batches, counts, radii)
  left = certified.attacked_accuracy(
    model, params, batches, counts, radii, steps=10
  )
  assert sure.keys() == left.keys()
  for key in sure:
    assert_between(sure[key], 0, left[key])
  assert sure["tokens", 0] > 0.9
  assert sure["tokens", 2] <= sure["tokens", 1] <= sure["tokens", 0]


@pytest.mark.parametrize(
  ("name", "options"),
  [
    ("transformer", {}),
    ("transject", {}),
    ("random_transject", {}),
    ("isometric", {"pool": "first"}),
  ],
)
@pytest.mark.slow
def test_other_layers_have_no_certificate_but_can_be_attacked(name, options):
  model, params = build(name, **options)
  ids = ids_of(5, 4)
  batches = [{"inputs": ids, "targets": np.zeros(4, np.int32)}]
  found = certified.certified_accuracy(model, params, batches, [1], [])
  assert bool(found) == (name == "isometric")
  left = certified.attacked_accuracy(model, params, batches, [1], [], steps=1)
  assert_between(left["tokens", 1], 0, 1)


def test_reach_is_the_greatest_distance_to_a_token():
  table = np.random.default_rng(0).normal(size=(7, 3))
  apart = np.linalg.norm(table[:, None] - table[None, 1:], axis=-1)
  chex.assert_trees_all_close(
    certified.token_reach(table), apart.max(1), rtol=1e-12
  )


def test_batches_hold_every_example_once():
  rng = np.random.default_rng(0)
  rows = [rng.integers(1, 9, n) for n in rng.integers(1, 40, 120)]
  split = pack(rows, np.arange(120, dtype=np.int32))
  batches = certified.make_batches(split, np.arange(120), 32)
  targets = np.concatenate([batch["targets"] for batch in batches])
  assert sorted(targets) == list(range(120))
  for batch in batches:
    for row, target in zip(batch["inputs"], batch["targets"], strict=True):
      chex.assert_trees_all_equal(row[row > 0], rows[target][:32])
