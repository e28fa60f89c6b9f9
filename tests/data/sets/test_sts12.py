import pytest

from jaxformers.data.sets import sts12
from tests.data.archives import simcse as files
from tests.data.archives import write_folder, write_tar


def test_sts12_reads_sentences_and_pairs_in_sentevals_order(tmp_path):
  content = files(7)
  folder = write_folder(tmp_path / "simcse", content)
  splits = sts12.read(folder)
  sizes = {name: len(rows) for name, rows in splits.items()}
  assert sizes == {"train": 7, "validation": 6, "test": 15}
  lines = content["wiki1m_for_simcse.txt"].split(b"\n")
  key, example = splits["train"][2]
  assert (key, example["first"], example["second"]) == (2, lines[2], lines[2])
  # The first subset, whose last pair has no score.
  name = "STS/STS12-en-test/STS.{}.MSRpar.txt".format
  pairs = content[name("input")].split(b"\n")
  for row, score in enumerate(content[name("gs")].split()):
    example = splits["test"][row][1]
    assert pairs[row] == example["first"] + b"\t" + example["second"]
    assert float(example["score"]) == float(score)
  tar = write_tar(tmp_path / "simcse.tar.gz", content)
  assert sts12.read(tar) == splits


def test_sts12_names_missing_or_damaged_files(tmp_path):
  content = files(7)
  gold = "STS/STS12-en-test/STS.gs.MSRvid.txt"
  few = {name: text for name, text in content.items() if name != gold}
  folder = write_folder(tmp_path / "few", few)
  with pytest.raises(ValueError, match="STS.gs.MSRvid.txt"):
    sts12.read(folder)
  few.pop("wiki1m_for_simcse.txt")
  with pytest.raises(
    ValueError, match="wiki1m_for_simcse.txt.*STS.gs.MSRvid.txt"
  ):
    sts12.read(write_folder(tmp_path / "fewer", few))
  for changed in (b"1.0\n", b"x\n" * 4):
    folder = write_folder(tmp_path / "bad", content | {gold: changed})
    with pytest.raises(ValueError, match="bad.*SentEval's format"):
      sts12.read(folder)
  twice = write_folder(tmp_path / "two", content | {"train.txt": b"a b\n"})
  with pytest.raises(ValueError, match="two files.*wiki1m_for_simcse.txt"):
    sts12.read(twice)


def test_sts12_without_sts_b_has_no_validation_split(tmp_path):
  content = files(7)
  del content["STS/STSBenchmark/sts-dev.csv"]
  splits = sts12.read(write_folder(tmp_path / "simcse", content))
  assert splits.keys() == {"train", "test"}
