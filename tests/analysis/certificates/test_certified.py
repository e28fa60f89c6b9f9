"""Certified and attacked accuracy: the bounds, and searches against them."""

import functools

import chex
import jax
import numpy as np
import pytest

from jaxformers.analysis.certificates import certified
from jaxformers.data.engine.packed import pack
from jaxformers.models import bounds, certificates
from jaxformers.models.variables import make_variables
from tests.assertions import assert_between
from tests.marks import long_except
from tests.models.test_certificates import CASES, build, find_bound, ids_of

pytestmark = pytest.mark.slow

VOCAB, LENGTH, CLASSES = 12, 9, 3


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
  sizes, _ = attack.sizes(ids)
  is_tight = []
  for share in (0.003, 0.03, 0.3):
    change = certificates.perturbed(share * sizes, n)
    moved = find_bound(model, params)(change, n)
    sure = certificates.is_certified(logits, labels, kernel, moved)
    right = attack.perturb(ids, labels, share * sizes, steps=30)
    assert right[sure].all()
    is_tight += [sure.any(), (~right).any()]
  assert any(is_tight[::2])
  assert any(is_tight[1::2])


def test_attacks_change_tokens_that_follow_padding():
  model, params = build("allpass", causal=True, positions="none")
  ids = ids_of(1, 20)
  attack = certified.Attack(model, params)
  labels = attack.logits(ids).argmax(1)
  sizes, _ = attack.sizes(ids)
  moved = np.stack([np.roll(row, (row == 0).sum()) for row in ids])
  right = [
    attack.perturb(x, labels, 0.3 * sizes, steps=8) for x in (ids, moved)
  ]
  chex.assert_trees_all_equal(*right)
  assert not all(right[0])
  replaced = [attack.replace(x, labels, [1, 2]) for x in (ids, moved)]
  chex.assert_trees_all_equal(*replaced)
  assert not all(replaced[0][1])


def test_attacked_margins_are_computed_at_full_precision():
  """Below it, an attack could be found where a certificate holds."""
  model, params = build()
  ids, labels = ids_of(0), np.zeros(6, np.int32)
  arguments = (model, make_variables(model, params), ids, labels)
  change = np.zeros((*ids.shape, model.config.d_model), np.float32)
  for text in (
    certified._margins.lower(*arguments).as_text(),
    certified._slopes.lower(*arguments, change).as_text(),
  ):
    assert "precision = [HIGHEST, HIGHEST]" in text
    assert "precision = [DEFAULT" not in text


@pytest.mark.long
def test_attack_replace_matches_exhaustive_search_for_one_token():
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
def test_certified_accuracy_never_exceeds_attacked_accuracy():
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
def test_certified_accuracy_is_empty_for_uncertified_layers(name, options):
  model, params = build(name, **options)
  ids = ids_of(5, 4)
  batches = [{"inputs": ids, "targets": np.zeros(4, np.int32)}]
  found = certified.certified_accuracy(model, params, batches, [1], [])
  assert bool(found) == (name == "isometric")
  left = certified.attacked_accuracy(model, params, batches, [1], [], steps=1)
  assert_between(left["tokens", 1], 0, 1)


def test_make_batches_holds_every_example_once():
  rng = np.random.default_rng(0)
  rows = [rng.integers(1, 9, n) for n in rng.integers(1, 40, 120)]
  split = pack(rows, np.arange(120, dtype=np.int32))
  batches = certified.make_batches(split, np.arange(120), 32)
  targets = np.concatenate([batch["targets"] for batch in batches])
  assert sorted(targets) == list(range(120))
  for batch in batches:
    for row, target in zip(batch["inputs"], batch["targets"], strict=True):
      chex.assert_trees_all_equal(row[row > 0], rows[target][:32])
