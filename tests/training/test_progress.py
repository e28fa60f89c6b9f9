import time

from jaxformers.training import progress


def test_duration_is_hours_minutes_seconds():
  assert progress.duration(3671.4) == "1:01:11"
  assert progress.duration(59.6) == "0:01:00"


def test_clock_leaves_out_compiling_and_pauses(monkeypatch):
  now = [100.0]
  monkeypatch.setattr(time, "perf_counter", lambda: now[0])
  clock = progress.Clock()
  assert (clock.rate(), clock.eta(5)) == (0.0, "?")
  now[0] += 50  # Compiling.
  clock.tick(7)
  for step in range(8, 12):
    now[0] += 2
    clock.tick(step)
  with clock.paused():
    now[0] += 1_000  # Evaluating.
  now[0] += 2
  clock.tick(12)
  assert (clock.seconds, clock.rate()) == (10.0, 0.5)
  assert clock.eta(30) == "0:01:00"


def test_remaining_time_follows_the_last_steps(monkeypatch):
  now = [100.0]
  monkeypatch.setattr(time, "perf_counter", lambda: now[0])
  clock = progress.Clock()
  # Short examples come first, and their steps take a tenth of the time.
  times = [0.0] + [0.1] * 500 + [1.0] * progress.RECENT
  for step, seconds in enumerate(times):
    now[0] += seconds
    clock.tick(step)
  assert clock.eta(60) == "0:01:00"


def test_remaining_time_counts_all_examples_of_a_batch(monkeypatch):
  now = [100.0]
  monkeypatch.setattr(time, "perf_counter", lambda: now[0])
  with progress.Progress(1_000, 0, "test", unit="example") as shown:
    for examples in (40, 80, 120):
      now[0] += 2.0
      shown.update(examples, batch_size=1)
    assert shown.speed(120, batch_size=1) == "20 examples/s, ETA 0:00:44"


def test_progress_prints_lines_without_a_terminal(capsys):
  with progress.Progress(10, 0, "title") as shown:
    shown.update(1, 4)
    shown.line("step 1")
    with shown.phase("validation"):
      pass
  assert capsys.readouterr().err == "step 1\n"


def test_progress_shows_a_bar_on_a_terminal(capsys, monkeypatch):
  monkeypatch.setattr("sys.stderr.isatty", lambda: True)
  with progress.Progress(10, 2, "title") as shown:
    for step in (3, 4, 5):
      time.sleep(0.12)
      shown.update(step, 4)
    shown.line("a line")
  shown = capsys.readouterr().err
  assert "5/10" in shown
  assert "examples/s, ETA 0:00:" in shown
  assert "a line\n" in shown


def test_progress_prints_regularly_to_a_log_file(capsys, monkeypatch):
  now = [100.0]
  monkeypatch.setattr(time, "perf_counter", lambda: now[0])
  with progress.Progress(10, 0, "s5 on text") as shown:
    shown.update(1, 4)
    now[0] += progress.SILENCE + 1
    shown.update(2, 4)
    shown.update(3, 4)
    now[0] += progress.SILENCE + 1
    shown.show_alive("validation: 5/10 examples")
  first, second = capsys.readouterr().err.splitlines()
  assert first.startswith("s5 on text: step 2/10  ")
  assert second == "validation: 5/10 examples"
