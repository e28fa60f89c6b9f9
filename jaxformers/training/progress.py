"""Progress of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import collections
import contextlib
import sys
import time
from collections.abc import Iterator

from tqdm import tqdm

from jaxformers.training import processes

SILENCE = 30.0  # Seconds without a line after which a log file gets one.
RECENT = 100  # Ticks whose speed is shown: short examples make fast steps.


def line(text: str) -> None:
  """Writes a line to stderr; only the first process of a run does."""
  if processes.is_first():
    print(text, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
  """Returns seconds as hours, minutes and seconds: 3671 as "1:01:11"."""
  minutes, seconds = divmod(round(seconds), 60)
  return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


class Clock:
  """Measures the time of steps, without compilation, evaluation and saving.

  Attributes:
    seconds: total time of the measured steps.
  """

  def __init__(self) -> None:
    self.seconds, self._since = 0.0, 0.0
    # Seconds and steps at the last ticks.
    self._ends = collections.deque([(0.0, 0)], RECENT + 1)

  def tick(self, step: int) -> None:
    """Counts the steps up to `step`. The first call only starts the clock."""
    now = time.perf_counter()
    if self._since:
      self.seconds += now - self._since
    else:
      self._ends.clear()
    self._ends.append((self.seconds, step))
    self._since = now

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Excludes the time of a block from the measurement."""
    # Shift the start of the current step by the time of the block.
    began = time.perf_counter()
    yield
    if self._since:
      self._since += time.perf_counter() - began

  def rate(self) -> float:
    """Returns steps per second of the last `RECENT` ticks; 0 before any."""
    (began, first), (ended, last) = self._ends[0], self._ends[-1]
    return (last - first) / (ended - began) if ended > began else 0.0

  def eta(self, steps: int) -> str:
    """Returns the time that `steps` more steps will take, as text."""
    return duration(steps / self.rate()) if self.rate() else "?"


class Progress:
  """Shows the progress of a run on stderr.

  On a terminal it shows a progress bar. Elsewhere it prints one line per log
  entry, or one after `SILENCE` seconds without any, so that a log file stays
  readable. Only the first of several processes shows anything.

  Args:
    total: last step.
    step: step at which the run starts.
    title: text before the bar.
    unit: name of what is counted, in the singular.
  """

  def __init__(
    self, total: int, step: int, title: str, unit: str = "step"
  ) -> None:
    self.clock = Clock()
    self._total, self._title, self._unit = total, title, unit
    self._line_time = time.perf_counter()
    self._quiet = not processes.is_first()
    self._is_terminal = sys.stderr.isatty() and not self._quiet
    self._bar = tqdm(
      total=total,
      initial=step,
      desc=title,
      disable=not self._is_terminal,
      dynamic_ncols=True,
      bar_format="{desc} {percentage:3.0f}%|{bar}| {n}/{total}{postfix}",
    )

  def __enter__(self) -> Progress:
    return self

  def __exit__(self, *_: object) -> None:
    self._bar.close()

  def update(self, step: int, batch_size: int) -> None:
    """Shows that all steps up to `step` are finished."""
    self.clock.tick(step)
    # tqdm redraws the bar at most ten times per second.
    self._bar.n = step
    speed = self.speed(step, batch_size)
    if self.clock.rate():
      self._bar.set_postfix_str(speed, refresh=False)
    self._bar.update(0)
    self.show_alive(
      f"{self._title}: {self._unit} {step}/{self._total}  {speed}"
    )

  def speed(self, step: int, batch_size: int) -> str:
    """Returns examples per second and the remaining time, as text."""
    rate = self.clock.rate() * batch_size
    return f"{rate:,.0f} examples/s, ETA {self.clock.eta(self._total - step)}"

  def line(self, text: str) -> None:
    """Writes a line; on a terminal, above the bar."""
    self._line_time = time.perf_counter()
    if self._is_terminal:
      self._bar.write(text, file=sys.stderr)
    elif not self._quiet:
      print(text, file=sys.stderr, flush=True)

  def show_alive(self, text: str) -> None:
    """Writes a line if a log file got none for `SILENCE` seconds."""
    is_silent = time.perf_counter() > self._line_time + SILENCE
    if is_silent and not self._is_terminal:
      self.line(text)

  @contextlib.contextmanager
  def phase(self, name: str) -> Iterator[None]:
    """Shows the name of a phase other than training, and stops the clock."""
    with self.clock.paused():
      if self._is_terminal:
        self._bar.set_postfix_str(name, refresh=True)
      yield
