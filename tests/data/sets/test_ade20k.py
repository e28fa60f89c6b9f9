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
    ValueError, match="12 training and 3 .* of 20,210 and 2,000.*set num_train"
  ):
    ade20k.source().read(folder)
  annotations = folder / "annotations" / "training"
  (annotations / "ADE_training_00000003.png").unlink()
  with pytest.raises(ValueError, match="the image of 'ADE_training_00000003'"):
    FEW.read(folder)
  (folder / "images/training/ADE_training_00000003.jpg").unlink()
  with pytest.raises(ValueError, match="11 training and 3 .* of 12 and 3"):
    FEW.read(folder)
  with pytest.raises(ValueError, match="0 training and 0 validation"):
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
    ("images", pictures.EPS, "no JPEG or PNG file"),
    ("images", pictures.picture("JPEG")[:-40], "damaged or truncated"),
    ("annotations", pictures.picture("JPEG"), "no PNG file"),
    ("annotations", pictures.picture(mode="P"), "of mode P instead of L"),
    ("annotations", pictures.picture(mode="L"), "of 32 x 24 pixels instead"),
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
  with pytest.raises(ValueError, match=f"{folder} holds '{name}'.*{reason}"):
    FEW.read(folder)
