"""launch/local.sh: processes that are started, watched and started again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

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


def test_local_script_sets_the_environment_of_every_process(tmp_path):
  code = (
    "import os; rank = os.environ['JAX_PROCESS_ID']; "
    f"open('{tmp_path}/' + rank, 'w').write(' '.join(os.environ[k] for k in "
    "('JAX_NUM_PROCESSES', 'JAX_COORDINATOR_ADDRESS', 'XLA_FLAGS')))"
  )
  assert run("3", "--devices", "2", code=code).returncode == 0
  environments = {p.name: p.read_text().split() for p in tmp_path.iterdir()}
  assert sorted(environments) == ["0", "1", "2"]
  assert len({tuple(words) for words in environments.values()}) == 1
  assert environments["0"][0] == "3"
  assert environments["0"][-1] == "--xla_force_host_platform_device_count=2"


def test_local_script_dry_run_prints_and_runs_nothing(tmp_path):
  code = f"open('{tmp_path}/ran', 'w')"
  ran = run("2", "--dry_run", code=code)
  assert ran.returncode == 0
  lines = ran.stdout.splitlines()
  assert [line.split()[2] for line in lines] == [
    "JAX_PROCESS_ID=0",
    "JAX_PROCESS_ID=1",
  ]
  assert not (tmp_path / "ran").exists()


def test_local_script_restarts_all_processes_when_one_dies(tmp_path):
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
  assert "ended with 137" in ran.stderr
  assert time.monotonic() - began < 30


def test_local_script_stops_after_its_restarts():
  ran = run("2", "--restarts", "1", code="import sys; sys.exit(7)")
  assert ran.returncode == 7
  assert "2 times, at last with 7" in ran.stderr


def test_local_script_does_not_restart_a_wrong_command():
  ran = run("2", code="import sys; sys.exit(2)")
  assert ran.returncode == 2
  assert ran.stderr == ""


@pytest.mark.parametrize("arguments", [[], ["0"], ["two"], ["2"], ["2", "--x"]])
def test_local_script_prints_usage_for_wrong_arguments(arguments):
  ran = run(*arguments)
  assert ran.returncode == 2
  assert "usage: launch/local.sh N" in ran.stderr


@pytest.mark.parametrize("option", ["--devices", "--restarts", "--grace"])
@pytest.mark.parametrize("value", ["abc", "", "-1", "1.5", "010", "9" * 20])
def test_local_script_refuses_options_that_are_no_numbers(
  tmp_path, option, value
):
  ran = run("2", option, value, code=f"open('{tmp_path}/ran', 'w')")
  assert ran.returncode == 2
  assert f"{option} '{value}'" in ran.stderr
  assert ran.stderr.count("\n") == 1
  assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("option", ["--devices", "--restarts", "--grace"])
def test_local_script_does_not_evaluate_numbers(tmp_path, option):
  value = f"a[$(touch {tmp_path}/injected)]"
  assert run("2", option, value, code="raise SystemExit(1)").returncode == 2
  assert not (tmp_path / "injected").exists()


RANK = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
name = os.environ["JAX_PROCESS_ID"]
def save(*_):
  (folder / ("told" + name)).touch()
  if sys.argv[2] == "ends":
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
(folder / (name + ".staged")).write_text(str(os.getpid()))
(folder / (name + ".staged")).rename(folder / name)
while not (folder / "told0").exists() or sys.argv[2] == "stays":
  time.sleep(0.05)
sys.exit(143)
"""


def lives(pid):
  try:
    status = Path(f"/proc/{pid}/stat").read_text()
  except OSError:
    return False
  return status.rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def ranks(tmp_path):
  """A function that starts two ranks: the script, and their process ids."""
  started, pids = [], []

  def start(script, kind):
    command = (str(script), "2", "--", sys.executable, "-c", RANK)
    # A shell's background, where tests may run, ignores Ctrl-C, and nohup the
    # end of the terminal; a script that starts so cannot undo it.
    before = {
      number: signal.signal(number, handler)
      for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
      )
    }
    process = subprocess.Popen([*command, str(tmp_path), kind])
    for number, handler in before.items():
      signal.signal(number, handler)
    started.append(process)
    while not all((tmp_path / name).exists() for name in "01"):
      assert process.poll() is None
      time.sleep(0.02)
    pids.extend(int((tmp_path / name).read_text()) for name in "01")
    return process, pids

  yield start
  for process in started:
    process.kill()
    process.wait()
  for pid in filter(lives, pids):
    os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux")
@pytest.mark.parametrize("kind", ["ends", "stays"])
def test_local_script_killed_leaves_no_process(tmp_path, ranks, kind):
  """All are told, and killed if that does not end them in time."""
  script = tmp_path / "local.sh"
  script.write_text(SCRIPT.read_text().replace("HOLD=120", "HOLD=1"))
  script.chmod(0o755)
  process, pids = ranks(script, kind)
  for pid in pids:  # No rank holds the guard's pipe open, nor any other.
    links = [os.readlink(p) for p in Path(f"/proc/{pid}/fd").glob("[3-9]*")]
    assert not [link for link in links if link.startswith("pipe:")]
  process.kill()
  until = time.monotonic() + 20
  while any(map(lives, pids)):
    assert time.monotonic() < until
    time.sleep(0.05)
  assert {p.name for p in tmp_path.glob("told*")} == {"told0", "told1"}


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_local_script_lets_processes_save_at_hangup_and_ctrl_c(
  tmp_path, ranks, number
):
  process, pids = ranks(SCRIPT, "ends")
  for pid in pids:
    if number == signal.SIGHUP:  # It goes to all.
      os.kill(pid, number)
  process.send_signal(number)
  assert process.wait(20) == 143
  assert (tmp_path / "told0").exists()
  assert not any(map(lives, pids))


def test_local_script_passes_sigterm_to_the_first_process(tmp_path):
  """JAX passes a signal on: only the first process gets it from the script."""
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
