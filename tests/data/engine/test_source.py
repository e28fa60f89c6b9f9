import pytest

from jaxformers.data.engine import source as s


def test_collect_verifies_counts_and_labels(tmp_path):
  stream = [("train", i, {"label": "a"}) for i in range(3)]
  splits = s.collect(stream, tmp_path, {"train": 3, "test": 0}, ("a", None))
  assert [key for key, _ in splits["train"]] == [0, 1, 2]
  for count, labels, message in (
    (2, ("a",), "3 examples of 'a'.*'train'.*2"),
    (4, (None,), "3 examples.*'train'.*4"),
    (3, ("a", "b"), "0 examples of 'b'.*'train'.*3"),
  ):
    with pytest.raises(ValueError, match=message):
      s.collect(stream, tmp_path, {"train": count}, labels)
