import os

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
