"""The loop from end to end, on a ListOps of seconds."""

import os
import signal

import jax
import numpy as np
import pytest

from jaxformers import config as configs
from jaxformers.foundations import workdirs
from jaxformers.models import MODELS
from jaxformers.training import evaluate, loop, optim, provenance, steps
from jaxformers.training.checkpoint import Checkpoints
from jaxformers.training.run import open_run
from jaxformers.training.trainer import Trainer
from tests.marks import long_except, slow_except

TIMES = ("train_seconds", "wall_seconds", "examples_per_second")


def timeless(results):
  return {key: value for key, value in results.items() if key not in TIMES}


def curve(workdir):
  records, damaged = workdirs.read_metrics(workdir)
  assert not damaged
  return [
    {k: v for k, v in record.items() if k not in TIMES} for record in records
  ]


def stop_at(monkeypatch, step, act):
  """Calls act when a step of training has been started."""
  real = loop._Loop.step

  def stopping(self, now, batch):
    real(self, now, batch)
    if now == step:
      act()

  monkeypatch.setattr(loop._Loop, "step", stopping)


@pytest.fixture(scope="module")
def undisturbed(smoke, tmp_path_factory):
  """The results and the curve of a run that nothing stops.

  And after every of its steps, how many programs there are of it.
  """
  workdir = tmp_path_factory.mktemp("whole")
  real, programs = loop._Loop.step, []

  def counted(self, now, batch):
    real(self, now, batch)
    trainer = self.trainer
    programs.append(len(trainer._programs) + trainer._step._cache_size())

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(loop._Loop, "step", counted)
    results = loop.run(smoke(), workdir)
  return timeless(results), curve(workdir), programs


@pytest.mark.slow
def test_run_compiles_one_program_for_all_steps(undisturbed):
  assert len(undisturbed[2]) == 10
  assert set(undisturbed[2]) == {1}


def test_run_refuses_implicit_host_transfers(smoke, tmp_path, monkeypatch):
  real = loop._Loop.step
  monkeypatch.setattr(
    loop._Loop,
    "step",
    lambda self, now, batch: real(self, now, jax.device_get(batch)),
  )
  with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
    loop.run(smoke(), tmp_path / "run")


def test_run_logs_every_step_once(smoke, tmp_path, undisturbed):
  """The mean over ten steps is the mean of five means over two."""

  def losses(lines):
    return [line["train/loss"] for line in lines if "train/loss" in line]

  loop.run(smoke(log_steps=10), tmp_path)
  (once,), parts = losses(curve(tmp_path)), losses(undisturbed[1])
  assert len(parts) == 5
  assert once == pytest.approx(np.mean(parts), rel=1e-6)


class Killed(BaseException):
  pass


@pytest.mark.parametrize("step", long_except((3,), (3, 5, 8)))
def test_resumed_run_is_bitwise_equal_to_an_uninterrupted_one(
  smoke, tmp_path, monkeypatch, undisturbed, step
):
  def kill():
    raise Killed

  config = smoke(log_steps=3)  # Windows that the checkpoint cuts through.
  want = timeless(loop.run(config, tmp_path / "want"))
  with monkeypatch.context() as patch:
    stop_at(patch, step, kill)
    with pytest.raises(Killed):
      loop.run(config, tmp_path / "run")
  assert timeless(loop.run(config, tmp_path / "run")) == want
  assert curve(tmp_path / "run") == curve(tmp_path / "want")
  # The configs differ in log_steps alone, which changes no number of the end.
  assert want["accuracy"] == undisturbed[0]["accuracy"]


@pytest.fixture
def hears_ctrl_c():
  """Python's own handler, also where tests run in a shell's background."""
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_run_saves_at_a_signal_and_resumes(
  smoke, tmp_path, monkeypatch, undisturbed, number, hears_ctrl_c
):
  with monkeypatch.context() as patch:
    patch.setattr(provenance, "commit", lambda: "earlier commit")
    stop_at(patch, 3, lambda: os.kill(os.getpid(), number))
    with pytest.raises(SystemExit) as exit_info:
      loop.run(smoke(), tmp_path / "run")
  assert exit_info.value.code == 128 + number
  with Checkpoints(tmp_path / "run", {}, {}) as checkpoints:
    assert checkpoints.steps() == [3]
  # Results name the code of all steps, and otherwise are those of one run.
  results = loop.run(smoke(), tmp_path / "run")
  now = provenance.commit()
  assert results["commit"] == f"earlier commit, {now}"
  assert timeless(results) | {"commit": now} == undisturbed[0]
  assert curve(tmp_path / "run") == undisturbed[1]


# One of each way in which a layer draws, carries, or has a block.
SOME_MODELS = ("informer", "mega", "transject")


@pytest.mark.slow
@pytest.mark.parametrize("model", long_except(SOME_MODELS, sorted(MODELS)))
def test_run_trains_scores_and_resumes_every_model(
  smoke, tmp_path, monkeypatch, one_device, model
):
  config = smoke(model, total_steps=2, eval_steps=1)
  config.task.update(num_train=16, num_validation=2, num_test=2)
  config.task.max_length = 300  # Linformer's rank and landmarks are 128.
  config.model.num_layers = 1
  with monkeypatch.context() as patch:
    stop_at(patch, 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit):
      loop.run(config, tmp_path)
  results = loop.run(config, tmp_path)
  assert results["examples"] == 2
  steps = [line["step"] for line in curve(tmp_path) if "train/loss" in line]
  assert steps == [2]
  validated = [line["step"] for line in curve(tmp_path)]
  assert validated.count(1) == 1


def test_run_stops_at_once_at_a_second_ctrl_c(
  smoke, tmp_path, monkeypatch, hears_ctrl_c
):
  def twice():
    for _ in range(2):
      os.kill(os.getpid(), signal.SIGINT)

  stop_at(monkeypatch, 3, twice)
  with pytest.raises(KeyboardInterrupt):
    loop.run(smoke(), tmp_path)
  assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
def test_run_warns_of_a_warmup_as_long_as_the_run(smoke, tmp_path, capsys):
  loop.run(smoke(total_steps=4, eval_steps=4, log_steps=4), tmp_path)
  said = capsys.readouterr().err
  assert "schedule.warmup_steps=4" in said and "total_steps=4" in said


@pytest.mark.slow
def test_run_is_lengthened_with_a_constant_schedule(smoke, tmp_path):
  schedule = {"name": "constant", "learning_rate": 1e-2, "warmup_steps": 4}

  def make(steps):
    config = smoke(total_steps=steps, **{"optimizer.cycle_momentum": False})
    config.schedule = schedule
    return config

  want = loop.run(make(10), tmp_path / "want")
  loop.run(make(5), tmp_path / "run")
  lengthened = loop.run(make(10), tmp_path / "run")
  # The end that was moved was logged, too.
  assert lengthened.pop("metrics_records") == want.pop("metrics_records") + 1
  assert timeless(lengthened) == timeless(want)
  with pytest.raises(ValueError, match=r"total_steps: 10 -> 5"):
    loop.run(make(5), tmp_path / "run")


def test_run_returns_results_of_a_finished_run(smoke, tmp_path, monkeypatch):
  first = loop.run(smoke(), tmp_path)
  monkeypatch.setattr(loop, "Trainer", lambda *_: pytest.fail("compiled"))
  monkeypatch.setattr(loop._Loop, "step", lambda *_: pytest.fail("trained"))
  monkeypatch.setattr(
    evaluate.Evaluator, "__call__", lambda *_: pytest.fail("scored")
  )
  assert loop.run(smoke(), tmp_path) == first


def test_run_eval_only_gives_the_same_score(smoke, tmp_path):
  results = loop.run(smoke(), tmp_path)
  again = loop.run(smoke(), tmp_path, eval_only=True)
  assert timeless(again) == timeless(results)
  with pytest.raises(ValueError, match="other.*config.json"):
    loop.run(smoke(), tmp_path / "other", eval_only=True)
  assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
  "model",
  slow_except(
    (),
    ("transject", "random_transject", "transformer"),
    ("transject",),
  ),
)
def test_run_beats_the_majority_class_on_easy_listops(
  smoke, tmp_path, model, one_device
):
  """Above chance and above the majority class on an easy ListOps."""
  rate = 3e-3 if model == "transformer" else 1e-2
  config = smoke(
    model,
    total_steps=300,
    eval_steps=300,
    log_steps=50,
    checkpoint_steps=300,
    batch_size=32,
    **{"schedule.warmup_steps": 30, "schedule.learning_rate": rate},
  )
  config.task.update(num_train=2_000, num_validation=100, num_test=200)
  config.task.update(min_length=3, max_length=8)
  with config.task.unlocked():
    config.task.update(max_depth=2, max_args=3)
  results = loop.run(config, tmp_path)
  assert results["accuracy"] > results["baselines"]["majority class"] + 0.1


@pytest.mark.slow
def test_run_under_pmap_agrees_with_jit(smoke, tmp_path, undisturbed):
  b = loop.run(smoke(parallel="pmap"), tmp_path / "pmap")
  assert undisturbed[0]["accuracy"] == b["accuracy"]
  assert undisturbed[0]["loss"] == pytest.approx(b["loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.long
def test_run_resumes_on_another_mesh(smoke, tmp_path, monkeypatch, undisturbed):
  """Begun with the experts spread, ended with the parameters spread."""
  with monkeypatch.context() as patch:
    stop_at(patch, 5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit):
      loop.run(smoke(mesh="data:2,model:2"), tmp_path)
  b = loop.run(smoke(mesh="data:2,fsdp:2"), tmp_path)
  assert undisturbed[0]["accuracy"] == b["accuracy"]
  assert undisturbed[0]["loss"] == pytest.approx(b["loss"], rel=1e-5)


@pytest.mark.slow
def test_run_stops_at_the_first_nonfinite_loss_and_names_its_step(
  smoke, tmp_path, monkeypatch
):
  real = steps._forward

  def spoiled(variables, batch, key, **static):
    total, sums = real(variables, batch, key, **static)
    bad = batch["targets"].sum() == spoiled.targets
    sums["objective"] = jax.numpy.where(bad, jax.numpy.nan, total)
    return total, sums

  trainer = Trainer(open_run(smoke(), tmp_path / "look"))
  split = trainer.task.splits["train"]
  sums = [split.labels[trainer.order(step)].sum() for step in range(10)]
  bad = next(s for s in range(6, 10) if sums[s] not in sums[:s])
  spoiled.targets = int(sums[bad])
  monkeypatch.setattr(steps, "_forward", spoiled)
  message = f"step {bad + 1} .*finite.*step 5"
  with pytest.raises(FloatingPointError, match=message):
    loop.run(smoke(), tmp_path / "run")


@pytest.mark.parametrize("select", ["accuracy", "loss"])
@pytest.mark.slow
def test_run_never_saves_nonfinite_parameters(
  smoke, tmp_path, monkeypatch, select
):
  config = smoke(
    total_steps=1, select=select, **{"schedule.learning_rate": 1e38}
  )

  # With a rate that no config may have, one step is enough.
  def without_range(learning_rate, warmup_steps, total_steps):
    return optim.onecycle(learning_rate, warmup_steps, total_steps)

  monkeypatch.setitem(optim.SCHEDULES, "onecycle", without_range)
  for _ in range(2):  # Also when it is started again.
    with pytest.raises(
      FloatingPointError, match="validation loss.*step 1 .*finite"
    ):
      loop.run(config, tmp_path)
  assert not (tmp_path / "results.json").exists()
  with Checkpoints(tmp_path, {}, {}) as checkpoints:
    assert checkpoints.steps() == []


@pytest.mark.slow
def test_run_ends_by_patience(smoke, tmp_path):
  config = smoke(
    total_steps=40, eval_steps=2, patience=3, **{"schedule.learning_rate": 1e-9}
  )
  results = loop.run(config, tmp_path)
  evaluated = [
    line["step"] for line in curve(tmp_path) if "validation/loss" in line
  ]
  assert evaluated == [2, 4, 6, 8]
  assert results["best_step"] == 2
  assert timeless(loop.run(config, tmp_path)) == timeless(results)
  config.patience = 5
  loop.run(config, tmp_path)
  evaluated = [
    line["step"] for line in curve(tmp_path) if "validation/loss" in line
  ]
  assert evaluated == [2, 4, 6, 8, 10, 12]
  config.patience = 3
  with pytest.raises(ValueError, match="patience: 5 -> 3"):
    loop.run(config, tmp_path)


@pytest.mark.slow
def test_patience_begins_after_short_examples(smoke, tmp_path):
  fields = {"schedule.learning_rate": 1e-9, "short_length": 30}
  config = smoke(
    total_steps=40, eval_steps=2, patience=2, short_steps=6, **fields
  )
  loop.run(config, tmp_path)
  evaluated = [
    line["step"] for line in curve(tmp_path) if "validation/loss" in line
  ]
  assert evaluated == [2, 4, 6, 8, 10]


def test_run_selects_by_loss(smoke, tmp_path):
  results = loop.run(smoke(select="loss"), tmp_path)
  losses = {
    line["step"]: line["validation/loss"]
    for line in curve(tmp_path)
    if "validation/loss" in line
  }
  assert results["best_step"] == min(losses, key=losses.get)
  assert results["selection_score"] == -min(losses.values())


@pytest.mark.slow
def test_run_refuses_a_checkpoint_of_another_shape(smoke, tmp_path):
  loop.run(smoke(), tmp_path)
  (tmp_path / "results.json").unlink()
  wider = smoke(**{"model.d_model": 32})
  workdirs.write(tmp_path, "config.json", configs.plain(wider))
  with pytest.raises(ValueError, match="model.d_model: 16 -> 32"):
    loop.run(wider, tmp_path)


@pytest.mark.long
def test_run_profile_writes_a_trace(smoke, tmp_path):
  loop.run(smoke(total_steps=25, eval_steps=25), tmp_path, profile=True)
  assert list((tmp_path / "profile").rglob("*.xplane.pb"))
  with pytest.raises(ValueError, match="--profile needs 20 steps, and 10"):
    loop.run(smoke(), tmp_path / "short", profile=True)


@pytest.mark.slow
def test_run_depends_on_the_seed(smoke, tmp_path, undisturbed):
  b = loop.run(smoke(seed=1), tmp_path)
  assert undisturbed[0]["loss"] != b["loss"]
  assert not np.isnan(b["loss"])
