"""The bounds of theorems 1 and 2, against the reference's values."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformers.theory import bounds as b

SIZES = st.tuples(
  st.integers(1, 100), st.integers(3, 13_000), st.integers(1, 2)
)


@pytest.mark.parametrize(
  ("num_layers", "lower", "upper"),
  [
    (1, 2.21, 6.30),
    (2, 5.64, 25.21),
    (3, 13.93, 81.93),
    (4, 32.78, 252.1),
    (5, 71.34, 762.6),
    (6, 133.01, 2294.0),
  ],
)
def test_theorem_1_at_the_papers_width(num_layers, lower, upper):
  found = b.bounds(num_layers, 1_000, 16)
  assert found.theorem == 1
  assert found.lower == pytest.approx(lower, abs=0.006)
  assert found.upper == pytest.approx(upper, rel=4e-4)


@pytest.mark.parametrize(
  ("num_layers", "lower", "upper"),
  [
    (7, -384, 4_241),
    (8, 107, 6_242),
    (12, 2_071, 14_246),
    (24, 7_963, 38_258),
    (48, 19_747, 86_282),
  ],
)
def test_theorem_2_at_the_papers_width(num_layers, lower, upper):
  found = b.bounds(num_layers, 1_000, 16)
  assert found.theorem == 2
  assert found.lower == pytest.approx(lower, abs=0.6)
  assert found.upper == pytest.approx(upper, abs=0.6)


@pytest.mark.parametrize(
  ("d_model", "depth"),
  [
    *((128, 4.42), (256, 5.05), (512, 5.68), (768, 6.05), (1_000, 6.29)),
    *((1_024, 6.31), (4_096, 7.57), (12_288, 8.57)),
  ],
)
def test_the_threshold(d_model, depth):
  assert b.threshold(d_model) == pytest.approx(depth, abs=0.006)


def test_the_degree():
  assert [b.degree(k) for k in range(1, 7)] == [1, 4, 13, 40, 121, 364]


@given(SIZES)
def test_lower_is_below_upper_and_nothing_overflows(sizes):
  found = b.bounds(*sizes)
  assert math.isfinite(found.lower)
  assert found.lower <= found.upper
  assert found.upper > 0
  largest = b.bounds(96, 12_288, 96)
  assert largest.lower == pytest.approx(524_091, abs=1)


def test_the_upper_bounds_meet_at_the_threshold():
  for d in (729, 2_187, 6_561):  # log_3 d = 6, 7, 8.
    depth = round(b.threshold(d))
    one, two = (t(depth, d, 1).upper for t in (b.theorem_1, b.theorem_2))
    assert two < one < 1.5 * two


def test_corollary_1_and_where_the_paper_differs():
  # 2e17 and 2e5 are printed; the formulas give these.
  two, three = (b.width_needed(s, 6, 1_000, 16) for s in (2, 3))
  assert 10**two.log10 == pytest.approx(7.3e15, rel=0.01)
  assert 10**three.log10 == pytest.approx(7.6e4, rel=0.01)
  assert two.advantage
  assert three.advantage
  assert 10 ** b.width_needed(2, 6, 1_024, 16).log10 == pytest.approx(
    1.2e16, rel=0.01
  )
  assert 10 ** b.width_needed(3, 6, 1_024, 16).log10 == pytest.approx(
    8.9e4, rel=0.01
  )
  four = b.width_needed(4, 6, 1_000, 16)
  assert 10**four.log10 == pytest.approx(23, abs=1)
  assert not four.advantage
  one = b.width_needed(1, 6, 1_000, 16)
  assert one.log10 == pytest.approx(133.01 * math.log10(3), rel=1e-4)


@given(st.integers(14, 96), st.sampled_from([256, 1_000, 12_288]))
def test_corollary_2_surpasses_the_deeper_network(num_layers, d_model):
  found = b.surpassing(num_layers, d_model, 16)
  assert found.num_layers < num_layers
  deep = b.bounds(num_layers, d_model, 16)
  d = 3**found.log3_width
  assert b.theorem_1(found.num_layers, round(d), 16).lower > deep.upper
  if found.beta:
    less = 3 ** (found.log3_width - 1)
    own = b.theorem_1(found.num_layers - 1, round(less), 16)
    assert own.lower <= deep.upper * (1 + 1e-6)


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda: b.bounds(0, 8, 1), "num_layers=0: there is at least one layer"),
    (lambda: b.bounds(2, 8, 8), "num_heads=8 with d_model=8.*log_3"),
    (lambda: b.bounds(2, 8, 0), "num_heads=0 with d_model=8"),
    (lambda: b.degree(0), "num_layers=0"),
    (lambda: b.threshold(1), "d_model=1"),
    (lambda: b.width_needed(6, 6, 1_000, 16), "shallow=6, num_layers=6"),
    (lambda: b.width_needed(2, 12, 1_000, 16), "fewer layers than log_3 d"),
    (lambda: b.surpassing(5, 1_000, 16), "deeper than log_3 d = 6.29"),
    # Some layers above the threshold the bounds are too far apart.
    (lambda: b.surpassing(7, 1_000, 16), "no shallower"),
    (lambda: b.surpassing(11, 1_000, 16), "no shallower"),
    (lambda: b.surpassing(13, 12_288, 16), "no shallower"),
  ],
)
def test_what_cannot_be(call, message):
  with pytest.raises(ValueError, match=message):
    call()
