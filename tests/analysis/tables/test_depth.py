"""Depth against width: which runs count, and what their seeds allow to say."""

import math

import pytest
import scipy.stats

from jaxformers.analysis.tables import depth
from jaxformers.commands import depth as depth_command
from jaxformers.foundations import workdirs
from tests import results as made


def run(num_layers, d_model, seed, loss, rate=1e-3, **other):
  config = {
    "seed": seed,
    "select": "loss",
    "batch_size": 4,
    "total_steps": 10,
    "schedule": {"learning_rate": rate},
    "task": {"max_len": 8},
    "model": {"num_layers": num_layers, "d_model": d_model},
  }
  return made.make(
    config | other,
    task="language",
    protocol="jaxformers",
    model="transformer",
    parameters=1_000,
    metric="perplexity",
    seed=seed,
    loss=loss,
    perplexity=math.exp(loss),
    selection_score=1 - loss,
    task_description={
      "vocabulary_sha256": "abcdef0123",
      "examples": {"train": 20},
      "data": {"test": "0123"},
    },
  )


def grid():
  """Depths 6 and 12 at two sizes, three seeds."""
  losses = {
    (6, 128): (5.0, 5.1, 5.2),
    (12, 90): (5.0, 5.05, 5.3),
    (6, 256): (4.5, 4.51, 4.52),
    (12, 180): (4.3, 4.31, 4.32),
  }
  return [
    run(*shape, seed, loss)
    for shape, by_seed in losses.items()
    for seed, loss in enumerate(by_seed)
  ]


def test_depth_pairs_compare_depths_of_equal_parameters():
  points = depth.select_points(grid())
  assert [(p.num_layers, p.d_model) for p in points] == [
    (6, 128),
    (6, 256),
    (12, 90),
    (12, 180),
  ]
  assert points[0].parameters == 12 * 6 * 128**2
  assert points[0].tokens == 320
  assert points[0].epochs == 2
  assert points[0].mean == pytest.approx(5.1)
  assert points[0].deviation == pytest.approx(0.1)
  small, large = depth.pairs(points)
  assert small.gain == pytest.approx(5.1 - 5.35 / 3 - 10 / 3)
  assert small.verdict == "no significant difference"
  assert large.gain == pytest.approx(0.2)
  assert large.error == pytest.approx(0.01 * math.sqrt(2 / 3))
  # Four degrees of freedom for equal deviations.
  assert large.margin == pytest.approx(2.7764 * large.error, rel=1e-4)
  assert large.verdict == "deeper is better"
  samples = [list(points[k].losses.values()) for k in (0, 2)]
  welch = scipy.stats.ttest_ind(*samples, equal_var=False)
  interval = welch.confidence_interval(0.95)
  assert small.gain + small.margin == pytest.approx(interval.high)
  text = depth.markdown(points)
  assert "| 4.72 | 6, 12 | 0.2000 +- 0.0082 | +- 0.0227 | deeper is" in text
  assert "320 tokens, 2 epochs." in text


def test_select_points_takes_the_tuned_learning_rate():
  """The one with most seeds, then the best on the selection split."""
  others = [
    run(6, 128, 0, 1.0, rate=3e-3),  # Better, but tried with one seed.
    # Better than the mean of the others, and not than the same seed.
    run(6, 256, 0, 4.505, rate=3e-3),
    run(12, 90, 0, 5.6, rate=3e-3),
    run(12, 90, 1, 5.6, rate=3e-3),
    run(12, 90, 2, 5.6, rate=3e-3),
    run(12, 90, 2, 5.6, rate=3e-3),  # Found twice, counted once.
  ]
  points = {
    (p.num_layers, p.d_model): p for p in depth.select_points(others + grid())
  }
  assert points[6, 128].rate == 1e-3
  assert points[12, 90].rate == 1e-3
  assert len(points[12, 90].losses) == 3
  assert (points[6, 128].better, points[12, 90].better) == (3e-3, 0)
  assert points[6, 256].better == 0
  text = depth.markdown(list(points.values()))
  assert "d = 128: learning rate 0.003 scored better" in text


def test_depth_pairs_verdict_is_wider_or_undecided_for_one_seed():
  runs = [run(6, 128, s, 4 + s / 100) for s in (0, 1)]
  runs += [run(12, 90, s, 5.5 + s / 100) for s in (0, 1)]
  (pair,) = depth.pairs(depth.select_points(runs))
  assert pair.verdict == "wider is better"
  (pair,) = depth.pairs(depth.select_points(runs[:1] + runs[2:]))
  assert "one seed" in pair.verdict
  assert (
    depth.pairs(depth.select_points([run(6, 128, 0, 1), run(6, 132, 0, 1)]))
    == []
  )


def test_select_points_refuses_runs_of_different_fields():
  with pytest.raises(ValueError, match="total_steps: 10, 20"):
    depth.select_points([*grid(), run(24, 64, 0, 5.0, total_steps=20)])
  other = run(24, 64, 0, 5.0)
  other["task_description"]["data"] = {"test": "4567"}
  with pytest.raises(ValueError, match="data: .*0123.*4567"):
    depth.select_points([*grid(), other])
  # A field that the others leave at its default, and other kinds of models.
  other = run(24, 64, 0, 5.0)
  other["config"]["model"]["block"] = {"streams": 4}
  with pytest.raises(ValueError, match="block.streams: 4, not set"):
    depth.select_points([*grid(), other])
  runs = [run(24, 64, 0, 5.0), run(24, 128, 0, 5.0)]
  for result in runs:
    result["config"]["model"]["block"] = {"mlp_dim": 256}
  with pytest.raises(ValueError, match="mlp_dim / d_model: 2.0, 4.0"):
    depth.select_points(runs)
  runs = [run(24, 64, 0, 5.0), run(24, 128, 0, 5.0)]
  runs[0]["config"]["model"]["embedding"] = {"norm_epsilon": 1e-5}
  with pytest.raises(ValueError, match="embedding.norm_epsilon: 1e-05, not"):
    depth.select_points(runs)
  # Defaults, empty sections and rounded widths are no differences.
  runs = [run(24, d, 0, 5.0) for d in (128, 90, 64)]
  for result, width in zip(runs, (342, 240, 170), strict=True):
    block = {"mlp_dim": width}
    result["config"]["model"] |= {"name": "transformer", "block": block}
  runs[0]["config"]["model"]["mixer"] = {}
  runs[1]["config"]["model"]["block"] |= {"streams": 1, "norm_first": True}
  assert len(depth.select_points(runs)) == 3
  runs = [run(24, 64, seed, 5.0) for seed in (0, 1)]
  runs[0]["config"]["model"]["embedding"] = {"scale": 8.0}
  with pytest.raises(ValueError, match="embedding of L=24 d=64"):
    depth.select_points(runs)
  with pytest.raises(ValueError, match="L=24 d=64.*0.001.*seed 0"):
    depth.select_points([run(24, 64, 0, 5.0), run(24, 64, 0, 4.0)])
  with pytest.raises(ValueError, match="listops.*loss per token"):
    depth.select_points([{"task": "listops", "metric": "accuracy"}])


def test_select_points_groups_nearly_equal_parameters():
  """12 x 12 x 256^2 is 1.2 % more than what stands beside it."""
  shapes = ((6, 360), (12, 256), (24, 180))
  points = depth.select_points([run(*shape, 0, 5.0) for shape in shapes])
  rows = [
    line for line in depth.markdown(points).splitlines() if "| 0 |" in line
  ]
  assert [row.split("|")[2].strip() for row in rows] == ["6", "12", "24"]
  pairs = [
    (p.shallow.num_layers, p.deep.num_layers) for p in depth.pairs(points)
  ]
  assert pairs == [(6, 12), (6, 24), (12, 24)]


def test_depth_command_prints_a_table_and_draws_a_figure(tmp_path, capsys):
  for number, result in enumerate(grid()):
    folder = tmp_path / "runs" / f"cell_{number % 3}" / f"rate/seed_{number}"
    folder.mkdir(parents=True)
    workdirs.write(folder, "results.json", result)
  depth_command.main(
    [str(tmp_path / "runs"), "--out", str(tmp_path / "figure")]
  )
  assert "| 1.18 | 6 | 128 | 0.001 | 0 1 2 | 5.1000 +- 0.1000 |" in (
    capsys.readouterr().out
  )
  assert (tmp_path / "figure.png").stat().st_size > 10_000
  assert (tmp_path / "figure.svg").exists()
  depth_command.main([str(tmp_path / "runs"), "--out", str(tmp_path / "fig.5")])
  assert (tmp_path / "fig.5.csv").read_text().startswith("depth,seed,d,")
  with pytest.raises(SystemExit, match="error: "):
    depth_command.main(
      [str(tmp_path / "runs"), "--out", "/proc/nowhere/figure"]
    )
  with pytest.raises(SystemExit, match=r"no results\.json in .*nothing"):
    depth_command.main([str(tmp_path / "nothing")])
