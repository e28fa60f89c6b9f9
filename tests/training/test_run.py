"""Runs: their results, and the configs and workdirs that are refused."""

import jax
import pytest

from jaxformers import config as configs
from jaxformers.config import RunConfig
from jaxformers.foundations import workdirs
from jaxformers.training import compilers, loop, resume, run
from jaxformers.training.run import first_params, open_run, open_trained_run


@pytest.mark.slow
def test_results_record_the_run(smoke, tmp_path):
  results = loop.run(smoke(), tmp_path)
  assert results == workdirs.read_results(tmp_path)
  assert results["examples"] == 13
  assert (results["protocol"], results["selection"]) == (
    "jaxformers",
    "validation",
  )
  assert results["best_step"] in (5, 10)
  assert set(results["baselines"]) == {"majority class", "first-token rule"}
  assert results["parameter_ratio"] == pytest.approx(
    results["parameters"] / 81_612, rel=0.2
  )
  assert results["config"] == workdirs.read_config(tmp_path)
  assert results["config"]["task"]["name"] == "listops"
  for key in (
    "commit",
    "hardware",
    "versions",
    "data",
    "train_seconds",
    "seed",
  ):
    assert key in results


def as_if_trained(workdir, config):
  """The workdir of a run that has a checkpoint."""
  (workdir / "checkpoints" / "5").mkdir(parents=True, exist_ok=True)
  workdirs.write(workdir, "config.json", config)


def test_check_workdir_accepts_mixer_defaults_of_older_configs(smoke, tmp_path):
  """Configs had them as options of the mixer before."""
  config = configs.plain(smoke("performer"))
  before = configs.plain(smoke("performer"))
  for section in ("model", "reference"):
    defaults = before[section].pop("mixer_defaults")
    if section == "model":
      del defaults["dropout_rate"]  # A Performer has no weights to drop.
    before[section]["mixer"] |= defaults
  as_if_trained(tmp_path, before)
  resume.check_workdir(tmp_path, RunConfig.from_dict(config))
  before["model"]["mixer"]["num_heads"] = 1
  as_if_trained(tmp_path, before)
  with pytest.raises(ValueError, match="model.mixer.num_heads: 1 -> 2"):
    resume.check_workdir(tmp_path, RunConfig.from_dict(config))


def test_check_workdir_refuses_to_lengthen_an_ended_schedule(smoke, tmp_path):
  as_if_trained(tmp_path, configs.plain(smoke(total_steps=5)))
  message = r"total_steps: 5 -> 10\n.*'onecycle'"
  with pytest.raises(ValueError, match=message):
    resume.check_workdir(tmp_path, RunConfig.from_dict(smoke()))


@pytest.mark.parametrize("content", ["[]", "{", '{"hidden_size": 8}'])
def test_open_run_refuses_the_config_of_another_program(
  smoke, tmp_path, content
):
  (tmp_path / "config.json").write_text(content)
  with pytest.raises(ValueError, match=r"not a run.*config\.json"):
    open_trained_run(tmp_path, smoke())


def test_run_refuses_a_workdir_of_another_config(smoke, tmp_path):
  loop.run(smoke(), tmp_path)
  before = sorted(str(path) for path in tmp_path.rglob("*"))
  with pytest.raises(
    ValueError, match=r"batch_size: 8 -> 16[\s\S]*seed: 0 -> 1"
  ):
    loop.run(smoke(batch_size=16, seed=1), tmp_path)
  assert sorted(str(path) for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"model.name": "hyena"}, "model.*'hyena'"),
    (
      {"model.mixer": {"nun_experts": 2}},
      "'transject'.*'nun_experts'.*'num_experts'",
    ),
    ({"model.pool": "mex"}, "pool.*'mex'"),
    ({"model.depth": 2}, "config.model.*'depth'"),
    ({"model.positions": "places"}, "positions.*'places'"),
    ({"select": "bleu"}, "config.select.*'bleu'"),
    ({"parallel": "xmap"}, "mode.*'xmap'"),
    ({"label_smoothing": 2.0}, "label_smoothing=2.0"),
    ({"margin_loss": "emma"}, "margin_tokens=0"),
    ({"margin_weight": 0.5}, "margin_weight=0.5.*margin_tokens=0"),
    ({"short_length": 200}, "short_length=200.*short_steps=0.*give both"),
    (
      {"short_steps": 10, "short_length": 9},
      "short_steps=10.*total_steps=10.*fewer",
    ),
    ({"margin_loss": "ema"}, "margin_loss.*'ema'"),
    ({"task.deletion": 1.0}, "task.deletion=1.0"),
    ({"reference.d_model": 15}, "num_heads=2.*d_model=15"),
    ({"task.num_test": 0}, "config.task.num_test=0"),
    ({"model.d_model": 15}, "d_model=15.*even"),
  ],
)
def test_open_run_refuses_wrong_names_before_preparing_data(
  smoke, tmp_path, fields, message
):
  config = smoke()
  with config.unlocked():
    config.update_from_flattened_dict(fields)
  config.data_dir = str(tmp_path / "data")
  with pytest.raises(ValueError, match=message):
    open_run(config, tmp_path / "run")
  assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"batch_size": 10}, "batch_size=10.*4 device"),
    ({"accumulate": 3}, "batch_size=8.*3 part"),
    ({"eval_steps": 0}, r"config.eval_steps=0.*\[1, 2\^31\)"),
    ({"seed": -1}, "config.seed=-1"),
    ({"seed": 2**64}, "config.seed=18446744073709551616"),
    ({"accumulate": -1}, "config.accumulate=-1"),
    ({"patience": -1}, "config.patience=-1"),
    ({"mesh": "data:2,data:2"}, "'data:2,data:2'"),
    ({"schedule.learning_rate": 0.0}, "schedule.learning_rate=0.0"),
    ({"schedule.learning_rate": float("nan")}, "learning_rate=nan"),
    ({"schedule.learning_rate": 1e30}, r"learning_rate=1e\+30"),
    ({"schedule.warmup_steps": -1}, "schedule.warmup_steps=-1"),
    (
      {"schedule.warmup_steps": 11},
      "warmup_steps=11.*total_steps=10.*warmup_steps=1",
    ),
    ({"optimizer.b2": 1.0}, r"config.optimizer.b2=1.0.*\[0, 1\)"),
    ({"optimizer.eps": -1e-9}, "config.optimizer.eps=-1e-09"),
    ({"optimizer.clip_value": -1.0}, "config.optimizer.clip_value=-1.0"),
    ({"optimizer.weight_decay": -1.0}, "config.optimizer.weight_decay=-1.0"),
    (
      {"schedule": {"name": "rsqrt", "learning_rate": 0.1}},
      "'rsqrt'.*warmup_steps",
    ),
    ({"optimizer": {}}, "optimizer.*''.*adam"),
    ({"task": {}}, "task.*''.*listops"),
    ({"task.seed": -1}, "config.task.seed=-1"),
    ({"model.head_dim": -8}, "config.model.head_dim=-8"),
    ({"model.d_model": 0}, "config.model.d_model=0"),
    ({"model.mixer.num_experts": 0}, "config.model.mixer.num_experts=0"),
    ({"reference.block.mlp_dim": 0}, "config.reference.block.mlp_dim=0"),
    ({"reference.d_model": 15}, "num_heads=2.*d_model=15"),
    ({"select": "bleu"}, "config.select.*'bleu'.*accuracy, error, f1, loss"),
    ({"parallel": "xmap"}, "mode.*'xmap'"),
    ({"model.name": "hyena"}, "model.*'hyena'"),
    ({"task.name": "copy"}, "task.*'copy'.*listops, mad, pathfinder"),
    ({"task.protocol": "s5"}, "listops.*'s5'"),
    ({"buckets": 0}, "buckets=0"),
  ],
)
def test_run_refuses_wrong_configs(smoke, tmp_path, fields, message):
  with pytest.raises(ValueError, match=message):
    loop.run(smoke(**fields), tmp_path)


def test_run_refuses_an_unwritable_workdir(smoke, tmp_path):
  (tmp_path / "file").touch()
  with pytest.raises(ValueError, match="file/run.*--workdir"):
    loop.run(smoke(), tmp_path / "file" / "run")


def test_run_with_an_unknown_model_leaves_the_workdir_free(smoke, tmp_path):
  with pytest.raises(ValueError, match="model.*'hyena'"):
    loop.run(smoke(**{"model.name": "hyena"}), tmp_path)
  assert [path.name for path in tmp_path.iterdir()] == [".lock"]
  assert loop.run(smoke(), tmp_path)["examples"] == 13


def test_run_replaces_a_config_without_checkpoints(smoke, tmp_path):
  (tmp_path / "config.json").write_text('{"seed": 7}')
  assert loop.run(smoke(), tmp_path)["seed"] == 0


def test_run_eval_only_ignores_the_training_batch_size(
  smoke, tmp_path, monkeypatch
):
  first = loop.run(smoke(), tmp_path)
  monkeypatch.setattr(compilers, "devices", lambda: jax.devices()[:3])
  again = loop.run(smoke(), tmp_path, eval_only=True)
  assert again["accuracy"] == first["accuracy"]
  assert again["train_seconds"] == first["train_seconds"]


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"ema_decay": 1.0}, r"ema_decay=1.0.*\[0, 1\)"),
    ({"label_smoothing": -0.1}, "label_smoothing=-0.1"),
    (
      {"ema_decay": 0.9, "model.orthogonal_map": "matrix"},
      "config.ema_decay=0.9.*orthogonal_map='matrix'",
    ),
    ({"select": "perplexity"}, "config.select.*'perplexity'.*accuracy, loss"),
  ],
)
def test_open_run_refuses_wrong_configs(smoke, tmp_path, fields, message):
  with pytest.raises(ValueError, match=message):
    open_run(smoke(**fields), tmp_path)


def test_eval_examples_choose_the_same_part_for_every_seed(smoke, tmp_path):
  def opened(name, **fields):
    return open_run(smoke(**fields), tmp_path / name)

  whole = opened("whole")
  assert whole.selection_split is whole.task.splits["validation"]
  assert whole.selection == "validation"
  assert opened("more", eval_examples=99).selection == "validation"
  parts = [opened(f"{seed}", eval_examples=4, seed=seed) for seed in (0, 1)]
  assert {part.selection for part in parts} == {"validation, 4 of 10"}
  first, second = (part.selection_split for part in parts)
  assert len(first) == len(second) == 4
  assert first.keys.tolist() == second.keys.tolist()
  with pytest.raises(ValueError, match=r"eval_examples=-1"):
    opened("wrong", eval_examples=-1)


def test_default_workdir_is_named_by_config_and_overrides(monkeypatch, request):
  monkeypatch.chdir(request.config.rootpath)

  def folder(spec, *overrides):
    loaded = configs.load(spec)
    config = configs.override(loaded, overrides)
    return run.default_workdir(spec, loaded, config).as_posix()

  spec = "configs/lra/text.py:size=tiny,model=lru"
  name = "runs/lra_text-lru-tiny-jaxformers-0"
  assert folder(spec) == folder("lra/text:model=lru,size=tiny") == name
  # Neither what may differ when a run resumes, nor the names of its parts.
  assert folder(spec, "--config.task.archive=x", "--config.patience=3") == name
  assert folder(spec, "--config.seed=2") == name[:-1] + "2"
  assert folder("lm/text") == "runs/lm_text-transformer-jaxformers-0"
  assert folder("lra/text:protocol=lra") == "runs/lra_text-transject-lra-0"
  # Other numbers have other folders.
  others = {
    folder(spec, flag)
    for flag in ("--config.model.d_model=8", "--config.model.d_model=16")
  }
  assert len(others) == 2
  assert all(other.startswith(f"{name}-") for other in others)
  # A longer run is the same one, if its schedule allows it.
  longer = "--config.total_steps=100000"
  assert folder(spec, longer) != name
  endless = ["--config.schedule.name=constant"]
  assert folder(spec, *endless) == folder(spec, *endless, longer)


def test_first_params_are_on_one_device(smoke, tmp_path):
  """Analyses do not split over devices, and no kernel could."""
  params = first_params(open_run(smoke("transject"), tmp_path / "run"))
  assert all(x.sharding.num_devices == 1 for x in jax.tree.leaves(params))
