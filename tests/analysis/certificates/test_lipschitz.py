import dataclasses
import json
import types

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import models
from jaxformers.analysis.certificates import lipschitz
from jaxformers.commands import lipschitz as lipschitz_command
from jaxformers.commands import states
from jaxformers.models.capture import capture
from jaxformers.models.transject.layer import interval
from jaxformers.models.variables import make_variables
from tests import draws, initial
from tests.assertions import assert_between

pytestmark = pytest.mark.slow

IDS = draws.integers(0, (3, 9), 1, 20, end=6)


def build(name="transject", alpha=2.0, **mixer):
  model = models.build(
    name,
    vocab_size=20,
    max_len=9,
    num_classes=3,
    d_model=8,
    num_layers=2,
    mixer={"num_experts": 2, **mixer} if "transject" in name else mixer,
  )
  params = initial.params(model, IDS, seed=1)
  for i in range(2):
    layer = params["encoder"][f"layer_{i}"]
    if "residual" in layer:
      layer["residual"]["alpha"] = jnp.float32(alpha * (i + 1))
  return model, params


def test_interval_is_vacuous_where_a_branch_is_no_contraction():
  assert interval(0.5, 0.25) == (0.375, 1.875)
  assert interval(1.5, 0.25) == (0.0, 3.125)
  assert interval(1.5, 1.5) == (0.0, 6.25)
  assert lipschitz.product([(0.5, 2.0), (0.5, 3.0)]) == (0.25, 6.0)


def test_guaranteed_interval_of_orthogonal_weights_is_that_of_the_paper():
  model, params = build()
  rows = lipschitz.guaranteed(model, params, jnp.ones((1, 8)), [10.0, 20.0])
  for i, row in enumerate(rows):
    a = np.tanh(2.0 * (i + 1)) / 2
    chex.assert_trees_all_close(row["a"], a, rtol=1e-5)
    want = ((1 - a) ** 2, (1 + a) ** 2)
    chex.assert_trees_all_close(row["tokens"], want, rtol=1e-4)
    # docs/theory.md: a (1 + e |w| (1 + a) |X| / 2), e = 2 experts.
    w = np.linalg.norm(params["encoder"][f"layer_{i}"]["mixer"]["gate"])
    norm = 10.0 * (i + 1)
    across = a * (1 + w * (1 + a) * norm)
    chex.assert_trees_all_close(
      row["sequences"], interval(across, a), rtol=1e-4
    )


def test_guaranteed_interval_is_computed_from_the_actual_weights():
  model, params = build()
  rows = lipschitz.guaranteed(model, params, 0.5 * jnp.ones((1, 8)), [1.0, 1.0])
  a = np.tanh(2.0) / 2
  chex.assert_trees_all_close(
    rows[0]["tokens"], ((1 - a / 2) * (1 - a), (1 + a / 2) * (1 + a)), rtol=1e-4
  )


def test_guaranteed_interval_of_the_certified_gate_covers_sequences():
  model, params = build("random_transject", gating="certified")
  rows = lipschitz.guaranteed(model, params, jnp.ones((1, 8)), [1e9, 1e9])
  for row in rows:
    a = row["a"]
    chex.assert_trees_all_close(
      row["sequences"], ((1 - a) ** 2, (1 + a) ** 2), rtol=1e-4
    )
    assert row["tokens"][0] > row["sequences"][0]


def test_pairs_are_distinct_tokens_of_one_sample():
  mask = np.array([[1, 1, 0, 1, 1], [0, 0, 0, 0, 1], [1, 0, 1, 0, 0]], bool)
  places = lipschitz.pairs(mask, 200, seed=0)
  assert places.shape == (3, 200, 2)
  assert (places[0, :, 0] != places[0, :, 1]).all()
  assert {*places[0].ravel().tolist()} == {0, 1, 3, 4}
  assert {*map(tuple, places[2].tolist())} == {(0, 2), (2, 0)}
  assert not places[1].any()


def test_activation_factors_are_distances_relative_to_the_embedding():
  x = jnp.asarray([[[0.0, 0.0], [3.0, 4.0], [3.0, 4.0]]])
  chosen = jnp.asarray([[[0, 1], [1, 2]]])
  apart = lipschitz.distances((x, 2 * x, x / 5), chosen)
  chex.assert_trees_all_close(apart[:, 0, 0], np.array([5, 10, 1]), rtol=1e-6)
  factors = lipschitz.activation_factors(apart)
  chex.assert_trees_all_close(
    factors[:, 0, 0], np.array([1, 2, 0.2]), rtol=1e-6
  )
  assert np.isnan(factors[:, 0, 1]).all()


def test_measure_factors_covers_all_batches_without_padding():
  model, params = build()
  ids = np.asarray(IDS)
  seen = lipschitz.measure_factors(
    model, params, [ids[:2], ids[2:]], count=5_000
  )
  assert seen["pairs"] == 15_000
  hidden = capture(model, make_variables(model, params), IDS).hidden
  low, high, total = [], [], []
  for b, length in enumerate([9, 6, 9]):
    start, end = (np.asarray(hidden[k][b, :length]) for k in (0, 2))
    i, j = np.nonzero(~np.eye(length, dtype=bool))
    ratio = np.linalg.norm(end[i] - end[j], axis=1)
    ratio = ratio / np.linalg.norm(start[i] - start[j], axis=1)
    low.append(ratio.min())
    high.append(ratio.max())
    total.append(ratio.mean())
  last = seen["factors"][-1]
  chex.assert_trees_all_close(last["min"], min(low), rtol=1e-4)
  chex.assert_trees_all_close(last["max"], max(high), rtol=1e-4)
  chex.assert_trees_all_close(last["mean"], np.mean(total), rtol=0.02)
  # The sample with padding alone: its padding must not count.
  padded = hidden[1][1, :6]
  seen = lipschitz.measure_factors(model, params, [ids[1:2]])
  chex.assert_trees_all_close(
    seen["norms"][1], np.linalg.norm(padded), rtol=1e-4
  )


def test_measure_factors_draws_pairs_of_tokens_that_follow_padding():
  model = models.build(
    "lru",
    vocab_size=9,
    max_len=9,
    num_classes=3,
    d_model=8,
    num_layers=1,
    causal=True,
  )
  ids = np.asarray([[3, 5, 0, 0, 0, 0, 0, 0, 0]])
  params = initial.params(model, ids)
  one, other = (
    lipschitz.measure_factors(model, params, [x], count=50)
    for x in (ids, np.roll(ids, 6, 1))
  )
  chex.assert_trees_all_close(one["factors"], other["factors"], rtol=1e-5)


def test_measure_factors_of_untrained_transject_is_one():
  model, params = build(alpha=0.0)
  seen = lipschitz.measure_factors(model, params, [np.asarray(IDS)])
  for factor in seen["factors"]:
    assert factor == {"mean": 1.0, "min": 1.0, "max": 1.0}


def test_factors_in_bfloat16_are_those_of_float32():
  """Tokens that are no nearer than rounding keep their distances there, too."""
  model, params = build(alpha=0.9)
  half = models.from_config(dataclasses.replace(model.config, dtype="bfloat16"))
  plain, short = (
    lipschitz.measure_factors(m, params, [np.asarray(IDS)])["factors"][-1]
    for m in (model, half)
  )
  assert plain != short
  chex.assert_trees_all_close(short, plain, rtol=0.01)


def test_measure_factors_refuses_equal_tokens():
  model, params = build()
  with pytest.raises(ValueError, match="samples.*different tokens"):
    lipschitz.measure_factors(model, params, [np.ones((2, 1), np.int32)])


@pytest.mark.slow
def test_report_measured_factors_lie_within_the_guaranteed_interval():
  model, params = build()
  content = lipschitz.measure_encoder(model, params, np.asarray(IDS), steps=40)
  low, high = content["guaranteed"]["all"]["tokens"]
  assert_between(content["measured"]["factors"][-1], low, high)
  assert_between(content["adversarial"]["tokens"], low, high)
  assert any("vacuous" in says for says in content["guaranteed"]["says"])


@pytest.mark.long
def test_report_of_uncertified_encoder_has_measured_factors_only():
  model, params = build("local", block_size=3, num_heads=2)
  content = lipschitz.measure_encoder(model, params, np.asarray(IDS), steps=2)
  assert content["guaranteed"]["all"] is None
  assert "has no certificate (only softmax" in lipschitz.factor_table(content)
  assert len(content["measured"]["factors"]) == 3


@pytest.mark.slow
def test_report_of_a_transformer_has_powers_of_ten():
  model, params = build("transformer", num_heads=2)
  content = lipschitz.measure_encoder(model, params, np.asarray(IDS), steps=2)
  logs = content["guaranteed"]["attention"]["log10"]
  assert 0 < logs["tokens"] < logs["frobenius"]
  table = lipschitz.factor_table(content)
  assert f"at most 10^{logs['tokens']:.1f}, for any number of tokens" in table
  assert "vacuous" in table and "by up to 316" in table
  # No pair that is found grows by more.
  assert content["adversarial"]["sequences"][1] < 10 ** logs["frobenius"]


@pytest.mark.slow
def test_lipschitz_command_prints_a_report_for_each_run(
  monkeypatch, tmp_path, capsys
):
  loaded = states.load
  model, params = build()
  run = types.SimpleNamespace(
    config=types.SimpleNamespace(model=model.config),
    task=types.SimpleNamespace(name="listops"),
    model=model,
    params=params,
    step=5,
    sample=lambda count, length, split, seed: np.asarray(IDS),
  )
  monkeypatch.setattr(
    states,
    "load",
    lambda workdir, **_: loaded(workdir) if "nothing" in workdir else run,
  )
  lipschitz_command.main(
    [str(tmp_path), "--samples=4", "--steps=3", "--length=20"]
  )
  printed = capsys.readouterr().out
  assert "with one Sigma" in printed
  assert "transject at step" in printed
  content = json.loads((tmp_path / "lipschitz.json").read_text())
  assert len(content["measured"]["factors"]) == 3
  assert content["samples"] == 4
  with pytest.raises(SystemExit, match="There is no run in"):
    lipschitz_command.main([str(tmp_path / "nothing")])
  with pytest.raises(SystemExit, match="--steps=0: give at least 1"):
    lipschitz_command.main([str(tmp_path), "--steps=0"])


def test_dot_factors_of_equal_and_orthogonal_tokens():
  """Of one sequence with a pair of equal tokens, and one of orthogonal ones."""
  hidden = np.random.default_rng(0).normal(size=(3, 1, 4, 5))
  hidden[0, 0, 1] = hidden[0, 0, 0]
  hidden[0, 0, 2:] = np.eye(5)[:2]
  places = np.array([[[0, 1], [2, 3], [0, 3]]])
  factors = lipschitz.dot_factors(tuple(map(jnp.asarray, hidden)), places)
  assert factors.shape == (3, 1, 3)
  assert np.isnan(factors[:, 0, :2]).all()
  first, last = hidden[:, 0, 0], hidden[:, 0, 3]
  products = (first * last).sum(-1)
  np.testing.assert_allclose(
    factors[:, 0, 2], products / products[0], rtol=1e-4
  )
