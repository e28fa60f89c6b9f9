"""Classification of short texts as word pieces: IMDb and AG's News."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxformers.data.engine.encodings import marks, pieces, word_pieces
from jaxformers.data.engine.packed import Packed
from jaxformers.data.engine.preparation import open_splits
from jaxformers.data.sets import ag_news, imdb
from jaxformers.foundations.ranges import Count, Length
from jaxformers.foundations.registry import choose
from jaxformers.tasks import baselines, text
from jaxformers.tasks.splits import hold_out, replace_all, with_validation
from jaxformers.tasks.task import TASKS, Task

# Neither data set has a validation split.
# jaxformers: a part of train chooses the checkpoint.
# paper: the test split chooses it, as in papers that report the best score.
# test_only (AG's News): test.csv is divided into three splits, for archives
# without train.csv.
PROTOCOLS = {
  "imdb": ("jaxformers", "paper"),
  "ag_news": ("jaxformers", "paper", "test_only"),
}

CLASSES = {"imdb": text.CLASSES, "ag_news": ag_news.LABELS}
HELD_OUT = {"imdb": 2_500, "ag_news": 12_000, "test_only": 1_000}
TRIVIAL = baselines.MAJORITY | {
  "bag-of-pieces regression": baselines.bag_regression
}


@TASKS.register("imdb")
def load_imdb(
  *,
  data_dir: str = "",
  protocol: str = "jaxformers",
  archive: str = "",
  vocabulary: str = "",
  vocab_size: Count = 30_522,
  max_len: Length = 512,
  special_tokens: bool = False,
) -> Task:
  """Opens IMDb reviews as word pieces; classes are negative and positive.

  Args:
    data_dir: folder of prepared data; see `data_folder`.
    protocol: "jaxformers": 2,500 reviews of train are validation. "paper":
      validation is test.
    archive: path of aclImdb_v1.tar.gz or of its folder; "" searches for one of
      them, and else downloads the archive.
    vocabulary: path of a vocab.txt in BERT's format, of a tokenizer.json, or of
      their folder; "" trains a vocabulary. A tokenizer_config.json in the same
      folder is obeyed.
    vocab_size: size of a trained vocabulary.
    max_len: number of word pieces to which reviews are cut.
    special_tokens: True to open every review with [CLS] and close it with
      [SEP], as in BERT.
  """
  # Open the word pieces, and hold out validation.
  choose("protocol of imdb", protocol, PROTOCOLS["imdb"])
  encoding = word_pieces("text", vocabulary=vocabulary, size=vocab_size)
  splits, info = open_splits(imdb.SOURCE, encoding, data_dir, archive)
  held_out = HELD_OUT["imdb"] if protocol == "jaxformers" else 0
  splits = with_validation(splits, held_out)
  return _task("imdb", protocol, splits, info, max_len, special_tokens)


@TASKS.register("ag_news")
def load_ag_news(
  *,
  data_dir: str = "",
  protocol: str = "jaxformers",
  archive: str = "",
  vocabulary: str = "",
  vocab_size: Count = 30_522,
  max_len: Length = 512,
  special_tokens: bool = False,
) -> Task:
  """Opens title and description of AG's News as word pieces, four classes.

  Args:
    data_dir: folder of prepared data; see `data_folder`.
    protocol: "jaxformers": 12,000 articles of train are validation. "paper":
      validation is test. "test_only": the 7,600 articles of test.csv are
      divided by hash into 5,600 for training, 1,000 for validation and 1,000
      for the test; scores are not comparable with other scores, and
      without a `vocabulary` the word pieces are fitted on all 7,600.
    archive: path of ag_news_csv.tar.gz or of its folder; for "test_only", of
      any archive or folder with test.csv. "" searches for one of them, and else
      downloads the archive.
    vocabulary, vocab_size, max_len, special_tokens: see `load_imdb`.
  """
  choose("protocol of ag_news", protocol, PROTOCOLS["ag_news"])
  encoding = word_pieces(
    "title", "description", vocabulary=vocabulary, size=vocab_size
  )
  # Open train and test, or only test.csv.
  is_test_only = protocol == "test_only"
  origin = ag_news.TEST_SOURCE if is_test_only else ag_news.SOURCE
  splits, info = open_splits(origin, encoding, data_dir, archive)
  if is_test_only:
    # Hold out the test split first, then the validation split.
    count = HELD_OUT["test_only"]
    rest = hold_out(splits["test"], count)
    splits = {"test": rest["validation"], **hold_out(rest["train"], count)}
  else:
    held_out = HELD_OUT["ag_news"] if protocol == "jaxformers" else 0
    splits = with_validation(splits, held_out)
  return _task("ag_news", protocol, splits, info, max_len, special_tokens)


def _task(
  name: str,
  protocol: str,
  splits: Mapping[str, Packed],
  info: dict[str, Any],
  max_len: int,
  special_tokens: bool,
) -> Task:
  """Returns the task of splits of word pieces; see `load_imdb`."""
  # Take the tokenizer out of `info`, and read its vocabulary.
  tokenizer = info.pop("tokenizer")
  vocabulary = pieces(tokenizer)
  # Open every sequence with [CLS] and close it with [SEP].
  if special_tokens:
    start, end = marks(vocabulary)
    splits = replace_all(splits, start=start, end=end)
  return Task(
    name=name,
    protocol=protocol,
    splits=splits,
    selection="test" if protocol == "paper" else "validation",
    vocabulary=vocabulary,
    max_len=max_len,
    num_classes=len(CLASSES[name]),
    classes=CLASSES[name],
    trivial=TRIVIAL,
    info=info,
    tokenizer="word_pieces",
    tokenizer_json=tokenizer,
  )
