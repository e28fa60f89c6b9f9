"""Training of a run: its first state, its batches and its files."""

import dataclasses
import json
import math
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformers import config as configs
from jaxformers.foundations.errors import UserError
from jaxformers.training import loop, losses, steps, trainer
from jaxformers.training.run import open_run
from jaxformers.training.trainer import Trainer

ROOT = Path(__file__).parents[2]


def trainer_of(config, workdir):
  return Trainer(open_run(config, workdir))


def test_trainer_scores_do_not_depend_on_buckets(smoke, tmp_path):
  """Batches are shorter and dealt anew; the scores of a state are the same."""
  padded = trainer_of(smoke(), tmp_path / "one")
  bucketed = trainer_of(smoke(buckets=2), tmp_path / "two")
  split = padded.task.splits["test"]
  a, b = (t.evaluate(t.state.params, split) for t in (padded, bucketed))
  assert (a["accuracy"], a["count"]) == (b["accuracy"], b["count"])
  assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
  longest = bucketed.task.max_len
  lengths = {next(bucketed.batches(k))["inputs"].shape[1] for k in range(4)}
  assert lengths <= {-(-longest // 2), longest}


def test_packed_rows_train_as_the_examples_do(smoke, tmp_path):
  records = []
  for name, packing in (("one", False), ("packed", True)):
    config = smoke("lru", total_steps=4, packing=packing)
    config.model.mixer = {"dropout_rate": 0.0}
    loop.run(config, tmp_path / name)
    lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
    records.append([json.loads(line) for line in lines])
  losses = [
    [line["train/loss"] for line in each if "train/loss" in line]
    for each in records
  ]
  assert len(losses[0]) == 2
  assert losses[0] == pytest.approx(losses[1], rel=1e-4)
  last = records[1][-2]
  assert 0 < last["padding"] < 0.6
  assert last["tokens_per_step"] > 8 * 5


@pytest.mark.parametrize(
  ("model", "fields", "message"),
  [
    ("s4d", {}, "'s4d' reads every example in a separate row"),
    ("lru", {"margin_tokens": 1}, "no certified training"),
  ],
)
def test_packing_is_refused_where_it_gains_nothing(
  smoke, tmp_path, model, fields, message
):
  with pytest.raises(UserError, match=message):
    trainer_of(smoke(model, packing=True, **fields), tmp_path)


@pytest.mark.usefixtures("one_device")
def test_trainer_splits_a_batch_to_fit_the_cache(smoke, tmp_path, monkeypatch):
  def parts(model, **fields):
    config = smoke(model, **fields)
    return trainer_of(config, tmp_path / f"{model}{fields}").parts

  monkeypatch.setattr("os.cpu_count", lambda: 2)
  # Two of eight rows of 60 tokens fit, with 16 channels each.
  monkeypatch.setattr(trainer, "CACHED", 2 * 60 * 16)
  assert parts("transject") == 4
  assert parts("transject", accumulate=2) == 2
  assert parts("local") == 4
  # Scans compute rows in parallel: a part keeps two.
  monkeypatch.setattr(trainer, "CACHED", 60 * 16)
  assert parts("lru") == 4
  with monkeypatch.context() as patch:  # Eight cores have four times the cache.
    patch.setattr("os.cpu_count", lambda: 8)
    assert parts("lru", seed=1) == 2
  # Packed rows are made for one part, and BatchNorm sees the whole batch.
  assert parts("lru", packing=True) == 1
  assert parts("lru", **{"model.block.norm_type": "batch"}) == 1
  # A loss that sees the whole batch does not divide it.
  objective = dataclasses.replace(
    losses.LOSSES["classification"], sees_batch=True
  )
  with monkeypatch.context() as patch:
    patch.setitem(losses.LOSSES, "classification", objective)
    assert parts("transject", seed=1) == 1
    run = trainer_of(smoke(buckets=2), tmp_path / "seen")
    assert not run._loader.is_sorted
  monkeypatch.setattr(trainer, "CACHED", 2**19)
  assert parts("random_transject") == 1


@pytest.mark.usefixtures("one_device")
def test_shorter_batches_have_fewer_parts(smoke, tmp_path, monkeypatch):
  counts = {}
  sum_parts = steps._sum_parts

  def count(part, batch, key, number):
    counts[batch["inputs"].shape[1]] = number
    return sum_parts(part, batch, key, number)

  monkeypatch.setattr(steps, "_sum_parts", count)
  monkeypatch.setattr("os.cpu_count", lambda: 2)
  monkeypatch.setattr(trainer, "CACHED", 2 * 60 * 16)

  def traced(folder, **fields):
    run = trainer_of(smoke("lru", buckets=4, **fields), tmp_path / folder)
    assert run.parts == 4
    for length in (15, 30, 45, 60):
      batch = run._loader.batch(run.order(0), (0, 0))
      batch["inputs"] = np.resize(batch["inputs"], (8, length))
      jax.eval_shape(run._step, run.state, batch)
    return dict(counts)

  assert traced("free") == {15: 1, 30: 2, 45: 4, 60: 4}
  # The user's number of parts holds for all batches.
  assert set(traced("fixed", accumulate=4).values()) == {4}


@pytest.mark.parametrize(
  ("shape", "dtype"),
  [((8, 30), np.int32), ((8, 2, 30), np.int32), ((8, 30, 3), np.float32)],
  ids=["tokens", "pairs", "series"],
)
def test_parts_follow_the_length_of_any_batch(shape, dtype):
  batch = {"inputs": np.zeros(shape, dtype)}
  assert steps.count_parts(batch, most=4, longest=60) == 2


@pytest.mark.usefixtures("one_device")
def test_parts_for_memory_hold_for_shorter_batches(
  smoke, tmp_path, monkeypatch
):
  """Fewer parts could need more memory than the planned step."""
  monkeypatch.setattr("os.cpu_count", lambda: 2)
  monkeypatch.setattr(trainer, "CACHED", 4 * 60 * 16)
  run = trainer_of(smoke("lru", buckets=4), tmp_path)
  longest = run.run.padded_lengths[-1]
  assert (run.parts, run._longest_length) == (2, longest)
  monkeypatch.setattr(trainer.memory, "device_bytes", lambda _: 1 << 40)
  planned = iter([(1 << 41, None), (1 << 30, "program")])  # Four parts fit.
  monkeypatch.setattr(run, "_planned", lambda *_: next(planned))
  run.plan()
  assert (run.parts, run._longest_length) == (4, 0)
  assert run._make_step().keywords["longest"] == 0


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize(
  ("needed", "available"), [(2.0**41, 2**40), (2.0**39, 2**40), (math.inf, 0)]
)
@pytest.mark.slow
def test_plan_takes_more_parts_of_a_step_that_the_compiler_refuses(
  smoke, tmp_path, monkeypatch, needed, available
):
  """The compiler of TPUs refuses a step that does not fit."""
  refused = iter([True, True, False])
  real = trainer.memory.compile_step

  def compile_step(lowered):
    if next(refused):
      raise trainer.memory.TooLargeError(needed)
    return real(lowered)

  monkeypatch.setattr(trainer.memory, "compile_step", compile_step)
  monkeypatch.setattr(trainer.memory, "device_bytes", lambda _: available)
  run = trainer_of(smoke("lru"), tmp_path)
  assert run.plan() > 0
  assert run.parts == 4


def test_trainer_begins_with_pretrained_weights(smoke, tmp_path, monkeypatch):
  def begin_with(folder, start, model, task):
    assert (folder, model["name"], task.name) == (
      "weights",
      "transject",
      "listops",
    )
    record = {"folder": folder, "sha256": "f" * 64}
    return jax.tree.map(lambda leaf: leaf + 1, start), record

  plain = trainer_of(smoke(), tmp_path / "plain")
  monkeypatch.setattr(trainer.origin, "begin_with", begin_with)
  monkeypatch.setattr(trainer.origin, "read_fields", lambda folder: {})
  config = smoke(pretrained="weights", ema_decay=0.5)
  begun = trainer_of(config, tmp_path / "begun")
  for params in (begun.state.params, begun.state.average):
    chex.assert_trees_all_equal(
      params, jax.tree.map(lambda leaf: leaf + 1, plain.state.params)
    )
  assert plain.state.average is plain.origin is None


def test_an_optimiser_may_keep_the_pretrained_weights(
  smoke, tmp_path, monkeypatch
):
  """As those of which the state holds where the parameters begin."""
  keep = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.copy, params), lambda *_: None
  )
  monkeypatch.setattr(
    trainer.origin,
    "begin_with",
    lambda folder, start, model, task: (
      jax.tree.map(lambda leaf: leaf + 1, start),
      {"folder": folder, "sha256": "f" * 64},
    ),
  )
  monkeypatch.setattr(trainer.origin, "read_fields", lambda folder: {})
  run = open_run(smoke(pretrained="weights"), tmp_path / "run")
  begun = trainer.Trainer(dataclasses.replace(run, tx=keep))
  chex.assert_trees_all_equal(begun.state.opt_state, begun.state.params)


def test_trainer_refuses_pretrained_weights_of_another_model(smoke, tmp_path):
  weights = Path(__file__).parents[1] / "models" / "pretrained" / "bert"
  with pytest.raises(ValueError, match="3 heads.*model 2"):
    trainer_of(smoke("transformer", pretrained=str(weights)), tmp_path)


@pytest.mark.slow
def test_run_writes_the_vocabulary_beside_the_checkpoints(smoke, tmp_path):
  results = loop.run(smoke(), tmp_path)
  saved = json.loads((tmp_path / "vocabulary.json").read_text())
  assert saved["tokens"][:3] == ["<pad>", "[MIN", "[MAX"]
  assert len(saved["tokens"]) == saved["vocab_size"] == 16
  # With these a model reads inputs without the data.
  assert saved["tokenizer"] == "listops"
  assert saved["sizes"]["num_classes"] == len(saved["classes"]) == 10
  for name in ("tokens", "digest", "tokenizer", "sizes", "classes"):
    del saved[name]
  assert saved == results["task_description"]
  assert saved["protocol"] == "jaxformers"


@pytest.fixture
def limit(monkeypatch):
  """Sets the bytes of a device."""
  return lambda size: monkeypatch.setattr(
    trainer.memory, "device_bytes", lambda _: size
  )


@pytest.mark.usefixtures("one_device")
@pytest.mark.long
def test_plan_takes_a_step_that_does_not_fit_in_parts(smoke, tmp_path, limit):
  def made(name, **fields):
    return trainer_of(smoke("local", batch_size=8, **fields), tmp_path / name)

  limit(0)  # Unknown: nothing is refused.
  whole = made("whole")
  needed = whole.plan()
  assert needed > 0 and whole.parts == 1
  few = made("few", accumulate=4).plan()
  assert few < needed
  # Chosen where the config leaves it open, named where it does not.
  limit(few)
  chosen = made("chosen")
  assert chosen.plan() <= few
  assert 1 < chosen.parts <= 4
  with pytest.raises(ValueError, match="1 part.*accumulate=[24]"):
    made("asked", accumulate=1).plan()
  limit(1)
  with pytest.raises(ValueError, match="8 parts.*recomputed"):
    made("none").plan()
  # The same number of parts trains to the same numbers.
  batch = next(chosen.batches(0))
  again = made("again", accumulate=chosen.parts)
  chex.assert_trees_all_equal(
    chosen.train_step(chosen.state, batch)[1],
    again.train_step(again.state, batch)[1],
  )


@pytest.mark.usefixtures("one_device")
@pytest.mark.long
def test_run_that_does_not_fit_stops_before_its_first_step(
  smoke, tmp_path, limit
):
  limit(1)
  with pytest.raises(ValueError, match="step needs .* GiB.*--config"):
    loop.run(smoke(), tmp_path)
  assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.usefixtures("one_device")
@pytest.mark.slow
def test_plan_uses_the_longest_batch(smoke, tmp_path):
  run = trainer_of(smoke(buckets=4), tmp_path)
  run.plan()
  ((key, _),) = run._programs.items()
  assert f"inputs int32[8, {run.task.max_len}]" in key


@pytest.fixture
def graded(data_dir):
  """Returns a function that makes a config whose task has a curriculum."""

  def make(**fields):
    config = configs.load(
      f"{ROOT}/configs/lra/pathfinder.py:size=tiny,model=s5"
    )
    config.data_dir = str(data_dir)
    config.task.update(difficulty="easy", num_images=40, num_short=16)
    config.task.short_paddles = "3 4"
    config.model.d_model = 8
    config.update(batch_size=4, total_steps=15, short_steps=7)
    config.schedule.warmup_steps = 4
    config.update_from_flattened_dict(fields)
    return config

  return make


def test_first_steps_read_the_curriculum_once_in_its_order(graded, tmp_path):
  run = trainer_of(graded(), tmp_path)

  def images(batch):
    return [row.tobytes() for row in np.asarray(batch["inputs"])]

  read = [images(batch) for batch in run.batches(0)]
  # Seven steps are four of one split and three of another; 32 examples follow.
  names = ["train_3"] * 4 + ["train_4"] * 3 + ["train"] * 8
  assert len(read) == len(names)
  for name in ("train_3", "train_4", "train"):
    split = run.task.splits[name]
    batches = zip(read, names, strict=True)
    rows = [row for batch, source in batches if source == name for row in batch]
    every = split.batch(np.arange(len(split)), 1_024)
    assert {*rows} <= {*images(every)}
    assert len({*rows}) == len(rows)  # None is read twice.
  # A resumed run reads the same batches.
  for start in (5, 9):
    assert [images(batch) for batch in run.batches(start)] == read[start:]


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"short_steps": 0}, "short_steps=0.*train_3, train_4.*least 2"),
    ({"short_steps": 1}, "short_steps=1.*train_3, train_4.*least 2"),
    ({"short_length": 9}, "short_length=9.*train_3, train_4.*no short_length"),
    (
      {"task.num_short": 0, "task.short_paddles": ""},
      "short_steps=7.*no splits.*no short_steps",
    ),
  ],
)
def test_curriculum_needs_short_steps(graded, tmp_path, fields, message):
  with pytest.raises(UserError, match=message):
    trainer_of(graded(**fields), tmp_path)
