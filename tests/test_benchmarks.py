"""Benchmarks can be run, on models of seconds; their speed is not tested."""

import ast
import dataclasses
import graphlib
import itertools
import json
import math
import runpy
import sys
import time
import types
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
  __main__,
  compare,
  data,
  depth,
  diagnostics,
  encoders,
  fidelity,
  gpu,
  injective,
  laptop,
  memory,
  orthogonal,
  ours,
  programs,
  scaling,
  scan,
  speed,
  start,
  timing,
  training,
)
from jaxformers.analysis.tables.runs import RunRecord
from jaxformers.config import RunConfig
from jaxformers.foundations import workdirs
from jaxformers.foundations.errors import UserError
from jaxformers.models import MODELS
from jaxformers.models.variables import make_variables
from jaxformers.orthogonal import MAPS
from jaxformers.training.ahead import Report
from jaxformers.training.programs import Collective
from tests import draws, initial
from tests import results as made
from tests.configs import test_lra
from tests.marks import long_except

pytestmark = pytest.mark.slow

# Modules that other benchmarks import, and that are not commands.
LIBRARIES = (
  "__init__",
  "matrix_twins",
  "ours",
  "recurrent_twins",
  "rivals",
  "timing",
  "twins",
)
COMMANDS = sorted(
  path
  for path in Path(__main__.__file__).parent.glob("*.py")
  if path.stem not in LIBRARIES
)


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_every_benchmark_has_help(path, monkeypatch, capsys):
  monkeypatch.setattr(sys, "argv", [str(path), "--help"])
  with pytest.raises(SystemExit) as ended:
    runpy.run_path(str(path), run_name="__main__")
  assert ended.value.code == 0
  assert capsys.readouterr().out.startswith("usage: ")


def test_benchmark_module_prints_its_tables(monkeypatch, capsys):
  rows = [{"import": "jax", "s": 2.0}]
  monkeypatch.setattr(start, "tables", lambda rounds: {"import": rows * rounds})
  monkeypatch.setattr(sys, "argv", [start.__file__, "--rounds=1"])
  runpy.run_path(start.__file__, run_name="__main__")
  assert "| jax | 2 |" in capsys.readouterr().out


@pytest.mark.parametrize(
  ("platform", "peak"), [("darwin", 3 << 20), ("linux", 3 << 10)]
)
def test_resident_memory_without_proc_is_in_mib(platform, peak, monkeypatch):
  usage = types.SimpleNamespace(ru_maxrss=peak)  # Bytes on macOS, else KiB.
  monkeypatch.setattr(data.resource, "getrusage", lambda _: usage)
  monkeypatch.setattr(data.sys, "platform", platform)
  monkeypatch.setattr(data.Path, "exists", lambda _: False)
  assert data.resident_memory() == 3


@pytest.mark.long
def test_loader_speed_and_table_have_their_rows(monkeypatch):
  monkeypatch.setattr(data, "ROUNDS", 1)
  rows = data.loader_speed(batches=20)
  assert [row["what"] for row in rows] == ["loader", "NumPy, a matrix"]
  assert all(row["batches/s"] > 0 for row in rows)
  text = data.table(rows).splitlines()
  assert text[0].startswith("| what | batches/s |")
  assert len(text) == 4


@pytest.mark.long
def test_encoder_growth_fits_the_exponent_of_memory():
  (row,) = encoders.growth(["local"], 1, (512, 1024))
  assert row["longest"] == 1024
  assert 0.9 < row["exponent of memory"] < 1.1
  assert data.table([row]).splitlines()[2].startswith("| local | 1024 |")


@pytest.mark.parametrize(
  "name",
  [name for name, kind in MODELS.items() if kind.block != "injective"],
)
def test_linen_twin_has_the_outputs_of_our_encoder(name):
  torch = pytest.importorskip("torch")
  from benchmarks import twins

  model = encoders.make_encoder(name, 640)
  ids = ours.random_ids(2, 640)
  params = initial.params(model, jnp.asarray(ids))
  # Move what starts at 0 or 1.
  params = jax.tree.map(
    lambda a: a + 0.1 * draws.normal(a.size, a.shape),
    params,
  )
  variables = make_variables(model, params)

  def loss(tokens):
    table = params["encoder"]["embedding"]["tokens"] | {"embedding": tokens}
    embedding = params["encoder"]["embedding"] | {"tokens": table}
    encoder = params["encoder"] | {"embedding": embedding}
    given = variables | {"params": params | {"encoder": encoder}}
    logits, drawn = model.apply(given, ids, train=False, mutable=["random"])
    return jnp.square(logits).sum(), (logits, drawn)

  table = params["encoder"]["embedding"]["tokens"]["embedding"]
  slope, (want, drawn) = jax.jit(jax.grad(loss, has_aux=True))(table)
  attends = [None, twins.fused] if MODELS[name].mixer == "softmax" else [None]
  for attend in attends:
    twin = twins.Twin(model, {**variables, **drawn}, attend)
    logits, _ = twin(torch.tensor(ids).long())
    logits.square().sum().backward()
    size = np.abs(want).max()
    np.testing.assert_allclose(logits.detach(), want, atol=1e-5 * size)
    got = twin.tokens.weight.grad
    atol = 3e-5 * np.abs(slope).max()
    np.testing.assert_allclose(got, slope, atol=atol)


@pytest.mark.long
@pytest.mark.usefixtures("one_device")
def test_train_model_benchmark_reports_finite_losses(
  monkeypatch, tmp_path, request
):
  monkeypatch.chdir(request.config.rootpath)
  small = {"num_train": 200, "num_validation": 20, "num_test": 20}
  small |= {"min_length": 20, "max_length": 40}
  monkeypatch.setattr(training, "TASK", small)
  row = training.train_model("local", "float32", 4, tmp_path)
  assert row["all finite"]
  assert 1 < row["entropy of classes"] < np.log(10)


@pytest.mark.long
def test_depth_benchmark_reports_factors_before_and_after_training(
  monkeypatch, tmp_path, request
):
  monkeypatch.chdir(request.config.rootpath)
  small = {"num_train": 200, "num_validation": 20, "num_test": 20}
  small |= {"min_length": 20, "max_length": 40}
  monkeypatch.setattr(training, "TASK", small)
  before, after = depth.train_depth(2, 2, tmp_path)
  assert before["factor"] == before["least"] == before["greatest"] == 1
  assert after["greatest"] > 1
  assert before["entropy in"] == before["entropy out"] != after["entropy out"]


def test_map_benchmark_reports_small_orthogonality_defects(monkeypatch):
  monkeypatch.setattr(orthogonal, "COUNT", 2)
  monkeypatch.setattr(orthogonal, "TORCH_MAPS", {})  # Not a test dependency.
  rows = [*orthogonal.measure_maps(8, 1)]
  rows += [orthogonal.measure_drift(name, 3, 8) for name in MAPS]
  assert {row["map"].removeprefix("ours: ") for row in rows} == {*MAPS}
  assert all(row["defect"] < 5e-6 for row in rows)


@pytest.mark.long
def test_fidelity_benchmark_reports_time_relative_to_softmax():
  rows = list(fidelity.measure_cost(size=32, batch=1, layers=2, rounds=1))
  assert [row["what"] for row in rows] == ["forward", "step"]
  for row in rows:
    assert row["time"] == pytest.approx(
      row["with the term s"] / row["softmax s"]
    )
    assert 0.9 < row["memory"] < 1.5


def test_compiled_passes_take_the_batch_at_run_time(monkeypatch):
  compiled = {}

  def keep(program, *args):
    compiled[len(args)] = (program, args)
    return lambda: None

  monkeypatch.setattr(ours, "ready", keep)
  model = ours.build("local", 16, num_layers=1, d_model=8, positions="learned")
  ours.compile_passes(model, jnp.asarray(ours.random_ids(2, 16)), train=False)
  forward, (params, inputs) = compiled[2]
  padded = inputs.at[:, 8:].set(0)
  expected = model.apply({"params": params}, padded, train=False)
  chex.assert_trees_all_close(forward(params, padded), expected, atol=1e-5)
  # So does the train step.
  step, (*state, _, labels) = compiled[5]
  results = [step(*state, ids, labels)[0] for ids in (inputs, padded)]
  with pytest.raises(AssertionError):
    chex.assert_trees_all_close(*results)


def test_programs_sums_collectives_and_trips(monkeypatch, tmp_path):
  def compile_config(config, device, task):
    calls.append((config, device, task))
    return {
      "step": "train",
      "parts": 2,
      "devices": 4,
      "arguments": 0.5,
      "temporaries": 0.7,
      "total": 1.23456,
      "available": 16,
      "tflop": 0.5,
      "precise": 0.2,
      "library": 0.1,
      "gigabytes": 2.0,
      "compiler_ms": 3.0,
      "compute_ms": 1.0,
      "memory_ms": 2.0,
      "binds": "memory",
      "loops": [4, 1, 0, 6],
      "collectives": [
        {"kind": "all-reduce", "count": 1},
        {"kind": "all-gather", "count": 2},
        {"kind": "all-gather", "count": 3},
      ],
      "seconds": 9.6,
    }

  calls = []
  monkeypatch.setattr(programs, "compile_config", compile_config)
  monkeypatch.setattr(programs, "compilers", lambda device: device)
  out = tmp_path / "programs.jsonl"
  options = ["--models=s5", "--tasks=listops", f"--out={out}"]
  for _ in range(2):  # The second call finds the records of the first one.
    programs.main([*options, "--device=v5e:2x2"])
  assert calls == [("lra/listops:model=s5", "v5e:2x2", "listops")]
  (train,) = programs.read(out)
  assert train["table"] == "v5e_listops_train"
  assert train["values"] == {
    "parts": 2,
    "GiB": 1.235,
    "TFLOP": 0.5,
    "precise": 0.2,
    "library": 0.1,
    "GB": 2.0,
    "static ms": 3.0,
    "binds": "memory",
    "trips": 10,
    "sends": "1 all-reduce, 5 all-gather",
    "s to compile": 10,
  }


@pytest.mark.parametrize(
  ("option", "message"),
  [
    ("--models=s55", "--models name 's55'"),
    ("--tasks=listop", "--tasks name 'listop'"),
    ("--device=v5e:4x4", "has v5e_listops_train, compiled for v5e:2x2"),
  ],
)
def test_programs_refuses_names_and_another_shape_of_a_table(
  monkeypatch, tmp_path, option, message
):
  monkeypatch.setattr(programs, "compile_config", lambda *_: "failed")
  monkeypatch.setattr(programs, "compilers", lambda device: device)
  out = tmp_path / "programs.jsonl"
  arguments = ["--models=s5", "--tasks=listops", f"--out={out}"]
  programs.main(arguments)
  with pytest.raises(SystemExit, match=message):
    programs.main([*arguments, "--models=s4d", option])
  assert len(programs.read(out)) == 1


def test_programs_have_the_sizes_of_the_tasks():
  assert programs.TASKS == test_lra.SIZES


def test_diagnostics_writes_the_matrix_and_keeps_other_tables(
  monkeypatch, tmp_path
):
  def finished(model, problem, share, **mixer):
    task = {"name": "state_tracking", "problem": problem, "causal": True}
    model_fields = {"name": model, "mixer": mixer}
    config = {"seed": 0, "task": task, "model": model_fields}
    split = {"accuracy": 1.0, "sequence_accuracy": share}
    results = made.make(
      config,
      task="state_tracking",
      model=model,
      by_length={"8": split, "32": split | {"sequence_accuracy": 0.0}},
    )
    results |= {"commit": "0123456789, abcdefghij", "train_seconds": 90.0}
    results |= {"hardware": {"processor": "CPU", "platform": "cpu"}}
    results["hardware"] |= {"devices": 1}
    results |= {"versions": {"jax": "1"}}
    return RunRecord(Path("run"), config, results)

  found = [
    finished("s5", "Z2", 0.5),
    finished("s5", "Z3", 0.25),
    finished("mamba", "Z2", 1.0, signed=True),
  ]
  monkeypatch.setattr(diagnostics.runs, "discover", lambda _: (found, []))
  out, picture = tmp_path / "records.jsonl", tmp_path / "matrix.png"
  programs.append(out, [{"table": "other"}])
  diagnostics.main(["runs", f"--out={out}"])
  other, s5, mamba, telling = programs.read(out)
  assert other == {"table": "other"}
  assert (s5["row"], s5["minutes"], s5["commit"]) == (
    "`s5`",
    1.5,
    "0123456, abcdefg",
  )
  columns = ("Z2, 8 tokens", "Z3, 8 tokens")
  assert s5["values"] == dict(
    zip(columns, ["50; 0; cannot", "25; 0; cannot"], strict=True)
  )
  assert mamba["values"] == dict(
    zip(columns, ["100; 0; can", None], strict=True)
  )
  assert mamba["config"].endswith(
    "model=mamba --config.model.mixer.signed=True"
  )
  assert telling == mamba | {"table": "telling"}
  # Cells without a new run stay.
  found[:] = [finished("s5", "Z2", 0.75), finished("lru", "A5", 1.0)]
  found[0].results["train_seconds"] = 270.0
  diagnostics.main(["runs", f"--out={out}", f"--picture={picture}"])
  _, s5, lru, mamba, *_ = programs.read(out)
  columns = (*columns, "A5, 8 tokens")
  for each, cells in (
    (s5, ["75; 0; cannot", "25; 0; cannot", None]),
    (lru, [None, None, "100; 0; cannot"]),
    (mamba, ["100; 0; can", None, None]),
  ):
    assert each["values"] == dict(zip(columns, cells, strict=True))
  assert s5["minutes"] == 3.0
  # Cells without all seeds stay, too: the runs have seed 0.
  found[:] = [finished("s5", "Z2", 0.25)]
  diagnostics.main(["runs", f"--out={out}", "--seeds=0,1"])
  assert programs.read(out)[1] == s5
  diagnostics.main(["runs", f"--out={out}", "--seeds=0"])
  changed = programs.read(out)[1]["values"]
  assert changed["Z2, 8 tokens"] == "25; 0; cannot"
  assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
  ("task", "model", "score"),
  [
    ("listops", "s5", 62.15),
    ("listops", "mega", 58.76),
    ("image", "transformer", 42.44),
    ("text", "transject", 64.9),
    ("retrieval", "s5", None),
    ("pathfinder", "s5", None),
    ("text", "mamba2", None),
  ],
)
def test_laptop_names_published_scores(task, model, score):
  assert laptop.published(task, model) == score


@pytest.mark.parametrize("task", laptop.TASKS)
@pytest.mark.parametrize("model", laptop.ENCODERS)
def test_laptop_overrides_fields_that_the_configs_have(task, model):
  config, overrides = laptop.arguments(task, model, "folder")
  loaded = laptop.configs.load_with(config, laptop.flags(overrides))
  RunConfig.from_dict(loaded)
  fields = loaded.to_dict()
  for name, value in overrides.items():
    *path, last = name.split(".")
    section = fields
    for part in path:
      section = section[part]
    assert section[last] == value, name


@pytest.mark.usefixtures("one_device")
def test_laptop_trains_for_its_minutes_once(monkeypatch, tmp_path, smoke):
  def small(task, model, archives):
    config = smoke(model, seed=3, short_steps=8, short_length=30)
    monkeypatch.setattr(laptop.configs, "load_with", lambda *_: config)
    return "lra/listops", {"task.archive": f"{archives}/a.tar"}

  ran = []

  def run(command, **_):
    folder = Path(command[command.index("--workdir") + 1])
    folder.mkdir()
    results = made.make(smoke("lru", seed=3).to_dict())
    results |= {"selection_score": 0.25, "best_step": 7, "wall_seconds": 90.0}
    results["train_seconds"] = 66.0
    results |= {"commit": "0123456789, abcdefghij", "hardware": {"cores": 2}}
    results["hardware"]["processor"] = "CPU"
    results["versions"] = {"jax": "1"}
    workdirs.write(folder, "results.json", results)
    scores = {laptop.SCORE: 0.25, "wall_seconds": 60.0}
    (folder / "metrics.jsonl").write_text(workdirs.metrics_line(7, scores))
    ran.append(command)

  monkeypatch.setattr(laptop, "arguments", small)
  monkeypatch.setattr(laptop, "seconds_per_step", lambda run, start: 1 + start)
  fake = types.SimpleNamespace(run=run, DEVNULL=-3)
  monkeypatch.setattr(laptop, "subprocess", fake)
  out, picture = tmp_path / "records.jsonl", tmp_path / "picture.png"
  options = ["--tasks=listops", "--models=lru", f"--workdir={tmp_path}/runs"]
  options += ["--archives=/folder", f"--out={out}", f"--picture={picture}"]
  for _ in range(2):  # The second call finds the record of the first one.
    laptop.main([*options, "--minutes=1"])
  (command,) = ran
  # Of ten steps, eight are short. A step takes 1 s, and after them 9 s.
  assert "--config.total_steps=23" in command
  assert "--config.short_steps=18" in command
  (record,) = programs.read(out)
  assert record["values"]["published"] == 60.2
  assert (record["minutes"], record["seeds"]) == (1.5, [3])
  assert record["values"]["training minutes"] == 1.1
  with pytest.raises(SystemExit, match="'lra, trained for 1 minutes'"):
    laptop.main([*options, "--minutes=2"])
  assert record["commit"] == "0123456, abcdefg"
  # The folder of the archives is not a fact of the result.
  assert "--config.task.archive=a.tar" in record["config"]
  (row,) = laptop.figure(tmp_path / "runs").rows
  # The metrics are of step 7 of 10.
  assert row == ("lru", 3, "listops", pytest.approx(70), 25.0)
  assert picture.read_bytes().startswith(b"\x89PNG")


def test_laptop_continues_a_run_with_its_minutes_only(monkeypatch, tmp_path):
  monkeypatch.setattr(laptop, "schedule", lambda *_: {"total_steps": 5})
  folder = tmp_path / "runs" / "text_lru"
  for _ in range(2):
    assert laptop.saved_schedule(folder, "", {}, 1) == {"total_steps": 5}
  with pytest.raises(UserError, match="has a run of 1 minutes, and --minutes"):
    laptop.saved_schedule(folder, "", {}, 2)
  # An older version wrote no minutes.
  folder.with_suffix(".json").write_text(json.dumps({"total_steps": 5}))
  with pytest.raises(UserError, match="has a run of unknown minutes"):
    laptop.saved_schedule(folder, "", {}, 1)


@pytest.mark.parametrize(
  ("lengths", "timed", "mean"),
  [
    ((32,), 3, (16 + 16 + 32) / 3),
    # Batches of several lengths are timed in whole windows.
    ((16, 32), 16, (12 * 16 + 4 * 32) / 16),
  ],
)
def test_laptop_times_steps_without_their_compilation(
  monkeypatch, lengths, timed, mean
):
  steps = []

  def step(state, batch):
    steps.append(batch["inputs"].shape[1])
    return state, None

  def batches(start):
    assert start == 5
    for length in itertools.cycle([16, 16, 32, 16]):
      yield {"inputs": np.zeros((2, length))}

  monkeypatch.setattr(laptop, "timed", lambda call: (call(), steps[-1]))
  monkeypatch.setattr(laptop, "TIMED_SECONDS", 999)
  monkeypatch.setattr(laptop, "MOST_TIMED", 3)
  opened = types.SimpleNamespace(padded_lengths=lengths)
  run = types.SimpleNamespace(
    run=opened, state=0, train_step=step, batches=batches
  )
  assert laptop.seconds_per_step(run, 5) == mean
  # The first step of each shape is run once more, untimed.
  assert len(steps) == timed + len({*steps})


def scaling_report(*collectives):
  numbers = dict.fromkeys(
    [field.name for field in dataclasses.fields(Report)], 1.0
  )
  return Report(**numbers | {"binds": "memory", "collectives": collectives})


@pytest.mark.parametrize(
  ("kind", "sent"),
  [
    ("all-reduce", 1.5),
    ("all-gather", 0.75),
    ("reduce-scatter", 3),
    ("collective-permute", 1),
  ],
)
def test_scaling_counts_the_time_to_communicate(kind, sent):
  """Four chips, an array of 0.2 GB: 1 ms for each time that a chip sends it."""
  size = int(scaling.BETWEEN_CHIPS / 1e3)
  report = scaling_report(Collective(kind, 4, False, 1, size))
  assert scaling.network_ms(report) == pytest.approx(sent)


def test_scaling_counts_data_between_slices_at_their_rate():
  # Two slices sum arrays of 2 MB: each chip sends half of its array twice.
  report = scaling_report(Collective("all-reduce", 2, True, 1, 2_000_000))
  expected = 1e3 * 2_000_000 / scaling.BETWEEN_SLICES
  assert scaling.network_ms(report) == pytest.approx(expected)


def test_scaling_plans_split_their_batches():
  for step in scaling.plans("s5"):
    mesh = dict(axis.split(":") for axis in step.mesh.split(","))
    assert math.prod(map(int, mesh.values())) == step.chips
    assert step.batch % step.chips == 0 or step.table == "strong"
  rows = {(s.table, s.chips, s.slices): s.batch for s in scaling.plans("s5")}
  assert rows["weak", 256, 1] == 2_048
  assert rows["strong", 4, 1] == rows["strong", 256, 1] == 256
  assert rows["weak", 64, 4] == 512


def test_scaling_stops_a_series_at_the_first_step_that_does_not_fit(
  monkeypatch, tmp_path
):
  tried = []

  def compile_step(step):
    tried.append((step.table, step.length))
    if step.length > 2**18 or "d_model=4096" in str(step.overrides):
      raise UserError("A step needs more.")
    return scaling_report(), 7_000_000

  monkeypatch.setattr(scaling.Step, "compile", compile_step)
  monkeypatch.setattr(scaling, "compilers", lambda device: device)
  out = tmp_path / "scaling.jsonl"
  for _ in range(2):  # The second call finds the records of the first one.
    scaling.main(["--models=s5", f"--out={out}"])
  assert len(tried) == len(list(scaling.plans("s5"))) + 3 + 2
  assert ("longest", 2**19) in tried and ("longest", 2**20) not in tried
  records = programs.read(out)
  assert records[0]["values"]["million parameters"] == 7
  assert records[-1]["values"]["failed"] == "A step needs more."


def test_interleaved_timing_skips_the_first_round():
  turns = []
  calls = {name: lambda name=name: turns.append(name) for name in "ab"}
  seconds = timing.interleaved(calls, 2)
  assert turns == ["a", "b"] * 3
  assert [len(rounds) for rounds in seconds.values()] == [2, 2]
  # The median of the ratios, not the ratio of the medians.
  seconds = {"slow": [2.0, 9.0, 8.0], "fast": [1.0, 3.0, 1.0]}
  assert timing.ratio(seconds, "slow", "fast") == 3


@pytest.fixture
def small(monkeypatch):
  """Models of seconds, without PyTorch."""
  monkeypatch.setattr(ours, "D", 8)
  monkeypatch.setattr(speed, "TOKENS", 32)
  monkeypatch.setattr(speed, "rival_calls", lambda *_, **__: {})
  monkeypatch.setattr(speed, "product", lambda: (lambda: None, 1.0))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
  "training", [pytest.param(True, marks=pytest.mark.long), False]
)
def test_speed_row_has_length_batch_and_seconds(training):
  row = speed.row("random_transject", 16, 1, training=training)
  assert (row["n"], row["batch"]) == (16, 2)
  assert row["s"] > 0
  # The paper's: every map once forwards, twice for the gradients.
  maps = 2 * 4 + 2
  forward = 2 * 32 * 2 * maps * 8**2
  assert speed.flops(32, training=False) == forward
  assert speed.flops(32, training=True) == 3 * forward


def rotations_in_order(turned, name):
  """The order in `FastTransJect`: U, V and feed-forward of each layer."""
  rotations = []
  for layer in ("layer_0", "layer_1"):
    parts = turned["encoder"][layer]
    rotations += [parts["mixer"]["u_skew"], parts["mixer"]["v_skew"]]
    rotations.append(parts["feed_forward_skew"])
  if name == "transject":
    rotations.append(turned["encoder"]["layer_0"]["mixer"]["basis_skew"][None])
  return np.concatenate(rotations)


@pytest.mark.parametrize(
  "case",  # Fewer tokens than channels, and more.
  long_except(
    {("transject", 24), ("random_transject", 6)},
    [(name, n) for name in speed.MODELS for n in (6, 24)],
  ),
)
def test_rival_implementations_have_the_outputs_of_ours(case):
  name, n = case
  torch = pytest.importorskip("torch")
  from torch.nn.utils import parametrize

  from benchmarks import rivals

  model = ours.build(
    name, n, d_model=16, num_layers=2, mixer={"num_experts": 3}
  )
  ids = ours.random_ids(2, n)
  params = initial.params(model, jnp.asarray(ids))
  for i in range(2):
    layer = params["encoder"][f"layer_{i}"]
    layer["residual"]["alpha"] = jnp.float32(0.4 + i)
    layer["bias"] = draws.normal(i, (2, 16))
  variables = make_variables(model, params)
  want = model.apply(variables, jnp.asarray(ids), train=False)
  q = torch.tensor(rotations_in_order(variables["rotations"], name))
  sizes = (n, 16, 3, 2, name == "random_transject")
  fast, user = rivals.FastTransJect(*sizes), rivals.TransJect(*sizes)
  for module in user.modules():
    if parametrize.is_parametrized(module, "weight"):
      parametrize.remove_parametrizations(module, "weight")
  with torch.no_grad():
    fast.kept = q
    for i, layer in enumerate(user.stack):
      trained = params["encoder"][f"layer_{i}"]
      u, v, w = q[8 * i : 8 * i + 8].split((3, 3, 2))
      for e, expert in enumerate(layer.experts):
        expert.u.weight.copy_(u[e].T)
        expert.v.weight.copy_(v[e].T)
      layer.first.weight.copy_(w[0].T)
      layer.second.weight.copy_(w[1].T)
      for alpha in (layer.alpha, fast.alpha[i]):
        alpha.copy_(torch.tensor(float(trained["residual"]["alpha"])))
      gate = torch.tensor(np.asarray(trained["mixer"]["gate"]))
      layer.gate.weight.copy_(gate[None])
      fast.gate[i] = gate
      layer.bias.copy_(torch.tensor(np.asarray(trained["bias"])))
      fast.bias[i] = layer.bias
    for rival in (fast, user):
      tokens = np.asarray(params["encoder"]["embedding"]["tokens"]["embedding"])
      rival.embedding.tokens.weight.copy_(torch.tensor(tokens))
      logits = params["head"]["logits"]
      rival.head.weight.copy_(torch.tensor(np.asarray(logits["kernel"]).T))
      rival.head.bias.copy_(torch.tensor(np.asarray(logits["bias"])))
      if rival.sigma is not None:
        sigma = params["encoder"]["layer_0"]["mixer"]["sigma"]
        rival.sigma.copy_(torch.tensor(np.asarray(sigma)))
    if name == "transject":
      user.basis.weight.copy_(q[-1])
    for rival in (fast, user):
      logits, _ = rival(torch.tensor(ids).long())
      np.testing.assert_allclose(logits.numpy(), want, atol=2e-4)


def test_rival_and_twin_calls_run(monkeypatch):
  pytest.importorskip("torch")
  from benchmarks import rivals

  monkeypatch.setattr(ours, "D", 8)
  calls = speed.rival_calls("transject", 2, 6, training=True)
  assert calls.keys() == {"user", "our algebra", "first steps"}
  models_of_inference = rivals.make("random_transject", 6, training=False)
  calls |= {k: rivals.infer(m, 2, 6) for k, m in models_of_inference.items()}
  for name in ("transformer", "transject"):
    for both in encoders.twin_calls(name, 128, 2, compiled=False).values():
      calls |= {f"{name} {key}": call for key, call in both.items()}
  assert encoders.twin_flops("local", 128, 1) > 0
  for call in calls.values():
    call()


@pytest.mark.long
def test_planned_bytes_of_reversible_are_below_stored():
  stored, reversible = (
    ours.planned_bytes(ours.build("transject", 64, d_model=8, **options), 4, 64)
    for options in (
      memory.transject_options(kind, "float32", 6)
      for kind in ("stored", "reversible")
    )
  )
  assert 0 < reversible < stored
  assert timing.exponent((1, 2, 4), [3.0, 12.0, 48.0]) == pytest.approx(2)


def test_start_benchmark_measures_import_seconds(monkeypatch):
  monkeypatch.setattr(start, "IMPORTS", {"Python": "", "json": "import json"})
  python, other = start.imports(1)
  assert python["s besides Python"] == 0
  assert other["s"] > 0


def test_benchmark_main_saves_each_table_to_json(monkeypatch, tmp_path, capsys):
  rows = [{"model": "a", "times user": 2.0}]
  monkeypatch.setattr(start, "tables", lambda rounds: {"train": rows * rounds})
  out = tmp_path / "now.json"
  __main__.main(["--tables=start", "--rounds=2", f"--out={out}"])
  assert "| a | 2 |" in capsys.readouterr().out
  assert json.loads(out.read_text())["train"] == rows * 2
  with pytest.raises(SystemExit, match=r"sped.*speed"):
    __main__.main(["--tables=sped"])


def test_compare_lists_figures_that_became_worse():
  before = {
    "speed": [
      {"model": "a", "n": 8, "s": 1.0, "times user": 4.0, "of the rate": 0.8},
      {"model": "b", "n": 8, "s": 1.0, "times user": 4.0, "of the rate": 0.8},
    ],
    "memory": [{"of": "memory, MB", "MB, L = 2": 10.0, "exponent": 1.0}],
    "hardware": {},
  }
  now = json.loads(json.dumps(before))
  assert compare.compare(before, now, allowed=0.1) == []
  now["speed"][1] |= {"times user": 3.0, "of the rate": 0.9, "s": 2.0}
  now["memory"][0] |= {"MB, L = 2": 12.0, "exponent": 1.05}
  now["speed"].append({"model": "c", "n": 8, "times user": 1.0})
  worse = compare.compare(before, now, allowed=0.1)
  assert [(row["row"], row["figure"]) for row in worse] == [
    ("b, 8", "times user"),
    ("c, 8", "a new row"),
    ("memory, MB", "MB, L = 2"),
  ]
  assert worse[0]["worse by"] == "25%"
  worse = compare.compare(before, now, allowed=0.1, seconds=True)
  assert ("b, 8", "s") in [(row["row"], row["figure"]) for row in worse]
  # What is missing is worse, too; a table that was not measured is not.
  less = {
    "speed": [{"model": "a", "n": 8, "s": 1.0, "times user": math.nan}],
    "hardware": {},
  }
  worse = compare.compare(before, less, allowed=0.1)
  assert {(r["row"], r["figure"], r["worse by"]) for r in worse} == {
    ("b, 8", "the row", "missing"),
    ("a, 8", "times user", "missing"),
    ("a, 8", "of the rate", "missing"),
  }


def test_compare_command_exits_with_status_by_result(
  monkeypatch, tmp_path, capsys
):
  old, new = tmp_path / "old.json", tmp_path / "new.json"
  data.save({"speed": [{"model": "a", "times user": 4.0}]}, old)
  data.save({"speed": [{"model": "a", "times user": 2.0}]}, new)
  for now, status in ((old, False), (new, True)):
    monkeypatch.setattr(sys, "argv", ["", str(now), f"--baseline={old}"])
    with pytest.raises(SystemExit) as ended:
      compare.main()
    assert ended.value.code == status
  assert "50%" in capsys.readouterr().out
  missing = str(tmp_path / "none.json")
  monkeypatch.setattr(sys, "argv", ["", missing, f"--baseline={old}"])
  with pytest.raises(SystemExit, match=r"no file .*none.json: python -m"):
    compare.main()


def test_benchmarks_have_no_import_cycle():
  """Also within functions: PyTorch is imported only where it is needed."""
  folder = Path(__main__.__file__).parent
  graph = {
    path.stem: {
      alias.name if node.module == "benchmarks" else node.module.split(".")[-1]
      for node in ast.walk(ast.parse(path.read_text()))
      if isinstance(node, ast.ImportFrom)
      and (node.module or "").startswith("benchmarks")
      for alias in node.names
    }
    for path in folder.glob("*.py")
  }
  assert graph["speed"] >= {"ours", "rivals"}
  sorter = graphlib.TopologicalSorter(graph)
  sorter.prepare()  # Raises CycleError.


def test_gpu_benchmark_tables_have_their_rows(monkeypatch):
  small = gpu.SMALL._replace(product=8, encoder_lengths=(64,), tokens=64)
  products = [row["what"] for row in gpu.rates(small)]
  assert products == [
    *(f"product of 8, {name}" for name in gpu.PRECISIONS),
    "copy",
  ]
  monkeypatch.setattr(ours, "D", 8)
  assert all(row["max |Q.T Q - I|"] < 1e-5 for row in gpu.exactness(small))
  small = small._replace(models=("linear_transformer",))
  (row,) = gpu.encoders(small)
  assert row["step s"] > 0
  assert row["planned MB"] > 0
  qkv = draws.normal(0, (3, 1, 2, 16, 4))
  calls = gpu.attention_calls(qkv)
  chex.assert_trees_all_close(
    calls["ours forward"](),
    jnp.swapaxes(calls["JAX forward"](), 1, 2),
    atol=1e-5,
  )
  rows = ({"k": k} for k in range(3))
  assert list(gpu.until(rows, time.monotonic() + 60)) == [
    {"k": k} for k in range(3)
  ]
  assert list(gpu.until(iter([{"k": 0}]), time.monotonic() - 1)) == []


@pytest.mark.long
def test_injective_benchmark_measures_invertible_layers(monkeypatch):
  monkeypatch.setattr(injective, "TOKENS", 32)
  rows = list(injective.measure_layers(1, sizes=((16, 8),)))
  names = [row["layer"] for row in rows]
  assert names == ["TransJect", "isometric", "isometric, padded", "allpass"]
  assert all(row["gradient ms"] > 0 for row in rows)
  assert rows[0]["forward / TransJect"] == 1
  monkeypatch.setattr(injective, "BATCH", 2)
  monkeypatch.setattr(injective, "LENGTH", 16)
  monkeypatch.setattr(injective, "WIDTH", 8)
  rows = list(injective.measure_memory((2,)))
  assert [row["model"] for row in rows] == [
    "isometric",
    "coupled transformer",
    "coupled s5",
  ]


def test_scan_benchmark_times_ours_and_jax_scans(monkeypatch):
  forms = scan.forms
  monkeypatch.setattr(scan, "FORMS", ("scan",))
  monkeypatch.setattr(scan, "TOKENS", 16)
  for varies in (False, True):
    rows = list(scan.measure(8, 1, varies=varies))
    assert [row["form"] for row in rows] == [
      "scan",
      "auto",
      "JAX tree",
      "JAX loop",
    ]
    assert all(row["gradient ms"] > 0 for row in rows)
  # All of them have the same states.
  b = draws.normal(0, (2, 9, 3))
  results = [run(b / 2, b) for run in forms(varies=True).values()]
  for result in results[1:]:
    chex.assert_trees_all_close(result, results[0], atol=1e-6)
