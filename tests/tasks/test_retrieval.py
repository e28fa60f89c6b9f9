import numpy as np
import pytest

from jaxformers import tasks
from tests.data.archives import aan, write_tar

COUNTS = {"train": 40, "validation": 6, "test": 8}
SMALL = dict(num_train=40, num_validation=6, num_test=8)


def load(folder, **options):
  path = folder / "a.tar.gz"
  if not path.exists():  # Written again it has another time, and checksum.
    write_tar(path, aan(COUNTS))
  return tasks.get(
    "retrieval",
    data_dir=str(folder / "data"),
    archive=str(path),
    **SMALL,
    **options,
  )


def test_retrieval_task_has_pairs_of_bytes(tmp_path):
  task = load(tmp_path)
  assert {n: len(split) for n, split in task.splits.items()} == COUNTS
  assert (task.num_inputs, task.vocab_size, task.max_len) == (2, 257, 4_000)
  inputs = task.splits["validation"].batch(np.array([1]), 6)["inputs"]
  first, second = (np.frombuffer(t, np.uint8) for t in (b'"valid', b"and tw"))
  np.testing.assert_array_equal(inputs, [[first + 1, second + 1]])
  rules = {"majority class", "histogram similarity", "word similarity"}
  assert task.baselines().keys() == rules


def test_retrieval_protocols_have_their_lengths(tmp_path):
  sky = load(tmp_path, protocol="skyformer")
  assert (sky.max_len, sky.padded_len) == (4_000, 4_096)
  s4 = load(tmp_path, protocol="s4")
  assert s4.vocabulary[:3] == ("<pad>", "<unk>", "<eos>")
  split = s4.splits["test"]
  inputs = split.batch(np.arange(8), 5)["inputs"]
  assert (inputs[:, :, -1] == 2).all()  # A text that is cut has an end too.
  assert load(tmp_path, max_len=100).max_len == 100
  with pytest.raises(ValueError, match="protocol.*'mega'"):
    load(tmp_path, protocol="mega")


@pytest.mark.slow
def test_retrieval_baselines_of_the_real_sample(archives, prepared):
  task = tasks.get(
    "retrieval",
    data_dir=str(prepared),
    archive=str(archives / "retrieval_pairs.tar.xz"),
    num_train=8_000,
    num_validation=1_000,
    num_test=1_000,
  )
  scores = task.baselines()
  assert scores["majority class"] == 0.5
  assert 0.5 < scores["histogram similarity"] < 0.56
  assert scores["word similarity"] == pytest.approx(0.787)
