"""Commands end with the sweep, save first, and tell their status."""

import os
import signal
import subprocess
import sys
import time

import pytest

from jaxformers.sweep import commands

RUN = """
import os, pathlib, signal, sys, time

here = pathlib.Path(__file__).parent

def save(*_):
  time.sleep(0.2)
  (here / "saved").touch()
  sys.exit(143)

signal.signal(signal.SIGTERM, save)
staged = here / "staged"  # Who waits for the file reads it whole.
staged.write_text(os.environ.get("JAX_LOCAL_DEVICE_IDS", ""))
staged.rename(here / "began")
time.sleep(60)
"""


@pytest.mark.parametrize(
  ("number", "saves"),
  [
    (signal.SIGTERM, True),
    (signal.SIGTERM, False),
    pytest.param(signal.SIGHUP, True, marks=pytest.mark.long),
    (signal.SIGKILL, True),
  ],
)
@pytest.mark.slow
def test_sweep_passes_a_signal_to_its_run_and_ends(tmp_path, number, saves):
  """The sweep waits for a run that saves, and for one that does not."""
  (tmp_path / "run.py").write_text(
    RUN if saves else RUN.replace("signal.signal", "#")
  )
  code = (
    "import sys; from jaxformers.sweep import commands; "
    f"commands.call([sys.executable, {str(tmp_path / 'run.py')!r}]); "
    f"open({str(tmp_path / 'went on')!r}, 'w').close()"
  )
  env = os.environ | {"PYTHONPATH": "."}
  with subprocess.Popen([sys.executable, "-c", code], env=env) as process:
    while not (tmp_path / "began").exists():
      assert process.poll() is None
      time.sleep(0.02)
    process.send_signal(number)
    assert process.wait() == (-9 if number == signal.SIGKILL else 143)
  until = time.monotonic() + (5 if number == signal.SIGKILL else 0)
  while not (tmp_path / "saved").exists() and time.monotonic() < until:
    time.sleep(0.05)
  assert (tmp_path / "saved").exists() == saves
  assert not (tmp_path / "went on").exists()


@pytest.mark.slow
def test_job_checkpoint_saves_and_resubmits(tmp_path, monkeypatch):
  (tmp_path / "run.py").write_text(RUN)
  job = commands.Job([sys.executable, str(tmp_path / "run.py")])
  monkeypatch.setenv("SLURM_GPUS_ON_NODE", "3")

  def time_is_up(*_):
    submissions.append(job.checkpoint())

  submissions = []
  before = signal.signal(signal.SIGUSR2, time_is_up)
  code = (
    "import os, pathlib, signal, time\n"
    f"while not pathlib.Path({str(tmp_path / 'began')!r}).exists(): "
    "time.sleep(0.02)\n"
    f"os.kill({os.getpid()}, signal.SIGUSR2)"
  )
  # A job that is stopped has no result.
  with (
    subprocess.Popen([sys.executable, "-c", code]),
    pytest.raises(SystemExit),
  ):
    job()
  signal.signal(signal.SIGUSR2, before)
  assert (tmp_path / "saved").exists()
  assert (tmp_path / "began").read_text() == "0,1,2"  # Its devices.
  assert submissions[0].function.command == job.command


@pytest.mark.parametrize("status", [0, 1, 2])
def test_call_returns_the_status_of_a_command(status):
  code = f"raise SystemExit({status})"
  assert commands.call([sys.executable, "-c", code]) == status


def test_call_exits_after_a_terminated_command():
  with pytest.raises(SystemExit, match="143"):
    commands.call([sys.executable, "-c", "raise SystemExit(143)"])
