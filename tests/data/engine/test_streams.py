"""Content of files, plain and compressed, whole and damaged."""

import bz2
import gzip
import io
import lzma
import random
import tarfile

import pytest

from jaxformers.data.engine import streams

CONTENT = random.Random(0).randbytes(5_000) + bytes(5_000)
COMPRESS = pytest.mark.parametrize(
  "compress", [bytes, gzip.compress, bz2.compress, lzma.compress]
)


def read(file, max_bytes=10_000):
  return b"".join(streams.read_file(io.BytesIO(file), max_bytes))


@COMPRESS
def test_a_file_is_read_to_its_end_and_within_a_limit(compress):
  file = compress(CONTENT)
  assert streams.is_compressed(file) == (compress is not bytes)
  assert read(file) == CONTENT
  with pytest.raises(streams.TooLargeError):
    read(file, len(CONTENT) - 1)


@pytest.mark.parametrize("compress", COMPRESS.args[1][1:])
def test_a_damaged_file_is_an_error(compress):
  file = compress(CONTENT)
  assert read(file + bytes(700)) == CONTENT
  middle = len(file) // 2
  flipped = file[:middle] + bytes([file[middle] ^ 1]) + file[middle + 1 :]
  for damaged in (file[:middle], file[:-1], flipped, file + b"x"):
    with pytest.raises(streams.DAMAGE):
      read(damaged)


@COMPRESS
@pytest.mark.parametrize("buffer_size", [100, 1 << 20])
def test_a_reader_has_the_methods_of_a_file(monkeypatch, compress, buffer_size):
  monkeypatch.setattr(streams, "CHUNK", buffer_size)
  monkeypatch.setattr(streams, "BUFFER", buffer_size)
  reader = streams.Reader(io.BytesIO(compress(CONTENT)), len(CONTENT))
  assert reader.read(150) == CONTENT[:150]
  # Bytes that were peeked at are read again, from several parts, too.
  assert reader.peek(250) == CONTENT[150:400]
  assert reader.peek(10) == CONTENT[150:160]
  assert reader.tell() == 150
  assert reader.read(300) == CONTENT[150:450]
  reader.seek(2_000)
  assert reader.tell() == 2_000
  assert b"".join(reader.chunks(1_000)) == CONTENT[2_000:3_000]
  reader.place = " at a place"
  with pytest.raises(tarfile.ReadError, match="ends .* at a place, byte 10,0"):
    reader.read(len(CONTENT))
