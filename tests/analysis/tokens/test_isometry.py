"""Singular values of Jacobians: closed forms, and certificates."""

import csv
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import models
from jaxformers.analysis.certificates import lipschitz
from jaxformers.analysis.tokens import isometry
from jaxformers.commands import isometry as isometry_command
from jaxformers.commands import states
from jaxformers.foundations.errors import UserError
from jaxformers.models.attention import FirstValues
from jaxformers.models.capture import capture
from jaxformers.models.variables import make_variables
from tests import initial
from tests.marks import long_except
from tests.models.mixers.oracle import small_sizes

IDS = np.array([[1, 2, 3, 4], [5, 6, 0, 0]], np.int32)
NUM_TOKENS = (4, 2)


def build(name, alpha=0.0, **options):
  sizes = dict(vocab_size=9, max_len=4, num_classes=2, d_model=8, num_layers=2)
  model = models.build(name, **sizes | options)
  params = initial.params(model, IDS)
  for layer in ("layer_0", "layer_1"):
    if alpha:
      params["encoder"][layer]["residual"]["alpha"] = jnp.float32(alpha)
  return model, params


def lanczos(matrices, steps, seed=0):
  """Estimates the spectra of matrices [g, m, m]."""
  start = np.random.default_rng(seed).normal(size=matrices.shape[:2])
  start /= np.linalg.norm(start, axis=-1, keepdims=True)
  diagonals = isometry.bidiagonalize(
    lambda y: jnp.einsum("gij,gi->gj", matrices, y),
    lambda x: jnp.einsum("gij,gj->gi", matrices, x),
    jnp.asarray(start),
    steps,
  )
  return start, list(map(isometry.quadrature, *(x.T for x in diagonals)))


def test_lanczos_finds_all_singular_values_in_as_many_steps_as_rows():
  with jax.enable_x64(True):
    matrices = np.random.default_rng(1).normal(size=(3, 10, 10))
    start, spectra = lanczos(matrices, 10)
    for v, matrix, spectrum in zip(start, matrices, spectra, strict=True):
      want = isometry.decompose(matrix)
      np.testing.assert_allclose(spectrum.values, want.values, rtol=1e-8)
      # Few steps are exact for the mean square along the start.
      few = lanczos(matrices, 3)[1][0].root_mean_square()
      along = np.linalg.norm(matrices[0] @ start[0])
      np.testing.assert_allclose(few, along, rtol=1e-10)
      assert v.shape == (10,)
    extremes = lanczos(matrices, 6)[1][0].quantiles([0, 1])
    low, high = isometry.decompose(matrices[0]).quantiles([0, 1])
    assert low <= extremes[0]
    assert extremes[1] <= high * (1 + 1e-12)


def test_lanczos_of_an_orthogonal_map_finds_ones():
  """Also where the first step has already found all there is."""
  q, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(2, 8, 8)))
  for spectrum in [*map(isometry.decompose, q), *lanczos(q, 5)[1]]:
    np.testing.assert_allclose(spectrum.values, 1, rtol=1e-5)
    assert spectrum.root_mean_square() == pytest.approx(1, rel=1e-5)


def test_spectrum_quantiles_weight_values_by_their_share():
  spectrum = isometry.join(
    [
      isometry.Spectrum(np.array([1.0, 3.0]), np.array([0.9, 0.1])),
      isometry.Spectrum(np.array([2.0]), np.array([1.0])),
    ]
  )
  levels = np.array([0, 0.4, 0.5, 0.94, 0.96, 1])
  np.testing.assert_array_equal(spectrum.quantiles(levels), [1, 1, 2, 2, 3, 3])
  assert spectrum.root_mean_square() == pytest.approx((0.45 + 2 + 0.45) ** 0.5)
  # The greatest value counts whatever its weight.
  rare = isometry.Spectrum(np.array([1.0, 5.0]), np.array([1 - 4e-10, 4e-10]))
  np.testing.assert_array_equal(rare.quantiles(np.array([0.5, 1])), [1, 5])


@pytest.mark.long
def test_measure_spectra_matches_the_jacobian_of_the_tokens():
  """By layer with what is carried held fixed, and of all with it moving."""
  model, params = build("neutreno", mixer={"num_heads": 2, "fidelity": 0.9})
  spectra = isometry.measure_spectra(model, params, IDS)
  variables = make_variables(model, params)
  embedded = capture(model, variables, IDS).hidden
  hidden = jax.jit(lambda x: capture(model, variables, IDS, x).hidden[1:])
  slopes = jax.jit(jax.jacrev(hidden))(embedded[0])
  for sample, n in enumerate(NUM_TOKENS):
    of_all, first = (
      isometry.decompose(
        np.reshape(slopes[k][sample, :n, :, sample, :n], (n * 8, n * 8))
      ).values
      for k in (1, 0)
    )
    values_of = {
      name: values[sample].values for name, values in spectra.items()
    }
    np.testing.assert_allclose(values_of["all"], of_all, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(values_of["1"], first, rtol=1e-3, atol=1e-4)
  # The second layer as a module, with the values of the first.
  weights = {
    kind: tree["encoder"]["layer_1"]
    for kind, tree in variables.items()
    if "layer_1" in tree.get("encoder", {})
  }
  block = model.stacks()["encoder"].clone(layer=1)
  values = capture(model, variables, IDS).heads[0]["value"]
  carry = FirstValues(values, jnp.int32(1), None)

  def second(x):
    arguments = {"mask": IDS > 0, "carry": carry, "train": False}
    return block.apply(weights, x, **arguments)[0]

  slope = jax.jit(jax.jacrev(second))(embedded[1])
  slope = np.asarray(slope)[0, :, :, 0].reshape(32, 32)
  np.testing.assert_allclose(
    spectra["2"][0].values,
    isometry.decompose(slope).values,
    rtol=1e-3,
    atol=1e-4,
  )
  estimated = isometry.measure_spectra(
    model, params, IDS, steps=40, most_rows=0
  )
  for name, of_layer in spectra.items():
    for exact, estimate in zip(of_layer, estimated[name], strict=True):
      np.testing.assert_allclose(
        estimate.quantiles([0, 1]), exact.quantiles([0, 1]), rtol=1e-3
      )


@pytest.mark.slow
def test_measure_spectra_of_untrained_rezero_is_one():
  """And coupled, looped or in half precision it is the same encoder."""
  options = {"memory": "reversible", "dtype": "bfloat16"}
  spectra = isometry.measure_spectra(*build("transject", **options), IDS)
  assert [*spectra] == ["1", "2", "all"]
  for of_layer in spectra.values():
    assert [len(spectrum.values) for spectrum in of_layer] == [32, 16]
    for spectrum in of_layer:
      np.testing.assert_allclose(spectrum.values, 1, rtol=1e-5)


@pytest.mark.slow
def test_measure_spectra_of_random_transject_lie_within_the_certificate():
  options = {"alpha": 3.0, "mixer": {"gating": "certified"}}
  model, params = build("random_transject", **options)
  measured = lipschitz.measure_factors(model, params, [IDS])
  rows = lipschitz.guaranteed(
    model, params, measured["shared"], measured["norms"][:-1]
  )
  spectra = isometry.measure_spectra(model, params, IDS)
  certified = {str(k + 1): row["sequences"] for k, row in enumerate(rows)}
  certified["all"] = lipschitz.product([*certified.values()])
  for name, (low, high) in certified.items():
    for spectrum in spectra[name]:
      assert low - 1e-5 < spectrum.values[0] < 0.95
      assert 1.05 < spectrum.values[-1] < high + 1e-5


@pytest.mark.parametrize("name", long_except(("lru",), sorted(models.MODELS)))
@pytest.mark.slow
def test_measure_spectra_of_every_encoder_are_finite(name):
  """Those that differentiate themselves in reverse only, too."""
  mixer = small_sizes(models.MODELS[name].mixer)
  model, params = build(name, d_model=16, max_len=17, mixer=mixer)
  spectra = isometry.measure_spectra(model, params, IDS[:1], most_rows=0)
  for (spectrum,) in spectra.values():
    assert np.isfinite(spectrum.values).all()
    assert spectrum.values[-1] > 0


def test_measure_spectra_refuses_streams():
  model, params = build("transformer", block={"streams": 2})
  with pytest.raises(UserError, match="streams=2: layers map 2 streams"):
    isometry.measure_spectra(model, params, IDS[:1])


@pytest.mark.slow
def test_isometry_command_prints_a_table_of_layers(
  monkeypatch, tmp_path, capsys
):
  model, params = build("transject", num_layers=2)
  run = types.SimpleNamespace(
    model=model,
    params=params,
    draw=lambda count, length, *_: {"inputs": IDS[:count, :length]},
  )
  monkeypatch.setattr(states, "load", lambda workdir, **_: run)
  out = tmp_path / "values"
  isometry_command.main(["one", "--samples=1", f"--out={out}"])
  printed = capsys.readouterr().out
  header, *lines = printed.splitlines()[1:5]
  assert header.split()[0] == "layer"
  assert [line.split()[0] for line in lines] == ["1", "2", "all"]
  assert lines[2].split()[1:] == ["1"] * 6
  assert "1 test samples of at most 4 tokens, 1 seed. Singular" in printed
  table = list(csv.reader(out.with_suffix(".csv").read_text().splitlines()))
  assert table[0][2:4] == ["layer", "quantile"]
  assert len(table) == 1 + 3 * len(isometry.LEVELS)
  assert out.with_suffix(".png").stat().st_size > 5_000
  # Seeds of a run have a table each, and one label in the figure.
  for seed in range(2):
    (tmp_path / "run" / f"seed_{seed}").mkdir(parents=True)
  isometry_command.main([str(tmp_path / "run"), f"--out={out}"])
  printed = capsys.readouterr().out
  tables = [line for line in printed.splitlines() if "seed_" in line]
  assert tables == [str(tmp_path / "run" / f"seed_{k}") for k in range(2)]
  assert "tokens, 2 seeds. Singular" in printed
  rows = list(csv.reader(out.with_suffix(".csv").read_text().splitlines()))[1:]
  assert {(row[0], row[1]) for row in rows} == {
    (str(tmp_path / "run"), str(k)) for k in range(2)
  }
  with pytest.raises(SystemExit, match="--steps=0: give at least 1"):
    isometry_command.main(["one", "--steps=0"])
