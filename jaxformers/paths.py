"""Paths as users write them."""

from __future__ import annotations

from pathlib import Path


def expand(path: str | Path) -> Path:
  """Returns a path with the home directory in the place of `~`.

  Raises:
    ValueError: if it begins with `~` and the home directory is unknown, as in a
      container whose user has no HOME and no entry in /etc/passwd.
  """
  try:
    return Path(path).expanduser()
  except RuntimeError:
    raise ValueError(
      f"{str(path)!r} begins with ~, and the home directory is unknown: write "
      "the whole path, or set HOME."
    ) from None
