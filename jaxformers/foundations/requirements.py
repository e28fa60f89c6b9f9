"""Checks of optional libraries and of devices, made before they are needed."""

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
# Names of packages for pip, where they differ from the name of the module.
_PACKAGES = {"sklearn": "scikit-learn"}


def _is_installed(module: str) -> bool:
  # An imported module may have no spec.
  return bool(sys.modules.get(module) or importlib.util.find_spec(module))


def require(extra: str, purpose: str) -> None:
  """Raises UserError if a library of an extra is not installed.

  The check is fast, because it imports no library.

  Args:
    extra: name of the extra in `EXTRAS`.
    purpose: feature that needs the libraries, for the error message.
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
  """Raises UserError if the library of a log is not installed.

  Args:
    logs: extras of the logs that the config turns on; see `RunConfig.logs`.
  """
  for extra in logs:
    require(extra, f"config.{extra}=True")


def require_device() -> None:
  """Raises UserError if no device of `JAX_PLATFORMS` exists.

  JAX itself would raise an AssertionError without a message. If the variable is
  not set, JAX always finds the CPU, and this function does not start JAX.
  """
  platforms = os.environ.get("JAX_PLATFORMS", "")
  if not platforms:
    return
  import jax

  # Other errors of JAX, such as a peer that has gone, are not replaced.
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
