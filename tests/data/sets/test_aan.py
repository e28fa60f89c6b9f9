import pytest

from jaxformers.data.sets import aan
from tests.data.archives import aan as pairs
from tests.data.archives import write_folder, write_tar

COUNTS = {"train": 6, "validation": 3, "test": 2}
SMALL = dict(num_train=6, num_validation=3, num_test=2)


def read(source, path):
  return {split: list(rows) for split, rows in source.read(path).items()}


def test_aan_reads_pairs_unquoted(tmp_path):
  splits = read(
    aan.source(**SMALL), write_tar(tmp_path / "lra_release.gz", pairs(COUNTS))
  )
  assert {name: len(rows) for name, rows in splits.items()} == COUNTS
  _, example = splits["validation"][1]
  assert example == {
    "text1": b'"validation 1\r one',
    "text2": b"and two 1",
    "label": "1",
  }


def test_aan_refuses_other_counts_unless_asked_for(tmp_path):
  path = write_tar(tmp_path / "a.tar.gz", pairs(COUNTS))
  with pytest.raises(ValueError, match=r"\b6 examples.*147,086.*num_train"):
    read(aan.source(), path)
  assert aan.source().key != aan.source(**SMALL).key


@pytest.mark.parametrize(
  "line", [b"1.0\ta\tb\tone", b"2.0\ta\tb\tc\td", b"x", b"1.0\ta\tb\tc\td\te"]
)
def test_aan_names_broken_lines(tmp_path, line):
  files = pairs(COUNTS)
  name = "lra_release/tsv_data/new_aan_pairs.train.tsv"
  files[name] = files[name].replace(b"\n", b"\n" + line + b"\n", 1)
  with pytest.raises(ValueError, match="train.tsv, line 2.*label"):
    read(aan.source(**SMALL), write_folder(tmp_path / "x", files))


def test_aan_refuses_a_repeated_file(tmp_path):
  files = pairs(COUNTS)
  name = "lra_release/tsv_data/new_aan_pairs.train.tsv"
  files["again/new_aan_pairs.train.tsv"] = files[name]
  with pytest.raises(
    ValueError, match="again/new_aan_pairs.train.tsv.*lra_release"
  ):
    read(aan.source(**SMALL), write_folder(tmp_path / "x", files))


def test_aan_reads_the_real_sample(archives):
  source = aan.source(8_000, 1_000, 1_000)
  splits = read(source, archives / "retrieval_pairs.tar.xz")
  labels = [example["label"] for _, example in splits["test"]]
  assert labels.count("1") == 500
