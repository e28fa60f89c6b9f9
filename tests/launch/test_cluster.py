"""Runs of several real processes: their numbers, and their failures.

All but the first take minutes and run on request:

pytest --long -n 0 tests/launch/test_cluster.py
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxformers.foundations import workdirs
from tests.marks import FAST_COMPILE

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EVENTS = int(os.environ.get("JAXFORMERS_RESTARTS", "20"))
FIELDS = {
  "total_steps": 12,
  "log_steps": 1,
  "eval_steps": 6,
  "checkpoint_steps": 3,
  "batch_size": 8,
  "eval_batch_size": 8,
  "buckets": 1,
  "task.num_train": 256,
  "task.num_validation": 16,
  "task.num_test": 16,
  "task.min_length": 5,
  "task.max_length": 67,  # Of which the longest are of 64 tokens.
  "schedule.warmup_steps": 3,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
  return tmp_path_factory.mktemp("data")


def command(workdir, data, *flags, **fields):
  return [
    sys.executable,
    "-m",
    "jaxformers.main",
    "--config",
    "configs/lra/listops.py:size=tiny",
    *(f"--config.{key}={value}" for key, value in (FIELDS | fields).items()),
    f"--config.data_dir={data}",
    f"--workdir={workdir}",
    *flags,
  ]


def environment(devices=1, **variables):
  flags = [
    FAST_COMPILE,
    f"--xla_force_host_platform_device_count={devices}",
  ]
  return os.environ | {
    "JAX_COMPILATION_CACHE_DIR": os.path.expanduser(
      "~/.cache/jaxformers/tests"
    ),
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
    "JAX_PLATFORMS": "cpu",
    "NPROC": "16",
    "PYTHONPATH": str(ROOT),
    "XLA_FLAGS": " ".join(flags),
    **variables,
  }


def launch(count, devices, *arguments):
  """Runs a command as so many processes, to the end."""
  done = subprocess.run(
    [str(ROOT / "launch" / "local.sh"), str(count), "--", *arguments],
    cwd=ROOT,
    env=environment(devices),
    capture_output=True,
    text=True,
    timeout=600,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  assert "[Gloo]" not in done.stdout + done.stderr
  return done


def curve(workdir):
  """The losses by step."""
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return {
    (row["step"], key): value
    for row in map(json.loads, lines)
    for key, value in row.items()
    if key.endswith("loss")
  }


def results(workdir):
  content = workdirs.read_results(workdir)
  differ = ("train_seconds", "wall_seconds", "config")
  return {key: value for key, value in content.items() if key not in differ}


def worst(workdir, other):
  """The greatest relative difference of two curves of the same steps."""
  a, b = curve(workdir), curve(other)
  assert a.keys() == b.keys()
  return max(abs(a[key] - b[key]) / a[key] for key in a)


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
  """The run of one process with one device."""
  workdir = tmp_path_factory.mktemp("runs") / "alone"
  launch(1, 1, *command(workdir, data))
  return workdir


@pytest.mark.long
def test_two_processes_sharing_sequences_train_as_one(alone, data, tmp_path):
  done = launch(2, 1, *command(tmp_path, data, "--config.mesh=sequence:2"))
  assert done.stdout.count("test accuracy") == 1  # One of them speaks.
  assert results(tmp_path)["hardware"]["devices"] == 2
  assert worst(alone, tmp_path) < 1e-5


@pytest.mark.long
def test_two_processes_under_pmap_sum_over_all_devices(alone, data, tmp_path):
  """By pmap, each of two processes maps two devices, and sums over all four."""
  mode = "--config.parallel=pmap"
  launch(2, 2, *command(tmp_path / "a", data, mode))
  assert results(tmp_path / "a")["hardware"]["devices"] == 4
  assert worst(alone, tmp_path / "a") < 1e-5
  # A checkpoint of both processes is whole: one process goes on from it.
  shutil.rmtree(tmp_path / "a" / "checkpoints" / "12")
  (tmp_path / "a" / "results.json").unlink()
  launch(1, 1, *command(tmp_path / "a", data, mode))
  assert worst(alone, tmp_path / "a") < 1e-5


@pytest.mark.long
def test_killed_process_ends_the_other_with_a_message(alone, data, tmp_path):
  """The other process ends within moments, even during a save."""
  script = str(ROOT / "launch" / "local.sh")
  with subprocess.Popen(
    [script, "2", "--", *command(tmp_path, data)],
    cwd=ROOT,
    env=environment(),
    stderr=subprocess.PIPE,
    text=True,
  ) as process:
    said = ""
    while "step 7/12" not in said:
      assert process.poll() is None, said
      said += process.stderr.readline()
    os.kill(children(process.pid)[1], signal.SIGKILL)
    said += process.stderr.read()
  assert process.returncode == 0, said
  assert said.count("has lost another process of this run") == 1
  assert restarts(said) == 1
  assert worst(alone, tmp_path) < 1e-5


def children(pid):
  """Returns the processes of a run that a launcher started, in order."""
  path = Path(f"/proc/{pid}/task/{pid}/children")
  return [
    child
    for child in map(int, path.read_text().split())
    if b"jaxformers.main" in Path(f"/proc/{child}/cmdline").read_bytes()
  ]


@pytest.mark.long
@pytest.mark.parametrize(
  ("count", "devices", "mesh"),
  [
    (1, 8, ""),
    (2, 4, ""),
    (4, 2, ""),
    (1, 8, "data:2,fsdp:4"),
    (1, 8, "data:2,model:4"),
    (2, 4, "data:2,sequence:2,model:2"),
    (4, 2, "fsdp:8"),
    (4, 2, "sequence:8"),
  ],
)
def test_training_curves_do_not_depend_on_processes_and_devices(
  alone, data, tmp_path, count, devices, mesh
):
  launch(count, devices, *command(tmp_path, data, f"--config.mesh={mesh}"))
  difference = worst(alone, tmp_path)
  print(f"{count} x {devices} {mesh or 'data:8'}: {difference:.1e}")
  assert difference < 1e-5


@pytest.mark.long
@pytest.mark.parametrize(
  ("count", "devices"), [(1, 1), (1, 2), (2, 1), (1, 4), (4, 1)]
)
def test_run_of_eight_devices_resumes_on_fewer(
  alone, data, tmp_path, count, devices
):
  stop = command(tmp_path, data)
  with subprocess.Popen(
    stop, cwd=ROOT, env=environment(8), stderr=subprocess.PIPE, text=True
  ) as process:
    said = ""
    while "step 5/12" not in said:
      said += process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    assert "SIGTERM: saved step" in process.stderr.read()
  done = launch(count, devices, *stop)
  assert "Resuming from step" in done.stderr
  assert worst(alone, tmp_path) < 1e-5


class Launched:
  """A launcher of four processes, and its output so far."""

  def __init__(self, log, arguments):
    self.path = log
    with log.open("w") as file:
      self.process = subprocess.Popen(
        [
          str(ROOT / "launch" / "local.sh"),
          "4",
          "--restarts",
          "1000",
          "--",
          *arguments,
          "--silence_seconds=10",
        ],
        cwd=ROOT,
        env=environment(),
        stderr=file,
      )

  def text(self):
    return self.path.read_text()

  def until(self, condition):
    """Waits until a condition on the output holds; False if the run ends."""
    while not condition(self.text()):
      if self.process.poll() is not None:
        return False
      time.sleep(0.05)
    return True


def begun(text):
  return text.count("First step done")


@pytest.mark.long
def test_run_with_random_failures_ends_as_an_undisturbed_one(data, tmp_path):
  """Processes are killed, asked to end, and suspended, at random."""
  steps = {"total_steps": 40 * EVENTS, "log_steps": 5, "checkpoint_steps": 7}
  steps |= {"eval_steps": 60}
  undisturbed, chaos = tmp_path / "undisturbed", tmp_path / "chaos"
  launch(4, 1, *command(undisturbed, data, **steps))
  rng, told = random.Random(0), []
  launched = Launched(tmp_path / "log", command(chaos, data, **steps))
  while len(told) < EVENTS:
    if rng.random() < 2 / 3:  # While they train.
      before = begun(launched.text())
      launched.until(lambda text: begun(text) > before)  # noqa: B023
      time.sleep(rng.uniform(0, 4))
    else:  # While they start.
      time.sleep(rng.uniform(0, 8))
    assert launched.process.poll() is None, "It has ended before all events."
    with contextlib.suppress(OSError, IndexError):
      kind = rng.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
      index = rng.randrange(4)
      os.kill(children(launched.process.pid)[index], kind)
      told.append((kind.name, index))
      launched.until(lambda text: restarts(text) >= len(told))
  assert launched.process.wait(600) == 0, launched.text()[-3000:]
  print(f"{len(told)} events: {told}")
  print(f"{restarts(launched.text())} restarts")
  assert restarts(launched.text()) >= EVENTS
  assert curve(chaos) == curve(undisturbed)
  assert results(chaos) == results(undisturbed)


def restarts(text):
  return text.count("starting all again")


@pytest.fixture
def hosts(tmp_path):
  """Two network namespaces with addresses and names of their own."""
  if os.geteuid() or shutil.which("ip") is None:
    pytest.skip("only root can make network namespaces")

  def ip(*words, check=True):
    subprocess.run(["ip", *words], check=check, capture_output=True)

  def clear():
    for k in (0, 1):
      ip("netns", "del", f"jf{k}", check=False)
      shutil.rmtree(f"/etc/netns/jf{k}", ignore_errors=True)
    ip("link", "del", "jfbridge", check=False)

  clear()
  ip("link", "add", "jfbridge", "type", "bridge")
  ip("link", "set", "jfbridge", "up")
  names = "127.0.0.1 localhost\n10.77.0.1 jf0\n10.77.0.2 jf1\n"
  for k in (0, 1):
    folder = Path(f"/etc/netns/jf{k}")
    folder.mkdir(parents=True)
    (folder / "hosts").write_text(names)
    ip("netns", "add", f"jf{k}")
    ip(
      "link",
      "add",
      f"jfv{k}",
      *["type", "veth", "peer", "name", "eth0", "netns"],
      f"jf{k}",
    )
    ip("link", "set", f"jfv{k}", "master", "jfbridge", "up")
    inside = ("-n", f"jf{k}")
    ip(*inside, "addr", "add", f"10.77.0.{k + 1}/24", "dev", "eth0")
    ip(*inside, "link", "set", "eth0", "up")
    ip(*inside, "link", "set", "lo", "up")

  def start(arguments):
    return [
      subprocess.Popen(
        [
          "ip",
          "netns",
          "exec",
          f"jf{k}",
          "unshare",
          "--uts",
          "bash",
          "-c",
          f'hostname jf{k}; exec "$@"',
          "bash",
          *arguments,
          "--coordinator=10.77.0.1:5000",
          "--num_processes=2",
          f"--process_id={k}",
          "--silence_seconds=10",
        ],
        cwd=ROOT,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
      )
      for k in (0, 1)
    ]

  yield start, lambda: ip("link", "set", "jfv1", "down")
  clear()


@pytest.mark.long
def test_processes_on_separate_addresses_train_together(
  alone, data, tmp_path, hosts
):
  start, _ = hosts
  processes = start(command(tmp_path, data))
  ends = [process.communicate(timeout=300)[1] for process in processes]
  assert [process.returncode for process in processes] == [0, 0], ends
  assert worst(alone, tmp_path) < 1e-5


@pytest.mark.long
def test_cut_network_ends_with_a_message(data, tmp_path, hosts):
  start, cut = hosts
  processes = start(command(tmp_path, data, total_steps=100_000))
  while "step 5/" not in processes[0].stderr.readline():
    assert processes[0].poll() is None
  cut()
  began = time.monotonic()
  ends = [process.communicate(timeout=60)[1] for process in processes]
  assert time.monotonic() - began < 30
  for k, said in enumerate(ends):
    last = said.strip().splitlines()[-1]
    assert last.startswith(f"error: process {k} (jf{k}) was ended by JAX")
    assert "Start all of them again" in last


@pytest.mark.parametrize(
  ("field", "values"),
  [
    pytest.param("eval_steps", (6, 4), marks=pytest.mark.long),
    ("schedule.learning_rate", (0.5, 0.005)),
  ],
)
def test_processes_with_different_configs_stop_and_name_the_field(
  data, tmp_path, field, values
):
  """All of them end before the first step, and name the field."""
  with contextlib.ExitStack() as stack:
    started = [
      stack.enter_context(
        subprocess.Popen(
          command(
            tmp_path,
            data,
            "--coordinator=127.0.0.1:18476",
            "--num_processes=2",
            f"--process_id={k}",
            **{field: value},
          ),
          cwd=ROOT,
          env=environment(),
          stderr=subprocess.PIPE,
          text=True,
        )
      )
      for k, value in enumerate(values)
    ]
    said = [process.communicate(timeout=300)[1] for process in started]
  assert [process.returncode for process in started] == [2, 2]
  for text in said:
    assert f"config.{field} is {values[0]} in process 0 and {values[1]}" in text
    assert "Traceback" not in text
  assert not (tmp_path / "metrics.jsonl").exists()
