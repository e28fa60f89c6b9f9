"""Groups of processes: who they are, and what one of them alone does."""

import pytest

from jaxformers.training import processes


def test_a_group_is_of_flags_then_of_the_environment():
  environ = {
    "JAX_COORDINATOR_ADDRESS": "host:1",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "3",
  }
  found = processes.group(environ)
  assert (found.coordinator, found.num_processes, found.process_id) == (
    *("host:1", 4, 3),
  )
  found = processes.group(environ, process_id=0, num_processes=-1)
  assert (found.num_processes, found.process_id) == (4, 0)
  assert processes.group({}) == processes.Group()


@pytest.mark.parametrize(
  ("environ", "flags", "message"),
  [
    ({}, {"process_id": 1}, "--process_id without --coordinator --num_proc"),
    ({"JAX_PROCESS_ID": "one"}, {}, "JAX_PROCESS_ID='one' is no number"),
    (
      {},
      {"coordinator": "a:1", "num_processes": 2, "process_id": 2},
      "--process_id=2 is not in 0 to 1",
    ),
  ],
)
def test_what_is_no_group(environ, flags, message):
  with pytest.raises(ValueError, match=message):
    processes.group(environ, **flags)


def test_one_process_agrees_with_itself():
  assert processes.is_first()
  assert not processes.is_together()
  assert processes.agreed(True)
  assert not processes.agreed(False)
  processes.wait("here")


def test_the_loss_of_another_process_is_told_from_other_errors():
  lost = "UNKNOWN: Gloo AllGather failed: Connection closed by peer [127.0.0.1]"
  assert "process 0 has lost another" in processes.lost(ValueError(lost))
  assert not processes.lost(ValueError("batch_size=0"))
  nowhere = "Gloo ...: Connection refused, remote=[127.0.0.1]:21923"
  assert "see /etc/hosts" in processes.lost(ValueError(nowhere))
