"""Damages to files, one for each kind that disks and people cause."""

import random
from pathlib import Path

KINDS = ("flip", "cut", "empty", "delete", "swap")


def damage(path: Path, kind: str, others: list[Path], rng: random.Random):
  """Damages a file.

  Args:
    path: file to damage.
    kind: one of `KINDS`. "flip" flips a bit, "cut" removes the end, "empty"
      removes the content, "delete" removes the file, and "swap" exchanges it
      with another file.
    others: files to exchange it with.
    rng: generator that draws the place of the damage.
  """
  content = path.read_bytes()
  if kind == "flip" and content:
    place = rng.randrange(len(content))
    flipped = content[place] ^ (1 << rng.randrange(8))
    path.write_bytes(content[:place] + bytes([flipped]) + content[place + 1 :])
  elif kind == "cut" and content:
    path.write_bytes(content[: rng.randrange(len(content))])
  elif kind == "delete":
    path.unlink()
  elif kind == "swap":
    other = rng.choice([other for other in others if other != path])
    theirs = other.read_bytes()
    other.write_bytes(content)
    path.write_bytes(theirs)
  else:
    path.write_bytes(b"")
