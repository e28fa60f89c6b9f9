"""Tables of a user's examples: rows, columns, files."""

import collections
import types

import numpy as np
import pytest

from jaxformers.tasks import from_arrays, rows

TEXTS = [f"{'good' if k % 2 else 'bad'} film {k}" for k in range(20)]
LABELS = [k % 2 for k in range(20)]
NAMES = ["pos" if k % 2 else "neg" for k in range(20)]
Row = collections.namedtuple("Row", "label text")


class Series:
  """A column with an index that has no 0, as of pandas."""

  def __init__(self, column):
    self.column = column

  def __getitem__(self, key):
    raise KeyError(key)

  def __len__(self):
    return len(self.column)

  def __iter__(self):
    return iter(self.column)

  def to_numpy(self):
    return np.array(self.column)


class Frame(dict):
  """Stands for a data frame: names of columns, and `to_numpy`."""

  columns = property(lambda self: [*self])

  def to_numpy(self):
    return np.array([*self.values()], object).T


class Dataset:
  """A table of `datasets`, whose labels may have names."""

  def __init__(self, columns, names=None):
    self.table = columns
    self.column_names = [*columns]
    self.features = {"label": types.SimpleNamespace(names=names)}

  def __len__(self):
    return len(self.table["label"])

  def __getitem__(self, key):
    return self.table[key]

  def __iter__(self):
    keys = self.table.keys()
    return (dict(zip(keys, row, strict=True)) for row in self.zipped())

  def zipped(self):
    return zip(*self.table.values(), strict=True)


COLUMNS = {"idx": range(20), "text": TEXTS, "label": LABELS}


@pytest.mark.parametrize(
  "examples",
  [
    (TEXTS, LABELS),
    [*zip(TEXTS, LABELS, strict=True)],
    [*map(list, zip(TEXTS, LABELS, strict=True))],
    (Series(TEXTS), Series(LABELS)),
    (np.array(TEXTS), np.array(LABELS)),
    (iter(TEXTS), iter(LABELS)),
    COLUMNS,
    Dataset(COLUMNS),
    Frame(COLUMNS),
    [*Dataset(COLUMNS)],
    iter(Dataset(COLUMNS)),
    [Row(label, text) for text, label in zip(TEXTS, LABELS, strict=True)],
    {"Review": Series(TEXTS), "Sentiment": Series(LABELS)},
    {"Headline": TEXTS, "y": LABELS, "Unnamed: 0": LABELS},
    {"title": TEXTS[::-1], "text": TEXTS, "label": LABELS},
  ],
)
def test_read_gives_the_same_examples_for_every_form(examples):
  columns = rows.read_columns(examples, "train")
  assert list(columns.inputs) == TEXTS
  assert list(columns.labels) == LABELS


def test_from_arrays_of_a_dataset_reads_columns_not_names():
  task = from_arrays([*Dataset({"text": TEXTS, "label": NAMES})])
  assert task.classes == ("neg", "pos")
  assert task.max_len == max(map(len, TEXTS))


def test_from_arrays_takes_class_names_of_a_dataset():
  task = from_arrays(Dataset(COLUMNS, ["no", "yes", "maybe"]))
  assert task.classes == ("no", "yes", "maybe")


def test_from_arrays_reads_two_texts_as_a_pair():
  columns = {"premise": TEXTS, "hypothesis": TEXTS[::-1], "label": LABELS}
  task = from_arrays(columns, ([*zip(TEXTS, TEXTS, strict=True)], LABELS))
  assert task.sizes()["num_inputs"] == 2
  batch = task.splits["train"].batch(np.array([3]), 12)["inputs"]
  assert batch.shape == (1, 2, 12)
  assert [task.inputs.decode(row) for row in batch[0]] == [TEXTS[3], TEXTS[16]]
  # Equal pairs are held out together, and others are not equal.
  assert len({*task.splits["train"].keys.tolist()}) == 20


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize(("ending", "mark"), [("csv", ","), ("TSV", "\t")])
def test_read_csv_and_tsv_files(tmp_path, encoding, ending, mark):
  path = tmp_path / f"reviews.{ending}"
  quoted = [f'"a ""{text}""{mark}\nna\u00efve"' for text in TEXTS]
  lines = [f"label{mark}text"]
  lines += [f"{y}{mark}{x}" for x, y in zip(quoted, LABELS, strict=True)]
  path.write_bytes("\r\n".join([*lines, ""]).encode(encoding))
  columns = rows.read_columns(str(path), "train")
  assert columns.labels == LABELS
  assert columns.inputs == [f'a "{text}"{mark}\nna\u00efve' for text in TEXTS]


@pytest.mark.parametrize(
  ("content", "message"),
  [
    ("text,label\ngood,1,2\n", "rows.csv, line 2.*3 fields.*2"),
    ('text,label\n"good,1\n', "rows.csv, line 2.*end of data"),
    ("text;label\ngood;1\n", "'text;label'.*text1.*label"),
    ("text,text\na,b\n", "rows.csv.*'text', 'text'"),
    ("text,label\n", "0 inputs.*0 labels"),
    ("caf\u00e9,label\n", "rows.csv.*UTF-8.*place 3"),
  ],
)
def test_read_refuses_wrong_files(tmp_path, content, message):
  path = tmp_path / "rows.csv"
  path.write_bytes(content.encode("latin-1"))
  with pytest.raises(ValueError, match=message):
    rows.read_columns(path, "train")


@pytest.mark.parametrize(
  ("examples", "message"),
  [
    ("reviews.parquet", r"reviews.parquet.*\.csv.*\.tsv"),
    ("nowhere.csv", r"nowhere\.csv"),
    ({"text": "good", "label": 1}, "train='good'.*list"),
    ({"train": Dataset(COLUMNS)}, r"dict.*'train'.*\['train'\]"),
    ({"title": TEXTS, "body": TEXTS, "label": LABELS}, "'title'.*'body'"),
    ({"text": TEXTS, "stars": LABELS}, "'text', 'stars'.*label"),
    ({0: TEXTS, 1: LABELS}, "columns 0, 1"),
    (
      [{"text": "a", "label": 0}, {"text": "b"}],
      "'label' in row 0.*'text' in row 1",
    ),
    (["ab", "cd"], "list.*'ab' at 0"),
    (b"ab", "train is bytes"),
    (("abc", [0, 1, 0]), "train='abc'.*list"),
    (({*TEXTS}, LABELS), "train is set.*order"),
    (({"text": TEXTS}, LABELS), "dict.*'text'"),
  ],
)
def test_read_refuses_wrong_examples(examples, message):
  with pytest.raises(ValueError, match=message):
    rows.read_columns(examples, "train")
