"""Damage to any file that the package writes: a right result, or a message.

`--long` makes twenty damages of every file, four (JAXFORMERS_DAMAGES) of each
kind; otherwise some are drawn. Others are drawn with JAXFORMERS_DAMAGE_SEED=1,
and `-rP` prints the table of counts.
"""

import collections
import os
import random
import re
import shutil

import pytest

from jaxformers import main
from jaxformers.analysis.tables import results as tables
from jaxformers.analysis.tables import runs
from jaxformers.foundations import workdirs
from jaxformers.training import loop
from tests.damages import KINDS, damage

# tensorstore prints the reads that were under way when one of them failed.
pytestmark = pytest.mark.filterwarnings(
  "ignore::pytest.PytestUnraisableExceptionWarning"
)
SEED = int(os.environ.get("JAXFORMERS_DAMAGE_SEED", "0"))
TIMES_EACH = int(os.environ.get("JAXFORMERS_DAMAGES", "4"))
# Numbers that differ between two runs of one config.
TIMES = ("train_seconds", "wall_seconds")
# What a message tells to do.
REMEDY = re.compile(
  r"remove|restore|another --workdir|run again|training command"
)
# Passed over, for nothing reads them: locks, and marks of orbax.
UNREAD = re.compile(r"\.lock|\.writable|\.probe")


def files(folder):
  """The files below a folder that a command may read, in order."""
  return sorted(
    path
    for path in folder.rglob("*")
    if path.is_file() and not UNREAD.search(path.name)
  )


@pytest.fixture(scope="module")
def whole(smoke, tmp_path_factory):
  """A folder with prepared data and a finished run, and the run's results."""
  folder = tmp_path_factory.mktemp("whole")
  config = smoke(data_dir=str(folder / "data"), eval_steps=2)
  results = loop.run(config, folder / "run")
  assert results["best_step"] < 10  # So that three checkpoints are kept.
  return folder, results


def train(config, folder):
  """The results of the training command."""
  return loop.run(config, folder / "run")


def train_anew(config, folder):
  """The results of the training command where there were none."""
  (folder / "run" / "results.json").unlink(missing_ok=True)
  return loop.run(config, folder / "run")


def prepare_anew(config, folder):
  """Trains anew where the arrays have to be packed again, too."""
  shutil.rmtree(folder / "data" / "packed")
  return train_anew(config, folder)


def evaluate(config, folder):
  """The results of --eval_only."""
  return loop.run(config, folder / "run", eval_only=True)


def tabulate(config, folder):
  """The results as the commands of analysis read them."""
  return tables.read_runs([folder / "run"])[0]


def draw(config, folder):
  """The curves of a report, in the place of results."""
  found, notes = runs.discover([folder / "run"])
  if not found:
    return {"curve": [], "told": "\n".join(notes)}
  return {"curve": found[0].metrics, "told": found[0].metrics_problem}


COMMANDS = {
  "run/checkpoints/": (train_anew, evaluate),
  "run/": (train, evaluate, tabulate, draw),
  "data/packed/": (train_anew,),
  "data/tfds/": (prepare_anew,),
}


def commands_of(name):
  return next(v for k, v in COMMANDS.items() if name.startswith(k))


def outcome(command, config, folder, want, capsys):
  """ "right", or "told" for a message; fails for anything else."""
  try:
    found = command(config, folder)
  except Exception as error:
    _, message = main._explain(error)
    assert message is not None, repr(error)
    assert str(folder) in message, message
    assert REMEDY.search(message), message
    return "told"
  finally:
    said = capsys.readouterr().err
  assert "Traceback" not in said, said
  if "curve" in found:
    curve = want["curve"]
    if found["curve"] == curve:
      return "right"
    assert all(record in curve for record in found["curve"])
    assert str(folder) in found["told"]
    return "told"
  if lost := found.get("damaged_best_step"):
    assert found["best_step"] != lost
    assert re.search("It was the best|may have been the best", said)
    return "told"
  assert timeless(found) == timeless(want["results"])
  return "right"


def timeless(results):
  dropped = (*TIMES, "config", "commit")
  return {k: v for k, v in results.items() if k not in dropped}


@pytest.mark.slow
def test_damage_to_any_written_file_gives_a_message_or_the_right_result(
  whole, smoke, tmp_path, capsys, request
):
  source, results = whole
  want = {
    "results": results,
    "curve": workdirs.read_metrics(source / "run")[0],
  }
  names = [str(path.relative_to(source)) for path in files(source)]
  rng = random.Random(SEED)
  cases = [
    (name, kind) for name in names for kind in KINDS for _ in range(TIMES_EACH)
  ]
  if not request.config.getoption("--long"):
    cases = rng.sample(cases, 6)
  counts = collections.Counter()
  failures = []
  for number, (name, kind) in enumerate(cases):
    folder = tmp_path / str(number)
    shutil.copytree(source, folder)
    config = smoke(data_dir=str(folder / "data"), eval_steps=2)
    group = next(key for key in COMMANDS if name.startswith(key))
    others = [
      p for p in files(folder) if str(p.relative_to(folder)).startswith(group)
    ]
    damage(folder / name, kind, others, rng)
    command = rng.choice(commands_of(name))
    label = re.sub(r"[0-9a-f]{32}", "*", name)
    try:
      counts[label, outcome(command, config, folder, want, capsys)] += 1
    except Exception as error:
      counts[label, "wrong"] += 1
      failures.append(f"{name}: {kind}, {command.__name__}: {error!r}"[:1500])
    shutil.rmtree(folder)
  for label in sorted({label for label, _ in counts}):
    row = [
      f"{counts[label, what]:4} {what}" for what in ("right", "told", "wrong")
    ]
    print(*row, label)
  assert not failures, "\n".join(failures)
