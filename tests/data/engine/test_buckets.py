"""Parts of a split on disk."""

from jaxformers.data.engine.buckets import Bucket


def test_bucket_returns_examples_in_order(tmp_path):
  bucket = Bucket(tmp_path / "folder" / "bucket_001.tmp")
  assert (len(bucket), bucket.size, list(bucket.read_values())) == (0, 0, [])
  bucket.del_file()
  examples = [((1 << 128) - 1, b"last"), (0, b""), (7, b"\x00\xff")]
  for key, data in examples:
    bucket.add(key, data)
  assert (len(bucket), bucket.size) == (3, 6)
  assert list(bucket.read_values()) == examples
  bucket.del_file()
  assert not list((tmp_path / "folder").iterdir())
