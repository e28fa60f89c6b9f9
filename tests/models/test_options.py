"""Every option of a mixer and of a block changes the model, or is refused."""

import dataclasses
import re

import flax
import jax
import numpy as np
import pytest

from jaxformers import models
from jaxformers.foundations.errors import UserError
from jaxformers.models.attention import Attention
from jaxformers.models.blocks.contract import BLOCKS
from jaxformers.models.mixer import MIXERS
from jaxformers.models.variants import MODELS
from tests import draws
from tests.marks import slow_except
from tests.models.mixers.oracle import small_sizes

N = 64
IDS = draws.integers(0, (2, N), 1, 16)
# Fields that the model sets.
WIRING = {"parent", "name", "dtype", "causal", "mixer", "residual"}
WIRING |= {"num_layers", "layer"}
FUNCTION = {"attend", "signature", "options", "step", "constants", "max_len"}
# Options that have nothing to change: there are no biases; all projections are
# rotations, which allow one size of heads; `small_sizes` sets the numbers that
# follow from the factor.
IDLE = {
  ("linearized", "qkv_bias"),
  ("capped_transformer", "qkv_bias"),
  ("injective_transformer", "init_std"),
  ("l2_transformer", "init_std"),
  ("injective_transformer", "head_size"),
  ("l2_transformer", "head_size"),
  ("transformer_orthogonal", "head_size"),
  ("informer", "factor"),
}


def program(name, sections):
  """Returns the text of a model's programs: start, evaluation, training."""
  sizes = {"vocab_size": 16, "max_len": N, "num_classes": 10}
  shape = {"d_model": 16, "num_layers": 2, "positions": "none"}
  model = models.build(name, **sizes, **shape, **sections)

  def init(key):
    return model.init({"params": key, "random": key}, IDS, train=False)

  def apply(variables, key, train):
    return model.apply(
      variables,
      IDS,
      train=train,
      rngs={"dropout": key, "random": key},
      mutable=flax.core.DenyList(["cache", "fixed"]),
    )

  key = jax.random.key(0)
  variables = jax.eval_shape(init, key)
  programs = [jax.make_jaxpr(init)(key)]
  for train in (False, True):
    step = jax.make_jaxpr(lambda v, k, train=train: apply(v, k, train))
    programs.append(step(variables, key))
  keys = jax.dtypes.prng_key
  constants = [
    np.asarray(value).tobytes()
    for made in programs
    for value in made.consts
    if not jax.dtypes.issubdtype(value.dtype, keys)
  ]
  # Addresses of functions differ.
  texts = [re.sub("0x[0-9a-f]+", "", str(made)) for made in programs]
  return texts, constants


def other_values(name, sections, section, option, value):
  """Yields values of an option besides `value`."""
  if isinstance(value, bool):
    yield not value
  elif isinstance(value, int):
    yield from (2 * value or 1, value // 2 or 2, value + 1, 4, 8, 3, 1)
  elif isinstance(value, float):
    yield from (value / 2 or 0.25, 2 * value, value + 0.1, 1.0, 0.0, 2.0)
  elif isinstance(value, str):
    # An unknown name must be refused, with the choices if there are any.
    names = ["unknown"]
    try:
      program(name, changed(sections, section, option, "unknown"))
    except UserError as error:
      if found := re.search("Choices: (.*?)[.]?$", str(error)):
        names = found[1].split(", ")
    yield from names
  elif isinstance(value, tuple):
    yield from ((1,), (1, 2), (0.5,))


def changed(sections, section, option, value):
  options = {**sections.get(section, {}), option: value}
  return {**sections, section: options}


def options_of(name):
  """Yields section, name and default of the options of a model."""
  variant = MODELS[name]
  if variant.mixer:
    make = MIXERS[variant.mixer]
    mixer = make()
    if isinstance(mixer, Attention):
      fields = {f.name for f in dataclasses.fields(mixer)} - FUNCTION
      values = mixer.options | {n: getattr(mixer, n) for n in sorted(fields)}
    else:
      values = {f.name: f.default for f in dataclasses.fields(make)}
    for option, value in values.items():
      if option not in WIRING | {*variant.fixed}:
        yield "mixer", option, variant.defaults.get(option, value)
  for field in dataclasses.fields(BLOCKS[variant.block]):
    if field.name not in WIRING:
      yield "block", field.name, field.default


@pytest.mark.parametrize(
  "name",
  slow_except(
    ("linoss",),
    sorted(MODELS),
    ("allpass", "lru", "random_transject"),
  ),
)
def test_every_option_changes_the_model_or_is_refused(name):
  mixer = small_sizes(MODELS[name].mixer)
  sections = {"mixer": mixer} if mixer else {}
  plain = program(name, sections)
  assert program(name, sections) == plain
  idle = []
  for section, option, default in options_of(name):
    value = sections.get(section, {}).get(option, default)
    results = set()
    for other in other_values(name, sections, section, option, value):
      if other == value:
        continue
      try:
        made = program(name, changed(sections, section, option, other))
      except UserError:
        results.add("refused")
        continue
      results.add("changed" if made != plain else "nothing")
      if made != plain:
        break
    if not results or ("nothing" in results and "changed" not in results):
      idle.append((name, option))
  assert {*idle} <= IDLE, idle


def test_oscillators_without_damping_refuse_the_ring_of_radii():
  mixer = MIXERS["linoss"](r_min=0.5)
  with pytest.raises(UserError, match="r_min=0.5: no effect.*damped_linoss"):
    mixer.init(
      jax.random.key(0),
      np.ones((1, 4, 8)),
      mask=np.ones((1, 4), bool),
      carry=None,
      train=False,
    )


@pytest.mark.parametrize(
  ("name", "section", "options", "message"),
  [
    ("transformer", "mixer", {"fidelity_schedule": (0.5,)}, "fidelity is 0"),
    ("linoss", "mixer", {"max_phase": 1.0}, "draws no angles"),
    ("isometric", "block", {"a": "budget", "a_max": 0.3}, "sets the bound"),
    (
      "injective_transformer",
      "block",
      {"a": "budget", "a_max": 0.3},
      "sets the bound",
    ),
  ],
)
def test_options_that_another_one_disables_are_refused(
  name, section, options, message
):
  with pytest.raises(UserError, match=f"no effect, since .*{message}"):
    program(name, {section: options})
