import pytest

from jaxformers.data.engine import source as s


def test_counts_and_labels_are_verified(tmp_path):
  stream = [("train", i, {"label": "a"}) for i in range(3)]
  expected = {"train": {"a": 3}, "test": {None: 0}}
  splits = s.collect(stream, tmp_path, expected)
  assert [key for key, _ in splits["train"]] == [0, 1, 2]
  for wrong in ({"a": 2}, {None: 4}, {"a": 3, "b": 1}):
    with pytest.raises(ValueError, match="instead of"):
      s.collect(stream, tmp_path, {"train": wrong})
