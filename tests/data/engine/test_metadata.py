"""Directories of tensorflow-datasets whose metadata are wrong or hostile."""

import json
import shutil
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds

from jaxformers.data.engine import builder, metadata, source

TEXT = "tensorflow_datasets.core.features.text_feature.Text"
FEATURES = "tensorflow_datasets.core.features.features_dict.FeaturesDict"


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
  """A directory of one image with a label and a text."""
  folder = tmp_path_factory.mktemp("sound")
  row = {"image": np.zeros((2, 3, 3), np.uint8), "label": "y", "text": b"hm"}
  toy = source.Source(
    "toy",
    {"image": (2, 3, 3), "label": ("x", "y"), "text": bytes},
    lambda archive: {"train": [(0, row)]},
  )
  builder.prepare(toy, None, folder, folder)
  return folder / "toy" / "1.0.0"


@pytest.fixture
def folder(sound, tmp_path):
  return shutil.copytree(sound, tmp_path / "copy")


@pytest.fixture
def foreign(tmp_path, monkeypatch):
  """The name of a class in a module which leaves a file when it is imported."""
  mark = tmp_path / "imported"
  (tmp_path / "foreign.py").write_text(f"open({str(mark)!r}, 'w').close()")
  monkeypatch.syspath_prepend(tmp_path)
  yield "foreign.Feature"
  assert not mark.exists()
  assert "foreign" not in sys.modules


def edit(path, change):
  content = json.loads(path.read_text())
  change(content)
  path.write_text(json.dumps(content))


def test_open_directory_opens_prepared_data(folder):
  opened = metadata.open_directory(folder)
  assert sorted(opened.info.features) == ["image", "label", "text"]
  assert len(opened.as_data_source("train")) == 1


def test_feature_classes_cover_those_of_tensorflow_datasets():
  """A set of tensorflow-datasets may have any of them."""
  registered = tfds.features.FeatureConnector._registered_features
  stored = {
    name
    for name, feature in registered.items()
    if feature.__module__.startswith("tensorflow_datasets.core.features")
    and "TopLevelFeature" not in name  # A base class, never stored.
  }
  assert stored <= metadata.feature_classes()


def feature(name):
  return {"pythonClassName": name, "text": {}}


PLACES = {
  "at the top": lambda name: {"pythonClassName": name, "featuresDict": {}},
  "in a dictionary": lambda name: {
    "pythonClassName": FEATURES,
    "featuresDict": {"features": {"x": feature(name)}},
  },
  "in protobuf's spelling": lambda name: {
    "python_class_name": FEATURES,
    "features_dict": {"features": {"x": {"python_class_name": name}}},
  },
  "in a sequence": lambda name: {
    "pythonClassName": FEATURES,
    "featuresDict": {
      "features": {
        "x": {
          "pythonClassName": (
            "tensorflow_datasets.core.features.sequence_feature.Sequence"
          ),
          "sequence": {"feature": feature(name), "length": "-1"},
        }
      }
    },
  },
  "in JSON within JSON": lambda name: {
    "pythonClassName": FEATURES,
    "jsonFeature": {
      "json": json.dumps({"x": {"type": name, "content": {}}}),
    },
  },
  "as of version 4.0": lambda name: {
    "type": FEATURES,
    "content": {"x": {"type": name, "content": {}}},
  },
  "as of version 4.3": lambda name: {
    "type": FEATURES,
    "proto_cls": "tensorflow_datasets.FeaturesDict",
    "content": json.dumps({"features": {"x": feature(name)}}),
  },
}


@pytest.mark.parametrize("place", sorted(PLACES))
def test_features_file_imports_no_module_by_name(folder, foreign, place):
  path = folder / "features.json"
  path.write_text(json.dumps(PLACES[place](TEXT)))
  metadata.check(path)
  path.write_text(json.dumps(PLACES[place](foreign)))
  for open_folder in (
    metadata.open_directory,
    builder.open_images,
    builder.open_texts,
  ):
    with pytest.raises(ValueError, match="features.json.*'foreign.Feature'"):
      open_folder(folder)


def test_dataset_info_imports_no_module_by_name(folder, foreign):
  edit(
    folder / "dataset_info.json",
    lambda info: info.update(features=PLACES["in a dictionary"](foreign)),
  )
  with pytest.raises(ValueError, match="dataset_info.json.*foreign.Feature"):
    metadata.open_directory(folder)


BROKEN = {
  "nothing": "",
  "half of it": '{"pythonClassName": ',
  "a list": "[]",
  "a number": "7",
  "no text": "\udcff",
  "no name": "{}",
  "a name that is a list": '{"pythonClassName": [1]}',
  "a name that is a number": '{"type": 1, "content": 2}',
  "no features": f'{{"pythonClassName": "{FEATURES}", "featuresDict": 3}}',
  "a text at the top": f'{{"pythonClassName": "{TEXT}", "text": {{}}}}',
  "a long number": '{"length": ' + "9" * 5_000 + "}",
  "deep nesting": '{"x":' * 100_000,
  "an unknown field": '{"nonsense": 1}',
}


@pytest.mark.parametrize("name", metadata.FILES)
@pytest.mark.parametrize("case", sorted(BROKEN))
def test_open_directory_refuses_broken_files(folder, name, case):
  content = BROKEN[case].encode("utf-8", "surrogateescape")
  (folder / name).write_bytes(content)
  with pytest.raises(ValueError, match=f"{name}.*tensorflow-datasets"):
    metadata.open_directory(folder)


@pytest.mark.parametrize(
  "change",
  [
    {"splits": [{"name": "train", "shardLengths": ["x"]}]},
    {"splits": [{"shardLengths": 1}]},
    {"splits": []},
    {"version": "one"},
    {"fileFormat": "unheard of"},
    {"fileFormat": 4},
    {"name": []},
  ],
  ids=str,
)
def test_open_directory_refuses_wrong_values(folder, change):
  edit(folder / "dataset_info.json", lambda info: info.update(change))
  with pytest.raises(
    ValueError, match=r"dataset_info\.json.*tensorflow-datasets"
  ):
    metadata.open_directory(folder)


def test_open_images_refuses_labels_without_classes(folder):
  def change(content):
    features = content["featuresDict"]["features"]
    features["label"] = features["text"]

  edit(folder / "features.json", change)
  with pytest.raises(ValueError, match="`image`.*`label`"):
    builder.open_images(folder)


def test_open_directory_names_a_missing_file(folder):
  (folder / "features.json").unlink()
  with pytest.raises(ValueError, match="features.json.*No such file"):
    metadata.open_directory(folder)
