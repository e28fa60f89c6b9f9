"""The module of isometric layers, in a model: options, inverse, certificate."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import models
from jaxformers.analysis.certificates import lipschitz
from jaxformers.models import inverse
from jaxformers.models.isometric.layer import BOUNDS, FORMS
from jaxformers.models.kinds import EIGENVALUES, find_kinds
from tests import draws, initial
from tests.assertions import assert_between

IDS = draws.integers(0, (3, 12), 1, 20, end=7)


def build(
  form="pointwise", num_layers=2, d_model=8, positions="sinusoid", **block
):
  return models.build(
    "isometric",
    vocab_size=20,
    max_len=16,
    num_classes=3,
    d_model=d_model,
    num_layers=num_layers,
    positions=positions,
    block={"form": form, **block},
  )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.slow
def test_isometric_encoder_is_undone_to_its_tokens(form):
  model = build(form, positions="none" if form == "pointwise" else "learned")
  params = initial.params(model, IDS)
  hidden, side = inverse.forward(model, params, IDS)
  x = inverse.inverse(model, params, hidden[-1], side)
  found, positions = inverse.tokens(model, params, x)
  assert positions is None
  mask = np.asarray(side.mask)
  chex.assert_trees_all_equal(found[mask], np.asarray(IDS)[mask])


def test_isometric_inverse_recovers_real_numbers():
  model = models.build(
    "isometric",
    vocab_size=0,
    max_len=16,
    num_classes=3,
    d_model=8,
    num_layers=2,
  )
  x = draws.normal(0, (2, 9))
  params = initial.params(model, x)
  hidden, side = inverse.forward(model, params, x)
  found, _ = inverse.tokens(
    model, params, inverse.inverse(model, params, hidden[-1], side)
  )
  chex.assert_trees_all_close(found, x, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_isometric_report_guarantees_sequences_only():
  model = build()
  params = initial.params(model, IDS)
  content = lipschitz.measure_encoder(model, params, np.asarray(IDS), steps=20)
  guarantee = content["guaranteed"]
  low, high = guarantee["all"]["sequences"]
  assert guarantee["all"].keys() == {"sequences"}
  assert 0 < low < 1 < high
  least, greatest = content["adversarial"]["sequences"]
  assert_between((least, greatest), low, high, rtol=1e-4)
  assert least < greatest
  assert "nothing is guaranteed" in guarantee["says"][0]
  assert f"{high:.4g}" in lipschitz.factor_table(content)


@pytest.mark.parametrize("a", BOUNDS)
def test_isometric_certificate_width_follows_the_option(a):
  width = {"a_max": 0.5} if a == "wide" else {}
  model = build(a=a, num_layers=4, **width)
  params = initial.params(model, IDS)
  rows = lipschitz.guaranteed(model, params, None, [1.0] * 4)
  low, high = lipschitz.product([row["sequences"] for row in rows])
  alpha = np.tanh(0.5)
  a = 1 - (1 - alpha / 4) ** 2 if a == "budget" else 0.5 * alpha
  chex.assert_trees_all_close(low, (1 - a) ** 4, rtol=1e-4)
  chex.assert_trees_all_close(high, (1 + a) ** 4, rtol=1e-4)


def test_isometric_kinds_mark_eigenvalues():
  model = build()
  params = models.shapes(model)
  layer = find_kinds(model.stacks(), params)["encoder"]["layer_0"]
  assert layer["decay"] == layer["angle"] == EIGENVALUES
  assert layer["bias"] == layer["alpha"] == ""


def test_isometric_refuses_widths_its_dilations_do_not_divide():
  with pytest.raises(ValueError, match="d_model=8.*3.*12"):
    build(dilations=(1, 2, 3))
  with pytest.raises(ValueError, match="form.*'wide'.*pointwise"):
    build(form="wide")
  with pytest.raises(ValueError, match=r"\ba\b.*'narrow'.*budget"):
    build(a="narrow")
  with pytest.raises(ValueError, match="d_model=6.*4"):
    build(d_model=6)


@pytest.mark.slow
def test_isometric_half_precision_is_near_float32():
  model = build()
  params = initial.params(model, IDS)
  half = models.build(
    "isometric",
    vocab_size=20,
    max_len=16,
    num_classes=3,
    d_model=8,
    num_layers=2,
    dtype="bfloat16",
  )
  y, z = (m.apply({"params": params}, IDS, train=False) for m in (model, half))
  assert z.dtype == jnp.float32
  chex.assert_trees_all_close(y, z, atol=0.1, rtol=0)
