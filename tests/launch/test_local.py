"""launch/local.sh: processes that are started, watched and started again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "launch" / "local.sh"


def run(*arguments, code="", **options):
  command = [sys.executable, "-c", code] if code else []
  return subprocess.run(
    [str(SCRIPT), *arguments, *(("--", *command) if code else ())],
    capture_output=True,
    text=True,
    timeout=60,
    check=False,
    **options,
  )


def test_every_process_knows_its_place(tmp_path):
  code = (
    "import os; rank = os.environ['JAX_PROCESS_ID']; "
    f"open('{tmp_path}/' + rank, 'w').write(' '.join(os.environ[k] for k in "
    "('JAX_NUM_PROCESSES', 'JAX_COORDINATOR_ADDRESS', 'XLA_FLAGS')))"
  )
  assert run("3", "--devices", "2", code=code).returncode == 0
  found = {p.name: p.read_text().split() for p in tmp_path.iterdir()}
  assert sorted(found) == ["0", "1", "2"]
  assert len({tuple(words) for words in found.values()}) == 1
  assert found["0"][0] == "3"
  assert found["0"][-1] == "--xla_force_host_platform_device_count=2"


def test_a_dry_run_prints_and_runs_nothing(tmp_path):
  code = f"open('{tmp_path}/ran', 'w')"
  ran = run("2", "--dry_run", code=code)
  assert ran.returncode == 0
  lines = ran.stdout.splitlines()
  assert [line.split()[2] for line in lines] == [
    "JAX_PROCESS_ID=0",
    "JAX_PROCESS_ID=1",
  ]
  assert not (tmp_path / "ran").exists()


def test_when_one_dies_the_others_are_ended_and_all_start_again(tmp_path):
  """The second start finds what the first left, and ends well."""
  code = (
    "import os, pathlib, signal, sys, time; "
    f"mark = pathlib.Path('{tmp_path}/mark'); again = mark.exists(); "
    "rank = os.environ['JAX_PROCESS_ID']; "
    "sys.exit() if again else None; "
    "time.sleep(60) if rank == '0' else time.sleep(0.5); mark.touch(); "
    "os.kill(os.getpid(), signal.SIGKILL)"
  )
  began = time.monotonic()
  ran = run("2", "--grace", "1", code=code)
  assert ran.returncode == 0
  assert "a process ended with 137; starting all again" in ran.stderr
  assert time.monotonic() - began < 30


def test_it_gives_up_and_says_so():
  ran = run("2", "--restarts", "1", code="import sys; sys.exit(7)")
  assert ran.returncode == 7
  assert "ended 2 times, at last with 7" in ran.stderr


def test_a_wrong_command_is_not_tried_again():
  ran = run("2", code="import sys; sys.exit(2)")
  assert ran.returncode == 2
  assert ran.stderr == ""


@pytest.mark.parametrize("arguments", [[], ["0"], ["two"], ["2"], ["2", "--x"]])
def test_how_it_is_used(arguments):
  ran = run(*arguments)
  assert ran.returncode == 2
  assert "usage: launch/local.sh N" in ran.stderr


def test_a_signal_goes_to_a_process_and_ends_all(tmp_path):
  """As JAX has it: the first is told, and the others end with it."""
  code = (
    "import os, pathlib, signal, sys, time\n"
    f"told = pathlib.Path('{tmp_path}/told')\n"
    "signal.signal(signal.SIGTERM, lambda *_: told.touch())\n"
    f"pathlib.Path('{tmp_path}/' + os.environ['JAX_PROCESS_ID']).touch()\n"
    "while not told.exists(): time.sleep(0.05)\n"
    "sys.exit(143)"
  )
  with subprocess.Popen(
    [str(SCRIPT), "2", "--", sys.executable, "-c", code],
    stderr=subprocess.PIPE,
    text=True,
  ) as process:
    while not all((tmp_path / name).exists() for name in "01"):
      time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    _, stderr = process.communicate(timeout=30)
  assert process.returncode == 143
  assert "starting" not in stderr
