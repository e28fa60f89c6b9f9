"""TransJect's table 3: counts as in the authors' code, and measured speeds."""

import pytest

from jaxformers.analysis.tables import speed


@pytest.mark.slow
def test_count_parameters_are_a_tenth_of_the_printed_ones():
  """But for the biases of the authors' experts, and of their positions."""
  for title, count in speed.count_parameters().items():
    assert count / 1e5 == pytest.approx(speed.PRINTED[title], rel=0.01)


@pytest.mark.slow
@pytest.mark.long
def test_measure_seconds_times_encoders_in_turns(monkeypatch):
  monkeypatch.setitem(speed.SIZES, "num_layers", 1)
  monkeypatch.setitem(speed.SIZES, "d_model", 16)
  found = speed.measure_seconds((64, 128), rounds=1)
  assert {len(times) for times in found.values()} == {3}
  assert all(s > 0 for times in found.values() for s in times.values())
  text = speed.text(
    {1_024: {"Transformer": 3.0, **dict.fromkeys(speed.SPEED_UPS, 0.5)}}
  )
  assert "| TransJect, E = 1, paper | 5.0 |" in text
  assert "| TransJect, E = 1, ours | 6.0 |" in text
  assert "| TransJect, E = 8 | 286.8 |" in text
