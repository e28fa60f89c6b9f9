import csv
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import models
from jaxformers.analysis.tokens import curves
from jaxformers.analysis.tokens import smoothness as s
from jaxformers.commands import smoothness as smoothness_command
from jaxformers.commands import states
from jaxformers.models.capture import Capture, capture
from jaxformers.models.variables import make_variables
from tests import draws, initial
from tests.analysis.tokens.test_smoothness import normal
from tests.marks import long_except
from tests.models.mixers.oracle import small_sizes


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


def build(name, **options):
  model = models.build(
    name,
    vocab_size=20,
    max_len=9,
    num_classes=3,
    num_layers=3,
    **{"d_model": 8, **options},
  )
  ids = draws.integers(0, (3, 9), 1, 20, end=6)
  return model, initial.params(model, ids, seed=1), np.asarray(ids)


@pytest.mark.parametrize(
  "name",
  long_except(("isometric", "mega"), sorted(models.MODELS)),
)
@pytest.mark.slow
def test_measure_curves_of_every_encoder_are_finite(name):
  with jax.enable_x64(False):
    mixer = small_sizes(models.MODELS[name].mixer)
    model, params, ids = build(name, d_model=16, mixer=mixer)
    measured = curves.measure_curves(model, params, ids)
  assert len(measured["similarity"]) == 4
  assert np.isfinite(measured["similarity"]).all()


@pytest.mark.long
def test_measure_curves_match_the_formulas():
  with jax.enable_x64(False):
    model, params, ids = build("neutreno", mixer={"num_heads": 2})
    measured = curves.measure_curves(model, params, ids, batch_size=2)
    names = [name for name in curves.CURVES if not name.startswith("streams")]
    assert set(measured) == set(names)
    lengths = [len(measured[name]) for name in names]
    assert lengths == [4, 3, 3, 3, 2, *[4] * 4, *[3] * 5]
    seen = capture(model, make_variables(model, params), jnp.asarray(ids))
  for k, x in enumerate(seen.hidden):
    alike = [
      s.cosine_similarity(x[b : b + 1, :n], jnp.ones((1, n), bool))[0]
      for b, n in enumerate([9, 6, 9])
    ]
    np.testing.assert_allclose(
      measured["similarity"][k], np.mean(alike), rtol=1e-4
    )
  k, v = (seen.heads[1][x][1, :, :6] for x in ("key", "value"))
  single = curves.measure_curves(model, params, ids[1:2])
  w = s.attention_weights(k, k, jnp.ones((2, 6), bool))
  want = s.functional(v, w / 6).mean()
  np.testing.assert_allclose(single["functional"][1], want, rtol=1e-4)
  logs = s.log_functional_kernel(v, k, jnp.ones((2, 6), bool))
  want = np.log10(np.exp(logs).mean())
  np.testing.assert_allclose(single["functional_kernel"][1], want, rtol=1e-4)


def test_maps_are_numbered_by_their_layers():
  """Also where a layer before them has no keys."""
  k = normal(0, 2, 3, 4, 5)
  mask = jnp.ones((2, 4), bool)
  heads = ({}, {"key": k}, {"key": k, "query": 2 * k})
  maps = curves.maps(Capture((), mask, None, None, heads))
  assert [*maps] == [2, 3]
  with jax.enable_x64(False):
    k = jnp.asarray(k[:1], jnp.float32)
    for layer, q in ((2, k), (3, 2 * k)):
      want = s.attention_weights(q, k, mask[:1, None])[0]
      np.testing.assert_allclose(maps[layer], want, rtol=1e-4)


def test_average_weights_batches_by_their_samples():
  values, counts = np.array([[1.0, 3.0], [4.0, 0.0]]), np.array([2, 1])
  np.testing.assert_allclose(
    curves._average("functional", values, counts), [2, 2]
  )
  logs = curves._average("functional_kernel", np.log10(values + 1), counts)
  np.testing.assert_allclose(10**logs, [3, 3])
  huge = curves._average(
    "functional_kernel", 400 + np.log10(values + 1), counts
  )
  np.testing.assert_allclose(huge, 400 + np.log10([3, 3]))


@pytest.mark.slow
def test_measure_curves_without_heads_are_those_of_tokens():
  with jax.enable_x64(False):
    measured = curves.measure_curves(*build("transject"))
  assert set(measured) == set(curves.HIDDEN)


def test_curves_of_streams_are_those_of_the_products():
  block = {"streams": 3, "mixing": "sinkhorn", "dynamic": False}
  model, params, ids = build("transformer", block=block)
  # Move the matrices away from the identity.
  for layer in params["encoder"].values():
    for part in ("connect_mixer", "connect_mlp"):
      if part in layer:
        bias = layer[part]["mixing_bias"]
        layer[part]["mixing_bias"] = bias / 8 + draws.normal(3, bias.shape)
  measured = curves.measure_curves(model, params, ids)
  mixing = capture(model, make_variables(model, params), ids).mixing
  assert len(mixing) == 6
  product = np.eye(3)
  for layer in range(3):
    for matrix in mixing[2 * layer : 2 * layer + 2]:
      product = np.asarray(matrix[0, 0], float) @ product
    values = np.linalg.svd(product, compute_uv=False)
    for name, want in (("second", values[1]), ("last", values[2])):
      np.testing.assert_allclose(
        measured[f"streams_{name}"][layer], want, rtol=1e-4
      )
    gain = max(product.sum(0).max(), product.sum(1).max())
    np.testing.assert_allclose(measured["streams_gain"][layer], gain, rtol=1e-5)


def test_curves_of_streams_do_not_see_padding():
  model, params, ids = build(
    "transformer", block={"streams": 3}, mixer={"num_heads": 2}
  )
  params = jax.tree.map(lambda p: p + draws.normal(5, p.shape) / 5, params)
  ids = ids[:1, :5]
  padded = jnp.pad(ids, ((0, 0), (0, 4)))
  short, long = (curves.measure_curves(model, params, x) for x in (ids, padded))
  for name in ("streams_second", "streams_last", "streams_gain"):
    np.testing.assert_allclose(long[name], short[name], rtol=1e-5)


@pytest.mark.slow
def test_smoothness_command_prints_tables_and_writes_csv(
  monkeypatch, tmp_path, capsys
):
  loaded = states.load

  def load(workdir, **_):
    if "nothing" in str(workdir):
      return loaded(workdir)
    name = workdir.parent.name if "seed" in workdir.name else workdir.name
    options = {} if name == "transject" else {"mixer": {"num_heads": 2}}
    model, params, ids = build(name, **options)
    if workdir.name == "seed_1":
      params = jax.tree.map(lambda leaf: 2 * leaf, params)
    return types.SimpleNamespace(
      model=model,
      params=params,
      draw=lambda *_: {"inputs": ids},
      task=types.SimpleNamespace(max_len=9),
    )

  settings = []
  monkeypatch.setattr(states, "load", load)
  monkeypatch.setattr(states, "record", lambda *_, **how: settings.append(how))
  with jax.enable_x64(False):
    # A cut sample has another score, which does not replace the first one.
    for length in (512, 9, 8):
      smoothness_command.main(["transject", f"--length={length}"])
    first, second, third = settings
    assert second == first
    assert third == first | {"length": 8}
    capsys.readouterr()
    seeded = tmp_path / "symmetric_transformer"
    for k in range(2):
      (seeded / f"seed_{k}").mkdir(parents=True)
    runs = [str(seeded), "transject"]
    out = tmp_path / "report" / "alike"
    smoothness_command.main([*runs, "--samples=4", "--out", str(out)])
    printed = capsys.readouterr().out
    assert printed.count("layer (0: embedding)") == len(runs)
    # What was read: neither --samples nor --length, which are more.
    assert "3 test samples of at most 9 tokens, 1 to 2 seeds;" in printed
    assert "J = 1/2 sum_ij" in printed
    assert "mean cosine of two tokens " in printed
    table = out.with_suffix(".csv").read_text()
    rows = list(csv.reader(table.splitlines()))[1:]
    assert list(dict.fromkeys(row[0] for row in rows)) == runs

    def values(run, seed, name):
      return {
        int(row[3]): float(row[4])
        for row in rows
        if row[:3] == [run, str(seed), name]
      }

    assert list(values(runs[0], 1, "similarity")) == [0, 1, 2, 3]
    assert list(values(runs[0], 0, "functional")) == [1, 2, 3]
    assert list(values(runs[0], 0, "head_redundancy")) == [2, 3]
    alike = values(runs[0], 1, "gradient_cosine")
    assert list(alike.values()) == pytest.approx([1] * 3)
    assert values(runs[0], 0, "functional") != values(runs[0], 1, "functional")
    assert not values("transject", 1, "similarity")
    first, second = (values(runs[0], k, "functional")[2] for k in (0, 1))
    line = printed[printed.index("J of the values, per token") :].split("\n")
    assert line[0].split()[-2] == f"{(first + second) / 2:.4g}"
    assert line[1].split()[-2] == f"{abs(first - second) / 2**0.5:.2g}"
    for suffix in (".png", ".svg"):
      assert out.with_suffix(suffix).stat().st_size > 5_000
    with pytest.raises(SystemExit, match="There is no run in"):
      smoothness_command.main([str(tmp_path / "nothing")])


def test_smoothness_text_has_a_column_for_each_layer():
  table_rows = []
  for seed in (0, 1):
    measured = {  # Not in the order of the panels.
      "functional": [1234.5 + seed, 2.0],
      "head_redundancy": [0.5],
      "similarity": [0.1, 0.25, 0.123456],
    }
    table_rows += curves.rows("run", seed, measured)
  _, run, head, *lines = curves.text(table_rows).split("\n")
  assert run == "run"
  assert head.split()[-3:] == ["0", "1", "2"]
  assert {len(line) for line in lines} == {len(head)}
  cells = [line.split()[-3:] for line in lines]
  assert cells == [
    ["0.1", "0.25", "0.1235"],
    ["0", "0", "0"],
    ["-", "1235", "2"],
    ["-", "0.71", "0"],
    ["-", "-", "0.5"],
    ["-", "-", "0"],
  ]
  # One seed has no deviation.
  assert "+-" not in curves.text(table_rows[: len(table_rows) // 2])


def test_smoothness_figure_caption_defines_j():
  table_rows = curves.rows(
    "run", 0, {"similarity": [0.1, 0.2], "functional": [3.0]}
  )
  caption = curves.figure(table_rows, "8 test samples").caption
  assert caption.startswith("8 test samples; ")
  assert "J = 1/2 sum_ij w_ij |v_i - v_j|^2" in caption
  assert "NeuTRENO, equation 6" in caption


@pytest.mark.slow
@pytest.mark.long
def test_measure_curves_skip_samples_of_one_token():
  model, params, ids = build("transformer", mixer={"num_heads": 2})
  with jax.enable_x64(False):
    ids = np.array(ids)[:3]
    short = np.zeros_like(ids[:1])
    short[0, 0] = ids[0, 0]
    want = curves.measure_curves(model, params, ids)
    ids = np.concatenate([ids, short])
    for batch_size in (3, 4):
      measured = curves.measure_curves(model, params, ids, batch_size)
      for name in curves.NEEDS_PAIRS:
        np.testing.assert_allclose(measured[name], want[name], rtol=1e-5)


@pytest.mark.parametrize("causal", long_except([True], [False, True]))
@pytest.mark.long
def test_measure_curves_of_a_causal_classifier_use_causal_weights(causal):
  """Its objective does not predict the next token."""
  mixer = {"num_heads": 2, "causal": causal}
  model, params, ids = build("transformer", mixer=mixer)
  with jax.enable_x64(False):
    measured = curves.measure_curves(model, params, ids[:2])
    captured = capture(model, make_variables(model, params), ids[:2])
    for name, values in curves.curves(captured, causal).items():
      np.testing.assert_allclose(measured[name], values, rtol=1e-4)
    other = curves.curves(captured, not causal)
  difference = np.array(measured["functional"]) - other["functional"]
  assert abs(difference).max() > 1e-4
