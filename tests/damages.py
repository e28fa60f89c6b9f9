"""How tests damage files: one way of each kind that disks and people have."""

import random
from pathlib import Path

KINDS = ("flip", "cut", "empty", "delete", "swap")


def damage(path: Path, kind: str, others: list[Path], rng: random.Random):
  """Damages a file.

  Args:
    path: file that is damaged.
    kind: one of `KINDS`: a bit is flipped, the end is cut off, all of it is
      gone, the file is gone, or it is exchanged for another.
    others: files that it may be exchanged for.
    rng: draws the place.
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
