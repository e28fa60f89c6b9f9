"""ADE20K as its authors ship it."""

import shutil
import tarfile

import pytest

from jaxformers.data.sets import ade20k
from tests.data import pictures, scenes

FEW = ade20k.source(num_train=12, num_test=3)


def test_ade20k_pairs_images_and_annotations(tmp_path):
  folder = scenes.write(tmp_path / "ADEChallengeData2016")
  (folder / "sceneCategories.txt").write_text("not read")
  splits = FEW.read(folder)
  assert {name: len(rows) for name, rows in splits.items()} == {
    "train": 12,
    "test": 3,
  }
  key, example = splits["train"][5]
  assert key == example["id"] == "ADE_training_00000005"
  assert example["image"].startswith(b"\xff\xd8")
  assert example["annotation"].startswith(b"\x89PNG")
  with tarfile.open(tmp_path / "ade.tar", "w") as tar:
    tar.add(folder, "ADEChallengeData2016")
  assert FEW.read(tmp_path / "ade.tar") == splits


def test_ade20k_refuses_incomplete_folders(tmp_path):
  folder = scenes.write(tmp_path / "ADEChallengeData2016")
  with pytest.raises(
    ValueError, match="12 training.*3 .*20,210.*2,000.*num_train"
  ):
    ade20k.source().read(folder)
  annotations = folder / "annotations" / "training"
  (annotations / "ADE_training_00000003.png").unlink()
  with pytest.raises(ValueError, match="image.*'ADE_training_00000003'"):
    FEW.read(folder)
  (folder / "images/training/ADE_training_00000003.jpg").unlink()
  with pytest.raises(ValueError, match="11 training.*3 .*12"):
    FEW.read(folder)
  with pytest.raises(ValueError, match="0 training.*0 validation"):
    FEW.read(folder / "images")
  shutil.copytree(annotations, folder / "copy" / "annotations" / "training")
  with pytest.raises(ValueError, match="annotation of 'ADE_.*' twice"):
    FEW.read(folder)


def test_ade20k_source_key_differs_for_a_part():
  assert ade20k.source().key == "scene_parse150"
  assert FEW.key == "scene_parse150-12-3"
  assert ade20k.source().counts == ade20k.COUNTS


@pytest.mark.parametrize(
  ("kind", "content", "reason"),
  [
    ("images", pictures.EPS, "JPEG.*PNG"),
    ("images", pictures.picture("JPEG")[:-40], "truncated"),
    ("annotations", pictures.picture("JPEG"), "no PNG"),
    ("annotations", pictures.picture(mode="P"), r"mode P\b.*\bL\b"),
    ("annotations", pictures.picture(mode="L"), "32 x 24"),
  ],
)
def test_ade20k_names_files_that_cannot_be_decoded(
  tmp_path, no_program, kind, content, reason
):
  folder = scenes.write(tmp_path / "ADEChallengeData2016")
  (path,) = (folder / kind / "training").glob("*5.*")
  path.write_bytes(content)
  if "mode" in reason:  # The size is compared before.
    image = folder / "images" / "training" / f"{path.stem}.jpg"
    image.write_bytes(pictures.picture("JPEG"))
  name = f"{kind}/training/{path.name}"
  with pytest.raises(ValueError, match=f"{folder}.*'{name}'.*{reason}"):
    FEW.read(folder)
