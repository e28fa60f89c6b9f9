"""Files are decoded whole, or refused with a reason."""

import io
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from jaxformers.data.engine import pictures
from tests.data.pictures import EPS, SIZE, damaged, picture

PACKAGE = Path(pictures.__file__).parents[1]


def decode(content, **options):
  return pictures.decode(
    content, lambda why: ValueError(f"is {why}"), **options
  )


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_decode_refuses_or_decodes_damaged_files(kind):
  """Nothing but ValueError is raised, and no warning."""
  content = picture(kind)
  refused = 0
  for seed in range(300):
    try:
      image = decode(damaged(content, seed), size=SIZE)
      assert (image.size, image.mode) == (SIZE, "RGB")
    except ValueError as error:
      refused += 1
      assert str(error).startswith("is ")
  # A PNG has checksums, and a JPEG none.
  assert refused == 300 if kind == "PNG" else refused > 100


def test_decode_refuses_a_png_with_changed_pixels():
  content = bytearray(picture())
  refused = 0
  for place in range(60, len(content) - 20, 97):
    content[place] ^= 4
    with pytest.raises(ValueError, match="damaged"):
      decode(bytes(content), size=SIZE)
    content[place] ^= 4
    refused += 1
  assert refused > 20


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_decode_reads_every_format_and_mode(kind, mode):
  content = picture(kind, mode=mode)
  image = decode(content, mode=mode, size=SIZE)
  with Image.open(io.BytesIO(content)) as want:
    np.testing.assert_array_equal(np.asarray(image), np.asarray(want))
  assert decode(content).mode == "RGB"


def test_decode_converts_cmyk_and_palettes_to_rgb():
  assert decode(picture("JPEG", mode="CMYK")).mode == "RGB"
  file = io.BytesIO()
  image = Image.open(io.BytesIO(picture(mode="P")))
  image.save(file, "PNG", transparency=bytes(range(200)))
  want = np.asarray(image.convert("RGB"))
  np.testing.assert_array_equal(np.asarray(decode(file.getvalue())), want)


def test_decode_reads_a_16_bit_png_by_its_upper_bytes():
  ramp = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1_040
  file = io.BytesIO()
  Image.fromarray(ramp).save(file, "PNG")
  pixels = np.asarray(decode(file.getvalue()))
  assert pixels.shape == (8, 8, 3)
  assert (pixels == (ramp >> 8)[..., None]).all()
  # Where grey levels are labels, no conversion is allowed.
  with pytest.raises(ValueError, match=r"I;16.*\bL\b"):
    decode(file.getvalue(), mode="L")


@pytest.mark.parametrize(
  ("content", "options", "reason"),
  [
    (EPS, {}, "JPEG.*PNG"),
    (b"", {}, "JPEG.*PNG"),
    (picture("GIF"), {}, "JPEG.*PNG"),
    (picture("JPEG"), {"formats": ("PNG",)}, "no PNG"),
    (picture(), {"size": (32, 25)}, "32 x 24.*32 x 25"),
    (picture(), {"max_pixels": 767}, "32 x 24.*767"),
    (picture(mode="P"), {"mode": "L"}, r"mode P\b.*\bL\b"),
    (picture()[:-30], {}, "damaged"),
    (picture("JPEG")[:-30], {}, "damaged"),
  ],
)
def test_decode_refuses_unreadable_files(no_program, content, options, reason):
  with pytest.raises(ValueError, match=reason):
    decode(content, **options)


def chunk(name, content):
  size, crc = len(content), zlib.crc32(name + content)
  return struct.pack(">I", size) + name + content + struct.pack(">I", crc)


def test_decode_refuses_bombs_before_decoding(monkeypatch):
  """A few kilobytes would unpack to gigabytes."""

  def load(self):
    raise AssertionError("decoded")

  monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", load)
  header = struct.pack(">IIBBBBB", 50_000, 40_000, 8, 2, 0, 0, 0)
  start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
  rest = chunk(b"IDAT", zlib.compress(bytes(10_000))) + chunk(b"IEND", b"")
  with pytest.raises(ValueError, match="50000 x 40000.*100,000,000"):
    decode(start + rest)
  text = b"a\0\0" + zlib.compress(bytes(PngImagePlugin.MAX_TEXT_CHUNK + 1))
  with pytest.raises(ValueError, match="PngImagePlugin.MAX_TEXT_CHUNK"):
    decode(start + chunk(b"zTXt", text) + rest)


def test_decode_gives_no_pillow_warning():
  """An invalid animation beside the pixels is of no meaning."""
  content = picture()
  with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    decode(content[:33] + chunk(b"acTL", bytes(8)) + content[33:])
  assert not seen


def test_only_pictures_module_opens_images():
  for path in PACKAGE.rglob("*.py"):
    assert "Image.open(" not in path.read_text(), path
