"""Compiled train steps in a file."""

import dataclasses
import json
import zipfile

import chex
import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxformers import models
from jaxformers.foundations.errors import UserError
from jaxformers.training import executables, topologies
from jaxformers.training import trainer as trainer_module
from jaxformers.training.ahead import Ahead
from jaxformers.training.run import open_run
from jaxformers.training.trainer import Trainer


@pytest.fixture
def uncached():
  """Compiles anew: XLA cannot save CPU programs that come from the cache."""
  for is_used in (False, True):
    jax.config.update("jax_enable_compilation_cache", is_used)
    compilation_cache.reset_cache()
    if not is_used:
      yield


@pytest.mark.slow
@pytest.mark.usefixtures("uncached")
def test_a_run_takes_the_saved_step(smoke, tmp_path, capsys, monkeypatch):
  config = smoke("linear_transformer", buckets=2, **{"model.num_layers": 1})
  run = open_run(config, tmp_path / "run")
  path = str(tmp_path / "new" / "step")
  ahead = Ahead(
    run.config, jax.devices(), topologies.CHIPS["v5e"], run.task.sizes()
  )
  ahead.train()
  ahead.save(path)
  results = []
  for program in ("", path):
    changed = dataclasses.replace(run.config, program=program)
    trainer = Trainer(dataclasses.replace(run, config=changed))
    assert trainer.plan() > 0
    assert len(trainer._programs) == (2 if program else 1)
    batch = trainer._place(trainer._loader.batch(trainer._longest(), (0, 0)))
    state, sums = trainer.train_step(trainer.state, batch)
    results.append(jax.device_get((state.params, sums)))
  chex.assert_trees_all_equal(*results)
  assert "is not used" not in capsys.readouterr().out
  # All processes must be able to use the file.
  trainer = Trainer(dataclasses.replace(run, config=changed))
  with monkeypatch.context() as patch:
    patch.setattr(trainer_module.processes, "all_true", lambda flag: False)
    trainer._load_programs(batch)
  assert not trainer._programs
  assert "another process cannot use it" in capsys.readouterr().out
  # Another loss is another program.
  other = dataclasses.replace(run.config, program=path, label_smoothing=0.1)
  trainer = Trainer(dataclasses.replace(run, config=other))
  trainer.plan()
  assert len(trainer._programs) == 1
  said = "is not used: this run differs from it in config.label_smoothing"
  assert f"{said}: 0.0 -> 0.1" in capsys.readouterr().out
  # A file may lack the shapes of a batch, or be refused by the device.
  trainer = Trainer(run)
  batch = trainer._place(trainer._loader.batch(trainer._longest(), (0, 0)))
  facts = executables.describe(run.config, run.model, run.layout)

  def load(batch):
    step, state = trainer._step, trainer.state
    return executables.load(path, facts, step, state, batch)

  assert load(batch)[0] == 1
  shorter = jax.tree.map(lambda x: x[:4], batch)
  unfit = executables.UnfitError
  with pytest.raises(unfit, match=r"its batches are inputs int32\["):
    load(shorter)

  def refuse(*_, **options):
    raise jax.errors.JaxRuntimeError("no")

  monkeypatch.setattr(
    executables.serialize_executable, "deserialize_and_load", refuse
  )
  with pytest.raises(unfit, match="it cannot be loaded: no"):
    load(batch)


def test_facts_name_the_sizes_the_compilers_and_the_places_of_devices(
  smoke, tmp_path, monkeypatch
):
  run = open_run(smoke("s5"), tmp_path / "run")
  facts = executables.describe(run.config, run.model, run.layout)
  assert facts["model"]["max_len"] == run.task.max_len
  assert {"jax", "flax", "optax"} < facts["versions"].keys()
  count = run.layout.mesh.size
  assert facts["topology"] == count * [[0, []]]
  # Flags of the compilers change programs, except the level of tuning.
  monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0 --xla_other=1")
  on_tpus = "--xla_tpu_use_enhanced_launch_barrier=true"  # From JAX itself.
  monkeypatch.setenv("LIBTPU_INIT_ARGS", f" {on_tpus}")
  changed = executables.describe(run.config, run.model, run.layout)
  assert changed["flags"] == ["--xla_other=1"]
  monkeypatch.delenv("XLA_FLAGS")
  facts = executables.describe(run.config, run.model, run.layout)
  # The default of a padded length is the number of tokens.
  options = vars(run.config.model) | run.task.sizes()
  for length in (0, run.task.max_len):
    model = models.build(**options | {"padded_len": length})
    assert executables.describe(run.config, model, run.layout) == facts


def test_load_refuses_other_files(tmp_path):
  path = tmp_path / "step"
  for content in (None, b"no archive"):
    if content:
      path.write_bytes(content)
    with pytest.raises(UserError, match="program=.*step.*compile --out"):
      executables.load(path, {}, None, None, None)


def test_paths_may_begin_with_the_home_directory(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  executables.save("~/new/step", {"a": 1}, 1, {})
  assert (tmp_path / "new" / "step").exists()
  with pytest.raises(executables.UnfitError, match="a"):
    executables.load("~/new/step", {"a": 2}, None, None, {})


def test_load_refuses_a_damaged_file(tmp_path):
  path = tmp_path / "step"
  header = {"facts": {}, "parts": 1, "batches": [""]}
  with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
    file.writestr(executables.FACTS, json.dumps(header))
    file.writestr("0", bytes(100_000))
  content = bytearray(path.read_bytes())
  start = content.rindex(b"PK\3\4") + 31  # After the header of the last file.
  content[start : start + 40] = 40 * b"\xff"
  path.write_bytes(content)
  with pytest.raises(UserError, match="program=.*compile --out"):
    executables.load(path, {}, None, None, {})
