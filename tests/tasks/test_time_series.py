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
  for k in (4, 5):
    lines[k] = "?" + lines[k][lines[k].index(",") :]
  folder = series.write(tmp_path / "a", [*lines, lines[0]], lines[3:])
  tasks_ = [
    load(folder, tmp_path, protocol="linoss", seed=s) for s in (0, 0, 1)
  ]
  sizes = [len(split) for split in tasks_[0].splits.values()]
  # Two of the copies have missing numbers.
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


@pytest.mark.parametrize(
  ("options", "text"),
  [
    ({"seed": 3}, "task.seed=3 draws the splits of protocol='linoss' only"),
    ({"protocol": "uea"}, "'uea'.*jaxformers, linoss"),
  ],
)
def test_options_that_do_not_suit_are_refused(tmp_path, options, text):
  folder = series.write(tmp_path / "a", series.small())
  with pytest.raises(ValueError, match=text):
    load(folder, tmp_path, **options)


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
  # Raw series are normalised as in training.
  task = load(folder, tmp_path)
  test = task.splits["test"]
  raw = [test.values[a:b] for a, b in zip(test.starts, test.stops, strict=True)]
  encoded = model.encode(raw)
  batch = test.batch(np.arange(len(test)), task.max_len)
  np.testing.assert_array_equal(encoded, batch["inputs"])
  want = model.model.apply({"params": model.params}, encoded, train=False)
  np.testing.assert_allclose(model.outputs(raw), want, atol=2e-5)
  for wrong in (np.zeros((3, 3)), np.zeros((99, 2)), np.zeros(4)):
    with pytest.raises(ValueError, match=r"float32 \[n, 2\]|at most 6 steps"):
      model.predict([wrong])
  for wrong in (np.full((3, 2), np.nan), np.full((3, 2), 1e300)):
    with pytest.raises(ValueError, match=r"inputs\[0\] has no number"):
      model.predict([wrong])


def train(tmp_path, spec, examples, **options):
  small = {
    "total_steps": 4,
    "eval_steps": 4,
    "schedule.warmup_steps": 1,
    "batch_size": 8,
    "model.d_model": 8,
    "model.num_layers": 1,
  }
  return jf.train(
    spec, tmp_path / "run", train=examples, options=small | options
  )


def own(count=20):
  rng = np.random.default_rng(0)
  return [
    (50 + rng.normal(size=(3 + k % 4, 2))).astype(np.float32)
    for k in range(count)
  ]


@pytest.mark.slow
def test_a_class_for_each_step_is_trained_and_predicted(tmp_path):
  x = own()
  x[0][1] = np.nan
  steps = [np.arange(len(each)) % 2 for each in x]
  spec = "diagnostics/recall:model=lru"
  causal = {"model.mixer.causal": True}
  model = train(tmp_path, spec, (x, steps), **causal)
  predictions = model.predict(x[:3])
  # Masked steps have no class.
  assert [len(p.labels) for p in predictions] == [2, 4, 5]
  stream = model.stream()
  whole = model.outputs([x[1]])
  parts = [stream.feed(x[1][None, k : k + 1]) for k in range(len(x[1]))]
  np.testing.assert_allclose(np.concatenate(parts, 1), whole, atol=2e-5)


@pytest.mark.slow
def test_certified_and_inverted_series_are_read_once(tmp_path):
  x = own()
  labels = [k % 2 for k in range(20)]
  spec = "series/uea:model=isometric"
  model = train(tmp_path, spec, (x, labels))
  certificates = model.certify(x)
  assert [c.label for c in certificates] == [p.label for p in model.predict(x)]
  inversion = model.invert(x[:4])
  assert inversion.recovered == 1.0
  # Exported programs take series, too.
  model.save(tmp_path / "saved")
  np.testing.assert_allclose(
    jf.load(tmp_path / "saved").outputs(x), model.outputs(x), atol=1e-6
  )
