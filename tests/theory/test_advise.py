"""Depth and width from the fit of the depth-efficiency papers."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformers.commands import advise as advise_command
from jaxformers.theory import advise as a
from jaxformers.theory import fit
from tests.assertions import assert_all

DEPTHS = {
  1e6: (2.6, 178),
  3e6: (5.6, 211),
  1e7: (10.7, 279),
  3e7: (16.6, 388),
  1e8: (24, 588),
  1.25e8: (25.6, 638),
  1.3e9: (42, 1_603),
  1.3e10: (60, 4_257),
  1.75e11: (80.5, 13_459),
  1e12: (94.7, 29_657),
}


def check_depth(params, depth, width):
  """Fails unless sizes for a number of parameters are the reference's."""
  found = a.advise(params)
  assert found.fit_depth == pytest.approx(depth, abs=0.25)
  assert found.fit_width == pytest.approx(width, abs=1)
  assert fit.parameters(found.num_layers, found.d_model) == pytest.approx(
    params, rel=0.1 if params < 1e7 else 0.05
  )
  assert found.fitted == (6 <= found.num_layers <= 48)
  assert found.num_layers <= 96


def test_advise_depths_are_those_of_the_reference():
  assert_all(check_depth, [(key, *value) for key, value in DEPTHS.items()])


def test_advise_with_bottleneck_turns_width_into_depth():
  free, bound = a.advise(3e7), a.advise(3e7, vocab=256)
  assert bound.d_model == bound.bottleneck == 256
  assert bound.num_layers > 1.5 * free.num_layers
  assert fit.parameters(bound.num_layers, bound.d_model) == pytest.approx(
    3e7, rel=0.02
  )
  assert a.advise(3e7, vocab=32_000) == free
  low = a.advise(1e7, vocab=32_000, rank=100)
  assert (low.num_layers, low.d_model, low.bottleneck) == (90, 96, 96)


@given(
  st.floats(320e3, 1.16e12),
  st.integers(0, 40_000),
  st.integers(0, 2_000),
)
def test_advise_sizes_have_the_parameters_asked_for(params, vocab, rank):
  """Or the error says how to get one that has."""
  try:
    sizes = a.advise(params, vocab, rank)
  except ValueError as error:
    remedy = re.fullmatch(
      r".* Give --(\w+) (\d+) or more(, or --params (\d+) or less)?\.",
      str(error),
    )
    assert remedy, error
    name, least, _, most = remedy.groups()
    limits = {"vocab": vocab, "rank": rank}
    # Of two limits below the width, the message names the lower.
    other = limits["rank" if name == "vocab" else "vocab"]
    if not 0 < other < int(least):
      a.advise(params, **(limits | {name: int(least)}))
    if most:
      a.advise(float(most), vocab, rank)
    return
  error = fit.parameters(sizes.num_layers, sizes.d_model) / params - 1
  assert abs(error) <= (0.05 if params >= 1e7 else 0.1)
  assert sizes.num_layers <= 96
  assert sizes.d_model <= min(vocab or math.inf, rank or math.inf)


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (dict(params=1e13), "params=10,000,000,000,000.*--params 1164432361964 "),
    (
      dict(params=175e9, vocab=256),
      "vocab=256.*75,497,472.*--vocab 12352 .*--params 75497472 ",
    ),
    (
      dict(params=3e7, vocab=32_000, rank=100),
      "rank=100.*10,616,832.*--rank 176 .*--params 10616832 ",
    ),
    (dict(params=125e6, vocab=5), "vocab=5.*28,800.*--vocab 352 "),
  ],
)
def test_advise_refuses_sizes_that_96_layers_do_not_have(arguments, message):
  with pytest.raises(ValueError, match=message):
    a.advise(**arguments)


def test_advise_accepts_the_largest_size_of_its_error():
  sizes = a.advise(1164432361964)
  assert sizes.num_layers == 96
  assert not sizes.fitted


def test_report_explains_both_thresholds():
  lines = "\n".join(a.advice_lines(125e6, 32_000, 0, None))
  assert "122.9 M parameters (-1.7%)" in lines
  assert "log_3 d = 5.88 layers: the bounds favour depth up to it" in lines
  assert "25.6 layers, measured: trained networks" in lines
  assert "log d grows with L by log 3 = 1.10 per layer in the theory" in lines
  assert "choose sizes by the fit" in lines
  assert "beyond the 6 to 48 layers" not in lines
  assert "beyond the 6 to 48 layers" in "\n".join(
    a.advice_lines(1e12, 0, 0, None)
  )
  lines = "\n".join(a.advice_lines(3e7, 256, 0, None))
  assert "vocabulary 256: below the fit's width, so depth instead" in lines
  assert "more layers than the fit has for that width" in lines


def test_report_compares_the_sizes_of_a_config():
  """Counted by its own feed-forward, and set against the bottleneck."""
  lines = "\n".join(a.advice_lines(1e7, 100, 0, a.Sizes(16, 128, 2_048)))
  assert "16 layers of 128 channels, 9.4 M parameters (its layers" in lines
  assert "vocabulary 100, below its 128 channels" in lines
  lines = "\n".join(a.advice_lines(1e7, 1_000, 0, a.Sizes(6, 256, 1_024)))
  assert "6 layers of 256 channels, 4.7 M parameters\n" in lines
  assert "below its" not in lines


def test_advise_command_prints_depth_and_width(
  capsys, tmp_path, monkeypatch, request
):
  monkeypatch.chdir(request.config.rootpath)
  advise_command.main(
    [
      "--params=125e6",
      "--vocab=32000",
      "--config=configs/lm/text.py",
      f"--out={tmp_path / 'deep' / 'advice'}",
    ]
  )
  printed = capsys.readouterr().out
  assert "L = 25.6, d = 638" in printed
  assert "25 layers of 640 channels" in printed
  assert "the config: 6 layers of 256 channels" in printed
  assert "1.19 times that: near the fit" in printed
  for suffix in ("png", "svg"):
    path = tmp_path / "deep" / f"advice.{suffix}"
    assert path.stat().st_size > 5_000
  advise_command.main(["--params=3e7", "--rank=200"])
  assert "rank of the embedding 200: below" in capsys.readouterr().out


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--params=1000"], r"params=1,000\b.*319,306"),
    (["--params=1e8", "--vocab=-1"], "vocab=-1, rank=0"),
    (["--params=inf"], "params=inf"),
    (["--params=1e13"], r"^error: params=10,000,000,000,000\b.*114"),
    (["--params=1e30"], "96 layers.*--params 1164432361964"),
    (["--params=1e8", "--config=nowhere.py"], "'nowhere.py'"),
  ],
)
def test_advise_command_refuses_wrong_arguments(arguments, message):
  with pytest.raises(SystemExit, match=message):
    advise_command.main(arguments)


@pytest.mark.parametrize("vocab", [0, 164, 1_000])
@pytest.mark.parametrize("params", [330_000, 4e5, 566_558, 2e6, 125e6])
def test_advise_is_balanced_and_within_the_bottleneck(params, vocab):
  try:
    advice = a.advise(params, vocab)
  except ValueError as error:
    assert f"vocab={vocab:,} " in str(error)
    return
  assert not vocab or advice.d_model <= vocab
  if not vocab:
    assert fit.place(advice.num_layers, advice.d_model)[0] == "balanced"
