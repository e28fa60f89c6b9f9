"""Signals that end a run: noted between steps, and given back after it."""

import os
import signal
import threading

import pytest

from jaxformers.training.preemption import Preemption


@pytest.fixture(autouse=True)
def hears_ctrl_c():
  """Python's own handler, also where tests run in a shell's background."""
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_preemption_notes_a_signal_and_restores_the_handler(number, capfd):
  before = signal.getsignal(number)
  with Preemption() as preemption:
    assert preemption.stop_signal(1) == 0
    os.kill(os.getpid(), number)
    assert preemption.stop_signal(2) == number
  assert signal.getsignal(number) is before
  told = "Saving after this step; Ctrl-C again stops at once."
  assert (told in capfd.readouterr().err) == (number == signal.SIGINT)


def test_preemption_raises_at_a_second_ctrl_c():
  with Preemption(), pytest.raises(KeyboardInterrupt):
    for _ in range(2):
      os.kill(os.getpid(), signal.SIGINT)


def test_preemption_leaves_an_ignored_signal_ignored():
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  with Preemption() as preemption:
    os.kill(os.getpid(), signal.SIGINT)
    assert preemption.stop_signal(1) == 0


def test_preemption_in_another_thread_takes_no_signals():
  noted = []

  def enter():
    with Preemption():
      noted.append(signal.getsignal(signal.SIGTERM))

  thread = threading.Thread(target=enter)
  thread.start()
  thread.join()
  assert noted == [signal.getsignal(signal.SIGTERM)]
