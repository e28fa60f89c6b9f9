"""The command line of training, each time in its own process."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from absl.testing import flagsaver

from jaxformers import main
from jaxformers.foundations import workdirs
from tests.marks import FAST_COMPILE, long_except

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("JAXFORMERS_KILLS", "1"))
PAIRS = int(os.environ.get("JAXFORMERS_PAIRS", "3"))
TIMES = ("train_seconds", "wall_seconds")


@pytest.fixture(scope="module")
def command(tmp_path_factory, request):
  """A function that makes the command of a run of seconds."""
  data = tmp_path_factory.mktemp("data")
  fields = dict(
    data_dir=data,
    total_steps=24,
    log_steps=3,
    eval_steps=6,
    checkpoint_steps=1,
    batch_size=4,
    eval_batch_size=4,
    buckets=1,
  )
  fields |= {
    "task.num_train": 64,
    "task.num_validation": 8,
    "task.num_test": 10,
    "task.min_length": 5,
    "task.max_length": 200,
    "model.d_model": 8,
    "schedule.warmup_steps": 3,
  }

  def make(workdir, *flags, arg=":size=tiny"):
    return [
      sys.executable,
      "-m",
      "jaxformers.main",
      "--config",
      f"configs/lra/listops.py{arg}",
      *(f"--config.{key}={value}" for key, value in fields.items()),
      "--workdir",
      str(workdir),
      *flags,
    ]

  return make


def environment(**variables):
  kept = {
    k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")
  }
  compiling = {  # As in conftest.py.
    "JAX_COMPILATION_CACHE_DIR": os.path.expanduser(
      "~/.cache/jaxformers/tests"
    ),
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
    "XLA_FLAGS": FAST_COMPILE,
  }
  return kept | compiling | variables


def run(command, **variables):
  return subprocess.run(
    command,
    env=environment(**variables),
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )


def results(workdir):
  content = workdirs.read_results(workdir)
  return {key: value for key, value in content.items() if key not in TIMES}


@pytest.fixture(scope="module")
def finished(command, tmp_path_factory, request):
  """A finished run: its workdir, what it printed, and how long it took."""
  workdir = tmp_path_factory.mktemp("runs") / "whole"
  if request.config.getoption("long"):  # Only long tests read how long.
    run(command(workdir.with_name("warm")))  # Compiles, generates.
  began = time.monotonic()
  done = run(command(workdir))
  assert done.returncode == 0, done.stderr
  return workdir, done, time.monotonic() - began


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch, request):
  monkeypatch.chdir(request.config.rootpath)


def test_main_trains_and_prints_a_table(finished):
  workdir, done, _ = finished
  assert "step 24/24" in done.stderr
  assert "First step done" in done.stderr
  for row in (
    "test accuracy",
    "majority class",
    "first-token",
    "parameters",
    "time",
  ):
    assert row in done.stdout
  assert (workdir / "config.json").exists()
  assert results(workdir)["examples"] == 10


def test_eval_only_gives_the_same_table_under_another_hash_seed(
  finished, command
):
  workdir, done, _ = finished
  again = run(command(workdir, "--eval_only"), PYTHONHASHSEED="12345")
  assert again.returncode == 0, again.stderr

  def rows(text):
    return [line for line in text.splitlines() if "time" not in line[:16]]

  assert rows(again.stdout) == rows(done.stdout)


@pytest.mark.long
def test_main_killed_at_random_resumes_to_bitwise_equal_results(
  finished, command, tmp_path
):
  """SIGKILL, again and again, also while a checkpoint is being written."""
  undisturbed, _, seconds = finished
  done = True
  rng, kills, workdir, round_ = random.Random(0), 0, tmp_path / "0", 0
  while kills < KILLS or not done:
    process = subprocess.Popen(
      command(workdir),
      env=environment(),
      stderr=(errors := (tmp_path / "errors").open("a")),
      stdout=subprocess.DEVNULL,
    )
    errors.close()
    # Python starts for a good second, in which there is nothing to lose.
    wait = rng.uniform(0.3, 1.0) * seconds if kills < KILLS else None
    try:
      done = process.wait(wait) == 0
      assert done
    except subprocess.TimeoutExpired:
      process.send_signal(signal.SIGKILL)
      process.wait()
      kills, done = kills + 1, False
    if done:
      assert results(workdir) == results(undisturbed)
      lines = (workdir / "metrics.jsonl").read_text().splitlines()
      steps = [json.loads(line)["step"] for line in lines]
      assert steps == sorted(steps)
      assert len(steps) == 8 + 4  # Logged and evaluated, each once.
      round_ += 1
      workdir = tmp_path / str(round_)
  assert "damaged" not in (tmp_path / "errors").read_text()


@pytest.mark.long
def test_main_refuses_a_workdir_in_use(finished, command, tmp_path):
  """The second run may start at any time; the first is not disturbed."""
  undisturbed, _, seconds = finished
  rng = random.Random(0)
  for round_ in range(PAIRS):
    workdir, said, processes = tmp_path / str(round_), [], []
    for seed in rng.sample([0, 1], 2):
      processes.append(
        (
          seed,
          subprocess.Popen(
            command(workdir, f"--config.seed={seed}"),
            env=environment(),
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
          ),
        )
      )
      time.sleep(rng.uniform(0, 0.4) * seconds)
    ended = [seed for seed, process in processes]
    for seed, process in processes:
      _, stderr = process.communicate(timeout=300)
      assert "Traceback" not in stderr
      if process.returncode:
        ended.remove(seed)
        said.append(stderr)
    assert len(ended) == 1, said
    assert re.search("is in use by|belongs to a run of another", said[0])
    assert results(workdir)["seed"] == ended[0]
    if ended == [0]:
      assert results(workdir) == results(undisturbed)


# Tests in the background of a shell ignore Ctrl-C, and what they start, too.
HEARS_CTRL_C = (
  "import os, signal, sys;"
  "signal.signal(signal.SIGINT, signal.SIG_DFL);"
  "os.execv(sys.argv[1], sys.argv[1:])"
)


def start_session(command):
  """Starts a command as a terminal does: in a group that hears Ctrl-C."""
  return subprocess.Popen(
    [sys.executable, "-c", HEARS_CTRL_C, *command],
    env=environment(),
    stderr=subprocess.PIPE,
    text=True,
    start_new_session=True,
  )


@pytest.mark.parametrize(
  ("number", "status", "name"),
  [
    (signal.SIGTERM, 143, "SIGTERM"),
    pytest.param(signal.SIGINT, 130, "Ctrl-C", marks=pytest.mark.long),
  ],
)
def test_main_saves_a_checkpoint_at_a_signal(
  finished, command, tmp_path, number, status, name
):
  slow = command(tmp_path, "--config.total_steps=100000")
  process = start_session(slow)
  while not process.stderr.readline().startswith("step 3/"):
    assert process.poll() is None
  os.killpg(process.pid, number)  # A terminal sends Ctrl-C to all of a group.
  _, rest = process.communicate(timeout=60)
  assert process.returncode == status
  assert f"{name}: saved step" in rest
  assert "Traceback" not in rest
  assert list((tmp_path / "checkpoints").glob("*/commit_success.txt"))


def test_main_prints_one_line_at_ctrl_c_before_training(command, tmp_path):
  """The signal comes while data are generated."""
  data = tmp_path / "data"
  fields = {"task.num_train": 500_000, "task.max_length": 2_000}
  process = start_session(
    [
      *command(tmp_path / "run", f"--config.data_dir={data}"),
      *(f"--config.{key}={value}" for key, value in fields.items()),
    ]
  )
  while not data.exists():
    assert process.poll() is None
    time.sleep(0.1)
  time.sleep(1)
  os.killpg(process.pid, signal.SIGINT)
  _, said = process.communicate(timeout=60)
  assert process.returncode == 130
  assert "Interrupted" in said
  assert len(said.splitlines()) < 8, said
  assert "Traceback" not in said


def test_main_help_shows_flags_and_config_fields():
  module = "jaxformers.main"
  done = run([sys.executable, "-m", module, "--help"])
  assert done.returncode == 0
  for words in (
    "--workdir",
    "  seed=0  # seed of",
    "Models: jaxformers models.",
  ):
    assert words in done.stdout
  assert done.stderr == ""
  spec = "configs/lra/listops.py:size=tiny"
  done = run([sys.executable, "-m", module, "--config", spec, "--help"])
  assert done.returncode == 0
  assert "    model.d_model=32  # in [1, 2^16]\n" in done.stdout
  assert "    task.max_length=2000  # in [1, 2^31)\n" in done.stdout


@pytest.mark.parametrize("home", long_except({False}, [True, False]))
def test_main_without_home_uses_no_compilation_cache(tmp_path, home):
  """In a container a user may be missing from /etc/passwd."""
  code = (
    "import jax, os, pwd\n"
    "def unknown(_): raise KeyError\n"
    "pwd.getpwuid = unknown\n"
    "from jaxformers import main\n"
    "main.flags.FLAGS(['main'])\n"
    "main._prepare_jax()\n"
    "print(jax.config.jax_compilation_cache_dir)"
  )
  env = environment(**({"HOME": str(tmp_path)} if home else {}))
  del env["JAX_COMPILATION_CACHE_DIR"]
  if not home:
    env.pop("HOME", None)
  done = subprocess.run(
    [sys.executable, "-c", code], env=env, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  cache = f"{tmp_path}/.cache/jaxformers/xla" if home else "None"
  assert done.stdout == f"{cache}\n"


@pytest.fixture
def small_disk(tmp_path):
  """A file system of 400 kB, and a function that makes it larger."""
  folder = tmp_path / "disk"
  folder.mkdir()

  def mount(options):
    kind = ("-t", "tmpfs", "tmpfs", str(folder))
    return subprocess.run(
      ["mount", "-o", options, *kind], check=False
    ).returncode

  if shutil.which("mount") is None or mount("size=400k"):
    pytest.skip("only root can mount a small file system")
  yield folder, lambda: mount("remount,size=20m")
  subprocess.run(["umount", str(folder)], check=False)


@pytest.mark.long
def test_main_resumes_after_a_full_disk(finished, command, small_disk):
  folder, enlarge = small_disk
  again = command(folder / "run")
  done = run(again)
  assert done.returncode == main.RETRY
  assert "the disk is full" in done.stderr
  assert "same command" in done.stderr
  assert "Traceback" not in done.stderr
  enlarge()
  done = run(again)
  assert done.returncode == 0, done.stderr
  assert "Resuming from step" in done.stderr
  assert results(folder / "run") == results(finished[0])


@pytest.mark.long
def test_main_trains_several_seeds(finished, command, tmp_path):
  done = run(command(tmp_path, "--seeds=0,1"))
  assert done.returncode == 0, done.stderr
  assert [results(tmp_path / f"seed_{s}")["seed"] for s in (0, 1)] == [0, 1]
  assert results(tmp_path / "seed_0") | {"config": 0} == (
    results(finished[0]) | {"config": 0}
  )
  table = run(
    [sys.executable, "-m", "jaxformers.commands.results", str(tmp_path)]
  )
  assert "| 0 1 |" in table.stdout


@pytest.mark.parametrize(
  ("flags", "arg", "message"),
  [
    (["--config.modle.d_model=3"], "", "key of config: 'modle'.*'model'"),
    (["--config.model.dmodel=3"], "", "config.model: 'dmodel'.*'d_model'"),
    (
      ["--config.model.mixer.experts=3"],
      "",
      "option of mixer 'transject' 'experts'.*num_experts",
    ),
    (["--config.total_steps=1e3"], "", "1e3"),
    ([], ":model=hyena", "model 'hyena'"),
    ([], ":sise=tiny", "config argument 'sise'.*'size'"),
    (["--seeds=one"], "", "--seeds=one: give integers"),
    (["--seeds=0,-1"], "", "--seeds=-1 is not in"),
    (["--eval_only", "--profile"], "", "--profile traces training steps"),
    pytest.param(
      ["--config.batch_size=0"], "", "batch_size=0", marks=pytest.mark.long
    ),
    pytest.param(
      ["--config.schedule.learning_rate=nan"],
      "",
      "error: config.schedule.learning_rate=nan is not in",
      marks=pytest.mark.long,
    ),
    ([], ":size=tiny,size=paper", "argument size is given twice"),
    (["--nonsense"], "", "nonsense"),
    (["nonsense"], "", "Unexpected arguments nonsense"),
    (["lra/text"], "", "Unexpected arguments lra/text.*before the flags"),
  ],
)
def test_main_prints_user_errors_as_one_message(
  command, tmp_path, flags, arg, message
):
  done = run(command(tmp_path / "run", *flags, arg=arg or ":size=tiny"))
  assert done.returncode == main.MISTAKE
  assert re.search(message, done.stderr), done.stderr
  assert "Traceback" not in done.stderr


def test_main_without_config_is_refused():
  done = run([sys.executable, "-m", "jaxformers.main"])
  assert done.returncode == main.MISTAKE
  assert "A config is needed" in done.stderr


@pytest.mark.parametrize(
  "arguments",
  [
    ["lra/listops:size=tiny", "--config.seed=3"],
    ["--config.seed=3", "lra/listops:size=tiny"],
    ["--config", "lra/listops:size=tiny", "--config.seed=3"],
  ],
)
@flagsaver.flagsaver
def test_parse_takes_the_config_with_or_without_its_flag(arguments):
  command = main._parse(["main", *arguments])
  assert main.FLAGS.config == "lra/listops:size=tiny"
  assert command.config.seed == 3
  assert command.loaded.seed == 0


@flagsaver.flagsaver
def test_parse_refuses_two_configs(capsys):
  with pytest.raises(SystemExit) as ended:
    main._parse(["main", "lra/listops", "--config=lra/text"])
  assert ended.value.code == main.MISTAKE
  assert re.search("lra/listops.*lra/text", capsys.readouterr().err)


@pytest.mark.long
def test_main_without_workdir_makes_and_reuses_a_folder(
  finished, command, tmp_path
):
  """It has a folder, printed first, and the same command finds it again."""
  *given, _, _ = command("")
  root = os.getcwd()
  given[given.index("--config") + 1] = (
    f"{root}/configs/lra/listops.py:size=tiny"
  )
  for said in ("First step done", "nothing was trained"):
    done = subprocess.run(
      given,
      env=environment(PYTHONPATH=root),
      cwd=tmp_path,
      capture_output=True,
      text=True,
      timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert said in done.stderr
    first = done.stderr.splitlines()[0]
    (workdir,) = (tmp_path / "runs").iterdir()
    assert first == f"Workdir: runs/{workdir.name}"
  assert workdir.name.startswith("lra_listops-transject-tiny-jaxformers-0-")
  assert results(workdir) == results(finished[0])


def test_main_prints_workdir_model_data_device_and_training_first(finished):
  workdir, done, _ = finished
  lines = done.stderr.splitlines()
  assert lines[0] == f"Workdir: {workdir}"
  names = [line.partition(":")[0] for line in lines]
  start = names.index("Model")
  assert names[start : start + 4] == ["Model", "Data", "Device", "Training"]
  # Only the preparation of the data comes before.
  assert all(line.endswith(", once ...") for line in lines[1:start])
  for words in ("transject, ", " 64 train, 8 validation, 10 test", "24 steps"):
    assert words in done.stderr
  # The wall time is that of the process.
  assert workdirs.read_results(workdir)["wall_seconds"] > 1


def test_main_names_a_missing_config_file():
  done = run(
    [
      sys.executable,
      "-m",
      "jaxformers.main",
      "--config",
      "a.py",
      "--workdir",
      "b",
    ]
  )
  assert done.returncode == main.MISTAKE
  assert "no config file 'a.py'" in done.stderr
