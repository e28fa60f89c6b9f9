import os
import subprocess
import sys

import pytest

from jaxformers.foundations import interrupts


def test_leave_prints_one_line_and_exits_with_130(monkeypatch, capsys):
  def leave(status):
    raise SystemExit(status)

  monkeypatch.setattr(os, "_exit", leave)
  with pytest.raises(SystemExit) as stopped:
    interrupts.leave("it goes on.")
  assert stopped.value.code == 130
  said = capsys.readouterr().err
  assert said == "\nInterrupted. Run the same command again: it goes on.\n"


@pytest.mark.parametrize("command", ["--help", "models"])
@pytest.mark.slow
def test_command_ends_quietly_at_a_broken_pipe(command):
  done = subprocess.run(
    [
      "bash",
      "-c",
      f'"$0" -m jaxformers {command} | true; echo "${{PIPESTATUS[0]}}"',
      sys.executable,
    ],
    capture_output=True,
    text=True,
    check=True,
  )
  assert done.stderr == ""
  assert done.stdout.strip() in ("0", "141")


INTERRUPTED = """
import importlib, os, signal, sys, threading, time
sys.argv = ["jaxformers", *{arguments!r}]
from jaxformers.commands import console
def stop():
  # Python loses an interrupt that a destructor receives: press again.
  for pause in ({seconds}, 15):
    time.sleep(pause)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=stop, daemon=True).start()
console.console()
time.sleep(60)
"""


@pytest.mark.parametrize("arguments", [["models"], ["rank"], ["bounds"]])
@pytest.mark.parametrize("seconds", [0.1, 1.5])
@pytest.mark.slow
def test_ctrl_c_in_a_command_is_one_line(arguments, seconds):
  """While modules are imported, and while the command computes."""
  code = INTERRUPTED.format(arguments=arguments, seconds=seconds)
  done = subprocess.run(
    [sys.executable, "-c", code],
    capture_output=True,
    text=True,
    check=False,
    timeout=50,
  )
  if done.returncode == 130:
    assert done.stderr.endswith("Interrupted.\n")
    assert len(done.stderr.splitlines()) < 5
    assert "Traceback" not in done.stderr


def test_output_escapes_letters_outside_the_locale():
  code = (
    "from jaxformers.foundations import interrupts\n"
    "with interrupts.closed_pipe():\n  print('\\xb1 \\udcff')"
  )
  done = subprocess.run(
    [sys.executable, "-c", code],
    env=os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
    capture_output=True,
    text=True,
    check=True,
  )
  assert done.stdout == "\\xb1 \\udcff\n"
