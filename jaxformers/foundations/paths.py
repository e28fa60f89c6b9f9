"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path

from jaxformers.foundations.errors import UserError


def expand(path: str | os.PathLike[str]) -> Path:
  """Returns a path with the home directory in place of `~`.

  Raises:
    UserError: if it begins with `~` and the home directory is unknown, as in a
      container whose user has no HOME and no entry in /etc/passwd.
  """
  try:
    return Path(path).expanduser()
  except RuntimeError:
    raise UserError(
      f"{str(path)!r} begins with ~, but the home directory is unknown: write "
      "the full path, or set HOME."
    ) from None
