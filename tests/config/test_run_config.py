import dataclasses

import chex
import pytest

from jaxformers import config as c

MODEL = {"name": "s5", "d_model": 8, "num_layers": 1, "mixer": {"blocks": 2}}
FIELDS = {
  "task": {"name": "listops", "protocol": "lra", "seed": 4},
  "model": MODEL,
  "reference": MODEL,
  "schedule": {"name": "rsqrt", "learning_rate": 0.1, "warmup_steps": 7},
}


def test_base_refuses_an_unknown_field():
  assert c.base(seed=3).seed == 3
  with pytest.raises(ValueError, match="'batchsize'.*'batch_size'"):
    c.base(batchsize=3)


def test_resumable_fields_exist():
  for path in c.RESUMABLE_FIELDS:
    assert path.partition(".")[0] in c.FIELDS


def test_differences_names_keys_and_skips_resumable_fields():
  old = c.plain(c.base(model={"d_model": 8, "mixer": {"num_heads": 2}}))
  new = c.plain(
    c.base(model={"d_model": 16, "mixer": {}}, data_dir="elsewhere")
  )
  lines = c.differences(old, new)
  assert lines[0] == "model.d_model: 8 -> 16"
  assert any("model.mixer.num_heads: 2 -> 'absent'" in line for line in lines)
  assert not any("data_dir" in line for line in lines)
  assert c.differences(old, old) == []


def test_run_config_from_dict_has_types_and_defaults():
  config = c.RunConfig.from_dict(FIELDS)
  assert (config.seed, config.batch_size, config.logs) == (0, 32, ())
  assert (config.task.name, config.task.protocol) == ("listops", "lra")
  assert config.task.options["seed"] == 4
  assert (config.model.d_model, config.model.pool) == (8, "mean")
  assert config.optimizer == c.Choice(name="adam")
  assert config.schedule.warmup_steps == 7
  with pytest.raises(dataclasses.FrozenInstanceError):
    config.seed = 1


@pytest.mark.parametrize("spec", ["lra/text", "lm/text", "vision/cifar10"])
def test_run_config_survives_json(spec):
  config = c.RunConfig.from_dict(c.load(spec))
  content = config.as_dict()
  assert c.plain(content) == content
  assert c.RunConfig.from_dict(content) == config
  # It says more than the file, and nothing else.
  loaded, written = c.flatten(c.plain(c.load(spec))), c.flatten(content)
  same = {k: written[k] for k in loaded if k in written}
  chex.assert_trees_all_equal(same, {k: loaded[k] for k in same})
  assert all(value in ({}, []) for k, value in loaded.items() if k not in same)


def test_run_config_replace_checks_section_types():
  config = c.RunConfig.from_dict(FIELDS)
  with pytest.raises(ValueError, match="config.task={}.*TaskChoice"):
    dataclasses.replace(config, task={})
  assert config.task.protocol == "lra"
  assert c.TaskChoice.from_dict({"name": "x", "protocol": None}).protocol == ""


def test_run_config_without_defaults_omits_unset_model_options():
  fields = c.RunConfig.from_dict(FIELDS).without_defaults()
  assert fields["model"] == MODEL
  assert fields["schedule"] == FIELDS["schedule"]


def test_run_config_treats_an_empty_section_as_none():
  old = c.RunConfig.from_dict(FIELDS).as_dict()
  new = {**old, "model": {**old["model"], "embedding": {"init_std": 1.0}}}
  assert c.differences(old, new) == [
    "model.embedding.init_std: 'absent' -> 1.0"
  ]


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"seed": -1}, r"config.seed=-1.*\[0, 2\^31\)"),
    ({"batchsize": 1}, "'batchsize'.*'batch_size'"),
    ({"model": 3}, "config.model=3.*dict"),
    ({"model": {"name": "s5"}}, "config.model.*d_model, num_layers"),
    ({"model": MODEL | {"d_modle": 8}}, "config.model.*'d_modle'.*'d_model'"),
    ({"model": MODEL | {"d_model": 0}}, "config.model.d_model=0"),
    ({"reference": MODEL | {"pool": 1}}, "config.reference.pool=1.*str"),
  ],
)
def test_run_config_names_a_wrong_field(fields, message):
  with pytest.raises(ValueError, match=message):
    c.RunConfig.from_dict(FIELDS | fields)
