"""Memory that arrays free is used again."""

import ctypes
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, threading

from jaxformers.foundations.allocator import keep_freed_memory

if sys.argv[1] == "keep":
  assert keep_freed_memory()

def work():
  for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arrays = [bytearray(b"x") * (1 << 23) for _ in range(2)]
    del arrays
  print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def count_faults(mode):
  run = [sys.executable, "-c", FAULTS, mode]
  return int(subprocess.run(run, check=True, capture_output=True).stdout)


@pytest.mark.skipif(
  not hasattr(ctypes.CDLL(None), "mallopt"),
  reason="The C library has no mallopt.",
)
@pytest.mark.slow
def test_allocator_keep_reuses_freed_memory():
  assert count_faults("keep") < 100 < count_faults("default")
