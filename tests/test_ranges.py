"""Every field has a range, and what is out of it is refused with one error."""

import dataclasses
import functools
import inspect
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformers import config as configs
from jaxformers import main, models, ranges, tasks
from jaxformers.data.images.augment import Augment
from jaxformers.errors import UserError
from jaxformers.models.attention import Attention, shared_options
from jaxformers.models.blocks.contract import BLOCKS
from jaxformers.models.config import HEAD_OPTIONS
from jaxformers.models.embedding import Embedding
from jaxformers.training import compilers, optim, run
from tests.models.mixers.oracle import small_sizes

ROOT = Path(__file__).parents[1]
# Values that a hand or a sweep can put into any field.
POOL = (
  0,
  1,
  2,
  3,
  -1,
  2**64,
  0.5,
  2.0,
  -1e-9,
  1e30,
  math.nan,
  math.inf,
  -math.inf,
  True,
  False,
  "x",
  "",
  None,
  [],
  [1, 2],
  {},
)
# Fields that the package sets by itself, and no config.
WIRING = {
  "parent",
  "mixer",
  "layer",
  "encoder",
  "cls",
  "concatenate",
  "schedule",
  "total_steps",
  "max_len",
  "num_layers",
  "dtype",
  "orthogonal_map",
  "masked",
}
# Options of the head of a language model, which have no signature.
HEAD = {"tied": True, "dropout_rate": 0.0}
# Options that `optim.build` takes for every optimiser.
SHARED = {
  "clip_value": 0.0,
  "clip_norm": 0.0,
  "cycle_momentum": False,
  "groups": {},
  "layer_decay": 1.0,
  "frozen": "",
}
# Options of every task of sequences, which `tasks.get` takes.
PRETRAINING = {"objective": "masked", "mask_rate": 0.15, "targets": "values"}
# Options of every task of images, which `tasks.get` takes.
STATISTICS = {"mean": (0.5,), "deviation": (0.5,)}
SIZES = dict(vocab_size=20, max_len=24, num_classes=3, d_model=8, num_layers=2)
KINDS_OF_INPUT = (
  {},
  {"objective": "language_model"},
  {"objective": "segmentation", "image": (8, 8, 3), "patch_size": 4},
)
SECTIONS = {"mixer", "mixer_defaults", "block", "embedding", "head"}

# Options of the head of a language model, with values that they may have.
HEAD = dict(zip(HEAD_OPTIONS["language_model"], (True, 0.0), strict=True))


def parameters(function):
  """Options of a function, or fields of a Linen module, with their defaults."""
  if dataclasses.is_dataclass(function):
    return {f.name: f.default for f in dataclasses.fields(function)}
  return {
    k: p.default for k, p in inspect.signature(function).parameters.items()
  }


def mixer_options(mixer):
  """Options of a mixer with their defaults."""
  if not hasattr(mixer, "options"):
    return parameters(mixer)
  module = mixer()
  return {
    name: module.options.get(name, getattr(module, name, None))
    for name in mixer.options
  }


def sections():
  """All options that a config can set: (path of the section, options)."""
  yield "config", {k: field.default for k, field in configs.FIELDS.items()}
  yield "config.model", parameters(models.ModelConfig)
  for mixer in models.MIXERS.values():
    yield "config.model.mixer", mixer_options(mixer)
  shared = parameters(Attention)
  yield (
    "config.model.mixer_defaults",
    {name: shared[name] for name in shared_options()},
  )
  for block in BLOCKS.values():
    yield "config.model.block", parameters(block)
  yield "config.model.embedding", parameters(Embedding)
  yield "config.model.head", HEAD
  for optimizer in optim.OPTIMIZERS.values():
    own = parameters(optimizer)
    own.pop("decays")  # A function, which `build` gives.
    yield "config.optimizer", own | SHARED
  yield "config.optimizer.groups.step", {"factor": 1.0, "decay": True}
  for schedule in optim.SCHEDULES.values():
    yield "config.schedule", parameters(schedule)
  for task in tasks.TASKS.values():
    yield "config.task", parameters(task) | PRETRAINING | STATISTICS
  yield "config.task.augment", parameters(Augment)


def fields():
  """All fields that a config can set: path and default."""
  hidden = {"parent", "mixer", "residual"}
  return sorted(
    {
      f"{section}.{name}": default
      for section, options in sections()
      for name, default in options.items()
      if section in ("config", "config.model") or name not in WIRING
      if not (section.endswith("mixer") and name in hidden)
    }.items()
  )


@pytest.mark.parametrize(("path", "default"), fields())
def test_every_field_has_a_range_that_its_default_is_in(path, default):
  allowed = ranges.find(path)
  assert allowed is not None, f"Declare the range of {path} in ranges.RANGES."
  if default not in (None, inspect.Parameter.empty, dataclasses.MISSING):
    allowed.check(path, default)


def test_every_range_is_of_a_field():
  names = {path.rpartition(".")[2] for path, _ in fields()}
  names |= {"residual"}  # A flag of a block, and a module of a mixer.
  stale = {key.rpartition(".")[2] for key in ranges.RANGES} - names - WIRING
  assert not stale - {"name"}


@pytest.mark.parametrize(
  ("path", "value", "message"),
  [
    ("config.optimizer.b2", 1.5, r"config.optimizer.b2=1.5 is not in \[0, 1\)"),
    ("b2", 1.0, r"is not in \[0, 1\): give a number in that range"),
    ("b2", math.nan, "b2=nan is not in"),
    ("schedule.learning_rate", math.inf, r"is not in \(0, 1000\]"),
    ("learning_rate", True, "learning_rate=True is not of type float"),
    ("learning_rate", "x", r"'x' is not of type float: give a number in \(0,"),
    ("d_model", 2.0, r"d_model=2.0 is not of type int: give an integer in \[1"),
    ("seed", 2**31, r"seed=2147483648 is not in \[0, 2\^31\)"),
    ("causal", 1, "causal=1 is not of type bool: give True or False"),
    ("pool", 3, "pool=3 is not of type str: give text"),
    ("model", 3, "model=3 is not of type dict: give a section of fields"),
    ("cutoffs", 3, "cutoffs=3 is not of type list: give a list, each an int"),
    ("cutoffs", [3, 0], r"cutoffs=\[3, 0\] is not in"),
    ("block.norm_epsilon", 0, r"block.norm_epsilon=0 is not in \(0, 1\]"),
  ],
)
def test_a_value_out_of_range_names_the_field_and_the_range(
  path, value, message
):
  with pytest.raises(ValueError, match=message):
    ranges.find(path).check(path, value)


def test_sections_are_checked_to_their_last_field():
  ranges.check({"model": {"mixer": {"num_heads": 1, "of_a_user": -1}}})
  options = configs.base(model={"mixer": {"num_heads": 0}})
  with pytest.raises(ValueError, match="config.model.mixer.num_heads=0"):
    ranges.check(options, "config")


def test_integers_of_numpy_are_integers():
  import numpy as np

  ranges.check({"d_model": np.int64(8), "b2": np.float32(0.5), "eps": 1})


@pytest.mark.parametrize("size", ["paper", "tiny"])
@pytest.mark.parametrize(
  "path", sorted((ROOT / "configs").rglob("*.py")), ids=lambda p: p.stem
)
def test_every_config_of_the_package_is_in_range(path, size):
  try:
    config = configs.load(f"{path}:size={size}")
  except ValueError:
    config = configs.load(str(path))  # Of one size alone.
  run.check_fields(configs.complete(config))


def trace(name, **options):
  """Builds a model and traces its parameters and a training step's pass."""
  model = models.build(name, **(SIZES | options))
  params = models.shapes(model)
  rngs = {"dropout": jax.random.key(0), "random": jax.random.key(1)}
  apply = functools.partial(model.apply, train=True, rngs=rngs)
  jax.eval_shape(apply, {"params": params}, model.example())


def is_refused(function, *args, **kwargs):
  """Returns True for a UserError, False for none; raises other errors."""
  try:
    function(*args, **kwargs)
  except UserError:
    return True
  return False


def with_option(path, value, *, base):
  """A copy of nested options, one of them set."""
  section, _, rest = path.partition(".")
  inner = (
    value
    if not rest
    else with_option(rest, value, base=base.get(section) or {})
  )
  return {**base, section: inner}


def model_fields(name):
  """Paths of all options of `models.build` for a model."""
  variant = models.MODELS[name]
  inner = {
    "mixer": mixer_options(models.MIXERS[variant.mixer])
    if variant.mixer
    else (),
    "block": parameters(BLOCKS[variant.block]),
    "embedding": parameters(Embedding),
    "head": HEAD,
    "mixer_defaults": shared_options(),
  }
  paths = [path for path in parameters(models.ModelConfig) if path != "name"]
  return paths + [
    f"{section}.{option}"
    for section, options in inner.items()
    for option in options
    if option not in WIRING
  ]


def distinct_fields(name):
  """Paths of `model_fields`; those that all models share only for one model."""
  return [
    path
    for path in model_fields(name)
    if name == "transformer" or path.startswith(("mixer.", "block."))
  ]


@functools.cache
def split_pool(path):
  """The values of the pool in the range of a field, and the others."""
  allowed = ranges.find(path)
  inside, outside = [], []
  for value in POOL:
    # Sections are arguments of `models.build`, of which None is the default.
    is_default = value is None and path in SECTIONS
    refused = allowed and is_refused(allowed.check, path, value)
    (outside if refused and not is_default else inside).append(value)
  return inside, outside


def options_of(name, changes, **kind):
  """Options of `models.build` for a model, some of them changed."""
  mixer = small_sizes(models.MODELS[name].mixer)
  options = SIZES | {"mixer": mixer} | kind
  if "transject" in name and not kind:
    options["pool"] = "max"
  for path, value in changes.items():
    options = with_option(path, value, base=options)
  return options


@pytest.mark.parametrize("name", sorted(models.MODELS))
def test_no_model_is_built_of_a_value_out_of_range(name):
  """One option at a time: those of all models, and those of one model."""
  count = 0
  for path in distinct_fields(name):
    for value in split_pool(path)[1]:
      options = options_of(name, {path: value})
      assert is_refused(models.build, name, **options), (path, value)
      count += 1
  assert count > 50


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(models.MODELS))
def test_a_value_in_range_is_built_or_refused(name):
  """One option at a time; a raw error of JAX, Flax or Python fails the test."""
  for path in distinct_fields(name):
    for value in split_pool(path)[0]:
      is_refused(trace, name, **options_of(name, {path: value}))


@st.composite
def model_cases(draw, names):
  """A model, a kind of input, and some options out of the pool, in range."""
  name = draw(st.sampled_from(sorted(names)))
  kind = draw(st.sampled_from(KINDS_OF_INPUT))
  paths = st.lists(
    st.sampled_from(sorted(model_fields(name))),
    min_size=1,
    max_size=5,
    unique=True,
  )
  changes = {
    path: draw(st.sampled_from(split_pool(path)[0] or POOL))
    for path in draw(paths)
  }
  return name, kind, changes


def trace_some(case):
  """Traces a model of a name, of a kind of input and of some options."""
  name, kind, changes = case
  is_refused(trace, name, **options_of(name, changes, **kind))


@settings(max_examples=20, derandomize=True, database=None)
@given(model_cases(["transformer", "transject", "longformer"]))
def test_options_together_are_built_or_refused(case):
  trace_some(case)


@pytest.mark.long
@settings(max_examples=300, derandomize=True, database=None)
@given(model_cases(models.MODELS))
def test_options_of_all_models_together_are_built_or_refused(case):
  trace_some(case)


def begin(changes):
  """Does what a run does before it reads data, and takes two rates of it."""
  config = configs.plain(configs.load("configs/lra/listops.py:size=tiny"))
  for path, value in changes.items():
    config = with_option(path, value, base=config)
  run.check_fields(config)
  compilers.layout(config["mesh"])
  tx, schedule = optim.build(
    config["optimizer"], config["schedule"], config["total_steps"]
  )
  for section in ("model", "reference"):
    models.check_names(config[section], f"config.{section}")
  return config, tx, schedule


def run_fields():
  """Paths of the fields of a run, an optimiser and a schedule."""
  sections = ("config", "config.optimizer", "config.schedule", "config.task")
  paths = [path for path, _ in fields() if path.rpartition(".")[0] in sections]
  return sorted(path.removeprefix("config.") for path in paths)


@pytest.mark.parametrize("path", run_fields())
def test_no_run_begins_with_a_value_out_of_range(path):
  values = split_pool(f"config.{path}")[1]
  assert values
  for value in values:
    with pytest.raises(ValueError, match=f"config.{path}=") as error:
      begin({path: value})
    assert main._explain(error.value)[1].startswith("error: ")


def train_quadratic(tx, schedule, total_steps):
  """Two steps on |x|^2, and the rate of every kind of step."""
  steps = jnp.array([0, 1, total_steps // 2, total_steps - 1])
  rates = jax.vmap(schedule)(steps) * jnp.ones(4)
  params = {"kernel": jnp.ones((2, 2)), "bias": jnp.zeros(2)}
  state = tx.init(params)
  for _ in range(2):
    updates, state = tx.update(params, state, params)
    params = jax.tree.map(jnp.add, params, updates)
  finite = all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(params))
  return bool((rates >= 0).all() and (rates < jnp.inf).all()), finite


@st.composite
def run_changes(draw):
  """Draws values of the pool for fields of a run and of any optimiser."""
  schedule = draw(st.sampled_from(sorted(optim.SCHEDULES)))
  optimizer = draw(st.sampled_from(sorted(optim.OPTIMIZERS)))
  rate = draw(st.sampled_from([1e-3, 1.0, 1000.0]))
  changes = {
    "schedule": {"name": schedule, "learning_rate": rate},
    "optimizer": {"name": optimizer},
  }
  options = {
    *(f"schedule.{k}" for k in parameters(optim.SCHEDULES[schedule])),
    *(f"optimizer.{k}" for k in parameters(optim.OPTIMIZERS[optimizer])),
    *(f"optimizer.{k}" for k in SHARED),
    "total_steps",
    "seed",
    "batch_size",
    "select",
    "parallel",
    "ema_decay",
  }
  options -= {"schedule.total_steps", "optimizer.schedule"}
  options -= {"optimizer.decays"}
  paths = draw(st.lists(st.sampled_from(sorted(options)), unique=True))
  for path in paths:
    values = split_pool(f"config.{path}")[0]
    changes[path] = draw(st.sampled_from(values or POOL))
  return changes


@settings(max_examples=40, derandomize=True, database=None)
@given(run_changes())
def test_a_run_begins_with_rates_and_steps_that_are_finite(changes):
  check_run(changes)


@pytest.mark.long
@settings(max_examples=500, derandomize=True, database=None)
@given(run_changes())
def test_any_run_begins_with_rates_and_steps_that_are_finite(changes):
  check_run(changes)


def check_run(changes):
  """A run is refused by our error, or its first steps are finite."""
  try:
    config, tx, schedule = begin(changes)
    finite = train_quadratic(tx, schedule, config["total_steps"])
  except UserError:
    return
  assert finite == (True, True)
