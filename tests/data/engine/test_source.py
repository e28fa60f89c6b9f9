import pytest

from jaxformers.data.engine import source as s


def test_collect_verifies_counts_and_labels(tmp_path):
  stream = [("train", i, {"label": "a"}) for i in range(3)]
  splits = s.collect(stream, tmp_path, {"train": 3, "test": 0}, ("a", None))
  assert [key for key, _ in splits["train"]] == [0, 1, 2]
  for count, labels in ((2, ("a",)), (4, (None,)), (3, ("a", "b"))):
    with pytest.raises(ValueError, match="instead of"):
      s.collect(stream, tmp_path, {"train": count}, labels)
