"""A workdir belongs to one config, and to one process at a time."""

import dataclasses
import errno
import json
import multiprocessing
import os
import re
import shutil
import signal
import time

import pytest

from jaxformers import config as configs
from jaxformers import tasks
from jaxformers.foundations import workdirs
from jaxformers.foundations.errors import UserError
from jaxformers.training import loop, resume


@pytest.fixture(scope="module")
def finished(smoke, tmp_path_factory):
  """A workdir in which a run has ended, and its results."""
  workdir = tmp_path_factory.mktemp("finished") / "run"
  return workdir, loop.run(smoke(), workdir)


@pytest.fixture
def run(finished, tmp_path):
  """A copy of the finished workdir."""
  shutil.copytree(finished[0], tmp_path / "run")
  return tmp_path / "run"


def numbers(results):
  return {k: v for k, v in results.items() if k != "wall_seconds"}


@pytest.mark.slow
def test_run_refuses_results_of_another_config(smoke, run):
  """Also where nothing else is left of the run that they are of."""
  shutil.rmtree(run / "checkpoints")
  (run / "config.json").unlink()
  message = r"\(results.json\)[\s\S]*seed: 0 -> 1"
  with pytest.raises(ValueError, match=message):
    loop.run(smoke(seed=1, **{"schedule.learning_rate": 0.5}), run)


def test_run_refuses_a_checkpoint_of_another_config(smoke, run):
  """Also where neither config.json nor results.json say of which."""
  (run / "config.json").unlink()
  (run / "results.json").unlink()
  message = r"\(checkpoints/10\)[\s\S]*seed: 0 -> 1"
  with pytest.raises(ValueError, match=message):
    loop.run(smoke(seed=1), run)
  assert not (run / "results.json").exists()


def test_an_absent_option_of_a_task_has_its_default(smoke):
  config = configs.RunConfig.from_dict(smoke())
  options = {k: v for k, v in config.task.options.items() if k != "max_args"}
  section = dataclasses.replace(config.task, options=options)
  before = dataclasses.replace(config, task=section)
  assert config.task.name == "listops" and len(options)
  load = tasks.TASKS["listops"].__kwdefaults__
  given = dict(options, max_args=load["max_args"])
  after = dataclasses.replace(section, options=given)
  assert not resume._differences(
    before, dataclasses.replace(config, task=after)
  )
  other = dataclasses.replace(section, options=dict(options, max_args=3))
  other = dataclasses.replace(config, task=other)
  assert resume._differences(before, other) == ["task.max_args: 10 -> 3"]


def test_run_rewrites_a_lost_config(smoke, run, finished):
  before = (run / "config.json").read_text()
  (run / "config.json").unlink()
  assert numbers(loop.run(smoke(), run)) == numbers(finished[1])
  assert (run / "config.json").read_text() == before


def test_run_refuses_foreign_results_in_its_workdir(smoke, run, finished):
  other = configs.plain(smoke(seed=1))
  results = finished[1] | {"config": other, "seed": 1}
  workdirs.write(run, "results.json", results)
  with pytest.raises(ValueError, match=r"\(results.json\)[\s\S]*seed: 1 -> 0"):
    loop.run(smoke(), run)


def test_run_refuses_results_of_other_data(smoke, run, finished):
  about = finished[1]["task_description"] | {"max_len": 3}
  results = finished[1] | {"task_description": about}
  workdirs.write(run, "results.json", results)
  with pytest.raises(ValueError, match=r"results.json[\s\S]*max_len: 3 ->"):
    loop.run(smoke(), run)


@pytest.mark.parametrize("eval_only", [False, True])
@pytest.mark.parametrize("name", ["config.json", "results.json"])
def test_run_detects_a_changed_digit_in_config_and_results(
  smoke, run, name, eval_only
):
  path = run / name
  text = path.read_text()
  assert '"batch_size": 8' in text
  path.write_text(text.replace('"batch_size": 8', '"batch_size": 9'))
  if name == "config.json" and not eval_only:
    # Results of this very config say which it is.
    assert loop.run(smoke(), run)["config"]["batch_size"] == 8
    assert path.read_text() == text
    return
  with pytest.raises(ValueError, match=f"digest.*{name}"):
    loop.run(smoke(), run, eval_only=eval_only)


def test_run_refuses_results_without_digest(smoke, run):
  path = run / "results.json"
  content = json.loads(path.read_text())
  del content["digest"]
  path.write_text(json.dumps(content))
  with pytest.raises(ValueError, match="digest.*results.json"):
    loop.run(smoke(), run)


def test_run_refused_writes_no_files(smoke, run, finished):
  """Neither its config nor its vocabulary: the right run goes on."""
  (run / "config.json").unlink()
  (run / "results.json").unlink()
  with pytest.raises(ValueError, match="seed: 0 -> 1"):
    loop.run(smoke(seed=1), run)
  assert not (run / "config.json").exists()
  assert loop.run(smoke(), run)["accuracy"] == finished[1]["accuracy"]


@pytest.mark.slow
def test_run_keeps_results_when_a_longer_run_was_begun(smoke, tmp_path):
  fields = {"schedule.name": "constant", "schedule.warmup_steps": 0}
  short = smoke(total_steps=2, eval_steps=1, **fields)
  results = loop.run(short, tmp_path)
  config = configs.plain(smoke(total_steps=4, eval_steps=1, **fields))
  workdirs.write(tmp_path, "config.json", config)
  assert loop.run(short, tmp_path) == results
  # The longer run goes on with its own config.
  assert workdirs.read_config(tmp_path)["total_steps"] == 4
  # A damaged one is written again.
  (tmp_path / "config.json").write_text("{")
  assert loop.run(short, tmp_path) == results
  assert workdirs.read_config(tmp_path)["total_steps"] == 2


@pytest.mark.slow
def test_run_evaluated_at_its_end_is_not_lengthened(smoke, tmp_path):
  """A longer run would not have evaluated there, nor counted it."""
  fields = {"schedule.name": "constant", "schedule.warmup_steps": 0}
  loop.run(smoke(total_steps=3, eval_steps=2, **fields), tmp_path)
  with pytest.raises(ValueError, match="step 3.*config.eval_steps=2"):
    loop.run(smoke(total_steps=5, eval_steps=2, **fields), tmp_path)


def test_run_refuses_a_workdir_in_an_object_store(smoke):
  with pytest.raises(ValueError, match="gs:/bucket/run.*store"):
    loop.run(smoke(), "gs://bucket/run")


@pytest.mark.parametrize("character", resume.REFUSED)
def test_run_refuses_a_workdir_with_special_characters(
  smoke, tmp_path, character
):
  message = re.escape(repr(character)) + ".*--workdir"
  with pytest.raises(ValueError, match=message):
    loop.run(smoke(), tmp_path / f"run{character}1]")
  assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_run_accepts_a_workdir_with_other_characters(smoke, tmp_path):
  workdir = tmp_path / "a run-1](é):{x}%20"
  results = loop.run(smoke(total_steps=1), workdir)
  (workdir / "results.json").unlink()
  again = loop.run(smoke(total_steps=1), workdir)
  assert again["accuracy"] == results["accuracy"]


def hold(workdir, entered):
  with resume.locked(workdir):
    entered.set()
    time.sleep(60)


@pytest.mark.slow
def test_run_refuses_a_locked_workdir_until_its_process_ends(smoke, tmp_path):
  # Not a fork, which would have this process's threads but not their work.
  processes = multiprocessing.get_context("spawn")
  entered = processes.Event()
  holder = processes.Process(target=hold, args=(tmp_path, entered))
  holder.start()
  assert entered.wait(60)
  before = sorted(tmp_path.rglob("*"))
  message = f"process {holder.pid} .*20"
  began = time.monotonic()
  with pytest.raises(UserError, match=message):
    loop.run(smoke(), tmp_path)
  assert time.monotonic() - began < 5
  assert sorted(tmp_path.rglob("*")) == before
  os.kill(holder.pid, signal.SIGKILL)
  holder.join()
  assert loop.run(smoke(total_steps=1), tmp_path)["examples"] == 13
  assert not (tmp_path / ".lock.json").exists()


def test_locked_warns_of_a_file_system_without_locks(
  tmp_path, monkeypatch, capsys
):
  def refuse(*args, **kwargs):
    raise OSError(errno.ENOLCK, "No locks available")

  monkeypatch.setattr(resume.filelock.FileLock, "acquire", refuse)
  with resume.locked(tmp_path):
    pass
  assert "[Errno 37] No locks" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("number", "kind", "message"),
  [
    (errno.EACCES, UserError, "belongs to another user"),
    (errno.EIO, OSError, "said"),
  ],
)
def test_locked_takes_no_other_error_for_a_file_system_without_locks(
  tmp_path, monkeypatch, number, kind, message
):
  def refuse(*args, **kwargs):
    raise OSError(number, "said")

  monkeypatch.setattr(resume.filelock.FileLock, "acquire", refuse)
  with pytest.raises(kind, match=message), resume.locked(tmp_path):
    pass


def test_run_eval_only_takes_no_lock(smoke, run, finished):
  with resume.locked(run):
    again = loop.run(smoke(), run, eval_only=True)
  assert again["accuracy"] == finished[1]["accuracy"]


@pytest.mark.slow
def test_run_falls_back_from_a_damaged_best_checkpoint(smoke, tmp_path, capsys):
  """To the best of those that are whole; the results say so."""
  config = smoke(eval_steps=2, **{"schedule.learning_rate": 0.3})
  results = loop.run(config, tmp_path)
  best = results["best_step"]
  assert best < 10  # Such a rate makes it worse.
  shutil.rmtree(tmp_path / "checkpoints" / str(best) / "state")
  # Results that are there are right still.
  assert loop.run(config, tmp_path) == results
  (tmp_path / "results.json").unlink()
  again = loop.run(config, tmp_path)
  assert again["best_step"] != best
  assert again["damaged_best_step"] == best
  assert again["selection_score"] < results["selection_score"]
  assert "the best" in capsys.readouterr().err
  shutil.rmtree(tmp_path / "checkpoints" / str(best))
  (tmp_path / "results.json").unlink()
  gone = loop.run(config, tmp_path)
  assert {k: v for k, v in gone.items() if not k.endswith("seconds")} == {
    k: v for k, v in again.items() if not k.endswith("seconds")
  }
