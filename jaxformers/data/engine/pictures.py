"""JPEG and PNG files to pixels: the only module that decodes an image file.

Files come from archives of others. Pillow by itself reads forty formats, some
of them by starting a program (Ghostscript for EPS), and allocates what a header
asks for.
"""

from __future__ import annotations

import io
import re
import struct
import warnings
import zlib
from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image, JpegImagePlugin, PngImagePlugin

from jaxformers.foundations.errors import UserError

MAX_PIXELS = 100_000_000  # ImageNet's largest image has less than 70 million.

# Pillow's readers, which `Image.open` would choose among: called directly they
# try no other format, and leave the size to the check below.
_READERS = {
  "JPEG": (b"\xff\xd8\xff", JpegImagePlugin.JpegImageFile),
  "PNG": (b"\x89PNG\r\n\x1a\n", PngImagePlugin.PngImageFile),
}
# What Pillow raises for damaged files. A truncated file raises OSError.
_DAMAGED = (
  OSError,
  SyntaxError,
  ValueError,
  EOFError,
  LookupError,
  TypeError,
  struct.error,
  zlib.error,
  Image.DecompressionBombError,
)
_WARNINGS = re.compile(r"PIL\.")

Refuse = Callable[[str], UserError]


def decode(
  content: bytes,
  refuse: Refuse,
  *,
  formats: Sequence[str] = ("JPEG", "PNG"),
  mode: str = "RGB",
  size: tuple[int, int] | None = None,
  max_pixels: int = MAX_PIXELS,
) -> Image.Image:
  """Decodes an image file to its end.

  Format, size and mode are compared before a pixel is decoded.

  Args:
    content: bytes of the file.
    refuse: makes the error from the reason, which follows "is" or "which is".
    formats: formats of the source's files, a choice from "JPEG" and "PNG".
    mode: "RGB" converts any file to colours; "L" refuses files that are not
      stored in grey, because a conversion would change labels or grey levels.
    size: (width, height) that the image must have; None for any.
    max_pixels: largest allowed width times height.

  Raises:
    UserError: made by `refuse`, for a file of another format, size or mode, or
      one that is damaged or truncated.
  """
  # Choose the reader by the first bytes, never by the name of the file.
  readers = (_READERS[name] for name in formats)
  reader = next((r for start, r in readers if content.startswith(start)), None)
  if reader is None:
    raise refuse(f"no {' or '.join(formats)} file")
  _silence()
  try:
    with reader(io.BytesIO(content)) as picture:
      # The header is read now, the pixels are not.
      reason = _mismatch(picture, mode, size, max_pixels)
      if not reason:
        # Transparency is not used, and a damaged one cannot be converted.
        picture.info.pop("transparency", None)
        pixels = _in_8_bits(picture).convert(mode)
        if reader is PngImagePlugin.PngImageFile:
          # Decoding compares no checksum, and stops at the last pixel.
          reader(io.BytesIO(content)).verify()
        return pixels
  except _DAMAGED as error:
    reason = f"damaged or truncated ({error})"
  raise refuse(reason)


def _in_8_bits(picture: Image.Image) -> Image.Image:
  """Returns a grey image of 16 bits by its upper bytes; others unchanged.

  Pillow's own conversion makes 255 of all greater values. It reads colours of
  16 bits by their upper bytes.
  """
  if not picture.mode.startswith("I"):
    return picture
  return Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))


def _silence() -> None:
  """Ignores Pillow's warnings, such as one for a damaged EXIF block.

  `warnings.catch_warnings` would do it for one call, but not among threads.
  """
  rule = ("ignore", None, Warning, _WARNINGS, 0)
  if rule not in warnings.filters:
    warnings.filterwarnings("ignore", module=_WARNINGS.pattern)


def _mismatch(
  picture: Image.Image, mode: str, size: tuple[int, int] | None, max_pixels: int
) -> str:
  """Returns why a header is refused, or ""."""
  width, height = picture.size
  pixels = f"of {width} x {height} pixels"
  if size and picture.size != size:
    return f"{pixels} instead of {size[0]} x {size[1]}"
  if width * height > max_pixels:
    return f"{pixels}, more than {max_pixels:,}"
  if mode == "L" and picture.mode != "L":
    return f"of mode {picture.mode} instead of L (grey, 8 bits)"
  return ""
