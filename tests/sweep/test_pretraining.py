"""Pre-training and fine-tuning within one budget."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformers.foundations import workdirs
from jaxformers.sweep.pretraining import Way, split_budget, ways
from launch import pretrain

pytestmark = pytest.mark.slow

SPEC = "configs/lra/listops.py:size=tiny"


@given(total=st.integers(2, 10_000), share=st.floats(0.001, 0.999))
def test_split_budget_divides_without_rest(total, share):
  before, after = split_budget(total, share)
  assert before + after == total
  assert min(before, after) >= 1
  assert abs(before - total * share) <= 1


def test_split_budget_refuses_one_step():
  with pytest.raises(ValueError, match=r"config.total_steps=1\b"):
    split_budget(1, 0.5)


def test_ways_combine_objectives_and_shares_with_scratch_once():
  found = ways(["masked", "causal"], [0, 0.25, 0.5])
  assert found[0] == Way()
  assert [str(way.folder) for way in found] == [
    "scratch",
    "masked_0.25",
    "masked_0.5",
    "causal_0.25",
    "causal_0.5",
  ]
  for objectives, shares, message in (
    (["mask"], [0.5], "objective.*'mask'.*masked"),
    (["masked"], [1], r"--shares.*\b1 .*\[0, 1\)"),
    ([], [0.5], "--objectives.*--shares"),
  ):
    with pytest.raises(ValueError, match=message):
      ways(objectives, shares)


def test_pretrain_command_fine_tunes_the_run_of_the_same_seed(
  runs, tmp_path, capsys
):
  argv = ["--config", SPEC, f"--workdir={tmp_path}", "--seeds=0,1"]
  pretrain.main(argv)
  masked = f"{SPEC},objective=masked"
  assert runs.commands == [
    (SPEC, 0),
    (SPEC, 1),
    (masked, 0),
    (masked, 1),
    (SPEC, 0),
    (SPEC, 1),
  ]
  said = capsys.readouterr().out
  assert f"| {SPEC} | none | 1,500 | 50.00 +- 0.00 accuracy |" in said
  assert f"| {SPEC} | masked 50% | 750 + 750 | 50.00" in said
  # Scores over the steps of both phases.
  for path in tmp_path.rglob("results.json"):
    lines = [
      (150, {"train/accuracy": 0.5}),
      (300, {"validation/accuracy": 0.4}),
    ]
    text = "".join(workdirs.metrics_line(*line) for line in lines)
    path.with_name("metrics.jsonl").write_text(text)
  pretrain.main([*argv, f"--out={tmp_path / 'drawn'}"])
  drawn = (tmp_path / "drawn" / "pretraining.csv").read_text().splitlines()
  assert drawn[0] == "run,seed,quantity,step,value"
  assert [row.rsplit(",", 2)[1:] for row in drawn[1:]] == [
    *[["300", "0.4"]] * 2,
    *[["1050", "0.4"]] * 2,
  ]
  assert (tmp_path / "drawn" / "pretraining.png").exists()
  # Nothing is run twice, although the second phase depends on the first.
  pretrain.main(argv)
  assert len(runs.commands) == 6


@pytest.mark.parametrize("seeds", ["", "0,0"])
def test_pretrain_command_refuses_wrong_seeds(runs, tmp_path, seeds):
  argv = ["--config", SPEC, f"--workdir={tmp_path}", f"--seeds={seeds}"]
  with pytest.raises(SystemExit, match=f"--seeds={seeds}: give seeds"):
    pretrain.main(argv)
  assert not runs.commands


def test_pretrain_command_dry_run_prints_both_phases(runs, tmp_path, capsys):
  pretrain.main(
    [
      "--config",
      SPEC,
      f"--workdir={tmp_path}",
      "--shares=0.2",
      "--dry_run",
      "--pretraining",
      "schedule.learning_rate=0.01",
      "--tuning",
      "patience=2",
      "--config.batch_size=16",
    ]
  )
  first, second = capsys.readouterr().out.splitlines()
  assert not runs.commands
  for part in (
    "objective=masked",
    "--config.total_steps=300",
    "--config.schedule.warmup_steps=30",
    "--config.schedule.learning_rate=0.01",
    "--config.batch_size=16",
  ):
    assert part in first
  folder = Path(first.partition("--workdir=")[2].split()[0])
  for part in (
    "--config.total_steps=1200",
    "--config.schedule.warmup_steps=120",
    "--config.patience=2",
    "--config.batch_size=16",
    f"--config.pretrained={folder}",
  ):
    assert part in second
  assert "objective=masked " not in second
  assert "learning_rate" not in second


def test_pretrain_command_keeps_the_peak_rate_with_shorter_warmup(
  runs, tmp_path, capsys
):
  """The peak of rsqrt is the rate over the root of its warm-up."""
  spec = "configs/lra/listops.py:protocol=lra,model=transformer"
  argv = ["--config", spec, f"--workdir={tmp_path}", "--shares=0.05"]
  pretrain.main([*argv, "--dry_run"])
  for command in capsys.readouterr().out.splitlines():
    fields = dict(
      part.removeprefix("--config.").split("=", 1)
      for part in command.split()
      if part.startswith("--config.schedule.")
    )
    rate, warmup = (
      float(fields[f"schedule.{name}"])
      for name in ("learning_rate", "warmup_steps")
    )
    assert rate / warmup**0.5 == pytest.approx(0.05 / 1_000**0.5, rel=1e-5)


def test_pretrain_command_refuses_incompatible_phases_before_running(
  runs, tmp_path
):
  spec = f"{SPEC},model=s5"
  argv = ["--config", spec, f"--workdir={tmp_path}", "--objectives=causal"]
  with pytest.raises(SystemExit, match="config.model.mixer.causal=true"):
    pretrain.main(argv)
  assert not runs.commands


def test_pretrain_command_skips_fine_tuning_of_a_failed_run(runs, tmp_path):
  masked = f"{SPEC},objective=masked"
  runs.broken[masked] = 3
  argv = ["--config", SPEC, f"--workdir={tmp_path}"]
  with pytest.raises(SystemExit, match="masked_0.5/pretraining.*: 3"):
    pretrain.main(argv)
  assert runs.commands == [(SPEC, 0), (masked, 0)]


def test_pretrain_command_refuses_malformed_fields(tmp_path):
  argv = ["--config", SPEC, f"--workdir={tmp_path}", "--tuning=lower"]
  with pytest.raises(SystemExit, match="--tuning=lower.*FIELD=VALUE"):
    pretrain.main(argv)
