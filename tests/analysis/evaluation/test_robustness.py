"""Corruptions and unusual images."""

import dataclasses
import io
import json
import types

import numpy as np
import pytest
from PIL import Image

from jaxformers.analysis.evaluation import robustness as r
from jaxformers.commands import robustness as robustness_command
from jaxformers.commands import states
from jaxformers.data.engine import packed
from jaxformers.data.images import corruptions
from jaxformers.data.images.splits import Images
from jaxformers.foundations import workdirs
from tests.data.archives import write_folder
from tests.trained import on_task

CLASSES = ("n00", "n01", "n02")
VALUES = np.arange(30) * 8


class Bright:
  """A model whose class is how bright the middle of an image is."""

  orthogonal_map = "cayley"
  config = types.SimpleNamespace(name="bright")

  def stacks(self):
    return {}

  def apply(self, variables, x, train):
    middle = x[:, 4, 4, :1]
    return -abs(middle - np.array([[0.1, 0.5, 0.9]]))


@pytest.fixture
def run():
  pixels = np.broadcast_to(VALUES[:, None], (30, 8 * 8 * 3)).astype(np.uint8)
  labels = np.digitize(VALUES / 255, [0.3, 0.7])
  images = Images(
    packed.pack(list(pixels), labels),
    (8, 8, 3),
    mean=(0, 0, 0),
    deviation=(1, 1, 1),
  )
  task = types.SimpleNamespace(
    name="boxes", splits={"test": images}, classes=CLASSES
  )

  return on_task(task, Bright(), {}, 3)


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--batch_size=-1", "--imagenet_a=f"], "batch_size=-1"),
    (["--count=-5"], "count=-5"),
    (["--corruptions=fog,rain"], "corruption 'rain'"),
    (["--corruptions=fog", "--imagenet_a=f"], "--corruptions=fog.*no effect"),
  ],
)
def test_robustness_command_refuses_options_before_it_scores(
  run, monkeypatch, arguments, message
):
  calls = []
  monkeypatch.setattr(states, "load", lambda *_, **__: run)
  monkeypatch.setattr(r, "error", lambda *_, **__: calls.append(1))
  with pytest.raises(SystemExit, match=message):
    robustness_command.main(["run", *arguments])
  assert not calls


@pytest.mark.slow
def test_corrupted_measures_every_corruption(run):
  scores = r.corrupted(run, batch_size=7)
  assert scores["clean"] == 0
  assert set(scores["errors"]) == set(corruptions.CORRUPTIONS)
  assert all(len(row) == 5 for row in scores["errors"].values())
  assert scores["errors"]["pixelate"] == [0] * 5
  assert scores["errors"]["brightness"][4] > scores["errors"]["brightness"][0]
  every = np.concatenate([row for row in scores["errors"].values()])
  assert scores["mean"] == pytest.approx(every.mean())
  # 0.3 brighter: those of 0.0 to 0.3 and of 0.4 to 0.7 are taken for others.
  bright = np.digitize(np.minimum(VALUES / 255 + 0.3, 1), [0.3, 0.7])
  want = (bright != np.digitize(VALUES / 255, [0.3, 0.7])).mean()
  assert scores["errors"]["brightness"][4] == pytest.approx(want, abs=0.04)
  few = r.corrupted(run, ["contrast"], count=4)
  assert list(few["errors"]) == ["contrast"]


def jpeg(value):
  file = io.BytesIO()
  Image.new("RGB", (8, 8), (value,) * 3).save(file, "JPEG")
  return file.getvalue()


@pytest.mark.slow
def test_mce_of_alexnet_is_100(run, tmp_path):
  assert len(r.ALEXNET) == 15
  alexnet = {name: [error] * 5 for name, error in r.ALEXNET.items()}
  assert r.mce(alexnet) == pytest.approx(100)
  half = {name: [0.0, error] for name, error in r.ALEXNET.items()}
  assert r.mce(half) == pytest.approx(50)


@pytest.mark.slow
def test_imagenet_c_is_read_folder_by_folder(run, tmp_path):
  files = {}
  for number, name in enumerate(r.ALEXNET):
    for level in corruptions.SEVERITIES:
      # One of two images is of another class at the severities 4 and 5.
      value = 20 if level < 4 else 240
      folder = f"{'noise/' if number < 3 else ''}{name}/{level}"
      files[f"{folder}/n00/a.JPEG"] = jpeg(value)
      files[f"{folder}/n02/b.JPEG"] = jpeg(240)
  # A zip that macOS has packed has such a mirror of its folders.
  files |= {f"__MACOSX/{name}/1/n00/._a.JPEG": b"\0\5" for name in r.ALEXNET}
  root = write_folder(tmp_path / "c", files)
  # The authors' fifth archive has further corruptions.
  write_folder(root / "extra", {"saturate/1/n00/a.JPEG": jpeg(240)})
  assert r.count_images(root, "imagenet_c") == 2
  scores = r.imagenet_c(run, root)
  assert scores["errors"]["fog"] == [0, 0, 0, 0.5, 0.5]
  want = 100 * np.mean([0.2 / error for error in r.ALEXNET.values()])
  assert scores["mce"] == pytest.approx(want)
  for path in (root / "fog" / "5").rglob("a.JPEG"):
    path.unlink()
  with pytest.raises(ValueError, match="fog/5 has 1 images.*has 2"):
    r.imagenet_c(run, root)
  (root / "snow" / "2").rename(root / "snow" / "6")
  with pytest.raises(ValueError, match="snow/2.*mCE"):
    r.imagenet_c(run, root)


@pytest.mark.slow
def test_unusual_chooses_among_classes_of_the_folder_only(run, tmp_path):
  root = write_folder(
    tmp_path / "a", {"n00/a.jpg": jpeg(130), "n02/b.jpg": jpeg(240)}
  )
  # 130 is of n01, which is not there; of the others n02 is nearer? No: n00.
  assert r.unusual(run, root, "imagenet_a") == pytest.approx(0.5)
  (root / "n01").mkdir()
  (root / "n01" / "c.jpg").write_bytes(jpeg(130))
  assert r.unusual(run, root, "imagenet_a") == pytest.approx(2 / 3)


@pytest.mark.slow
def test_robustness_command_prints_mean_and_deviation_of_runs(
  run, monkeypatch, capsys
):
  scores = {
    "a": {"errors": {"fog": [0.5] * 5}, "mce": 60.0, "clean": 0.2},
    "b": {"errors": {"fog": [0.7] * 5}, "mce": 64.0, "clean": 0.4},
  }
  monkeypatch.setattr(
    states, "load", lambda workdir, **_: dataclasses.replace(run, step=workdir)
  )
  monkeypatch.setattr(r, "corrupted", lambda run, *_, **__: scores[run.step])
  robustness_command.main(["a", "b"])
  lines = capsys.readouterr().out.splitlines()
  assert lines[0] == "a: bright, step a"
  # The sample deviation of 60 and 64 is 2 sqrt 2.
  assert lines[-3:] == [
    "mean and deviation of 2 runs",
    "  mCE                  62.00 +- 2.83",
    "  error, clean         30.00 +- 14.14 %",
  ]
  robustness_command.main(["a", "b", "--json"])
  assert json.loads(capsys.readouterr().out) == scores


@pytest.mark.slow
def test_robustness_command_prints_errors_of_corruptions(
  run, monkeypatch, capsys, tmp_path
):
  loaded = states.load
  monkeypatch.setattr(states, "load", lambda workdir, **_: run)
  robustness_command.main(["here", "--corruptions=fog,snow", "--count=5"])
  printed = capsys.readouterr().out
  assert "fog" in printed
  assert "error, corrupted" in printed
  root = write_folder(tmp_path / "a", {"n00/a.jpg": jpeg(9)})
  robustness_command.main(["here", "--imagenet_a", str(root), "--json"])
  said = capsys.readouterr()
  assert json.loads(said.out) == {"here": {"imagenet_a": 1.0}}
  assert "7,500 of imagenet_a" in said.err
  finished = tmp_path / "finished"
  finished.mkdir()
  (finished / "results.json").touch()
  robustness_command.main([str(finished), "--imagenet_a", str(root)])
  (kept,) = workdirs.read_scores(finished)
  assert (kept["how"], kept["examples"]) == ({"set": "imagenet_a"}, 1)
  assert kept["scores"] == {"accuracy": 1.0}
  with pytest.raises(SystemExit, match="There is no folder"):
    robustness_command.main(["here", "--imagenet_r", str(tmp_path / "nowhere")])
  with pytest.raises(SystemExit, match=r"'rain'.*snow"):
    robustness_command.main(["here", "--corruptions=rain"])
  monkeypatch.setattr(states, "load", loaded)
  with pytest.raises(SystemExit, match="There is no run in"):
    robustness_command.main([str(tmp_path)])
