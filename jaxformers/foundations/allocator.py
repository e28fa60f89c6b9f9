"""Settings of the C library's allocator for freed memory."""

from __future__ import annotations

import ctypes
import os

# Parameters of glibc's mallopt (malloc.h), and the environment variables that
# set the same parameters.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
_VARIABLES = {
  _TRIM_THRESHOLD: "MALLOC_TRIM_THRESHOLD_",
  _TOP_PAD: "MALLOC_TOP_PAD_",
  _MMAP_MAX: "MALLOC_MMAP_MAX_",
  _ARENA_MAX: "MALLOC_ARENA_MAX",
}


def keep_freed_memory() -> bool:
  """Keeps the memory of freed arrays in the process, for later arrays.

  On CPUs, XLA allocates its arrays again in every step. By default, glibc
  returns the memory of large arrays to the kernel. The next step requests the
  memory again, and the kernel clears each page, which takes up to half of the
  time of a step. With these settings, the process holds its peak memory until
  it ends.

  Call this function before other threads start. Environment variables MALLOC_*
  of the user take precedence.

  Returns:
    True if the C library is glibc and accepted all settings.
  """
  # Other C libraries have no mallopt.
  try:
    mallopt = ctypes.CDLL("libc.so.6").mallopt
  except (OSError, AttributeError):
    return False
  settings = {
    _TRIM_THRESHOLD: -1,  # Never shrink the heap,
    _TOP_PAD: 1 << 28,  # grow it by 256 MiB at a time,
    _MMAP_MAX: 0,  # have large arrays on it too,
    _ARENA_MAX: 1,  # and let all threads share it.
  }
  # Build a list, so that all settings are tried even if one is refused.
  return all(
    [
      mallopt(parameter, value) == 1
      for parameter, value in settings.items()
      if _VARIABLES[parameter] not in os.environ
    ]
  )
