"""Images, damaged images, and files that are not images."""

import io
import random

import numpy as np
from PIL import Image

SIZE = (32, 24)
EPS = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 32 32
%%EndComments
showpage
%%EOF
"""


def picture(kind="PNG", size=SIZE, mode="RGB"):
  """Returns an image file of noise, which has many bytes to damage."""
  pixels = np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), np.uint8)
  file = io.BytesIO()
  Image.fromarray(pixels).convert(mode).save(file, kind)
  return file.getvalue()


def damaged(content, seed):
  """Removes the end or some bytes of a file, or changes some bytes."""
  rng = random.Random(seed)
  content = bytearray(content)
  match rng.randrange(4):
    case 0:
      return bytes(content[: rng.randrange(len(content))])
    case 1:
      start = rng.randrange(len(content))
      del content[start : start + rng.randrange(1, 20)]
    case 2:
      content[rng.randrange(min(len(content), 200))] ^= 1 << rng.randrange(8)
    case 3:
      for _ in range(rng.choice((1, 3, 10))):
        content[rng.randrange(len(content))] = rng.randrange(256)
  return bytes(content)
