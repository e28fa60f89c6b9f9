"""Depth and width from the fit of the depth-efficiency papers."""

import pytest

from jaxformers.theory import advise as a

WIDTHS = {
  **{6: 215, 12: 300, 18: 419, 24: 585, 30: 816, 36: 1_138},
  **{48: 2_215, 64: 5_383, 80: 13_082, 95: 30_077},
}
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


@pytest.mark.parametrize("num_layers", sorted(WIDTHS))
def test_widths_of_the_fit(num_layers):
  assert round(a.width(num_layers)) == WIDTHS[num_layers]
  params = a.parameters(num_layers, a.width(num_layers))
  assert a.depth_of(params) == pytest.approx(num_layers)


@pytest.mark.parametrize("params", sorted(DEPTHS))
def test_depths_of_numbers_of_parameters(params):
  depth, width = DEPTHS[params]
  found = a.advise(params)
  assert found.num_layers == pytest.approx(depth, abs=0.25)
  assert found.d_model == pytest.approx(width, abs=1)
  assert a.parameters(found.layers, found.width) == pytest.approx(
    params, rel=0.35 if params < 1e7 else 0.08
  )
  assert found.fitted == (6 <= found.layers <= 48)
  assert found.layers <= 96


def test_a_bottleneck_turns_width_into_depth():
  free, bound = a.advise(3e7), a.advise(3e7, vocab=256)
  assert bound.width == bound.bottleneck == 256
  assert bound.layers > 1.5 * free.layers
  assert a.parameters(bound.layers, bound.width) == pytest.approx(3e7, rel=0.02)
  assert a.advise(3e7, vocab=32_000) == free
  low = a.advise(3e7, vocab=32_000, rank=100)
  assert (low.width, low.bottleneck) == (96, 96)


def test_no_width_is_above_its_bottleneck_and_no_depth_absurd():
  found = a.advise(125e6, vocab=5)
  assert (found.width, found.bottleneck, found.layers) == (5, 5, 96)
  found = a.advise(125e6, vocab=288)
  assert (found.width, found.layers, found.fitted) == (288, 96, False)
  lines = "\n".join(a.report(175e9, 256, 0, None))
  assert "96 layers of 256 channels" in lines
  assert "beyond the 6 to 48 layers" in lines
  assert "widen the bottleneck" in lines


def test_the_config_in_hand():
  """Counted by its own feed-forward, and set against the bottleneck."""
  lines = "\n".join(a.report(1e7, 100, 0, a.Sizes(16, 128, 2_048)))
  assert "16 layers of 128 channels, 9.4 M parameters (its layers" in lines
  assert "vocabulary 100, below its 128 channels" in lines
  lines = "\n".join(a.report(1e7, 1_000, 0, a.Sizes(6, 256, 1_024)))
  assert "6 layers of 256 channels, 4.7 M parameters\n" in lines
  assert "below its" not in lines


def test_where_a_network_lies():
  # GPT-3 is called too deep for its size by the authors; 96 layers of 12,288.
  assert a.place(96, 12_288) == ("deep", pytest.approx(0.39, abs=0.01))
  assert a.place(12, 768)[0] == "wide"
  assert a.place(24, 600)[0] == "balanced"


def test_the_command(capsys, tmp_path, monkeypatch, request):
  monkeypatch.chdir(request.config.rootpath)
  a.main(
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
  a.main(["--params=3e7", "--rank=200"])
  assert "rank of the embedding 200: below" in capsys.readouterr().out


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--params=1000"], "params=1,000: the fit has networks of"),
    (["--params=1e8", "--vocab=-1"], "vocab=-1, rank=0"),
    (["--params=inf"], "params=inf"),
    (["--params=1e8", "--config=nowhere.py"], "There is no config file"),
  ],
)
def test_a_wrong_argument(arguments, message):
  with pytest.raises(SystemExit, match=message):
    a.main(arguments)
