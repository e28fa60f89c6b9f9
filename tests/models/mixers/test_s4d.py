"""S4D against its recurrence, and its start."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models.mixer import MIXERS
from jaxformers.models.mixers import state_space
from tests.marks import long_except
from tests.models.mixers import sequential
from tests.models.mixers.test_s5 import discretize

pytestmark = pytest.mark.slow  # Not in REPRESENTATIVES.

SMALL = {"state_size": 8}


def outputs(params, x, options):
  """One recurrence a channel; backwards without the present token."""
  d = x.shape[1]
  eigenvalue = -np.exp(params["log_A_real"]) + 1j * params["A_imag"]
  b = np.ones_like(eigenvalue)
  if "B" in params:
    b = params["B"][..., 0] + 1j * params["B"][..., 1]
  channels = np.arange(d) % len(eigenvalue)
  eigenvalue, b = eigenvalue[channels], b[channels]
  factor, gain = discretize(
    eigenvalue,
    np.exp(params["log_dt"])[:, None],
    options.get("discretization", "zoh"),
  )
  c = params["C"][..., 0] + 1j * params["C"][..., 1]
  drive = gain * b * x[..., None]
  y = 2 * (sequential.states(factor, drive) * c[0]).sum(-1).real
  if not options.get("causal"):
    later = sequential.states(factor, drive[::-1])[::-1][1:]
    y[:-1] += 2 * (later * c[1]).sum(-1).real
  y = y + params["D"] * x
  form = options.get("glu", "full")
  return sequential.gated(form, sequential.gelu, params.get("gate", {}), y)


@pytest.mark.parametrize(
  "options",
  [
    {},
    {"causal": True, "start": "lin", "discretization": "bilinear"},
    {"start": "inv", "num_ssm": 2, "glu": "half1"},
    {"causal": True, "num_ssm": 4, "glu": "none"},
  ],
)
def test_s4d_is_its_recurrence(options):
  sequential.check(
    "s4d",
    lambda params, x: outputs(params, x, options),
    SMALL | options,
    shift=0.1,
  )


def test_s4d_of_one_token_is_its_recurrence():
  options = SMALL | {"glu": "none"}
  sequential.check(
    "s4d", lambda params, x: outputs(params, x, options), options, n=8
  )


@pytest.mark.parametrize("start", ["legs", "lin", "inv"])
def test_s4d_starts_from_its_table(start):
  params = sequential.init(MIXERS["s4d"](state_size=16, start=start), 3)
  table = {
    "legs": state_space.legs(16)[0][8:],
    "lin": state_space.s4d_lin(16),
    "inv": state_space.s4d_inv(16),
  }[start]
  assert (table.imag >= 0).all()
  found = -np.exp(params["log_A_real"]) + 1j * np.asarray(params["A_imag"])
  np.testing.assert_allclose(found, np.tile(table, (3, 1)), rtol=1e-6)
  assert ("B" in params) == (start == "legs")
  if start == "legs":
    assert np.abs(params["B"][..., 1]).max() <= 2


@pytest.mark.parametrize("causal", long_except([False], [True, False]))
@pytest.mark.long
def test_a_certified_convolution_expands_no_distance(causal):
  """The norm of the map of n tokens, for all n up to the longest."""
  d, longest = 4, 12
  with jax.enable_x64(True):
    mixer = MIXERS["s4d"](
      **SMALL,
      certified=True,
      max_len=longest,
      causal=causal,
      dtype=jnp.float64,
      step_min=0.1,
      step_max=2.0,
    )
    params = sequential.init(mixer, d)
    # Where ELU has slope 1, and with kernels that are too strong.
    params["bias"] = jnp.full((d,), 50.0)
    params["D"] = 2 * params["D"]
    gain = mixer.gain({"params": params})
    assert gain == pytest.approx(1, abs=1e-6)
    norms = []
    for n in (5, longest):

      def flat(x, n=n):
        x, mask = x.reshape(1, n, d), jnp.ones((1, n), bool)
        how = {"mask": mask, "carry": None, "train": False}
        return mixer.apply({"params": params}, x, **how)[0].ravel()

      matrix = np.asarray(jax.jit(jax.jacrev(flat))(jnp.ones(n * d)))
      norms.append(np.linalg.norm(matrix, 2))
  assert norms == sorted(norms)
  assert 0.7 < norms[-1] <= gain * (1 + 1e-9)


def test_certified_s4d_does_not_depend_on_padding():
  x, mask = sequential.inputs()
  mixer = MIXERS["s4d"](**SMALL, certified=True, max_len=40)
  params = sequential.init(mixer, sequential.D)

  @jax.jit
  def outputs(x, mask):
    how = {"mask": mask, "carry": None, "train": False}
    return mixer.apply({"params": params}, x, **how)[0]

  far = [(0, 0), (0, 13)]
  wide = outputs(np.pad(x, [*far, (0, 0)]), np.pad(mask, far))
  np.testing.assert_allclose(
    wide[:, : sequential.N][mask], outputs(x, mask)[mask], atol=1e-6
  )


def test_s4d_gain_refuses_gates_and_dropout():
  with pytest.raises(ValueError, match="certified=True.*glu='none'.*dropout"):
    sequential.init(MIXERS["s4d"](certified=True, glu="none"), 4)
  with pytest.raises(ValueError, match="certified=True"):
    MIXERS["s4d"]().gain({})


def test_certified_s4d_refuses_sequences_beyond_max_len():
  mixer = MIXERS["s4d"](**SMALL, certified=True, max_len=3)
  with pytest.raises(ValueError, match="4 tokens.*max_len=3"):
    sequential.init(mixer, 4)
