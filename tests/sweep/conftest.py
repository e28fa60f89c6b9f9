"""Fakes of the training command and of Slurm's programs."""

import json
import os
import sys
from pathlib import Path

import pytest

from jaxformers import tasks
from jaxformers.foundations import workdirs
from jaxformers.sweep import commands, grid
from jaxformers.sweep import runs as runs_module
from jaxformers.sweep.runs import Sweep
from tests import results as made

SPEC = "configs/lra/listops.py:size=tiny"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch, request):
  monkeypatch.chdir(request.config.rootpath)


class Runs:
  """Fake of `jaxformers.main` that records commands and writes results."""

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
    workdirs.write(folder, "results.json", result)
    return 0


def content(spec, options, score=0.5):
  """Returns the results of a run with the given seed and overrides."""
  seed = int(options[0].removeprefix("--config.seed="))
  sweep = Sweep(Path(), options[1:])
  (cell,) = grid.expand([spec], [])
  config = sweep.load_config(cell, seed)
  return made.make(
    config.as_dict(),
    max_len=0,
    accuracy=score,
    selection_score=score,
    examples=10,
    task_description=describe_task(sweep, config),
  )


def describe_task(self, config):
  """Fake of `Sweep.describe_task` that opens no data."""
  return {"data": config.task.options.get("archive") or "listops"}


SMALL = {"num_train": 8, "num_validation": 2, "num_test": 2}
SMALL |= {"min_length": 5, "max_length": 20}


@pytest.fixture
def runs(monkeypatch, data_dir):
  fake = Runs()

  def open_task(self, config):
    fields = {**config.task.as_dict(), **SMALL, "data_dir": str(data_dir)}
    return tasks.get(**fields)

  monkeypatch.setattr(Sweep, "open_task", open_task)
  monkeypatch.setattr(commands, "call", fake)
  monkeypatch.setattr(Sweep, "describe_task", describe_task)
  return fake


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
if "SAYS" in os.environ:
  sys.exit(os.environ["SAYS"])
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
  """Installs fakes of Slurm's programs; returns the file of their scripts."""
  folder = tmp_path / "bin"
  folder.mkdir()
  for name, code in FAKES.items():
    (folder / name).write_text(f"#!{sys.executable}\n{code}")
    (folder / name).chmod(0o755)
  (folder / "run.py").write_text(FAKE_RUN)
  prepared = {
    spec + seed: workdirs.with_digest(content(spec, [seed]))
    for spec in (SPEC, f"{SPEC},model=transject", f"{SPEC},model=local")
    for seed in ("--config.seed=0", "--config.seed=1")
  }
  (folder / "prepared").write_text(json.dumps(prepared))
  monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
  monkeypatch.setenv("RECORD", str(tmp_path / "record"))
  main = (sys.executable, str(folder / "run.py"))
  monkeypatch.setattr(runs_module, "MAIN", main)
  return tmp_path / "record"
