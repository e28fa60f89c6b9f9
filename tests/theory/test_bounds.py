"""The bounds of theorems 1 and 2, against the reference's values."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformers.commands import advise as advise_command
from jaxformers.commands import bounds as bounds_command
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
def test_bounds_of_theorem_1_are_those_of_the_reference(
  num_layers, lower, upper
):
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
def test_bounds_of_theorem_2_are_those_of_the_reference(
  num_layers, lower, upper
):
  found = b.bounds(num_layers, 1_000, 16)
  assert found.theorem == 2
  assert found.lower == pytest.approx(lower, abs=0.6)
  assert found.upper == pytest.approx(upper, abs=0.6)


@pytest.mark.parametrize(
  ("d_model", "depth"),
  [
    (128, 4.42),
    (256, 5.05),
    (512, 5.68),
    (768, 6.05),
    (1_000, 6.29),
    (1_024, 6.31),
    (4_096, 7.57),
    (12_288, 8.57),
  ],
)
def test_threshold_is_that_of_the_reference(d_model, depth):
  assert b.threshold(d_model) == pytest.approx(depth, abs=0.006)


def test_degree_of_the_first_six_depths():
  assert [b.degree(k) for k in range(1, 7)] == [1, 4, 13, 40, 121, 364]


@given(SIZES)
def test_bounds_lower_is_below_upper_without_overflow(sizes):
  found = b.bounds(*sizes)
  assert math.isfinite(found.lower)
  assert found.lower <= found.upper
  assert found.upper > 0
  largest = b.bounds(96, 12_288, 96)
  assert largest.lower == pytest.approx(524_091, abs=1)


def test_bounds_of_both_theorems_meet_at_the_threshold():
  for d in (729, 2_187, 6_561):  # log_3 d = 6, 7, 8.
    depth = round(b.threshold(d))
    one, two = (t(depth, d, 1).upper for t in (b.theorem_1, b.theorem_2))
    assert two < one < 1.5 * two


def test_width_needed_is_corollary_1():
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
def test_surpassing_is_corollary_2(num_layers, d_model):
  found = b.surpassing(num_layers, d_model, 16)
  assert found.num_layers < num_layers
  deep = b.bounds(num_layers, d_model, 16)
  d = 3**found.log3_width
  assert b.theorem_1(found.num_layers, round(d), 16).lower > deep.upper
  if found.beta:
    less = 3 ** (found.log3_width - 1)
    own = b.theorem_1(found.num_layers - 1, round(less), 16)
    assert own.lower <= deep.upper * (1 + 1e-6)


@given(st.floats(1, 9), st.floats(0.6, 9), st.floats(0, 1))
def test_surpassing_has_the_order_of_corollary_2(
  log_layers, log_width, log_heads
):
  """beta is log_3 L + O(1), which is O(log H log d log L) for H >= 2."""
  d = round(10**log_width)
  heads = max(1, min(round(d**log_heads), d - 1))
  num_layers = round(10**log_layers) + 3 * round(b.threshold(d)) + 30
  beta = b.surpassing(num_layers, d, heads).beta
  assert 1.5 < beta - b.log3(num_layers) < 4
  # With one constant for all sizes; a constant of only H and d would not do.
  order = b.log3(max(heads, 2)) * b.log3(d) * b.log3(num_layers)
  assert beta <= 4 * order


def test_surpassing_beta_grows_with_the_logarithm_of_the_depth():
  betas = [b.surpassing(3**k, 1_000, 16).beta for k in range(4, 18)]
  assert all(after - before == 1 for before, after in pairwise(betas))
  sizes = [(d, heads) for d in (10, 1_000, 10**6) for heads in (1, 2, d - 1)]
  least = {b.surpassing(3**10, d, heads).beta for d, heads in sizes}
  assert max(least) - min(least) <= 2
  # For one head the printed order is 0, and the bounds need more than that.
  assert math.log(1) == 0 and b.surpassing(3**10, 1_000, 1).beta >= 10


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda: b.bounds(0, 8, 1), "num_layers=0"),
    (lambda: b.bounds(2, 8, 8), "num_heads=8.*d_model=8.*log_3"),
    (lambda: b.bounds(2, 8, 0), "num_heads=0.*d_model=8"),
    (lambda: b.degree(0), "num_layers=0"),
    (lambda: b.threshold(1), "d_model=1"),
    (lambda: b.width_needed(6, 6, 1_000, 16), "shallow=6, num_layers=6"),
    (
      lambda: b.width_needed(2, 12, 1_000, 16),
      r"shallow=2.*num_layers=12.*6\.29",
    ),
    (lambda: b.surpassing(5, 1_000, 16), r"num_layers=5.*6\.29"),
    # Some layers above the threshold the bounds are too far apart.
    (lambda: b.surpassing(7, 1_000, 16), "num_layers=7, d_model=1000"),
    (lambda: b.surpassing(11, 1_000, 16), "num_layers=11, d_model=1000"),
    (lambda: b.surpassing(13, 12_288, 16), "num_layers=13, d_model=12288"),
  ],
)
def test_bounds_refuse_wrong_sizes(call, message):
  with pytest.raises(ValueError, match=message):
    call()


def test_theorem_docstrings_cite_their_equation():
  """Equations 7 and 8 of the paper; 6 is proposition 1."""
  assert "(equation 7)" in b.theorem_1.__doc__
  assert "(equation 8)" in b.theorem_2.__doc__


def test_bounds_command_places_gpt_3(capsys):
  bounds_command.main(["--num_layers=96", "--d_model=12288", "--num_heads=96"])
  printed = capsys.readouterr().out
  assert "173,946.2 M parameters without embedding" in printed
  assert "depth-inefficient: L = 96 > log_3 d = 8.57" in printed
  assert "theorem 2          524,091.1 <= log_3 of the separation" in printed
  assert "corollary 2        15 layers of 26,873,856 channels have" in printed
  assert "corollary 1" not in printed
  assert "log_3 d = 8.57 layers: the bounds favour depth up to it" in printed
  assert "78.9 layers, extrapolated: trained networks" in printed
  assert "choose sizes by the fit" in printed
  assert "fit for this size  L = 80.5, d = 13,422" in printed
  assert "0.39 times the fit's width at L = 96:" in printed
  assert "too deep for its width" in printed
  assert "(beyond the 6 to 48 layers of the fit)" in printed
  assert max(map(len, printed.splitlines())) <= 80


def test_bounds_command_places_the_example_of_the_paper(capsys):
  bounds_command.main(["--num_layers=6", "--d_model=1000", "--num_heads=16"])
  printed = capsys.readouterr().out
  assert "depth-efficient: L = 6 <= log_3 d = 6.29" in printed
  assert "theorem 1          133.0 <= log_3 of the separation rank" in printed
  assert "at L = 2 it takes 7.3e+15 channels for this rank" in printed
  assert "at L = 3 it takes 7.6e+04 channels for this rank" in printed
  assert "at L = 4 it takes no more channels: nothing is proven" in printed
  assert "at L = 5" not in printed
  assert "4.64 times the fit's width at L = 6:" in printed
  assert "wide: more layers would be used" in printed
  assert "33.7 layers, measured: trained networks" in printed
  assert "beyond the 6 to 48" not in printed


@given(st.integers(1, 10**9), st.integers(2, 10**9))
def test_report_places_any_network(num_layers, d_model):
  lines = b.bound_lines(num_layers, d_model, 1)
  theorem = b.bounds(num_layers, d_model, 1).theorem
  assert lines[2].startswith(f"  theorem {theorem} ")
  assert any(line.startswith(f"  corollary {theorem} ") for line in lines)


def test_report_says_where_no_bound_or_fit_holds():
  lines = "\n".join(b.bound_lines(7, 1_000, 16))
  assert "-384.0 <= log_3 of the separation rank <= 4,240.9" in lines
  assert "(a negative lower bound says nothing)" in lines
  assert "the bounds show no shallower network that has a higher" in lines
  lines = "\n".join(b.bound_lines(1, 100, 2))
  assert "there is no shallower network" in lines
  assert "none: the fit begins at 163 channels" in lines
  assert "none: smaller than one layer of it" in lines
  assert "verdict" not in lines


@pytest.mark.parametrize(
  ("sizes", "message"),
  [
    ((0, 8, 1), "^error: num_layers=0"),
    ((2, 1, 1), "^error: num_heads=1.*d_model=1"),
    (
      (2, 8, 8),
      "^error: num_heads=8.*d_model=8",
    ),
    ((10**10, 8, 1), "^error: num_layers=10000000000.*1,000,000,000"),
    ((2, 10**10, 1), "^error: d_model=10000000000.*1,000,000,000"),
  ],
)
def test_bounds_command_refuses_wrong_sizes(sizes, message):
  names = ("num_layers", "d_model", "num_heads")
  with pytest.raises(SystemExit, match=message):
    bounds_command.main(
      [f"--{name}={n}" for name, n in zip(names, sizes, strict=True)]
    )


def test_bounds_command_help_fits_a_screen(capsys):
  with pytest.raises(SystemExit, match="^0$"):
    bounds_command.main(["--help"])
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) <= 24
  assert max(map(len, lines)) <= 80


def test_depth_page_shows_the_output_of_its_commands(
  capsys, monkeypatch, request
):
  """Every output in docs/depth.md that follows its command."""
  monkeypatch.chdir(request.config.rootpath)
  text = (request.config.rootpath / "docs/depth.md").read_text()
  for module in (bounds_command, advise_command):
    name = module.__name__.rpartition(".")[2]
    command = f"    jaxformers {name} "
    [line] = [x for x in text.splitlines() if x.startswith(command)]
    module.main(line.removeprefix(command).split())
    printed = capsys.readouterr().out.splitlines()
    assert "".join(f"    {x}\n" for x in printed) in text
