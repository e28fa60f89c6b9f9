"""LinOSS and D-LinOSS against their oscillators, and their norms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models.mixer import MIXERS
from jaxformers.models.mixers import linoss
from tests.models.mixers import sequential

SMALL = {"state_size": 5}
FORMS = [
  {},
  {"start": "ring"},
  {"scheme": "implicit"},
  {"damped": True, "start": "ring"},
]


def matrices(params, scheme):
  """Matrices [P, 2, 2] of a step of (velocity, position), and of the input."""
  step = sequential.sigmoid(params["steps"])
  # Negative damping is 0, and angles stay in [0.001, pi - 0.001].
  g = np.maximum(params.get("G_diag", 0), 0)
  root = np.sqrt(1 + step * g)
  least = 4 * root * np.sin(linoss.SMALLEST_ANGLE / 2) ** 2
  low, high = (root - 1) ** 2 + least, (root + 1) ** 2 - least
  if scheme == "implicit":
    low, high = np.tan(linoss.SMALLEST_ANGLE) ** 2, np.inf
  a = np.clip(params["A_diag"], low / step**2, high / step**2)
  if scheme == "implicit":
    s = 1 / (1 + step**2 * a)
    rows = [[1 - step**2 * a * s, -step * a * s], [step * s, s]]
    inputs = [rows[0][0] * step, rows[1][0] * step]
  else:
    s = 1 + step * g
    rows = [[1 / s, -step * a / s], [step / s, 1 - step**2 * a / s]]
    inputs = [step / s, step**2 / s]
  one = np.ones_like(step)
  return (
    np.moveaxis(np.array([[x * one for x in row] for row in rows]), 2, 0),
    np.stack([x * one for x in inputs], 1),
  )


def positions(params, x, scheme):
  """Positions of the oscillators, complex [n, P], step by step."""
  m, inputs = matrices(params, scheme)
  drive = x @ (params["B"][..., 0] + 1j * params["B"][..., 1]).T
  state = np.zeros((m.shape[0], 2), complex)
  found = []
  for v in drive:
    state = np.einsum("pij,pj->pi", m, state) + inputs * v[:, None]
    found.append(state[:, 1])
  return np.array(found)


def outputs(params, x, options):
  scheme = options.get("scheme", "imex")
  h = positions(params, x, scheme)
  if not options.get("causal"):
    back = positions(params, x[::-1], scheme)[::-1]
    h = np.concatenate([h, back], 1)
  c = params["C"][..., 0] + 1j * params["C"][..., 1]
  y = (h @ c.T).real + params["D"] * x
  return sequential.gated(
    "full", sequential.gelu_tanh, params.get("gate", {}), y
  )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("options", FORMS)
def test_linoss_is_its_oscillators(options, causal):
  options = options | {"causal": causal}
  sequential.check(
    "linoss",
    lambda params, x: outputs(params, x, options),
    SMALL | options,
    shift=0.02,
    atol=2e-5,
  )


@pytest.mark.parametrize("options", FORMS)
def test_rates_are_the_moduli_of_the_eigenvalues(options):
  mixer = MIXERS["linoss"](**SMALL, **options)
  params = sequential.start("linoss", SMALL | options, 0.02)
  m, _ = matrices(params, options.get("scheme", "imex"))
  np.testing.assert_allclose(
    mixer.rates({"params": params})[:, None] * np.ones(2),
    np.abs(np.linalg.eigvals(m)),
    rtol=1e-12,
  )


def test_imex_keeps_the_energy_of_each_oscillator():
  # M^T Q M = Q for Q = z^2 - D A z x + A x^2, and Q > 0.
  params = sequential.start("linoss", SMALL | {"start": "ring"}, 0.02)
  m, _ = matrices(params, "imex")
  step, a = sequential.sigmoid(params["steps"]), -m[:, 0, 1]
  a = a / step
  q = np.array([[np.ones_like(a), -step * a / 2], [-step * a / 2, a]])
  q = np.moveaxis(q, 2, 0)
  np.testing.assert_allclose(np.swapaxes(m, 1, 2) @ q @ m, q, atol=1e-13)
  assert np.linalg.eigvalsh(q).min() > 0


@pytest.mark.parametrize("options", FORMS)
def test_parameters_out_of_range_are_clipped(monkeypatch, options):
  """Frequencies of 0, below it and far above 4 / D^2, and negative damping."""
  options = SMALL | options | {"causal": True}
  start = sequential.start

  def extreme(*arguments):
    params = start(*arguments)
    params["A_diag"][:4] = 100.0, 0.0, -1.0, 7.0
    if "G_diag" in params:
      params["G_diag"][:2] = -1.0, 0.0
    return params

  monkeypatch.setattr(sequential, "start", extreme)
  sequential.check(
    "linoss",
    lambda params, x: outputs(params, x, options),
    options,
    shift=0.02,
    atol=2e-3,  # Rounding errors are divided by the sine of the angle.
  )


@pytest.mark.parametrize("options", FORMS)
def test_states_keep_or_lose_their_norm_as_the_rates_say(options):
  options = SMALL | options | {"causal": True}
  mixer = MIXERS["linoss"](**options)
  # A beyond 4 / D^2 lets the states of the published "imex" grow.
  params = sequential.start("linoss", options, 0.0)
  params["A_diag"][:2] = 100.0, 0.0
  variables = {"params": params}
  # States that lose energy are 0 after so many tokens.
  is_kept = options.get("scheme") != "implicit" and not options.get("damped")
  n = 16_384 if is_kept else 16
  sizes = np.random.default_rng(0).uniform(0, 2, (1, n))
  # The first token drives the oscillators; the others are zero.
  x = np.zeros((1, n, sequential.D), np.float32)
  x[0, 0] = 1

  @jax.jit
  def last(x, sizes):
    _, changed = mixer.apply(
      variables | {"step_sizes": {"s": sizes}},
      x,
      mask=jnp.ones(x.shape[:2], bool),
      carry=None,
      train=False,
      mutable=["cache"],
    )
    return jnp.square(jnp.stack(changed["cache"]["state"])).sum(0)[0]

  first, end = (last(x[:, :k], sizes[:, :k]) for k in (1, n))
  rates = np.tile(mixer.rates(variables), 2)
  want = np.asarray(first, np.float64) * rates ** (2 * sizes[0, 1:].sum())
  np.testing.assert_allclose(end, want, rtol=2e-3, atol=0)


def test_eigenvalues_start_on_the_ring():
  options = {"damped": True, "start": "ring", "r_min": 0.5, "max_phase": 1.0}
  mixer = MIXERS["linoss"](state_size=4_000, r_max=0.9, **options)
  params = sequential.init(mixer, 3)
  del params["gate"]
  params = {k: np.asarray(v, np.float64) for k, v in params.items()}
  m, _ = matrices(params, "imex")
  found = np.linalg.eigvals(m)[:, 0]
  # Uniform in the area, and in the angle: quantiles to three deviations.
  quantiles = np.linspace(0, 1, 11)
  for values, low, high in (
    (np.abs(found) ** 2, 0.25, 0.81),
    (np.abs(np.angle(found)), 0, 1),
  ):
    assert low - 1e-5 <= values.min() and values.max() <= high + 1e-5
    scaled = (np.quantile(values, quantiles) - low) / (high - low)
    np.testing.assert_allclose(scaled, quantiles, atol=3 * 0.5 / np.sqrt(4_000))


@pytest.mark.parametrize(
  ("options", "text"),
  [
    ({"scheme": "implicit", "start": "ring"}, "implicit.*ring"),
    ({"damped": True}, "damped=True.*start='ring'"),
    (
      {"damped": True, "start": "ring", "r_min": 0.95, "r_max": 0.9},
      "r_min=0.95.*r_max=0.9",
    ),
    ({"scheme": "im"}, "'im'.*imex, implicit"),
  ],
)
def test_linoss_refuses_options_that_do_not_suit(options, text):
  with pytest.raises(ValueError, match=text):
    sequential.init(MIXERS["linoss"](**options), 3)
