"""Mean IoU by windows that slide."""

import json

import jax
import numpy as np
import pytest

from jaxformers import models, tasks
from jaxformers.analysis.evaluation import segmentation as s
from jaxformers.commands import segmentation as segmentation_command
from jaxformers.commands import states
from jaxformers.foundations import workdirs
from tests import initial
from tests.data import scenes
from tests.trained import on_task


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  tmp_path = tmp_path_factory.mktemp("ade")
  task = tasks.get(
    "ade20k",
    data_dir=str(tmp_path / "data"),
    archive=str(scenes.write(tmp_path / "ADEChallengeData2016")),
    window=16,
    num_train=12,
    num_test=3,
  )
  model = models.build(
    "neutreno",
    d_model=8,
    num_layers=1,
    patch_size=8,
    positions="learned",
    **task.sizes(),
  )
  params = initial.params(model, model.example())
  return on_task(task, model, params, 7)


def test_sliding_scores_are_those_of_the_whole_scene():
  pixels = np.random.default_rng(0).normal(size=(23, 31, 3)).astype(np.float32)
  scores = s.sliding(lambda x: 2 * x, pixels, (8, 10), 5)
  np.testing.assert_allclose(scores, 2 * pixels, rtol=1e-6)
  small = s.sliding(lambda x: 2 * x, pixels[:5, :6], (8, 10), 5)
  want = 2 * s.interpolate(pixels[:5, :6], (8, 10))
  np.testing.assert_allclose(small, want, rtol=1e-6)


@pytest.mark.parametrize(
  ("size", "window", "want"),
  [
    ((8, 13), (16, 16), (16, 26)),
    ((13, 8), (16, 16), (26, 16)),
    ((13, 9), (16, 16), (23, 16)),  # 23.1 is rounded down.
    ((20, 9), (16, 16), (35, 16)),
    ((6, 9), (8, 10), (8, 12)),
    ((9, 6), (8, 10), (15, 10)),
    ((16, 30), (16, 16), (16, 30)),
  ],
)
def test_enlarge_makes_a_scene_hold_a_window(size, window, want):
  pixels = np.random.default_rng(0).normal(size=(*size, 3)).astype(np.float32)
  np.testing.assert_array_equal(
    s.enlarge(pixels, window), s.interpolate(pixels, want)
  )


@pytest.mark.slow
def test_predict_windows_stay_within_a_scene(run):
  """At half the scale a scene of 20 x 33 has 8 x 13 pixels, windows 16 x 16."""
  source, windows = run.task.splits["test"], []

  def score(parts):
    windows.extend(parts)
    return parts

  white = np.full((20, 33, 3), 255, np.uint8)
  predicted = s.predict(score, source, white, (0.5,), flip=True, stride=9)
  assert predicted.shape == (20, 33)
  assert len(windows) == 2 * 3  # 16 x 26 pixels, and their mirror image.
  for window in windows:
    np.testing.assert_allclose(
      window, np.broadcast_to(window[:1, :1], (16, 16, 3))
    )
    assert window.min() > 2  # White, normalised; what lay beyond was 0.


def test_sliding_averages_overlapping_windows():
  numbers = iter(range(1, 10))

  def score(parts):
    return np.stack([np.full((4, 4, 1), next(numbers)) for _ in parts])

  scores = s.sliding(score, np.zeros((4, 6, 3)), (4, 4), 2)
  assert scores[0, :, 0].tolist() == [1, 1, 1.5, 1.5, 2, 2]


def test_interpolate_is_jax_image_resize():
  x = np.random.default_rng(0).normal(size=(5, 7, 2)).astype(np.float32)
  for size in ((11, 9), (5, 7), (40, 7)):
    want = jax.image.resize(x, (*size, 2), "bilinear")
    np.testing.assert_allclose(s.interpolate(x, size), want, atol=1e-5)


@pytest.mark.slow
def test_count_areas_of_perfect_and_constant_predictions(run):
  source = run.task.splits["test"]

  def colours(parts):  # Red is class 1, blue class 0.
    scores = np.zeros((*parts.shape[:3], 150), np.float32)
    scores[..., 1], scores[..., 0] = parts[..., 0], parts[..., 2]
    return scores

  total = {}
  for k in range(3):
    pixels, labels = source.scene(k)
    for flip in (False, True):
      predicted = s.predict(
        colours, source, pixels, (1.0,), flip=flip, stride=9
      )
      assert predicted.shape == labels.shape
      there = labels >= 0
      assert (predicted == labels)[there].mean() > 0.85
    scene = s.count_areas(predicted, labels, 150)
    assert scene["labelled"].sum() == there.sum()
    total = {k: total.get(k, 0) + v for k, v in scene.items()}
  assert (total["labelled"][:2] > 0).all()
  assert (total["labelled"][2:] == 0).all()


@pytest.mark.slow
def test_evaluate_segmenter_counts_every_scene(run):
  single = s.evaluate_segmenter(run, batch_size=3)
  assert single["count"] == 3
  assert 0 <= single["mean_iou"] <= 1
  assert s.evaluate_segmenter(run, batch_size=2) == pytest.approx(single)
  several = s.evaluate_segmenter(run, (0.5, 1.5), flip=True, stride=5, count=2)
  assert several["count"] == 2


@pytest.mark.slow
def test_segmentation_command_prints_mean_iou(
  run, monkeypatch, capsys, tmp_path
):
  loaded = states.load
  monkeypatch.setattr(states, "load", lambda workdir, **_: run)
  segmentation_command.main(["here", "--count=1"])
  assert "mean IoU" in capsys.readouterr().out
  segmentation_command.main(["here", "--count=1", "--json"])
  assert json.loads(capsys.readouterr().out)["count"] == 1
  finished = tmp_path / "finished"
  finished.mkdir()
  (finished / "results.json").touch()
  segmentation_command.main(
    [str(finished), "--count=1", "--scales=1,2", "--flip"]
  )
  (kept,) = workdirs.read_scores(finished)
  assert kept["how"] == {
    "split": "test",
    "stride": 1,
    "scales": [1.0, 2.0],
    "flip": True,
    "count": 1,
  }
  assert {*kept["scores"]} == {"mean_iou", "accuracy"}
  with pytest.raises(SystemExit, match="stride=99"):
    segmentation_command.main(["here", "--stride=99"])
  monkeypatch.setattr(states, "load", loaded)
  with pytest.raises(SystemExit, match="There is no run in"):
    segmentation_command.main([str(tmp_path)])


@pytest.mark.slow
def test_segmentation_command_refuses_scales_that_are_no_numbers(tmp_path):
  with pytest.raises(SystemExit, match="--scales=1,big: give numbers"):
    segmentation_command.main([str(tmp_path), "--scales=1,big"])
