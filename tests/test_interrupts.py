import os
import subprocess
import sys

import pytest

from jaxformers import interrupts


def test_one_line_and_the_status_of_ctrl_c(monkeypatch, capsys):
  def leave(status):
    raise SystemExit(status)

  monkeypatch.setattr(os, "_exit", leave)
  with pytest.raises(SystemExit) as stopped:
    interrupts.leave("it goes on.")
  assert stopped.value.code == 130
  said = capsys.readouterr().err
  assert said == "\nInterrupted. Run the same command again: it goes on.\n"


@pytest.mark.parametrize("command", ["--help", "models"])
def test_a_reader_that_goes_away_is_no_error(command):
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
