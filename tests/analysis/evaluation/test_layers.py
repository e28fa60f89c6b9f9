"""Statistics of layers, sample by sample."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.spatial
import scipy.stats

from jaxformers import models
from jaxformers.analysis.evaluation import layers
from jaxformers.models.capture import capture, parts
from jaxformers.models.variables import make_variables
from tests import draws, initial
from tests.marks import slow_except
from tests.models.mixers.oracle import small_sizes

IDS = np.array(draws.integers(0, (5, 12), 1, 20, end=6))
IDS[2, 1:] = 0  # One token.


def make(name, **options):
  return models.build(
    name,
    vocab_size=20,
    max_len=12,
    num_classes=3,
    d_model=16,
    num_layers=2,
    **options,
  )


@functools.cache
def build(name, alpha=None):
  wiring = {"num_experts": 2} if name == "transject" else {"num_heads": 2}
  model = make(name, mixer=wiring)
  params = initial.params(model, jnp.asarray(IDS), seed=1)
  if alpha is not None:
    for k in range(2):
      residual = params["encoder"][f"layer_{k}"]["residual"]
      residual["alpha"] = jnp.float32(alpha)
  return model, params


@pytest.mark.slow
def test_share_of_finite_entropies_weights_samples_equally(monkeypatch):
  """Two of the five samples have too few tokens."""
  monkeypatch.setattr(
    layers.entropy, "summary", lambda x: 3 * [x.entropy.mean() % 1]
  )
  model, params = build("transformer")
  in_parts, at_once = (
    layers.measure_layers(model, params, IDS, batch_size=size, axis="tokens")
    for size in (2, 5)
  )
  assert np.isfinite(at_once.entropy[0]).sum() == 3
  np.testing.assert_allclose(in_parts.finite, at_once.finite, atol=1e-4)


@pytest.mark.parametrize("axis", ["units", "tokens"])
@pytest.mark.slow
def test_measure_layers_entropy_is_that_of_scipy_for_every_sample(axis):
  model, params = build("transformer")
  statistics = layers.measure_layers(
    model, params, IDS, batch_size=2, axis=axis
  )
  at_once = layers.measure_layers(model, params, IDS, batch_size=5, axis=axis)
  values = [16] * 5 if axis == "units" else [12, 6, 1, 12, 12]
  np.testing.assert_array_equal(statistics.values, values)
  for name in ("entropy", "shape", "finite", "parts"):
    np.testing.assert_allclose(
      getattr(statistics, name), getattr(at_once, name), atol=1e-4
    )
  variables = make_variables(model, params)
  seen = capture(model, variables, jnp.asarray(IDS))
  x, mask = np.asarray(seen.hidden[1], np.float64), np.asarray(seen.mask)
  for k in range(5):
    tokens = x[k, mask[k]]
    if axis == "tokens":
      if len(tokens) < 8:
        assert math.isnan(statistics.entropy[1, k])
        continue
      tokens = tokens.T
    want = scipy.stats.differential_entropy(tokens, axis=-1, method="vasicek")
    assert statistics.entropy[1, k] == pytest.approx(want.mean(), abs=1e-4)
    shape = (want - np.log(tokens.std(-1, ddof=1))).mean()
    assert statistics.shape[1, k] == pytest.approx(shape, abs=1e-4)
  heads = np.asarray(parts(model, variables, seen)[0], np.float64)
  assert statistics.parts.shape == (2, 2, 5)
  if axis == "units":
    want = scipy.stats.differential_entropy(
      heads[0, 1], axis=-1, method="vasicek"
    )
    assert statistics.parts[0, 1, 0] == pytest.approx(want.mean(), abs=1e-4)


@pytest.mark.parametrize(
  "name",
  slow_except(
    ("transject",), sorted(models.MODELS), ("mega", "s5", "transject")
  ),
)
@pytest.mark.slow
def test_measure_layers_traces_every_model(name):
  """Traced, not run: tokens of every layer; experts, heads or neither."""
  mixer = small_sizes(models.MODELS[name].mixer)
  model = make(name, head_dim=8, mixer=mixer)
  shapes = [jax.ShapeDtypeStruct(s, jnp.int32) for s in ((5, 12), (5, 9, 2))]
  captured, each, apart, dots = jax.eval_shape(
    lambda params, *rest: layers._observe(
      model, make_variables(model, params), *rest
    ),
    models.shapes(model),
    *shapes,
  )
  assert len(captured.hidden) == 3
  assert apart.shape == dots.shape == (3, 5, 9)
  has_gates = models.MODELS[name].block == "injective"
  assert (captured.gates is None) != has_gates
  if each is not None:
    assert [part.shape[:3] for part in each] == [(5, each[0].shape[1], 12)] * 2


def test_measure_layers_factors_are_ratios_of_distances():
  model, params = build("transformer")
  statistics = layers.measure_layers(model, params, IDS, pairs=400)
  x, mask = (
    np.stack(
      [
        np.asarray(layer[0])
        for layer in capture(
          model, make_variables(model, params), jnp.asarray(IDS[:1])
        ).hidden
      ]
    ),
    IDS[0] > 0,
  )
  apart = np.linalg.norm(x[:, :, None] - x[:, None], axis=-1)
  upper = np.triu_indices(mask.sum(), 1)
  factors = apart[:, *upper] / apart[0][upper]
  np.testing.assert_allclose(
    statistics.factors[:, 0], factors.mean(1), rtol=0.05
  )
  # Medians of dot products, none of which a sample of one token has.
  products = np.einsum("lid,ljd->lij", x, x)[:, *upper]
  medians = np.median(products / products[0], 1)
  np.testing.assert_allclose(statistics.dots[0, [0, 1, 3, 4]], 1)
  assert np.isnan(statistics.dots[:, 2]).all()
  np.testing.assert_allclose(
    statistics.dots[:, 0], medians, atol=0.25 * np.ptp(medians) + 0.1
  )
  np.testing.assert_array_equal(statistics.factors[0, [0, 1, 3, 4]], 1)
  assert np.isnan(statistics.factors[:, 2]).all()  # One token makes no pair.


def test_measure_layers_of_untrained_transject_has_factors_of_one():
  """Factors are 1 exactly, and gates 1 / E."""
  model, params = build("transject")
  statistics = layers.measure_layers(model, params, IDS)
  np.testing.assert_array_equal(statistics.factors[:, [0, 1, 3, 4]], 1)
  np.testing.assert_allclose(statistics.gates, 0.5, atol=1e-6)
  np.testing.assert_allclose(
    statistics.entropy[2], statistics.entropy[0], atol=1e-6
  )
  np.testing.assert_allclose(
    statistics.parts[1, 0], statistics.entropy[1], atol=1e-6
  )
  model, params = build("transject", 1.0)
  later = layers.measure_layers(model, params, IDS)
  assert (later.factors[1:, [0, 1, 3, 4]] != 1).all()
  assert later.gates.shape == (2, 5, 2)


def tokens(model, params, ids):
  seen = capture(model, make_variables(model, params), jnp.asarray(ids)[None])
  return layers.tokens(seen)


def test_distances_of_chosen_pairs_match_scipy():
  model, params = build("transformer")
  x, mask = tokens(model, params, IDS[0])
  apart = layers.distances(x, mask, [(0, 3), (2, 1)])
  np.testing.assert_allclose(
    apart["euclidean"][:, 1], np.linalg.norm(x[:, 2] - x[:, 1], axis=-1)
  )
  for k in range(3):
    want = scipy.spatial.distance.cosine(x[k, 0], x[k, 3])
    assert apart["cosine"][k, 0] == pytest.approx(want)
  with pytest.raises(ValueError, match="position 7.*6"):
    layers.distances(*tokens(model, params, IDS[1]), [(0, 7)])


@pytest.mark.slow
def test_isomap_of_a_plane_keeps_distances():
  """Turned: distances along it are kept, from layer to layer."""
  pytest.importorskip("sklearn")
  rng = np.random.default_rng(0)
  flat = rng.uniform(size=(60, 2))
  turns = np.linalg.qr(rng.normal(size=(2, 8, 8)))[0][:, :2]
  hidden, mask = flat @ turns, np.ones(60, bool)
  planes = layers.plane(hidden, mask, neighbours=59)
  want = flat - flat.mean(0)
  for layer in planes:
    np.testing.assert_allclose(layer @ layer.T, want @ want.T, atol=1e-8)
  np.testing.assert_allclose(planes[1], planes[0], atol=1e-8)
  with pytest.raises(ValueError, match="3 tokens.*4"):
    layers.plane(hidden[:, :3], mask[:3])
