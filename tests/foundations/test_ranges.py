"""Every option has a range, and what is out of it is refused with one error."""

import dataclasses
import functools
import inspect
import itertools
import math
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformers import config as configs
from jaxformers import main, models, tasks
from jaxformers.data.images.augment import Augment
from jaxformers.foundations import ranges
from jaxformers.foundations.errors import UserError
from jaxformers.models.attention import shared_options
from jaxformers.models.blocks.contract import BLOCKS
from jaxformers.models.config import HEADS
from jaxformers.models.embedding import Embedding
from jaxformers.tasks.reconstruction import reconstruct
from jaxformers.training import compilers, optim, run
from tests.assertions import assert_all
from tests.marks import slow_except
from tests.models.mixers.oracle import small_sizes

ROOT = Path(__file__).parents[2]
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
  "decays",
  "task",
  "total_steps",
  "max_len",
  "num_layers",
  "dtype",
  "orthogonal_map",
  "masked",
}
SIZES = dict(vocab_size=20, max_len=24, num_classes=3, d_model=8, num_layers=2)
KINDS_OF_INPUT = (
  {},
  {"objective": "language_model"},
  {"objective": "segmentation", "image": (8, 8, 3), "patch_size": 4},
)
SECTIONS = {"mixer", "mixer_defaults", "block", "embedding", "head"}

# Options of the head of a language model, with values that they may have.
HEAD = {"tied": True, "dropout_rate": 0.0}


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


def owners():
  """All functions and classes of options: (path of the section, owner)."""
  yield "config", configs.RunConfig
  yield "config.model", models.ModelConfig
  for mixer in models.MIXERS.values():
    yield "config.model.mixer", mixer
  for block in BLOCKS.values():
    yield "config.model.block", block
  yield "config.model.embedding", Embedding
  for head in HEADS.values():
    yield "config.model.head", head
  yield "config.optimizer", optim.SharedOptions
  for optimizer in optim.OPTIMIZERS.values():
    yield "config.optimizer", optimizer
  yield "config.optimizer.groups.step", optim.Group
  for schedule in optim.SCHEDULES.values():
    yield "config.schedule", schedule
  for task in (*tasks.TASKS.values(), reconstruct, tasks.normalise):
    yield "config.task", task
  yield "config.task.augment", Augment


def settable(section, owner):
  """Options of an owner that a config can set, with their defaults."""
  if hasattr(owner, "options"):
    options = mixer_options(owner)
  elif typing.is_typeddict(owner):
    options = dict.fromkeys(owner.__annotations__)
  else:
    options = parameters(owner)
  hidden = {"parent", "mixer", "residual"} if section.endswith("mixer") else ()
  return {
    name: default
    for name, default in options.items()
    if section in ("config", "config.model") or name not in WIRING
    if name not in hidden
  }


def fields():
  """All options that a config can set: path, owner and default."""
  for section, owner in owners():
    name = getattr(owner, "__name__", type(owner).__name__)
    for option, default in settable(section, owner).items():
      yield name, f"{section}.{option}", owner, default


def check_option(_, path, owner, default):
  """Fails unless an option has a range, which its default is in."""
  name = path.rpartition(".")[2]
  is_section = owner is configs.RunConfig and name in configs.SECTIONS
  if is_section:
    return
  allowed = ranges.of(owner).get(name)
  assert allowed is not None, f"Annotate {path} with its type and interval."
  if allowed.kind in (int, float):
    assert allowed.interval, f"Annotate {path} with an interval."
  is_open = default in (None, inspect.Parameter.empty, dataclasses.MISSING)
  if not is_open:
    allowed.check(path, default)


def test_every_option_has_a_range_that_its_default_is_in():
  assert_all(check_option, fields(), least=500)


def test_ranges_of_skips_annotations_it_cannot_read():
  """Neither those of names that are not there, nor of several kinds."""

  class Callable:
    __hash__ = None

    def __call__(self, x):
      return x

  def owner(a, b, c, d, e, f):
    return a, b, c, d, e, f

  owner.__annotations__ = {
    "a": "Absent",
    "b": int | str,
    "c": jax.typing.ArrayLike,
    "d": tuple[int, str],
    "e": typing.Tuple,  # noqa: UP006
    "f": ranges.Size | None,
    "return": "optax.GradientTransformation",
  }
  assert ranges.of(owner) == {"f": ranges.of(owner)["f"]}
  ranges.check(owner, {"f": None})
  for found in (Callable(), functools.partial(owner), optax.adamw, optax.lamb):
    assert "a" not in ranges.of(found)
  with pytest.raises(ValueError, match="f=0 "):
    ranges.check(functools.partial(owner), {"f": 0})


@pytest.mark.parametrize(
  ("path", "value"),
  [
    ("task.augment.mixup", -1),
    ("task.augment.flip", "no"),
    ("task.mask_rate", 2.0),
    ("optimizer.clip_norm", -1),
    ("optimizer.b2", 2),
    ("optimizer.groups.step.factor", -1),
    ("model.head.dropout_rate", 2),
    ("schedule.name", ["x"]),
    ("schedule.warmup_steps", "x"),
  ],
)
def test_check_fields_names_the_option_of_every_section(path, value):
  config = configs.plain(configs.load("vision/cifar10:size=tiny"))
  changed = with_option(path, value, base=config)
  with pytest.raises(ValueError, match=f"config.{path}="):
    run.check_fields(configs.RunConfig.from_dict(changed))
  assert path == "schedule.name" or run.find_range(changed, path)


def test_check_fields_checks_options_of_examples_in_memory(tmp_path):
  config = configs.load("lra/listops:size=tiny,objective=masked")
  config.task = {"name": "arrays", "objective": "masked", "mask_rate": 2.0}
  with pytest.raises(ValueError, match="config.task.mask_rate=2.0"):
    run.check_fields(configs.RunConfig.from_dict(config))
  with pytest.raises(ValueError, match="stride=-1"):
    tasks.language.from_texts(["a b c"] * 20, stride=-1)


def test_check_fields_checks_model_reference_and_task_options():
  config = configs.load("configs/lra/listops.py:size=tiny,model=local")
  for path in (
    "model.mixer.num_heads",
    "model.mixer_defaults.num_heads",
    "reference.block.mlp_dim",
    "task.max_depth",
  ):
    changed = with_option(path, 0, base=configs.plain(config))
    with pytest.raises(ValueError, match=f"config.{path}=0 "):
      run.check_fields(configs.RunConfig.from_dict(changed))


def test_ranges_check_accepts_numpy_scalars():
  import numpy as np

  ranges.check(models.ModelConfig, {"d_model": np.int64(8)})
  ranges.check(optim.adam, {"b2": np.float32(0.5), "eps": 1})


def check_config(path, size):
  """Fails unless all fields of a config are in range."""
  try:
    config = configs.load(f"{path}:size={size}")
  except ValueError:
    config = configs.load(str(path))  # Of one size alone.
  run.check_fields(configs.RunConfig.from_dict(config))


def test_every_config_of_the_package_is_in_range():
  paths = (ROOT / "configs").rglob("*.py")
  cases = itertools.product(sorted(paths), ("paper", "tiny"))
  assert_all(check_config, cases, least=30)


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
def split_pool(name, path):
  """The values of the pool in the range of a model's field, and the others."""
  config = {"model": {"name": name}}
  allowed = run.find_range(config, f"model.{path}") or ranges.of(
    models.ModelConfig
  ).get(path)
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


@pytest.mark.parametrize(
  "name", slow_except(("transformer", "transject"), sorted(models.MODELS))
)
def test_build_refuses_every_value_out_of_range(name):
  """One option at a time: those of all models, and those of one model."""
  count = 0
  for path in distinct_fields(name):
    for value in split_pool(name, path)[1]:
      options = options_of(name, {path: value})
      assert is_refused(models.build, name, **options), (path, value)
      count += 1
  assert count > 50


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(models.MODELS))
def test_build_handles_every_value_in_range(name):
  """One option at a time; a raw error of JAX, Flax or Python fails the test."""
  for path in distinct_fields(name):
    for value in split_pool(name, path)[0]:
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
    path: draw(st.sampled_from(split_pool(name, path)[0] or POOL))
    for path in draw(paths)
  }
  return name, kind, changes


def trace_some(case):
  """Traces a model of a name, of a kind of input and of some options."""
  name, kind, changes = case
  is_refused(trace, name, **options_of(name, changes, **kind))


@settings(max_examples=20, derandomize=True, database=None)
@given(model_cases(["transformer", "transject", "longformer"]))
@pytest.mark.slow
def test_build_handles_combinations_of_options(case):
  trace_some(case)


@pytest.mark.long
@settings(max_examples=300, derandomize=True, database=None)
@given(model_cases(models.MODELS))
def test_build_handles_combinations_of_options_of_all_models(case):
  trace_some(case)


def begin(changes):
  """Does what a run does before it reads data, and takes two rates of it."""
  fields = configs.plain(configs.load("configs/lra/listops.py:size=tiny"))
  for path, value in changes.items():
    fields = with_option(path, value, base=fields)
  config = configs.RunConfig.from_dict(fields)
  run.check_fields(config)
  compilers.layout(config.mesh)
  tx, schedule = optim.build_optimizer(
    config.optimizer, config.schedule, config.total_steps
  )
  return config, tx, schedule


def split(allowed, path):
  """The values of the pool in a range, and the others."""
  inside, outside = [], []
  for value in POOL:
    refused = allowed and is_refused(allowed.check, path, value)
    (outside if refused else inside).append(value)
  return inside, outside


def chosen_options():
  """Options of a run, and of every optimiser, schedule and task by name."""
  for name in set(ranges.of(configs.RunConfig)) - {*configs.SECTIONS}:
    yield name, {}
  registries = {
    "optimizer": optim.OPTIMIZERS,
    "schedule": optim.SCHEDULES,
    "task": tasks.TASKS,
  }
  for section, registry in registries.items():
    for name, owner in registry.items():
      for option in settable(section, owner):
        if option in ranges.of(owner):
          yield f"{section}.{option}", {f"{section}.name": name}
  for option in ranges.of(optim.SharedOptions):
    yield f"optimizer.{option}", {}


def find(changes, path):
  """The range of a field of a run with some changes."""
  section, _, option = path.partition(".")
  if section == "optimizer" and option in optim.SHARED_OPTIONS:
    return ranges.of(optim.SharedOptions)[option]
  names = {"optimizer.name": "adam", "schedule.name": "onecycle"} | changes
  fields = {}
  for name, value in names.items():
    fields = with_option(name, value, base=fields)
  return run.find_range(fields, path)


def check_values_out_of_range(path, changes):
  """Fails unless a run refuses all values of the pool out of a range."""
  _, values = split(find(changes, path), path)
  # None is the default of a task's options.
  values = [v for v in values if v is not None or not path.startswith("task.")]
  assert values
  for value in values:
    with pytest.raises(ValueError, match=f"config.{path}=") as error:
      begin({**changes, path: value})
    assert main._explain(error.value)[1].startswith("error: ")


@pytest.mark.long
def test_check_fields_refuses_every_value_out_of_range():
  assert_all(check_values_out_of_range, chosen_options(), least=100)


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
    *(f"optimizer.{k}" for k in optim.SHARED_OPTIONS),
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
    names = {"optimizer.name": optimizer, "schedule.name": schedule}
    values, _ = split(find(names, path), path)
    changes[path] = draw(st.sampled_from(values or POOL))
  return changes


@settings(max_examples=40, derandomize=True, database=None)
@given(run_changes())
def test_optimizer_and_schedule_in_range_give_finite_steps(changes):
  check_run(changes)


@pytest.mark.long
@settings(max_examples=500, derandomize=True, database=None)
@given(run_changes())
def test_all_optimizers_and_schedules_in_range_give_finite_steps(changes):
  check_run(changes)


def check_run(changes):
  """A run is refused by our error, or its first steps are finite."""
  try:
    config, tx, schedule = begin(changes)
    finite = train_quadratic(tx, schedule, config.total_steps)
  except UserError:
    return
  assert finite == (True, True)
