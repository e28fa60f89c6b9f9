"""Expansion of paths that users write."""

from __future__ import annotations

import os
from pathlib import Path

from jaxformers.foundations.errors import UserError


def expand(path: str | os.PathLike[str]) -> Path:
  """Replaces a leading `~` of a path by the home directory.

  Raises:
    UserError: if the path begins with `~` and the home directory is unknown.
      This happens in a container whose user has no HOME and no entry in
      /etc/passwd.
  """
  try:
    return Path(path).expanduser()
  except RuntimeError:
    raise UserError(
      f"{str(path)!r} begins with ~, but the home directory is unknown: write "
      "the full path, or set HOME."
    ) from None
