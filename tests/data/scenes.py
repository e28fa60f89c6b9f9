"""Folder in the layout of ADE20K, with scenes of coloured boxes."""

import io

import numpy as np
from PIL import Image


def write(folder, train=12, test=3, seed=0):
  """Writes scenes of two classes, with some pixels that are not counted."""
  rng = np.random.default_rng(seed)
  for split, count in (("training", train), ("validation", test)):
    for kind in ("images", "annotations"):
      (folder / kind / split).mkdir(parents=True)
    for k in range(count):
      height, width = rng.integers(20, 40, 2)
      labels = np.ones((height, width), np.uint8)
      y, x = rng.integers(0, height // 2), rng.integers(0, width // 2)
      labels[y : y + height // 2, x : x + width // 2] = 2
      labels[:2, :3] = 0
      pixels = np.where(labels[..., None] == 2, (230, 40, 40), (30, 60, 220))
      name = f"ADE_{split}_{k:08d}"
      (folder / "images" / split / f"{name}.jpg").write_bytes(
        encoded(pixels.astype(np.uint8), "JPEG")
      )
      (folder / "annotations" / split / f"{name}.png").write_bytes(
        encoded(labels, "PNG")
      )
  return folder


def encoded(pixels, kind):
  file = io.BytesIO()
  Image.fromarray(pixels).save(file, kind)
  return file.getvalue()
