import errno
import json
import random
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxformers.config import RunConfig
from jaxformers.foundations import workdirs
from jaxformers.training import checkpoint
from jaxformers.training.checkpoint import Checkpoints
from jaxformers.training.state import TrainState
from tests.damages import KINDS, damage

# tensorstore prints the reads that were under way when one of them failed.
pytestmark = pytest.mark.filterwarnings(
  "ignore::pytest.PytestUnraisableExceptionWarning"
)


ABOUT = {"protocol": "own", "max_len": 7}
MODEL = {"name": "transject", "d_model": 8, "num_layers": 1}
CONFIG = RunConfig.from_dict({"model": MODEL, "reference": MODEL})


def state(step, width=3):
  value = jnp.arange(width, dtype=jnp.float32) + step
  return TrainState(jnp.int32(step), {"w": value}, (value * 2,))


def there(folder):
  """The workdir of a run that has begun."""
  folder.mkdir(exist_ok=True)
  (folder / "config.json").touch()
  return folder


def save(folder, *scores):
  """Checkpoints of steps 1, 2, ... with these scores; None: not evaluated."""
  with Checkpoints(there(folder), ABOUT, CONFIG) as checkpoints:
    for step, score in enumerate(scores, 1):
      checkpoints.save(state(step), {"note": step}, score)


def restored(folder, width=3):
  with Checkpoints(there(folder), ABOUT, CONFIG) as checkpoints:
    return checkpoints.restore_latest(state(0, width))


def data_files(folder, step):
  files = (folder / "checkpoints" / str(step)).rglob("*")
  return [f for f in files if f.is_file() and f.parent.name == "d"]


def test_restore_latest_is_bitwise_equal(tmp_path):
  save(tmp_path, None, 0.5)
  latest, loop_state = restored(tmp_path)
  chex.assert_trees_all_equal(latest, state(2))
  assert loop_state == {"note": 2}


def test_restore_of_an_empty_folder(tmp_path):
  assert restored(tmp_path) is None
  with (
    Checkpoints(there(tmp_path), ABOUT, CONFIG) as checkpoints,
    pytest.raises(ValueError, match="checkpoints.*config.eval_steps"),
  ):
    checkpoints.restore_best(state(0))


def test_save_keeps_the_latest_two_and_the_best(tmp_path):
  save(tmp_path, 0.1, 0.9, None, 0.5, None, 0.7)
  with Checkpoints(there(tmp_path), ABOUT, CONFIG) as checkpoints:
    assert checkpoints.steps() == [2, 5, 6]
    assert checkpoints.restore_best(state(0)).step == 2
    chex.assert_trees_all_equal(checkpoints.restore(2, state(0))[0], state(2))


def test_restore_best_of_equal_scores_is_the_earliest(tmp_path):
  save(tmp_path, 0.1, 0.5, 0.5, 0.5)
  with Checkpoints(there(tmp_path), ABOUT, CONFIG) as checkpoints:
    assert checkpoints.restore_best(state(0)).step == 2


def test_restore_latest_has_the_sharding_of_the_example(tmp_path):
  save(tmp_path, None)
  mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
  whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  with Checkpoints(there(tmp_path), ABOUT, CONFIG) as checkpoints:
    like = jax.device_put(state(0), whole)
    latest, _ = checkpoints.restore_latest(like)
  assert latest.params["w"].sharding == whole


def test_restore_latest_detects_a_flipped_bit_and_takes_the_one_before(
  tmp_path, capsys
):
  save(tmp_path, None, None)
  for file in data_files(tmp_path, 2):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
  latest, _ = restored(tmp_path)
  assert latest.step == 1
  assert "damaged" in capsys.readouterr().err
  # It is set aside, so that step 2 can be saved again.
  assert (tmp_path / "checkpoints" / "damaged-2").exists()
  with Checkpoints(there(tmp_path), ABOUT, CONFIG) as checkpoints:
    assert checkpoints.steps() == [1]
    checkpoints.save(state(2), {})
  assert restored(tmp_path)[0].step == 2


@pytest.mark.parametrize("kind", KINDS)
def test_restore_never_returns_damaged_values(tmp_path, capsys, kind):
  """A file of the latest checkpoint, which is the best, is damaged."""
  save(tmp_path / "whole", 0.5, 0.9)
  rng = random.Random(0)
  folder = tmp_path / "run"
  latest = tmp_path / "whole" / "checkpoints" / "2"
  names = [p.relative_to(latest) for p in latest.rglob("*") if p.is_file()]
  for name in sorted(names):
    shutil.copytree(tmp_path / "whole", folder)
    here = folder / "checkpoints" / "2"
    damage(here / name, kind, [here / other for other in names], rng)
    with Checkpoints(folder, ABOUT, CONFIG) as checkpoints:
      best = checkpoints.restore_best(state(0))
      latest, loop_state = checkpoints.restore_latest(state(0))
    told = capsys.readouterr().err
    step = int(latest.step)
    chex.assert_trees_all_equal(latest, state(step))
    assert loop_state == {"note": step}
    assert (best.step, best.score) == ((1, 0.5) if step == 1 else (2, 0.9))
    assert ("damaged" in told) == (step == 1)
    shutil.rmtree(folder)


def test_restore_best_warns_of_a_lost_score(tmp_path, capsys):
  """The latest is the best, and nothing but its own memory knows it."""
  save(tmp_path, 0.5, 0.9)
  shutil.rmtree(tmp_path / "checkpoints" / "2" / "meta")
  with Checkpoints(tmp_path, ABOUT, CONFIG) as checkpoints:
    best = checkpoints.restore_best(state(0))
  assert (best.step, best.lost) == (1, 2)
  assert "the best" in capsys.readouterr().err
  shutil.rmtree(tmp_path / "checkpoints" / "2")
  results = {"best_step": 2, "selection_score": 0.9}
  path = tmp_path / "results.json"
  path.write_text(json.dumps(results))  # These know it, too.
  with (
    pytest.MonkeyPatch.context() as patch,
    Checkpoints(tmp_path, ABOUT, CONFIG) as checkpoints,
  ):
    patch.setattr(workdirs, "read_results", lambda folder: results)
    best = checkpoints.restore_best(state(0))
  assert (best.step, best.lost) == (1, 2)


def test_restore_best_detects_a_checkpoint_of_another_step(tmp_path, capsys):
  save(tmp_path, 0.9, 0.5)
  folder = tmp_path / "checkpoints"
  shutil.rmtree(folder / "1")
  shutil.copytree(folder / "2", folder / "1")
  with Checkpoints(tmp_path, ABOUT, CONFIG) as checkpoints:
    best = checkpoints.restore_best(state(0))
  assert (best.step, best.lost) == (2, 1)
  assert "step 2" in capsys.readouterr().err


def test_restore_best_without_a_whole_best_names_the_remedy(tmp_path):
  save(tmp_path, None, 0.5)
  shutil.rmtree(tmp_path / "checkpoints" / "2" / "meta")
  with (
    Checkpoints(tmp_path, ABOUT, CONFIG) as checkpoints,
    pytest.raises(ValueError, match=r"steps \[2\].*step 1"),
  ):
    checkpoints.restore_best(state(0))


def test_restore_latest_keeps_every_damaged_copy_of_a_step(tmp_path):
  save(tmp_path, None, None)
  for _ in range(2):
    shutil.rmtree(tmp_path / "checkpoints" / "2" / "meta")
    with Checkpoints(tmp_path, ABOUT, CONFIG) as checkpoints:
      assert checkpoints.restore_latest(state(0))[0].step == 1
      checkpoints.save(state(2), {})
  names = {p.name for p in (tmp_path / "checkpoints").iterdir()}
  assert {"1", "2", "damaged-2", "damaged-2-2"} <= names


def test_restore_latest_skips_a_truncated_checkpoint(tmp_path, capsys):
  save(tmp_path, None, None)
  for file in data_files(tmp_path, 2):
    file.write_bytes(file.read_bytes()[:10])
  assert restored(tmp_path)[0].step == 1


def test_restore_latest_refuses_if_all_are_damaged(tmp_path):
  save(tmp_path, None)
  shutil.rmtree(tmp_path / "checkpoints" / "1" / "state")
  with pytest.raises(ValueError, match=r"checkpoints.*damaged.*steps \[1\]"):
    restored(tmp_path)


@pytest.mark.parametrize(
  "error", [MemoryError(), ValueError("RESOURCE_EXHAUSTED: Out of memory")]
)
def test_restore_latest_passes_transient_errors(tmp_path, monkeypatch, error):
  save(tmp_path, None, None)
  with Checkpoints(there(tmp_path), ABOUT, CONFIG) as checkpoints:

    def fail(*args, **kwargs):
      raise error

    with monkeypatch.context() as patch:
      patch.setattr(ocp.PyTreeCheckpointHandler, "restore", fail)
      with pytest.raises(type(error)):
        checkpoints.restore_latest(state(0))
    assert checkpoints.steps() == [1, 2]


def test_save_refuses_values_that_are_not_finite(tmp_path):
  bad = state(3).replace(params={"w": jnp.array([1.0, jnp.nan, 2.0])})
  with Checkpoints(there(tmp_path), ABOUT, CONFIG) as checkpoints:
    with pytest.raises(FloatingPointError, match="step 3 .*'w'.*finite"):
      checkpoints.save(bad, {})
    assert checkpoints.steps() == []


def test_restore_latest_names_another_shape(tmp_path):
  save(tmp_path, None)
  with pytest.raises(ValueError, match=r"opt_state/0.*\[3\].*\[4\]"):
    restored(tmp_path, width=4)


def full(*args, **kwargs):
  raise OSError(errno.ENOSPC, "No space left on device")


def test_save_on_a_full_disk_keeps_earlier_checkpoints(tmp_path, monkeypatch):
  save(tmp_path, None)
  checkpoints = Checkpoints(there(tmp_path), ABOUT, CONFIG)
  monkeypatch.setattr(checkpoints._manager, "save", full)
  with pytest.raises(OSError, match="[Ss]tep 2.*disk is full"):
    checkpoints.save(state(2), {})
  assert checkpoints.steps() == [1]


def test_save_reports_a_failed_background_save(tmp_path, monkeypatch):
  save(tmp_path, None)
  checkpoints = Checkpoints(there(tmp_path), ABOUT, CONFIG)
  checkpoints.save(state(2), {})
  checkpoints._manager.wait_until_finished()
  monkeypatch.setattr(checkpoints._manager, "wait_until_finished", full)
  with pytest.raises(OSError, match="[Ss]tep 2.*disk is full"):
    checkpoints.save(state(3), {})
  assert restored(tmp_path)[0].step == 2


def test_save_passes_errors_that_are_not_of_the_disk(tmp_path, monkeypatch):
  def wrong(*args, **kwargs):
    raise ValueError("of another model")

  checkpoints = Checkpoints(there(tmp_path), ABOUT, CONFIG)
  monkeypatch.setattr(checkpoints._manager, "save", wrong)
  with pytest.raises(ValueError, match="^of another model$"):
    checkpoints.save(state(2), {})


def test_save_does_not_recreate_a_lost_workdir(tmp_path):
  """A disk that is gone leaves its mount point, which is another disk."""
  folder, away = tmp_path / "run", tmp_path / "away"
  folder.mkdir()
  checkpoints = Checkpoints(there(folder), ABOUT, CONFIG)
  checkpoints.save(state(1), {})
  checkpoints.wait()
  folder.rename(away)
  with pytest.raises(OSError, match="[Ss]tep 2.*Errno 5"):
    checkpoints.save(state(2), {})
  assert not folder.exists()
  away.rename(folder)
  assert restored(folder)[0].step == 1


def test_save_detects_a_workdir_that_vanished_meanwhile(tmp_path, monkeypatch):
  """orbax makes the folders that it does not find."""
  folder, away = tmp_path / "run", tmp_path / "away"
  folder.mkdir()
  save(folder, 0.5)
  checkpoints = Checkpoints(there(folder), ABOUT, CONFIG)
  really_save = checkpoints._manager.save

  def vanish(*args, **kwargs):
    folder.rename(away)
    return really_save(*args, **kwargs)

  monkeypatch.setattr(checkpoints._manager, "save", vanish)
  with pytest.raises(OSError, match="[Ss]tep 2.*Errno 5"):
    checkpoints.save(state(2), {})
    checkpoints.wait()
  shutil.rmtree(folder)
  away.rename(folder)
  assert restored(folder)[0].step == 1


def test_restore_best_restores_parameters_without_the_optimizer(tmp_path):
  save(tmp_path, 0.9, 0.5)
  like = state(0).without_optimizer()
  with Checkpoints(there(tmp_path), ABOUT, CONFIG) as checkpoints:
    best = checkpoints.restore_best(like)
  assert (best.step, best.score, best.loop_state) == (1, 0.9, {"note": 1})
  chex.assert_trees_all_equal(best.state, state(1).without_optimizer())


def test_restore_from_shapes_and_shardings_only(tmp_path):
  save(tmp_path, 0.9)
  device = jax.sharding.SingleDeviceSharding(jax.devices()[1])
  like = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device),
    state(0).without_optimizer(),
  )
  with Checkpoints(there(tmp_path), ABOUT, CONFIG) as checkpoints:
    restored_state = checkpoints.restore(1, like)[0]
  chex.assert_trees_all_equal(restored_state, state(1).without_optimizer())
  assert restored_state.params["w"].devices() == {jax.devices()[1]}


def test_restore_needs_the_average_of_parameters(tmp_path):
  averaged = state(1).replace(average={"w": jnp.ones(3)})
  with Checkpoints(there(tmp_path), ABOUT, CONFIG) as checkpoints:
    checkpoints.save(averaged, {}, 0.5)
    checkpoints.wait()
    for like in (averaged, averaged.without_optimizer()):
      chex.assert_trees_all_equal(checkpoints.restore(1, like)[0], like)
    for like in (state(1), state(1).without_optimizer()):
      with pytest.raises(ValueError, match=r"average/w.*\[3\]"):
        checkpoints.restore(1, like)


@pytest.mark.parametrize("damaged", ["params", "opt_state"])
def test_restore_compares_checksums_of_the_parts_it_reads(
  tmp_path, capsys, damaged
):
  """Damage to the optimiser's state alone does not change a score."""
  with pytest.MonkeyPatch.context() as patch:
    real = checkpoint.arrays.checksums

    def wrong(tree):
      crc32 = real(tree)
      name = next(key for key in crc32 if key.startswith(f".{damaged}"))
      return crc32 | {name: crc32[name] ^ 1}

    patch.setattr(checkpoint.arrays, "checksums", wrong)
    save(tmp_path, 0.5)
  for like in (state(0), state(0).without_optimizer()):
    with Checkpoints(there(tmp_path), ABOUT, CONFIG) as checkpoints:
      if damaged == "params" or like.opt_state is not None:
        with pytest.raises(ValueError, match="checkpoints/1.*checksums"):
          checkpoints.restore(1, like)
      else:
        restored_state = checkpoints.restore(1, like)[0]
        chex.assert_trees_all_equal(
          restored_state, state(1).without_optimizer()
        )


def test_restore_latest_refuses_another_protocol(tmp_path):
  save(tmp_path, 0.5)
  other = ABOUT | {"protocol": "lra"}
  with (
    Checkpoints(there(tmp_path), other, CONFIG) as checkpoints,
    pytest.raises(
      ValueError, match=r"protocol: 'own' -> 'lra'[\s\S]*--workdir"
    ),
  ):
    checkpoints.restore_latest(state(0))
