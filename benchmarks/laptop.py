r"""Encoders on the tasks of Long Range Arena, in equal minutes of one CPU.

taskset -c 0 python -m benchmarks.laptop --minutes 10 --archives PATH \
    --workdir runs/laptop --out runs/laptop.jsonl --picture runs/laptop.png

Each encoder is trained at size=laptop, with a schedule that fits the minutes:
its steps are timed first. Text and Retrieval are cut at 1,000 bytes, Image and
Pathfinder have the inputs of protocol=s4, and Pathfinder is easy. The command
appends a record for each pair of encoder and task; pairs that --out already has
are skipped. The minutes of a record include start, compilation and evaluations.
The picture has the validation accuracy of the runs over the share of their
steps.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.data import ARCHIVES, Row
from benchmarks.programs import RECORDS, append, read, record, short_commits
from benchmarks.timing import ready, timed
from jaxformers import config as configs
from jaxformers.analysis.plotting import plots
from jaxformers.analysis.plotting.figures import Figure, Texts
from jaxformers.analysis.tables import papers, runs
from jaxformers.data.engine.loader import WINDOW
from jaxformers.foundations import allocator, cli, workdirs
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import choose
from jaxformers.models import MODELS
from jaxformers.training.executables import batch_key
from jaxformers.training.run import open_run
from jaxformers.training.trainer import Trainer

ENCODERS = (
  *("transformer", "linear_transformer", "transject", "isometric", "s5"),
  *("lru", "mega", "gated_deltanet", "mamba2"),
)
# The evaluation of whole reviews would take most of the minutes of a run.
SHORT_REVIEWS = {"task.max_len": 1_000, "short_steps": 0, "short_length": 0}
# The harder levels stay at chance for half an hour.
EASY_PATHS = {
  "task.difficulty": "easy",
  "task.short_paddles": "3 4 5",
  "task.num_short": 40_000,
  "short_steps": 3_600,
  "total_steps": 8_000,
}
# Arguments and overrides of each task.
TASKS: dict[str, tuple[str, Row]] = {
  "listops": ("", {}),
  "text": ("", SHORT_REVIEWS),
  "image": (",protocol=s4", {}),
  "retrieval": ("", {"task.max_len": 1_000}),
  "pathfinder": (",protocol=s4", EASY_PATHS),
}
# Overrides of an encoder.
ENCODER_FIELDS: dict[str, Row] = {
  "transformer": {"model.positions": "none", "model.mixer.rotary": True}
}
# Limits of the steps that are timed, for each part of a schedule.
TIMED_SECONDS, MOST_TIMED = 15, 64
EVALUATIONS = 6  # Number of evaluations in a run.
VALIDATION_EXAMPLES = 1_000  # Examples of an evaluation.
# Tables with published scores, and rows that are not named after the model.
PAPERS = (papers.STATE_SPACES, papers.LRA, papers.TRANSJECT_2)
PUBLISHED_NAMES = {"mega": "mega, chunks"}
SCORE = "validation/accuracy"


def arguments(task: str, model: str, archives: str) -> tuple[str, Row]:
  """Returns the config of a run, and its overrides.

  Args:
    task: name in `TASKS`.
    model: name of the model.
    archives: folder of the archives in `benchmarks.data.ARCHIVES`.
  """
  protocol, fields = TASKS[task]
  file, sizes = ARCHIVES.get(task, ("", {}))
  overrides = {**fields, **ENCODER_FIELDS.get(model, {})}
  overrides |= {f"task.{name}": size for name, size in sizes.items()}
  if file:
    overrides["task.archive"] = str(Path(archives) / file)
  return f"lra/{task}:size=laptop,model={model}{protocol}", overrides


def flags(overrides: Row) -> list[str]:
  """Returns overrides as arguments of a command."""
  return [f"--config.{name}={value}" for name, value in overrides.items()]


def seconds_per_step(run: Trainer, start: int) -> float:
  """Returns the mean time of the steps from `start`, without compilation."""
  seen: set[str] = set()
  spent: list[float] = []
  # Whole windows of batches have the share of each length.
  window = WINDOW if len(run.run.padded_lengths) > 1 else 1
  for number, batch in enumerate(run.batches(start), 1):
    # The first step of each shape compiles its program: run it twice.
    if batch_key(batch) not in seen:
      run.state, _ = ready(run.train_step, run.state, batch)()
      seen.add(batch_key(batch))
    (run.state, _), seconds = timed(ready(run.train_step, run.state, batch))
    spent.append(seconds)
    is_enough = sum(spent) > TIMED_SECONDS or number >= MOST_TIMED
    if is_enough and number % window == 0:
      break
  return sum(spent) / len(spent)


def schedule(config: str, overrides: Row, minutes: float) -> Row:
  """Returns the fields of the config's schedule for a number of minutes.

  The shares of short steps and of the warm-up stay.
  """
  with tempfile.TemporaryDirectory() as folder:
    loaded = configs.load_with(config, flags(overrides))
    run = Trainer(open_run(loaded, Path(folder)))
    first = loaded.short_steps
    share = first / loaded.total_steps
    mean = (1 - share) * seconds_per_step(run, first)
    if first:
      mean += share * seconds_per_step(run, 0)
  total = max(int(60 * minutes / mean), EVALUATIONS)
  fields = {"total_steps": total, "short_steps": int(share * total)}
  fields["eval_examples"] = VALIDATION_EXAMPLES
  warmup = loaded.schedule.warmup_steps / loaded.total_steps
  fields["schedule.warmup_steps"] = int(warmup * total)
  fields["eval_steps"] = fields["checkpoint_steps"] = -(-total // EVALUATIONS)
  return fields


def saved_schedule(
  folder: Path, config: str, overrides: Row, minutes: float
) -> Row:
  """Returns the schedule of a run, and writes it to a file.

  A run that was stopped continues with its own schedule.

  Raises:
    UserError: if the run began with another number of minutes.
  """
  file = folder.with_suffix(".json")
  if not file.exists():
    file.parent.mkdir(parents=True, exist_ok=True)
    fields = schedule(config, overrides, minutes)
    file.write_text(json.dumps({"minutes": minutes, "fields": fields}))
  saved = json.loads(file.read_text())
  if (before := saved.get("minutes", "unknown")) != minutes:
    raise UserError(
      f"{folder} has a run of {before} minutes, and --minutes is {minutes}: "
      "choose the same number, or another --workdir."
    )
  return saved["fields"]


def published(task: str, model: str) -> float | None:
  """Returns the accuracy of a model's own paper, or of LRA; None without any.

  Retrieval and Pathfinder have none: the pairs and the level are not LRA's.
  """
  if task in ("retrieval", "pathfinder"):
    return None
  for table in PAPERS:
    for column, score in zip(
      table.columns,
      table.scores.get(PUBLISHED_NAMES.get(model, model), ()),
      strict=False,
    ):
      if column.task == task:
        return score
  return None


def figure(workdir: Path) -> Figure:
  """Returns the figure of validation accuracies over steps, by task.

  Pauses of the machine move no point of it.
  """
  rows = []
  for run in runs.discover([workdir])[0]:
    task, model = run.config["task"]["name"], run.config["model"]["name"]
    percent = 100 / run.config["total_steps"]
    rows += [
      (model, run.seed, task, percent * each["step"], 100 * each[SCORE])
      for each in run.metrics
      if SCORE in each
    ]
  titles = {row[2]: f"{row[2]}, accuracy in percent" for row in rows}
  caption = (
    f"Accuracy on {VALIDATION_EXAMPLES:,} validation examples. The training "
    "of each encoder has as many steps as fit into equal minutes of one CPU."
  )
  texts = Texts("laptop", "Encoders in equal minutes", caption)
  return plots.curves(texts, rows, "steps in percent", titles)


def hardware(results: Row) -> str:
  """Returns the cores of this process and the version of JAX, in words."""
  cores = len(os.sched_getaffinity(0))
  words = {1: "one core", 2: "two cores"}.get(cores, f"{cores} cores")
  processor, version = results["hardware"]["processor"], results["versions"]
  return f"{words} of an {processor} (shared), jax {version['jax']}"


def budget(minutes: float) -> str:
  """Returns the end of the protocol of a record."""
  return f"trained for {minutes:g} minutes"


def train(
  task: str, model: str, minutes: float, archives: str, workdir: Path
) -> dict[str, Any]:
  """Trains an encoder on a task; returns the record of its run."""
  config, overrides = arguments(task, model, archives)
  folder = workdir / f"{task}_{model}"
  overrides |= saved_schedule(folder, config, overrides, minutes)
  command = [sys.executable, "-m", "jaxformers.main", "--config", config]
  command += ["--workdir", str(folder), *flags(overrides)]
  subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
  results = workdirs.read_results(folder)
  # Archives are named without their folder.
  shown = {
    name: Path(value).name if name == "task.archive" else value
    for name, value in overrides.items()
  }
  row = record(
    f"encoders_{task}",
    model,
    {
      "test accuracy": round(100 * results["accuracy"], 2),
      "validation accuracy": round(100 * results["selection_score"], 2),
      "published": published(task, model),
      "parameters": results["parameters"],
      "steps": overrides["total_steps"],
      "best step": results["best_step"],
      "training minutes": round(results["train_seconds"] / 60, 1),
    },
    config=shlex.join([config, *flags(shown)]),
    protocol=f"{results['protocol']}, {budget(minutes)}",
    hardware=hardware(results),
    seeds=[results["seed"]],
  )
  commits = ", ".join(short_commits(results["commit"]))
  row["minutes"] = round(results["wall_seconds"] / 60, 1)
  return row | {"commit": commits}


@cli.command(
  cli.argument("--minutes", default=10.0, help="minutes of a training"),
  cli.option("models", ",".join(ENCODERS), "names: a,b"),
  cli.option("tasks", ",".join(TASKS), "names: a,b"),
  cli.option("archives", ".", "folder of the archives"),
  cli.argument(
    "--workdir", type=Path, required=True, help="folder of the runs"
  ),
  RECORDS,
  cli.argument("--picture", type=Path, help="PNG file for a figure of them"),
)
def main(
  minutes: float,
  models: str,
  tasks: str,
  archives: str,
  workdir: Path,
  out: Path,
  picture: Path | None,
) -> None:
  """Trains each encoder on each task, and appends the records."""
  allocator.keep_freed_memory()
  chosen = [choose("task", task, TASKS) for task in cli.names(tasks)]
  encoders = [choose("model", name, MODELS) for name in cli.names(models)]
  for task in chosen:
    table = f"encoders_{task}"
    done = {r["model"]: r["protocol"] for r in read(out) if r["table"] == table}
    for protocol in done.values():
      if not protocol.endswith(budget(minutes)):
        raise UserError(
          f"{out} has {table} with the protocol {protocol!r}, and --minutes is "
          f"{minutes:g}: choose the same number, or another --out."
        )
    for model in encoders:
      if model not in done:
        row = train(task, model, minutes, archives, workdir)
        append(out, [row])
        print(task, model, row["values"], flush=True)
  if picture:
    picture.write_bytes(figure(workdir).picture("png"))


if __name__ == "__main__":
  main()
