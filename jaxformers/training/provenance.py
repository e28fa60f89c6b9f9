"""Origin of the numbers of a run: code, hardware and libraries."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from jaxformers.version import __version__


@functools.cache
def commit() -> str:
  """Returns the git commit of the code, or its version outside a checkout.

  "+changes" follows the commit if tracked files were changed. The first call
  of a process decides: later changes do not alter code that was imported.
  """
  folder = Path(__file__).parent

  def git(*arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    text = subprocess.check_output(command, text=True, stderr=subprocess.PIPE)
    return text.strip()

  try:
    # The package may be installed inside an unrelated repository.
    git("ls-files", "--error-unmatch", __file__)
    changed = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "HEAD") + ("+changes" if changed else "")
  except (OSError, subprocess.CalledProcessError):
    return f"version {__version__}"


def code_digest() -> str:
  """Returns a digest of the package's Python files."""
  package = Path(__file__).parents[1]
  digest = hashlib.blake2b(digest_size=8)
  for path in sorted(package.rglob("*.py")):
    digest.update(path.relative_to(package).as_posix().encode())
    digest.update(path.read_bytes())
  return digest.hexdigest()


def hardware() -> dict[str, Any]:
  """Returns the devices, the processor and its number of cores."""
  devices = jax.devices()
  # Only Linux names the model of the processor.
  info = Path("/proc/cpuinfo")
  text = info.read_text(encoding="utf-8") if info.exists() else ""
  model = re.search(r"^model name\s*:\s*(.*?)\s*$", text, re.M)
  processor = model[1] if model else ""
  return {
    "devices": len(devices),
    "device_kind": devices[0].device_kind,
    "platform": devices[0].platform,
    "processor": processor or platform.processor() or platform.machine(),
    "cores": os.cpu_count(),
  }


def versions() -> dict[str, str]:
  """Returns the versions of the libraries that numbers depend on."""
  names = ("jax", "jaxlib", "flax", "optax", "numpy")
  return {name: metadata.version(name) for name in names} | {
    "python": platform.python_version(),
    "jaxformers": __version__,
  }
