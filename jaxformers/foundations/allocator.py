"""Settings of the C library for memory that was freed."""

from __future__ import annotations

import ctypes
import os

# Parameters of glibc's mallopt (malloc.h), with the environment variables that
# set them too.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
_VARIABLES = {
  _TRIM_THRESHOLD: "MALLOC_TRIM_THRESHOLD_",
  _TOP_PAD: "MALLOC_TOP_PAD_",
  _MMAP_MAX: "MALLOC_MMAP_MAX_",
  _ARENA_MAX: "MALLOC_ARENA_MAX",
}


def keep_freed_memory() -> bool:
  """Keeps memory of freed arrays in the process, for the arrays that follow.

  XLA on CPUs allocates its arrays anew in every step. glibc returns large
  arrays to the kernel. The next step asks for the memory again, and the kernel
  clears each page: up to half of the time of a step. Call it before other
  threads start. The process holds its greatest memory until it ends.

  Environment variables MALLOC_* of the user take precedence.

  Returns:
    True if the C library is glibc and took the settings.
  """
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
  # A list, so that one setting that is refused does not leave out the others.
  return all(
    [
      mallopt(parameter, value) == 1
      for parameter, value in settings.items()
      if _VARIABLES[parameter] not in os.environ
    ]
  )
