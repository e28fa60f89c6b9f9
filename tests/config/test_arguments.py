import pytest

from jaxformers import config as c


def test_parse_arg_types_values_by_their_defaults():
  arg = c.parse_arg(
    "model=softmax, depth=3,rate=1e-3,wide=true",
    model="x",
    depth=1,
    rate=0.1,
    wide=False,
  )
  assert arg.to_dict() == {
    "model": "softmax",
    "depth": 3,
    "rate": 1e-3,
    "wide": True,
  }
  assert c.parse_arg(None, seed=4).seed == 4


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("sede=1", "'sede'.*'seed'.*wide"),
    ("seed", "'seed'.*seed=VALUE"),
    ("seed=", "'seed='.*seed=VALUE"),
    ("seed=one", "seed='one'.*int"),
    ("seed=1,seed=1", "argument seed.*twice"),
    ("wide=maybe", "wide='maybe'.*bool"),
  ],
)
def test_parse_arg_refuses_wrong_arguments(text, message):
  with pytest.raises(ValueError, match=message):
    c.parse_arg(text, seed=0, wide=False)


def test_check_overrides_names_section_and_choices():
  config = c.base(model={"d_model": 8})
  c.check_overrides(config, ["x", "--config.model.d_model=3", "--config=a.py"])
  c.check_overrides(config, ["--noconfig.tensorboard"])
  with pytest.raises(ValueError, match=r"config\.model.*'dmodel'.*'d_model'"):
    c.check_overrides(config, ["--config.model.dmodel=3"])
  with pytest.raises(ValueError, match=r"config\.seed.*'x'"):
    c.check_overrides(config, ["--config.seed.x=3"])


def test_take_options_takes_mixer_options_absent_from_the_config():
  config = c.base(model={"name": "local", "mixer": {"num_heads": 2}})
  argv = [
    "main",
    "--config=a.py",
    "--config.model.mixer.num_heads=4",
    "--config.model.mixer.block_size=32",
    "--config.model.mixer.causal",
    "--noconfig.model.mixer.use_bias",
    "--config.model.block.kind=[1, 2]",
    "--config.model.mixer.gating=certified",
    "--config.model.d_model=3",
  ]
  rest, options = c.take_options(config, argv)
  assert rest == [argv[i] for i in (0, 1, 2, 8)]
  assert options == {
    "model.mixer.block_size": 32,
    "model.mixer.causal": True,
    "model.mixer.use_bias": False,
    "model.block.kind": [1, 2],
    "model.mixer.gating": "certified",
  }


def test_take_options_takes_fine_tuning_fields_of_every_config():
  argv = [
    "--config.optimizer.layer_decay=0.8",
    "--config.optimizer.frozen=head",
  ]
  config = c.base()
  rest, options = c.take_options(config, argv)
  assert rest == []
  c.set_options(config, options)
  assert config.optimizer.layer_decay == 0.8
  assert config.optimizer.frozen == "head"


def test_set_options_creates_absent_sections():
  config = c.base(model={"name": "transject"})
  c.set_options(config, {"model.block.foo": 1, "model.mixer.bar": True})
  assert config.model.block.foo == 1
  assert config.model.mixer.bar is True


@pytest.mark.parametrize(
  ("flag", "message"),
  [
    ("learning_rate=1", "'learning_rate'.*config.schedule.learn"),
    ("lr=1", "'lr'.*config.schedule.learning_rate"),
    ("model.lr=1", r"config\.model.*'lr'.*config\.schedule"),
    ("bs=1", "'bs'.*config.batch_size"),
    ("hidden_size=1", r"'hidden_size'.*config\.model\.d_model"),
    ("batch_size=abc", "config.batch_size='abc'.*integer"),
    ("batch_size=1.5", "config.batch_size='1.5'.*int"),
    ("tensorboard=maybe", "config.tensorboard='maybe'.*True.*False"),
    ("schedule.learning_rate=fast", "learning_rate='fast'.*number"),
  ],
)
def test_check_overrides_suggests_the_field_that_was_meant(flag, message):
  config = c.base(model={"d_model": 8, "name": "lru"})
  with pytest.raises(ValueError, match=message):
    c.check_overrides(config, [f"--config.{flag}"])


def test_override_of_optimizer_name_drops_other_options():
  spec = "lra/listops"
  loaded = c.load(spec)
  with loaded.unlocked():
    loaded.optimizer.update(cap="spectral", cap_max=2.0)
  before = loaded.optimizer.to_dict()
  assert {"name", "b2", "weight_decay"} <= before.keys()
  flags = ["--config.optimizer.name=sgd", "--config.optimizer.momentum=0.5"]
  after = c.override(loaded, flags).optimizer.to_dict()
  assert after["cap"] == "spectral"
  kept = {k: v for k, v in before.items() if k.startswith(("clip", "cap"))}
  assert after == {"name": "sgd", "momentum": 0.5, **kept}
  # The same name keeps them.
  same = c.override(loaded, [f"--config.optimizer.name={before['name']}"])
  assert same.optimizer.to_dict() == before
  schedule = c.override(
    c.load(spec), ["--config.schedule.name=constant"]
  ).schedule
  assert set(schedule) == {"name", "learning_rate", "warmup_steps"}
