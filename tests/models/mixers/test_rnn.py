"""LSTM, GRU and minGRU against loops."""

import functools

import numpy as np
import pytest

from tests.models.mixers import sequential
from tests.models.mixers.sequential import sigmoid

pytestmark = pytest.mark.slow  # Not in REPRESENTATIVES.


def lstm(cell, x):
  """The equations of `OptimizedLSTMCell`, without peepholes."""
  state = h = np.zeros(x.shape[1])
  out = []
  for row in x:
    i, f, g, o = (
      sequential.linear(cell[f"i{gate}"], row)
      + sequential.linear(cell[f"h{gate}"], h)
      for gate in "ifgo"
    )
    state = sigmoid(f) * state + sigmoid(i) * np.tanh(g)
    h = sigmoid(o) * np.tanh(state)
    out.append(h)
  return np.stack(out)


def gru(cell, x):
  """Section 2.3 of Cho et al. 2014; the reset gate follows the map."""
  h, out = np.zeros(x.shape[1]), []
  for row in x:
    r, z = (
      sigmoid(
        sequential.linear(cell[f"i{gate}"], row)
        + sequential.linear(cell[f"h{gate}"], h)
      )
      for gate in "rz"
    )
    new = sequential.linear(cell["in"], row)
    new = np.tanh(new + r * sequential.linear(cell["hn"], h))
    h = (1 - z) * new + z * h
    out.append(h)
  return np.stack(out)


def cells(params, x, *, run, name, causal):
  y = run(params[f"{name}_0"], x)
  if not causal:
    behind = run(params[f"{name}_1"], x[::-1])[::-1]
    y = np.concatenate([y, behind], 1)
  return sequential.linear(params["output"], y)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
  ("mixer", "run", "name"),
  [("lstm", lstm, "OptimizedLSTMCell"), ("gru", gru, "GRUCell")],
)
def test_cells_are_run_in_both_directions(mixer, run, name, causal):
  want = functools.partial(cells, run=run, name=name, causal=causal)
  sequential.check(mixer, want, {"causal": causal})


def mingru(params, x, causal):
  """Section 3.1 of Feng et al. 2024, with g of appendix B."""

  def run(x, end=""):
    z = sigmoid(sequential.linear(params[f"gate{end}"], x))
    new = sequential.linear(params[f"candidate{end}"], x)
    return sequential.states(
      1 - z, z * np.where(new > 0, new + 0.5, sigmoid(new))
    )

  y = run(x)
  if not causal:
    y = np.concatenate([y, run(x[::-1], "_reverse")[::-1]], 1)
  return sequential.linear(params["output"], y)


@pytest.mark.parametrize("causal", [True, False])
def test_mingru_is_its_recurrence(causal):
  want = functools.partial(mingru, causal=causal)
  sequential.check("mingru", want, {"causal": causal})
