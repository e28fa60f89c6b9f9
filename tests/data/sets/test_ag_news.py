import pytest

from jaxformers.data.sets import ag_news
from tests.data.archives import ag_news as articles
from tests.data.archives import write_folder, write_tar


@pytest.fixture
def few(monkeypatch):
  monkeypatch.setattr(ag_news, "PER_LABEL", {"train": 3, "test": 2})


def test_ag_news_reads_articles(tmp_path, few):
  path = write_tar(tmp_path / "a.tar.gz", articles({"train": 3, "test": 2}))
  splits = ag_news.read(path)
  assert (len(splits["train"]), len(splits["test"])) == (12, 8)
  assert splits["train"][3] == (
    3,
    {
      "title": b"train title 0",
      "description": b'a "quoted" text, 4',
      "label": "Sci/Tech",
    },
  )


def test_ag_news_without_train_csv_needs_protocol_test_only(tmp_path, few):
  files = {"test.csv": articles({"test": 2})["ag_news_csv/test.csv"]}
  folder = write_folder(tmp_path / "ag", files)
  with pytest.raises(ValueError, match="train.csv.*test_only"):
    ag_news.read(folder)
  for path in (folder, folder / "test.csv"):
    assert len(ag_news.read_test(path)["test"]) == 8


def test_ag_news_refuses_other_files(tmp_path, few):
  for line in (b'"5","a","b"\n', b'"1","a"\n', b"\n"):
    (tmp_path / "test.csv").write_bytes(line)
    with pytest.raises(ValueError, match="test.csv, row 1.*class"):
      ag_news.read_test(tmp_path / "test.csv")
  for content, reason in (
    (b'"1","' + b"x" * 200_000 + b'","b"\n', "131072"),
    (b"\xff\xfe", "'utf-8'"),
  ):
    (tmp_path / "test.csv").write_bytes(content)
    with pytest.raises(ValueError, match=f"test.csv.*CSV.*{reason}"):
      ag_news.read_test(tmp_path / "test.csv")
  short = write_tar(tmp_path / "a.tar.gz", articles({"train": 2, "test": 2}))
  with pytest.raises(ValueError, match="2 examples.*'World'.*3"):
    ag_news.read(short)


def test_ag_news_reads_the_real_test_split(archives):
  rows = ag_news.read_test(archives / "ag_news")["test"]
  assert len(rows) == 7_600
  assert rows[0][1]["title"] == b"Fears for T N pension after talks"
  assert rows[0][1]["label"] == "Business"
