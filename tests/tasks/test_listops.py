import numpy as np
import pytest

from jaxformers import tasks
from jaxformers.data.generators import listops as data
from jaxformers.data.generators import listops_text

SMALL = dict(
  num_train=30, num_validation=5, num_test=6, min_length=5, max_length=60
)


def load(folder, **options):
  return tasks.get("listops", data_dir=str(folder), **SMALL, **options)


def test_listops_protocols_differ_by_the_closing_bracket(tmp_path):
  lra, sky, s4 = (
    load(tmp_path, protocol=p) for p in ("lra", "skyformer", "s4")
  )
  assert [t.vocab_size for t in (lra, sky, s4)] == [16, 15, 18]
  assert (sky.padded_len, s4.max_len) == (2_048, 2_048)
  for name, split in lra.splits.items():
    for i in range(len(split)):
      ids = split[i]
      assert ids.max() == data.END
      np.testing.assert_array_equal(ids[ids != data.END], sky.splits[name][i])
    np.testing.assert_array_equal(split.labels, sky.splits[name].labels)
    closed = s4.splits[name].batch(np.arange(len(split)), 60)["inputs"]
    rows = split.batch(np.arange(len(split)), 60)["inputs"]
    np.testing.assert_array_equal(closed[closed > 2] - 2, rows[rows > 0])
    np.testing.assert_array_equal((closed == 2).sum(1), 1)
  assert sky.max_len < lra.max_len <= 59
  assert lra.selection == sky.selection == "validation"


@pytest.mark.parametrize("protocol", ["jaxformers", "skyformer", "s4"])
def test_listops_encode_reads_an_expression_as_the_task(tmp_path, protocol):
  split = load(tmp_path).splits["test"]
  task = load(tmp_path, protocol=protocol)
  ids = task.encode(listops_text.decode(split[0]))
  want = task.splits["test"].batch(np.array([0]), len(ids))["inputs"][0]
  np.testing.assert_array_equal(ids, want)
  assert len(ids) == task.splits["test"].lengths()[0]
  with pytest.raises(ValueError, match="'movie'.*ListOps"):
    task.encode("a movie"[2:])


def test_listops_task_has_its_splits_and_baselines(tmp_path):
  task = load(tmp_path)
  sizes = {name: len(split) for name, split in task.splits.items()}
  assert sizes == {"train": 30, "validation": 5, "test": 6}
  assert sorted(task.baselines()) == ["first-token rule", "majority class"]
  assert task.info["source"] == "generated"


def test_listops_data_depend_on_the_settings(tmp_path):
  task = load(tmp_path)
  two = load(tmp_path, seed=1)
  assert not np.array_equal(
    task.splits["test"].tokens, two.splits["test"].tokens
  )
  folders = [p for p in (tmp_path / "packed").iterdir() if p.is_dir()]
  assert len(folders) == 2


def test_listops_task_reads_the_files_of_lra(tmp_path):
  task = load(tmp_path / "data")
  listops_text.write_tsv(dict(task.splits), tmp_path / "tsv")
  counts = {key: SMALL[key] for key in ("num_train", "num_validation")}
  counts["num_test"] = SMALL["num_test"]
  read = tasks.get(
    "listops",
    data_dir=str(tmp_path / "data"),
    archive=str(tmp_path / "tsv"),
    **counts,
  )
  np.testing.assert_array_equal(
    read.splits["train"].tokens, task.splits["train"].tokens
  )
  assert read.info["source"] == "tsv"
  with pytest.raises(ValueError, match="num_train=30.*generated"):
    load(tmp_path / "data", archive=str(tmp_path / "tsv"))


def test_listops_task_refuses_an_unknown_protocol(tmp_path):
  with pytest.raises(
    ValueError, match="protocol.*'s5'.*lra, paper, s4, skyformer"
  ):
    load(tmp_path, protocol="s5")


@pytest.mark.slow
def test_listops_task_does_not_depend_on_the_hash_seed(prints_alike):
  code = (
    "import sys, zlib; from tests.tasks.test_listops import load;"
    "task = load(sys.argv[1]);"
    "print(zlib.crc32(task.splits['train'].tokens.tobytes()))"
  )
  prints_alike(code)
