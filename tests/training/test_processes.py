"""Clusters of processes: who they are, and what one of them alone does."""

import re
import subprocess
import sys
import types

import numpy as np
import pytest

from jaxformers.training import processes


def test_find_cluster_reads_flags_then_environment():
  environ = {
    "JAX_COORDINATOR_ADDRESS": "host:1",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "3",
  }
  cluster = processes.find_cluster(environ)
  assert (cluster.coordinator, cluster.num_processes, cluster.process_id) == (
    "host:1",
    4,
    3,
  )
  cluster = processes.find_cluster(environ, process_id=0, num_processes=-1)
  assert (cluster.num_processes, cluster.process_id) == (4, 0)
  assert processes.find_cluster({}) == processes.Cluster()


@pytest.mark.parametrize(
  ("environ", "flags", "message"),
  [
    ({}, {"process_id": 1}, "--process_id.*--coordinator --num_processes"),
    (
      {"JAX_PROCESS_ID": "one"},
      {},
      "JAX_PROCESS_ID='one'.*integer",
    ),
    (
      {},
      {"coordinator": "a:1", "num_processes": 2, "process_id": 2},
      "--process_id=2.*0 to 1",
    ),
  ],
)
def test_find_cluster_refuses_wrong_values(environ, flags, message):
  with pytest.raises(ValueError, match=message):
    processes.find_cluster(environ, **flags)


def test_process_functions_of_a_single_process():
  assert processes.is_first()
  assert not processes.has_peers()
  assert processes.broadcast_from_first(True)
  assert not processes.broadcast_from_first(False)
  assert processes.all_true(True)
  assert not processes.all_true(False)
  processes.wait_for_all("here")


class Sync:
  """JAX's rule: all stop at the step after the last one asked for.

  A notice that comes before any step asks to stop at step 1.
  """

  def __init__(self):
    self.asked, self.stop = 0, None

  def notice(self):
    self.stop = self.asked + 1

  def reached_preemption_sync_point(self, step):
    self.asked = step
    return step == self.stop


@pytest.mark.parametrize(
  ("last", "before", "steps", "stops"),
  [
    (0, True, (1,), 1),
    (0, True, (5_001,), 5_001),  # A resumed run, before its first step.
    (0, False, (5_001, 5_002), 5_002),
    (70, True, (1,), 1),  # The next seed.
    (70, False, (71, 72), 72),
  ],
)
def test_a_signal_stops_the_run_after_the_step(
  monkeypatch, last, before, steps, stops
):
  sync = Sync()
  sync.asked = last
  monkeypatch.setattr(processes, "multihost_utils", sync)
  monkeypatch.setattr(processes, "_last_step", last)
  if before:
    sync.notice()
  for step in steps:
    assert processes.is_stop_requested(step) == (step == stops)
    if not before:
      sync.notice()


def test_least_is_the_size_of_the_smallest_device(monkeypatch):
  assert processes.least(12_345) == 12_345
  monkeypatch.setattr(processes, "has_peers", lambda: True)
  others = [7 * 2**10, 9 * 2**10]  # In MiB.
  gathering = types.SimpleNamespace(
    process_allgather=lambda size: np.array([size, *others])
  )
  monkeypatch.setattr(processes, "multihost_utils", gathering)
  assert processes.least(80 * 2**30) == 7 * 2**30


def test_explain_lost_recognises_a_lost_process():
  lost = "UNKNOWN: Gloo AllGather failed: Connection closed by peer [127.0.0.1]"
  assert "process 0 has lost another" in processes.explain_lost(
    ValueError(lost)
  )
  assert not processes.explain_lost(ValueError("batch_size=0"))
  nowhere = "Gloo ...: Connection refused, remote=[127.0.0.1]:21923"
  assert "see /etc/hosts" in processes.explain_lost(ValueError(nowhere))


@pytest.mark.slow
def test_library_output_is_kept_from_stdout():
  code = """
import os
from jaxformers.training import processes
os.write(1, b"before\\n")
processes.hide_lines(b"[Gloo]")
os.write(1, b"[Gloo] Rank 0 is connected to 1 peer ranks.\\n")
print("of Python")
os.write(1, b"[Gloo] Rank 0 is connected to 1 peer ranks.\\nof C\\n")
import time
time.sleep(0.5)
"""
  done = subprocess.run(
    [sys.executable, "-c", code], check=True, capture_output=True, text=True
  )
  assert sorted(done.stdout.split("\n")) == ["", "before", "of C", "of Python"]


def test_require_same_names_a_field_that_differs():
  one = {"config.eval_steps": 25, "code": "a", "data train": "x"}
  assert processes.differing([one, dict(one), one]) == []
  other = one | {"config.eval_steps": 50}
  (line,) = processes.differing([one, one, other])
  assert re.search("config.eval_steps .*25.*process 0.*50.*process 2", line)
  (line,) = processes.differing([one, one | {"more": 1}])
  assert re.search("more .*'absent'.*process 0.*1 in process 1", line)
  processes.require_same(one)  # Alone, there is nothing to compare with.


@pytest.mark.parametrize("coordinator", ["x", "host:", "host:port", ":"])
def test_find_cluster_refuses_a_coordinator_without_port(coordinator):
  flags = {"coordinator": coordinator, "num_processes": 2, "process_id": 0}
  with pytest.raises(
    ValueError, match=f"--coordinator={coordinator} .*host:port"
  ):
    processes.find_cluster({}, **flags)
