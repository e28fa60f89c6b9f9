"""Compiled train steps in a file."""

import dataclasses

import chex
import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxformers.foundations.errors import UserError
from jaxformers.training import executables, topologies
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
def test_a_run_takes_the_saved_step(smoke, tmp_path, capsys):
  config = smoke("linear_transformer", buckets=2)
  run = open_run(config, tmp_path / "run")
  path = str(tmp_path / "step")
  ahead = Ahead(
    run.config, jax.devices(), topologies.CHIPS["v5e"], run.task.sizes()
  )
  ahead.save(path, ahead.train().parts)
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
  # Another learning rate is another program.
  other = dataclasses.replace(run.config, program=path, total_steps=99)
  trainer = Trainer(dataclasses.replace(run, config=other))
  trainer.plan()
  assert len(trainer._programs) == 1
  said = capsys.readouterr().out
  assert "is not used: its config is" in said and "99" in said


def test_load_refuses_other_files(tmp_path):
  path = tmp_path / "step"
  for content in (None, b"no archive"):
    if content:
      path.write_bytes(content)
    with pytest.raises(UserError, match="program=.*step.*compile --out"):
      executables.load(path, {}, None, None, None)
