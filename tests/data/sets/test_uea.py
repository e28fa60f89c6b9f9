"""The reader of .ts files, against sktime and on damaged files."""

import numpy as np
import pytest

from jaxformers.data.sets import uea
from tests.data import series


@pytest.mark.parametrize("problem", ["BasicMotions", "JapaneseVowels"])
def test_files_of_the_archive_are_read_as_sktime_reads_them(problem):
  folder = series.archive()
  from sktime.datasets import load_from_tsfile

  splits = uea.read(problem, folder)
  assert tuple(len(splits[s]) for s in uea.SPLITS) == uea.COUNTS[problem]
  for split, rows in splits.items():
    path = folder / problem / f"{problem}_{split.upper()}.ts"
    frame, labels = load_from_tsfile(str(path), return_data_type="nested_univ")
    for (key, row), k in zip(rows, range(len(frame)), strict=True):
      assert key == k and row["label"].decode().lower() == labels[k]
      want = np.stack([np.asarray(x) for x in frame.iloc[k]], 1)
      got = row["values"].reshape(-1, row["channels"][0])
      np.testing.assert_array_equal(got, want.astype(np.float32))


def test_missing_numbers_comments_and_empty_lines(tmp_path):
  lines = ["% Another comment.", "1,?,-3e-1:4,5,6:up", "", " 7 : ? : down "]
  rows = uea.read("Small", series.write(tmp_path, lines))["train"]
  assert [key for key, _ in rows] == [0, 1]
  np.testing.assert_array_equal(
    rows[0][1]["values"], np.float32([1, 4, np.nan, 5, -0.3, 6])
  )
  np.testing.assert_array_equal(rows[1][1]["values"], np.float32([7, np.nan]))
  assert [row["label"] for _, row in rows] == [b"up", b"down"]


@pytest.mark.parametrize(
  ("line", "text"),
  [
    ("1,2:3,4", "line 10: the class '3,4' is none of up, down"),
    ("1,2:3:up", r"line 10: 2 channels of \[1, 2\] steps"),
    ("1,2:up", r"line 10: 1 channels of \[2\] steps"),
    ("1,x:3,4:up", "line 10: .*'x'"),
    ("1,:3,4:up", "line 10: "),
    ("1,1e99:3,4:up", "line 10: a number is infinite"),
    ("1,2:3,4:left", "'left' is none of"),
    ("?,?:?,?:up", "line 10: the series has no number"),
  ],
)
def test_damaged_lines_are_refused(tmp_path, line, text):
  with pytest.raises(ValueError, match=text):
    uea.read("Small", series.write(tmp_path, [line, *series.small()]))


@pytest.mark.parametrize(
  ("old", "new", "text"),
  [
    ("@data", "", "no line @data|before @data"),
    ("@timeStamps false", "@timeStamps true", "time stamps"),
    ("@classLabel true up down", "@targetlabel true", "no classes"),
    ("@dimensions 2", "@dimensions 3", "all series have 3 channels"),
    (
      "@equalLength false",
      "@equalLength true\n@seriesLength 99",
      "every series has 99",
    ),
    ("@missing true", "hello", "line 4: expected a line such as"),
  ],
)
def test_wrong_headers_are_refused(tmp_path, old, new, text):
  assert old in series.HEADER
  header = series.HEADER.replace(old, new)
  with pytest.raises(ValueError, match=text):
    uea.read("Small", series.write(tmp_path, series.small(), header=header))


def test_marks_comments_and_capitals_are_read(tmp_path):
  folder = series.write(tmp_path, series.small())
  plain = uea.read("Small", folder)
  for path in folder.iterdir():
    text = path.read_bytes().replace(b"@classLabel true", b"@classlabel TRUE")
    text = text.replace(b"A comment", b"\xe9t\xe9")
    path.write_bytes(b"\xef\xbb\xbf" + text)
  for split, rows in uea.read("Small", folder).items():
    for row, want in zip(rows, plain[split], strict=True):
      assert row[1]["label"] == want[1]["label"]


def test_other_files_are_refused(tmp_path):
  folder = series.write(tmp_path / "a", series.small())
  with pytest.raises(
    ValueError, match=r"Other_TRAIN.ts and Other_TEST.ts.*zip"
  ):
    uea.read("Other", folder)
  series.write(tmp_path / "b", series.small())
  with pytest.raises(ValueError, match="two files Small_T"):
    uea.read("Small", tmp_path)
  only_up = [line for line in series.small() if line.endswith("up")]
  series.write(folder, only_up, series.small())
  with pytest.raises(
    ValueError, match="train has no series of the class 'down'"
  ):
    uea.read("Small", folder)
  # A known data set with a line cut off.
  series.write(folder, series.small(39), series.small(40), name="BasicMotions")
  with pytest.raises(ValueError, match="39 series of train.*has 40 and 40"):
    uea.read("BasicMotions", folder)
  with pytest.raises(ValueError, match="'../x' is no name"):
    uea.source("../x")
