"""All-pass sections against their recurrence, and what they keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import orthogonal
from jaxformers.models.mixer import MIXERS
from jaxformers.models.mixers import allpass
from jaxformers.scan import Pair
from tests.marks import long_except
from tests.models.mixers import sequential

# One program each: operations one by one take long to compile.
filter_causally = jax.jit(
  allpass.filter_causally, static_argnums=2, static_argnames="reverse"
)
filter_stream = jax.jit(allpass.filter_stream)
undo_stream = jax.jit(allpass.undo_stream)

CHANNELS = 3
SMALL = {"dilations": (1, 4)}


def pair(z, dtype=np.float64):
  return Pair(z.real.astype(dtype), z.imag.astype(dtype))


def joined(z):
  return np.asarray(z.real) + 1j * np.asarray(z.imag)


def logarithms(seed=0, slowest=0.01, channels=CHANNELS):
  rng = np.random.default_rng(seed)
  angle = rng.uniform(0, 6, channels)
  return -rng.uniform(slowest, 1, channels) + 1j * angle


def signal(n, seed=0, batch=2, channels=CHANNELS):
  rng = np.random.default_rng(seed)
  return rng.normal(size=(2, batch, n, channels)).T.swapaxes(0, 2) @ [1, 1j]


def section(x, log, m):
  """The recurrence of the module's docstring, [b, n, C], and all h."""
  factor = np.exp(log)
  s = np.sqrt(1 - abs(factor) ** 2)
  h = np.zeros((len(x), x.shape[1] + m, x.shape[2]), complex)
  y = np.zeros_like(x)
  for t in range(x.shape[1]):
    h[:, t + m] = factor * h[:, t] + s * x[:, t]
    y[:, t] = s * h[:, t] - factor.conj() * x[:, t]
  return y, h[:, x.shape[1] :]


@pytest.mark.parametrize("m", long_except([5, 40], [1, 4, 5, 12, 40]))
@pytest.mark.parametrize("reverse", [False, True])
def test_a_section_is_its_recurrence(m, reverse):
  """Dilations that divide the length, that do not, and that exceed it."""
  x, log = signal(12), logarithms()
  turn = slice(None, None, -1) if reverse else slice(None)
  want, _ = section(x[:, turn], log, m)
  for dtype, tolerance in ((np.float64, 1e-13), (np.float32, 2e-6)):
    with jax.enable_x64(dtype == np.float64):
      y = filter_causally(pair(x, dtype), pair(log, dtype), m, reverse=reverse)
      assert y.real.dtype == dtype
    np.testing.assert_allclose(joined(y), want[:, turn], atol=tolerance)


@pytest.mark.parametrize(
  ("n", "m", "slowest"),
  [(1, 1, 0.5), (1, 9, 1e-3), (13, 4, 1e-3), (50, 5, 0.5), (1_999, 64, 1e-3)],
)
def test_outputs_and_last_states_keep_the_norm(n, m, slowest):
  """To 1e-12 and 2e-6, whatever length, dilation and eigenvalues are."""
  x, log = signal(n), logarithms(n, slowest)
  count = np.full(2, n, np.int32)
  for dtype, tolerance in ((np.float64, 1e-12), (np.float32, 2e-6)):
    with jax.enable_x64(dtype == np.float64):
      past = allpass.begin(2, m, CHANNELS, dtype)
      y, past = filter_stream(pair(x, dtype), pair(log, dtype), past, count)
    before = np.linalg.norm(x)
    after = np.hypot(
      np.linalg.norm(joined(y)), np.linalg.norm(joined(past.states))
    )
    assert after == pytest.approx(before, rel=tolerance)


LENGTHS = [[3, 0, 5], [0, 0, 0], [7, 11, 2], [10, 9, 13]]


@pytest.mark.parametrize("m", long_except([7], [1, 4, 7, 30]))
@pytest.mark.parametrize(
  ("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 2e-6)]
)
def test_a_stream_in_parts_is_undone_exactly(m, dtype, tolerance):
  """Parts of unequal lengths; from the last one to the first."""
  lengths = np.array(LENGTHS, np.int32)
  x = signal(20, batch=3)
  log = logarithms()
  want, last = section(x, log, m)
  with jax.enable_x64(dtype == np.float64):
    past = allpass.begin(3, m, CHANNELS, dtype)
    parts, begun = [], np.zeros(3, int)
    for count in lengths:
      part = np.zeros((3, 14, CHANNELS), complex)
      for row in range(3):
        part[row, : count[row]] = x[row, begun[row] :][: count[row]]
      y, past = filter_stream(pair(part, dtype), pair(log, dtype), past, count)
      for row in range(3):
        np.testing.assert_allclose(
          joined(y)[row, : count[row]],
          want[row, begun[row] :][: count[row]],
          atol=tolerance,
        )
      begun += count
      parts.append((part, y, count))
    # The states stand by the number of their token mod m.
    order = (begun[:, None] + np.arange(m)[None]) % m
    found = np.take_along_axis(joined(past.states), order[..., None], 1)
    np.testing.assert_allclose(found, last, atol=tolerance)
    for part, y, count in reversed(parts):
      back, past = undo_stream(y, pair(log, dtype), past, count)
      for row in range(3):
        np.testing.assert_allclose(
          joined(back)[row, : count[row]],
          part[row, : count[row]],
          atol=4 * tolerance,
        )
  np.testing.assert_allclose(joined(past.states), 0, atol=4 * tolerance)
  assert not np.asarray(past.num_tokens).any()


def test_a_cascade_looks_back_as_far_as_its_dilations():
  """The mean lag, weighted by energy, is their sum, whatever lambda is."""
  n, dilations = 4_000, (1, 4, 16)
  x = np.zeros((1, n, CHANNELS), complex)
  x[:, 0] = 1
  with jax.enable_x64(True):
    y = pair(x)
    for seed, m in enumerate(dilations):
      y = filter_causally(y, pair(logarithms(seed, 0.2)), m)
  energy = abs(joined(y)[0]) ** 2
  np.testing.assert_allclose(energy.sum(0), 1, rtol=1e-9)
  lag = (np.arange(n)[:, None] * energy).sum(0)
  np.testing.assert_allclose(lag, sum(dilations), rtol=1e-9)


def test_cascade_dilations_grow_fourfold_to_an_eighth_of_the_length():
  assert allpass.cascade_dilations(1_024) == (1, 4, 16, 64)
  assert allpass.cascade_dilations(8_192) == (1, 4, 16, 64, 256, 1_024)
  assert allpass.cascade_dilations(8) == allpass.cascade_dilations(1) == (1,)


def outputs(params, x, options):
  """Sections one after the other, between the rotations."""
  with jax.enable_x64(True):
    first, second = np.asarray(
      jax.jit(orthogonal.cayley)(params["mixing_skew"])
    )
  log = -(allpass.SLOWEST + np.exp(params["decay"])) + 1j * params["angle"]
  half = x.shape[1] // 2
  y = x @ first
  y = (y[:, :half] + 1j * y[:, half:])[None]
  for row, m in zip(log, options["dilations"], strict=True):
    if options.get("causal"):
      y, _ = section(y, row, m)
    else:
      k = half // 2
      early, _ = section(y[..., :k], row[:k], m)
      late, _ = section(y[:, ::-1, k:], row[k:], m)
      y = np.concatenate([early, late[:, ::-1]], -1)
  y = np.concatenate([y[0].real, y[0].imag], -1) @ second + params["bias"]
  return np.where(y > 0, y, np.expm1(np.minimum(y, 0)))


@pytest.mark.parametrize("causal", [True, False])
def test_allpass_mixer_is_its_formula(causal, monkeypatch):
  """Under a mask with holes."""
  monkeypatch.setattr(sequential, "D", 8)
  options = SMALL | {"causal": causal}
  sequential.check(
    "allpass",
    lambda params, x: outputs(params, x, options),
    options,
    shift=0.1,
    atol=2e-5,
  )


def jacobian(mixer, params, n, d):
  def flat(x):
    y, _ = mixer.apply(
      {"params": params},
      x.reshape(1, n, d),
      mask=jnp.ones((1, n), bool),
      carry=None,
      train=False,
    )
    return y.ravel()

  return np.asarray(jax.jit(jax.jacrev(flat))(jnp.ones(n * d)))


@pytest.mark.parametrize("causal", long_except([True], [True, False]))
@pytest.mark.slow
def test_allpass_mixer_expands_no_direction_and_is_causal(causal):
  n, d = 9, 4
  with jax.enable_x64(True):
    mixer = MIXERS["allpass"](**SMALL, causal=causal, dtype=jnp.float64)
    params = sequential.init(mixer, d)
    # Where ELU has slope 1, all of the norm but the last states is kept.
    params["bias"] = jnp.full((d,), 50.0)
    matrix = jacobian(mixer, params, n, d)
    gain = mixer.gain({"params": params})
  values = np.linalg.svd(matrix, compute_uv=False)
  assert gain == pytest.approx(1, abs=1e-6)
  assert 0.999 * gain < values[0] <= gain * (1 + 1e-9)
  seen = np.abs(matrix.reshape(n, d, n, d)).max((1, 3)) > 0
  np.testing.assert_array_equal(seen, np.tri(n) > 0 if causal else seen | True)


def test_allpass_mixer_refuses_odd_pairs_of_channels():
  with pytest.raises(ValueError, match="6 channels.*4"):
    sequential.init(MIXERS["allpass"](), 6)
  with pytest.raises(ValueError, match="5 channels.*2"):
    sequential.init(MIXERS["allpass"](causal=True), 5)
