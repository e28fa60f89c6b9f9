"""The fit of width to depth, against the reference's values."""

import pytest

from jaxformers.theory import fit as f
from tests.assertions import assert_all

WIDTHS = {
  6: 215,
  12: 300,
  18: 419,
  24: 585,
  30: 816,
  36: 1_138,
  48: 2_215,
  64: 5_383,
  80: 13_082,
  95: 30_077,
}


def test_width_and_depth_are_those_of_the_reference():
  def check(num_layers, width):
    assert round(f.width(num_layers)) == width
    params = f.parameters(num_layers, f.width(num_layers))
    assert f.depth_of(params) == pytest.approx(num_layers)
    assert f.depth(f.width(num_layers)) == pytest.approx(num_layers)

  assert_all(check, WIDTHS.items())


def test_place_classifies_known_networks():
  # GPT-3 is called too deep for its size by the authors; 96 layers of 12,288.
  assert f.place(96, 12_288) == ("deep", pytest.approx(0.39, abs=0.01))
  assert f.place(12, 768)[0] == "wide"
  assert f.place(24, 600)[0] == "balanced"


def test_place_and_depth_do_not_overflow():
  assert f.place(10**9, 12_288) == ("deep", 0.0)
  assert f.depth(100) < 1
  with pytest.raises(ValueError, match=r"params=10,000\b.*319,306"):
    f.depth_of(1e4)
