"""The task of time series: protocols, rules, and runs to their scores."""

import numpy as np
import pytest

import jaxformers as jf
from jaxformers import tasks
from tests.data import series


def load(folder, tmp_path, **options):
  return tasks.get(
    "time_series",
    archive=str(folder),
    data_dir=str(tmp_path / "data"),
    **{"problem": "Small"} | options,
  )


def test_the_archive_gives_normalised_series(tmp_path):
  task = load(series.archive(), tmp_path, problem="JapaneseVowels")
  sizes = {name: len(split) for name, split in task.splits.items()}
  assert sizes == {"train": 216, "validation": 54, "test": 370}
  assert task.sizes()["channels"] == 12 and task.max_len == 29
  assert task.classes == tuple("123456789")
  train = task.splits["train"]
  batch = train.batch(np.arange(len(train)), task.max_len)
  assert np.abs(np.nanmean(batch["inputs"], (0, 1))).max() < 1e-5
  np.testing.assert_allclose(np.nanstd(batch["inputs"], (0, 1)), 1, rtol=1e-5)
  # Counts of the nine speakers, and the rule without the order of steps.
  assert np.bincount(task.splits["test"].labels).tolist() == [
    *(31, 35, 88, 44, 29, 24, 40, 50, 29)
  ]
  scores = task.baselines()
  assert scores["majority class"] == 88 / 370
  assert scores["regression on means and deviations"] > 0.9
  # Opened again, without the archive, it is the same.
  again = load("", tmp_path, problem="JapaneseVowels")
  assert again.description() == task.description()


def test_linoss_divides_all_series_without_copies(tmp_path):
  lines = series.small(120)
  lines = [line for line in lines if line.count(",") == 2 * 3]  # Four steps.
  folder = series.write(tmp_path / "a", [*lines, lines[0]], lines[3:])
  tasks_ = [
    load(folder, tmp_path, protocol="linoss", seed=s) for s in (0, 0, 1)
  ]
  sizes = [len(split) for split in tasks_[0].splits.values()]
  count = len({*lines})
  assert sizes == [
    int(0.7 * count),
    int(0.85 * count) - int(0.7 * count),
    count - int(0.85 * count),
  ]
  keys = [
    np.concatenate([split.keys for split in task.splits.values()]).tolist()
    for task in tasks_
  ]
  assert keys[0] == keys[1] != keys[2]
  assert len({*keys[0]}) == count and {*keys[0]} == {*keys[2]}
  # Nothing is normalised, and the pitfalls are told.
  assert not tasks_[0].splits["train"].mean
  assert len(tasks_[0].info["remarks"]) == 2
  few = series.write(tmp_path / "few", lines[:3], name="Few")
  with pytest.raises(ValueError, match="Few has 3 different series"):
    load(few, tmp_path, protocol="linoss", problem="Few")
  with pytest.raises(ValueError, match="unequal lengths.*3 to 6 steps"):
    other = series.write(tmp_path / "b", series.small(30), name="Other")
    load(other, tmp_path, protocol="linoss", problem="Other")


def test_time_is_a_channel_and_series_are_cut(tmp_path):
  folder = series.write(tmp_path / "a", series.small())
  task = load(folder, tmp_path, include_time=True, max_len=4)
  assert (task.channels, task.max_len) == (3, 4)
  x = task.splits["test"].batch(np.array([0]), 4)["inputs"]
  assert x.shape == (1, 4, 3) and x[0, 0, 0] == 0


def test_files_that_were_changed_are_noticed(tmp_path):
  folder = series.write(tmp_path / "a", series.small())
  load(folder, tmp_path)
  series.write(folder, series.small(12))
  with pytest.raises(ValueError, match="prepared from another archive"):
    load(folder, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True])
def test_a_run_trains_predicts_and_is_loaded(tmp_path, packing):
  folder = series.write(tmp_path / "a", series.small(40))
  result = jf.train(
    "series/uea:problem=Small,model=lru",
    workdir=tmp_path / "run",
    options={
      "task.archive": str(folder),
      "data_dir": str(tmp_path / "data"),
      "packing": packing,
      "total_steps": 4,
      "eval_steps": 4,
      "schedule.warmup_steps": 1,
      "batch_size": 8,
      "model.d_model": 8,
      "model.num_layers": 1,
    },
  )
  assert result.results["examples"] == 40
  model = jf.load(tmp_path / "run")
  x = np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)
  x[1, 0] = np.nan
  single, padded = model.outputs([x]), model.outputs([x, np.zeros((6, 2))])
  np.testing.assert_allclose(single[0], padded[0], atol=1e-5)
  assert model.predict([x])[0].label in ("up", "down")
  for wrong in (np.zeros((3, 3)), np.zeros((99, 2)), np.zeros(4)):
    with pytest.raises(ValueError, match=r"float32 \[n, 2\]|at most 6 steps"):
      model.predict([wrong])
