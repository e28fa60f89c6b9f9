"""Libraries of extras, and devices: checked before any work needs them."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable

from jaxformers.foundations.errors import UserError

# Modules that each extra of setup.cfg installs and the package imports.
EXTRAS = {
  "bench": ("torch",),
  "plots": ("matplotlib", "sklearn"),
  "slurm": ("submitit",),
  "tensorboard": ("tensorboardX",),
  "wandb": ("wandb",),
}
_PACKAGES = {"sklearn": "scikit-learn"}  # Where pip has another name.


def _is_installed(module: str) -> bool:
  # A module that is imported may have no spec to find.
  return bool(sys.modules.get(module) or importlib.util.find_spec(module))


def require(extra: str, purpose: str) -> None:
  """Raises UserError if a library of an extra is not installed.

  No library is imported, so this takes no time.

  Args:
    extra: name in `EXTRAS`.
    purpose: what needs the libraries, for the message.
  """
  packages = [
    _PACKAGES.get(module, module)
    for module in EXTRAS[extra]
    if not _is_installed(module)
  ]
  if packages:
    verb = "is" if len(packages) == 1 else "are"
    raise UserError(
      f"{purpose} needs {' and '.join(packages)}, which {verb} not installed: "
      f"run pip install {' '.join(packages)}, or pip install -e '.[{extra}]' "
      "in a copy of the repository."
    )


def require_logs(logs: Iterable[str]) -> None:
  """Raises UserError for a log of a run whose library is not installed.

  Args:
    logs: extras that the config turns on; see `RunConfig.logs`.
  """
  for extra in logs:
    require(extra, f"config.{extra}=True")


def require_device() -> None:
  """Raises UserError if JAX has no device of the platforms of `JAX_PLATFORMS`.

  JAX itself raises a bare AssertionError then. Without the variable it finds at
  least the CPU, and is not started here.
  """
  platforms = os.environ.get("JAX_PLATFORMS", "")
  if not platforms:
    return
  import jax

  try:
    jax.devices()
  except (AssertionError, RuntimeError) as error:
    is_missing = "Unable to initialize backend" in str(error)
    if not is_missing and not isinstance(error, AssertionError):
      raise
    raise UserError(
      f"JAX_PLATFORMS={platforms!r}, but JAX has no such device here: unset "
      "JAX_PLATFORMS or set it to cpu, or install JAX for the device (pip "
      "install -e '.[cuda]' or '.[tpu]' in a copy of the repository) and check "
      "its driver."
    ) from None
