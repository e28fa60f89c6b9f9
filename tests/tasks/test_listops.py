import subprocess
import sys

import numpy as np
import pytest

from jaxformers import tasks
from jaxformers.data import listops as data
from jaxformers.data import listops_text

SMALL = dict(
  num_train=30, num_validation=5, num_test=6, min_length=5, max_length=60
)


def load(folder, **options):
  return tasks.get("listops", data_dir=str(folder), **SMALL, **options)


def test_the_protocols_differ_by_the_closing_bracket(tmp_path):
  lra, sky = (load(tmp_path, protocol=p) for p in ("lra", "skyformer"))
  assert (lra.vocab_size, sky.vocab_size) == (16, 15)
  for name, split in lra.splits.items():
    for i in range(len(split)):
      ids = split[i]
      assert ids.max() == data.END
      np.testing.assert_array_equal(ids[ids != data.END], sky.splits[name][i])
    np.testing.assert_array_equal(split.labels, sky.splits[name].labels)
  assert sky.max_len < lra.max_len <= 59
  assert lra.selection == sky.selection == "validation"


def test_sizes_and_baselines(tmp_path):
  task = load(tmp_path)
  sizes = {name: len(split) for name, split in task.splits.items()}
  assert sizes == {"train": 30, "validation": 5, "test": 6}
  assert sorted(task.baselines()) == ["first-token rule", "majority class"]
  assert task.info["source"] == "generated"


def test_other_settings_are_other_data(tmp_path):
  one = load(tmp_path)
  two = load(tmp_path, seed=1)
  assert not np.array_equal(
    one.splits["test"].tokens, two.splits["test"].tokens
  )
  assert len(list((tmp_path / "packed").iterdir())) == 2


def test_lras_own_files(tmp_path):
  task = load(tmp_path / "data")
  listops_text.write_tsv(dict(task.splits), tmp_path / "tsv")
  read = load(tmp_path / "data", tsv=str(tmp_path / "tsv"))
  np.testing.assert_array_equal(
    read.splits["train"].tokens, task.splits["train"].tokens
  )
  assert read.info["source"] == "LRA's TSV files"
  with pytest.raises(ValueError, match="basic_train.tsv is missing"):
    load(tmp_path / "data", tsv=str(tmp_path / "nowhere"))


def test_unknown_protocol(tmp_path):
  with pytest.raises(
    ValueError, match="protocol of listops 's4'.*lra, skyformer"
  ):
    load(tmp_path, protocol="s4")


def test_processes_with_other_hash_seeds_agree(tmp_path):
  code = (
    "import sys, zlib; from tests.tasks.test_listops import load;"
    "task = load(sys.argv[1]);"
    "print(zlib.crc32(task.splits['train'].tokens.tobytes()))"
  )
  prints = [
    subprocess.run(
      [sys.executable, "-c", code, str(tmp_path / seed)],
      env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
      capture_output=True,
      check=True,
    ).stdout
    for seed in ("0", "1")
  ]
  assert prints[0] == prints[1] != b""
