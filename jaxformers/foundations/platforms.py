"""The device for which a program is traced."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

# Device of the programs that are traced; None for the process's own devices.
_TARGET: contextvars.ContextVar[Any] = contextvars.ContextVar(
  "target", default=None
)
# Names of backends, by the names of their devices.
_BACKENDS = {"cuda": "gpu", "rocm": "gpu"}


@contextlib.contextmanager
def targeting(device: Any) -> Iterator[None]:
  """Makes code that is traced in this context choose its form for a device.

  Args:
    device: device of JAX, or a device of the description of a topology.
  """
  token = _TARGET.set(device)
  try:
    yield
  finally:
    _TARGET.reset(token)


def target() -> Any:
  """Returns the device for which a program is traced."""
  import jax  # Commands that need no device import this package.

  device = _TARGET.get()
  return jax.devices()[0] if device is None else device


def backend() -> str:
  """Returns the backend for which a program is traced: cpu, gpu or tpu.

  `jax.default_backend` names the backend of the process, which may compile for
  another one.
  """
  import jax

  device = _TARGET.get()
  if device is None:
    return jax.default_backend()
  return _BACKENDS.get(device.platform, device.platform)
