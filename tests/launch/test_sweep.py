"""Grids of runs: what is run, what is not run again, and what is refused."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import cloudpickle
import pytest
import submitit  # noqa: F401  Not in a test: it closes the logs of absl.

from launch import sweep

SPEC = "configs/lra/listops.py:size=tiny"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch, request):
  monkeypatch.chdir(request.config.rootpath)


class Runs:
  """Stands for `jaxformers.main`: takes the command, leaves results behind."""

  def __init__(self):
    self.commands, self.scores, self.broken = [], {}, {}

  def __call__(self, command):
    assert command[:3] == [sys.executable, "-m", "jaxformers.main"]
    spec = command[command.index("--config") + 1]
    options = [part for part in command[5:] if part.startswith("--config.")]
    seed = int(options[0].removeprefix("--config.seed="))
    self.commands.append((spec, seed))
    if spec in self.broken:
      return self.broken[spec]
    folder = Path(command[5].removeprefix("--workdir="))
    folder.mkdir(parents=True)
    score = self.scores.get((spec, seed), 0.5)
    result = content(spec, options, score)
    (folder / "results.json").write_text(json.dumps(result))
    return 0


def content(spec, options, score=0.5):
  """Of the results of a run, with what goes to every run after its seed."""
  seed = int(options[0].removeprefix("--config.seed="))
  own = sweep.Sweep(Path(), options[1:])
  config = own.config(sweep.cells([spec], [])[0], seed)
  return {
    **{"task": "listops", "protocol": "lra", "model": "transject"},
    **{"seed": seed, "config": config, "max_len": 0, "metric": "accuracy"},
    **{"accuracy": score, "selection_score": score, "data": {}},
    **{"selection": "validation", "baselines": {}, "parameters": 1},
    **{"parameter_ratio": 1.0, "train_seconds": 1.0},
    "task_description": description(own, config),
  }


def description(self, config):
  """In the place of `Sweep.description`, which opens data."""
  return {"data": config["task"].get("archive") or "listops"}


@pytest.fixture
def runs(monkeypatch):
  fake = Runs()
  monkeypatch.setattr(sweep, "_call", fake)
  monkeypatch.setattr(sweep.Sweep, "description", description)
  return fake


def test_a_grid_is_every_combination():
  grid = [("model", ("transject", "local")), ("protocol", ("lra",))]
  found = sweep.cells([SPEC, "configs/lra/text.py"], grid)
  assert [cell.spec for cell in found] == [
    "configs/lra/listops.py:size=tiny,model=transject,protocol=lra",
    "configs/lra/listops.py:size=tiny,model=local,protocol=lra",
    "configs/lra/text.py:model=transject,protocol=lra",
    "configs/lra/text.py:model=local,protocol=lra",
  ]
  assert len({cell.folder for cell in found}) == 4


def test_what_has_results_is_not_run_again(runs, tmp_path, capsys):
  argv = ["--config", SPEC, f"--workdir={tmp_path}", "--seeds=0,1"]
  sweep.main([*argv, "--grid=model=transject,local"])
  assert len(runs.commands) == 4
  sweep.main([*argv, "--grid=model=transject,local,sparse"])
  assert [spec.rpartition("=")[2] for spec, _ in runs.commands[4:]] == [
    "sparse",
    "sparse",
  ]
  assert capsys.readouterr().out.count("| 50.00 +- 0.00 | 0 1 |") == 2 + 3


def test_results_of_another_config_are_not_taken(runs, tmp_path):
  argv = ["--config", SPEC, f"--workdir={tmp_path}"]
  argv.append("--config.schedule.warmup_steps=2")
  sweep.main([*argv, "--config.total_steps=5"])
  with pytest.raises(SystemExit, match="json.:\n  total_steps: 5 -> 6"):
    sweep.main([*argv, "--config.total_steps=6", "--seeds=1,0"])
  assert len(runs.commands) == 1
  sweep.main([*argv, "--config.total_steps=5", "--config.data_dir=elsewhere"])
  assert len(runs.commands) == 1


def test_results_of_other_data_are_not_taken(runs, tmp_path):
  argv = ["--config", "configs/lm/text.py", f"--workdir={tmp_path}"]
  sweep.main([*argv, "--config.task.archive=one"])
  with pytest.raises(SystemExit, match="protocol:\n  data: 'one' -> 'two'"):
    sweep.main([*argv, "--config.task.archive=two"])
  assert len(runs.commands) == 1


def test_data_that_cannot_be_had_are_found_before_anything_runs(tmp_path):
  argv = ["--config", "configs/lm/text.py", f"--workdir={tmp_path}"]
  with pytest.raises(SystemExit, match="error: A language model needs a text"):
    sweep.main(argv)
  with pytest.raises(SystemExit, match="There is no .*nowhere"):
    sweep.main([*argv, "--config.task.archive=nowhere"])


def test_tuning_looks_at_the_selection_split_and_the_first_seed(
  runs, tmp_path, capsys
):
  models = ("transject", "local", "sparse")
  for model, score in zip(models, (0.4, 0.6, 0.5), strict=True):
    runs.scores[f"{SPEC},model={model}", 3] = score
    runs.scores[f"{SPEC},model={model}", 4] = 1 - score
  argv = ["--config", SPEC, f"--workdir={tmp_path}", "--seeds=3,4"]
  sweep.main([*argv, f"--tune=model={','.join(models)}"])
  assert runs.commands == [
    *((f"{SPEC},model={model}", 3) for model in models),
    (f"{SPEC},model=local", 4),
  ]
  said = capsys.readouterr().out
  assert "model=local, by accuracy: transject: 0.4000, local: 0.6" in said
  assert "at the end" not in said
  assert "| 50.00 +- 14.14 | 3 4 |" in said
  # The score of a loss is below 0.
  for model, loss in zip(models, (0.4, 0.6, 0.5), strict=True):
    runs.scores[f"{SPEC},model={model}", 3] = -loss
  sweep.main(
    [
      *("--config", SPEC, f"--workdir={tmp_path / 'loss'}", "--seeds=3"),
      *("--config.select=loss", f"--tune=model={','.join(models)}"),
    ]
  )
  said = capsys.readouterr().out
  assert "model=transject, by loss: transject: 0.4000, loc" in said


def test_a_run_that_fails_does_not_stop_the_others(runs, tmp_path, capsys):
  runs.broken[f"{SPEC},model=local"] = 1
  argv = ["--config", SPEC, f"--workdir={tmp_path}"]
  with pytest.raises(SystemExit, match=r"failed.*\n.*model=local.seed_0: 1"):
    sweep.main([*argv, "--grid=model=local,sparse"])
  assert len(runs.commands) == 2
  assert "| 50.00 | 0 |" in capsys.readouterr().out
  # Of what is tuned, the others are left to choose from; that is no failure.
  sweep.main([*argv, "--tune=model=local,sparse", "--seeds=0,1"])
  assert runs.commands[-1] == (f"{SPEC},model=sparse", 1)
  assert "left out: " in capsys.readouterr().out
  with pytest.raises(SystemExit, match="failed"):
    sweep.main([*argv, "--tune=model=local"])


def test_the_end_of_what_was_tried():
  assert sweep._ends(("2e-3", "5e-4", "1e-3")) == ("5e-4", "2e-3")
  assert sweep._ends(("local", "1")) == sweep._ends(("1e-3",)) == ()


@pytest.mark.parametrize(
  ("argv", "message"),
  [
    (["--grid=model"], "no axis of a grid"),
    (["--grid=model=local,"], "no axis of a grid"),
    (["--grid=model=local,local"], "twice"),
    (["--grid=model=local", "--tune=model=sparse"], "model is an axis twice"),
    (["--grid=size=paper"], "size stands in .* and in the grid"),
    (["--config", f"{SPEC},size=paper"], "size stands in .* twice"),
    (["--config", f"{SPEC},seed=1"], "give --seeds"),
    (["--config", SPEC], "are one run"),
    (["--grid=model=local,sparse", "--config.model.name=local"], "one run"),
    (["--seeds=0,0"], "they differ"),
    (["--seeds=0,-1"], "not negative"),
    (["--grid=seed=1"], "give --seeds"),
    (["--config.seed=1"], "give --seeds"),
    (["--seeds=a"], "--seeds=a"),
    (["--grid=modle=local"], "Did you mean 'model'"),
    (["--grid=protocol=local"], "Unknown protocol 'local'"),
    (["--config.totl_steps=1"], "Did you mean 'total_steps'"),
    (["--config.total_steps=x"], "total_steps"),
    (["--total_steps=1"], "no option of a sweep"),
  ],
)
def test_what_is_refused_before_anything_runs(argv, message, runs, tmp_path):
  with pytest.raises(SystemExit, match=message):
    sweep.main(["--config", SPEC, f"--workdir={tmp_path}", *argv])
  assert not runs.commands


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
def test_a_signal_to_the_sweep_is_one_to_its_run_and_ends_both(
  tmp_path, number, saves
):
  """And the sweep waits for a run that saves first; not all of a run does."""
  (tmp_path / "run.py").write_text(
    RUN if saves else RUN.replace("signal.signal", "#")
  )
  code = (
    "import sys; from launch import sweep; "
    f"sweep._call([sys.executable, {str(tmp_path / 'run.py')!r}]); "
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


FAKES = {
  # Runs all jobs of an array at once, in the background.
  "sbatch": """
import os, re, subprocess, sys
text = open(sys.argv[1]).read()
with open(os.environ["RECORD"], "a") as file:
  file.write(text)
count = open(os.environ["RECORD"]).read().count("#!/bin/bash")
last = re.search(r"--array=0-(\\d+)", text)
for k in range(int(last[1]) + 1 if last else 1):
  own = {"SLURM_JOB_ID": f"{7 + count}"}
  if last:
    own = {"SLURM_ARRAY_JOB_ID": f"{7 + count}", "SLURM_ARRAY_TASK_ID": f"{k}"}
    own["SLURM_JOB_ID"] = f"{100 * count + k}"
  subprocess.Popen(
    ["bash", sys.argv[1]],
    env=os.environ | own,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  )
print(f"Submitted batch job {7 + count}")
""",
  "srun": """
import os, sys
os.execvp(sys.executable, [sys.executable, *sys.argv[sys.argv.index("-u"):]])
""",
  "sacct": """
print("JobID|State|NodeList")
""",
  "squeue": """
import os, sys
if not os.environ.get("GONE"):
  print(sys.argv[-1], "gpu")
""",
}
FAKE_RUN = """
import json, pathlib, sys
prepared = json.loads(pathlib.Path(__file__).with_name("prepared").read_text())
found = prepared.get(sys.argv[2] + sys.argv[4])
if found is None:
  sys.exit(1)
folder = pathlib.Path(sys.argv[3].removeprefix("--workdir="))
folder.mkdir(parents=True)
(folder / "results.json").write_text(json.dumps(found))
"""


@pytest.fixture
def slurm(runs, monkeypatch, tmp_path):
  """Programs that stand for Slurm's; the path of what they were given."""
  folder = tmp_path / "bin"
  folder.mkdir()
  for name, code in FAKES.items():
    (folder / name).write_text(f"#!{sys.executable}\n{code}")
    (folder / name).chmod(0o755)
  (folder / "run.py").write_text(FAKE_RUN)
  prepared = {
    spec + seed: content(spec, [seed])
    for spec in (SPEC, f"{SPEC},model=transject", f"{SPEC},model=local")
    for seed in ("--config.seed=0", "--config.seed=1")
  }
  (folder / "prepared").write_text(json.dumps(prepared))
  monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
  monkeypatch.setenv("RECORD", str(tmp_path / "record"))
  main = (sys.executable, str(folder / "run.py"))
  monkeypatch.setattr(sweep, "MAIN", main)
  # As it is of a program that is called.
  cloudpickle.register_pickle_by_value(sweep)
  yield tmp_path / "record"
  cloudpickle.unregister_pickle_by_value(sweep)


def test_slurm_runs_a_grid_as_an_array(slurm, tmp_path, capsys):
  argv = ["--config", SPEC, f"--workdir={tmp_path / 'runs'}", "--seeds=0,1"]
  argv += ["--slurm", "partition=gpu,time=60"]
  sweep.main([*argv, "--grid=model=transject,local"])
  text = slurm.read_text()
  assert "#SBATCH --array=0-3%4" in text
  assert "#SBATCH --partition=gpu" in text
  assert "#SBATCH --time=60" in text
  said = capsys.readouterr().out
  assert "4 jobs submitted, 0 were before" in said
  assert said.count("| 50.00 +- 0.00 | 0 1 |") == 2
  # What has results is not submitted again, and what fails is named.
  with pytest.raises(SystemExit, match=r"model=sparse.seed_0: 1\n.*seed_1: 1"):
    sweep.main([*argv, "--grid=model=transject,sparse"])
  assert "#SBATCH --array=0-1%2" in slurm.read_text()


def test_a_job_that_is_queued_is_waited_for(slurm, tmp_path, monkeypatch):
  """By the next sweep, too."""
  argv = ["--config", SPEC, f"--workdir={tmp_path / 'runs'}", "--slurm"]
  with monkeypatch.context() as patch:
    patch.setattr(sweep.SlurmSweep, "train", lambda *_: exit(130))
    with pytest.raises(SystemExit, match="130"):
      sweep.main(argv)
  sweep.main(argv)
  assert slurm.read_text().count("#!/bin/bash") == 1


def test_a_job_that_slurm_has_lost_is_submitted_again(
  slurm, tmp_path, monkeypatch
):
  folder = tmp_path / "runs"
  argv = ["--config", SPEC, f"--workdir={folder}", "--slurm"]
  (folder / "slurm").mkdir(parents=True)
  run = str(folder / "lra_listops" / "size=tiny" / "seed_0")
  (folder / "slurm" / "jobs.json").write_text(json.dumps({run: "3"}))
  monkeypatch.setenv("GONE", "yes")
  sweep.main(argv)
  assert slurm.read_text().count("#!/bin/bash") == 1


@pytest.mark.parametrize(
  ("given", "message"),
  [
    ("time", "'time' is not KEY=VALUE"),
    ("partition=a\n#SBATCH --wrap=x", "give a printable value"),
    ("tiem=1", "--slurm: Unav.*tiem"),
    ("time=12:00:00", "time=12:00:00: give a number of minutes"),
    ("nodes=2-4", "nodes=2-4: give a number"),
    ("ntasks_per_node=8", "one process a node"),
  ],
)
def test_what_slurm_does_not_take(slurm, tmp_path, given, message):
  argv = ["--config", SPEC, f"--workdir={tmp_path / 'runs'}"]
  with pytest.raises(SystemExit, match=message):
    sweep.main([*argv, f"--slurm={given}"])


def test_without_slurm(runs, tmp_path, monkeypatch):
  monkeypatch.setenv("PATH", "")
  with pytest.raises(SystemExit, match="--slurm: .*srun"):
    sweep.main(["--config", SPEC, f"--workdir={tmp_path}", "--slurm"])


def test_a_job_whose_time_is_up_saves_and_goes_on(tmp_path, monkeypatch):
  (tmp_path / "run.py").write_text(RUN)
  task = sweep.Task([sys.executable, str(tmp_path / "run.py")])
  monkeypatch.setenv("SLURM_GPUS_ON_NODE", "3")

  def up(*_):
    found.append(task.checkpoint())

  found = []
  before = signal.signal(signal.SIGUSR2, up)
  code = (
    "import os, pathlib, signal, time\n"
    f"while not pathlib.Path({str(tmp_path / 'began')!r}).exists(): "
    "time.sleep(0.02)\n"
    f"os.kill({os.getpid()}, signal.SIGUSR2)"
  )
  with subprocess.Popen([sys.executable, "-c", code]):
    assert task() == 143
  signal.signal(signal.SIGUSR2, before)
  assert (tmp_path / "saved").exists()
  assert (tmp_path / "began").read_text() == "0,1,2"  # Its devices.
  assert found[0].function.command == task.command


def test_ctrl_c_in_the_preparation_says_one_line(
  runs, tmp_path, monkeypatch, capsys
):
  def interrupted(*_):
    raise KeyboardInterrupt

  monkeypatch.setattr(sweep.Sweep, "description", interrupted)
  monkeypatch.setattr(sweep.os, "_exit", sys.exit)
  with pytest.raises(SystemExit, match="^130$"):
    sweep.main(["--config", SPEC, f"--workdir={tmp_path}"])
  said = capsys.readouterr().err.strip()
  assert said.startswith("Interrupted. Run the same command again")
  assert "\n" not in said


def test_a_dry_run_prints_what_has_no_results(runs, tmp_path, capsys):
  argv = ["--config", SPEC, f"--workdir={tmp_path}", "--seeds=0,1"]
  sweep.main([*argv, "--dry_run", "--grid=model=local,sparse"])
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 4
  assert lines[0].endswith("model=local/seed_0 --config.seed=0")
  assert not runs.commands


def test_statuses_of_a_run():
  assert sweep._call([sys.executable, "-c", "raise SystemExit(1)"]) == 1
  with pytest.raises(SystemExit, match="2"):
    sweep._call([sys.executable, "-c", "raise SystemExit(2)"])
