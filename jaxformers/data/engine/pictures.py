"""Decodes JPEG and PNG files; no other module decodes image files.

Files come from untrusted archives. Pillow's `Image.open` reads forty formats,
some of them by starting a program (Ghostscript for EPS), and allocates as much
memory as a header asks for.
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

# First bytes and Pillow's reader of each format. A reader that is called
# directly tries no other format; `_mismatch` checks the size.
_READERS = {
  "JPEG": (b"\xff\xd8\xff", JpegImagePlugin.JpegImageFile),
  "PNG": (b"\x89PNG\r\n\x1a\n", PngImagePlugin.PngImageFile),
}
# Errors that Pillow raises for damaged files; truncated files raise OSError.
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
  """Decodes an image file completely.

  Checks format, size and mode before the first pixel is decoded.

  Args:
    content: bytes of the file.
    refuse: function from a reason to the error; the reason completes the
      sentence "The image is ...".
    formats: allowed formats, from "JPEG" and "PNG".
    mode: "RGB" converts every file to colours; "L" refuses files that are not
      stored in grey, because a conversion would change labels or grey levels.
    size: required (width, height) of the image; None for any size.
    max_pixels: largest allowed width times height.

  Raises:
    UserError: the result of `refuse`, for a file of another format, size or
      mode, or a file that is damaged or truncated.
  """
  # Choose the reader by the first bytes, never by the name of the file.
  readers = (_READERS[name] for name in formats)
  reader = next((r for start, r in readers if content.startswith(start)), None)
  if reader is None:
    raise refuse(f"no {' or '.join(formats)} file")
  _silence()
  try:
    with reader(io.BytesIO(content)) as picture:
      # Check the header, before the pixels are decoded.
      reason = _mismatch(picture, mode, size, max_pixels)
      if not reason:
        # Drop the transparency: if it is damaged, the conversion fails.
        picture.info.pop("transparency", None)
        pixels = _in_8_bits(picture).convert(mode)
        if reader is PngImagePlugin.PngImageFile:
          # Verify the checksums: decoding ignores them, and stops at the last
          # pixel.
          reader(io.BytesIO(content)).verify()
        return pixels
  except _DAMAGED as error:
    reason = f"damaged or truncated ({error})"
  raise refuse(reason)


def _in_8_bits(picture: Image.Image) -> Image.Image:
  """Reduces a 16-bit grey image to the upper bytes; returns others unchanged.

  Pillow's conversion would set all values above 255 to 255. For 16-bit colours
  Pillow reads the upper bytes itself.
  """
  if not picture.mode.startswith("I"):
    return picture
  return Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))


def _silence() -> None:
  """Ignores Pillow's warnings, such as the one for a damaged EXIF block.

  `warnings.catch_warnings` would ignore them for one call, but it is not safe
  in threads.
  """
  rule = ("ignore", None, Warning, _WARNINGS, 0)
  if rule not in warnings.filters:
    warnings.filterwarnings("ignore", module=_WARNINGS.pattern)


def _mismatch(
  picture: Image.Image, mode: str, size: tuple[int, int] | None, max_pixels: int
) -> str:
  """Returns the reason why a header is refused, or ""."""
  width, height = picture.size
  pixels = f"of {width} x {height} pixels"
  if size and picture.size != size:
    return f"{pixels} instead of {size[0]} x {size[1]}"
  if width * height > max_pixels:
    return f"{pixels}, more than {max_pixels:,}"
  if mode == "L" and picture.mode != "L":
    return f"of mode {picture.mode} instead of L (grey, 8 bits)"
  return ""
