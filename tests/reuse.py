"""Caches for work that many tests would repeat in a process.

Most tests build the same few tiny models and runs. JAX would trace each model
again in Python, which takes longer than the computation of the test. The
patched functions are pure, and a result is reused only for equal arguments.
"""

import functools
import json
import threading
import types

import jax
import numpy as np
from flax.core import scope
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir

from jaxformers import config as configs
from jaxformers import models
from jaxformers.models import model as building
from jaxformers.models.blocks.contract import BLOCKS
from jaxformers.models.mixer import MIXERS
from jaxformers.models.variants import MODELS
from jaxformers.training import evaluate, losses, optim, run, steps, trainer

PROGRAMS = {}  # Compiled functions, by all values that they depend on.
KEPT = {}  # Objects by their id, so that no id is used again.
# Types whose values `_identify` compares directly.
PURE = (bool, int, float, complex, str, bytes, type(None), type, np.dtype)


def install(patch):
  """Installs the caches; `patch` removes them at its end."""
  patch.setattr(mlir, "make_ir_context", _context)
  patch.setattr(building, "check_mixer", _check_mixer)
  for module in (building, models):
    patch.setattr(module, "shapes", _shapes)
  patch.setattr(scope.Scope, "param", _param)
  patch.setattr(trainer.Trainer, "_compile", _compile_step)
  patch.setattr(evaluate.Evaluator, "__init__", _init_evaluator)
  patch.setattr(run.Run, "initial_state", _initial_state)


def forget():
  """Clears the compiled functions, so that their programs can be freed."""
  PROGRAMS.clear()


# One MLIR context for many programs. JAX makes one for every program, which
# takes longer than all else that it does to lower a single operation.

MOST_LOWERED = 500  # Programs of a context, which keeps all their constants.
real_context = mlir.make_ir_context
shared = threading.local()  # A context serves one thread at a time.


def _context():
  # While an operation is being lowered, JAX may compile a constant: modules of
  # one context would then be nested.
  if ir.Context.current:
    return real_context()
  if getattr(shared, "uses", MOST_LOWERED) == MOST_LOWERED:
    shared.context, shared.uses = real_context(), 0
  shared.uses += 1
  return shared.context


def _same(value):
  """Returns a key that is unique to this object, which is never freed."""
  KEPT[id(value)] = value
  return id(value)


def _registered(config):
  """Returns a key for the ways in which two equal configs may differ.

  Tests may register other code under the same name. Also, 1 equals 1.0, but the
  package refuses a float in place of an integer.
  """
  variant = MODELS[config.name]
  mixer = MIXERS[variant.mixer] if variant.mixer else None
  code = (variant, mixer, BLOCKS[config.block_name])
  return (repr(config), *map(_same, code))


def _modes():
  """Returns the options of JAX that change programs."""
  is_plain = jax.config.read("jax_disable_most_optimizations")
  return (is_plain, jax.config.jax_enable_x64)


# Cache of the checks of layers, by the config of the model.

real_check_mixer = building.check_mixer
checked = set()


@functools.wraps(real_check_mixer)
def _check_mixer(config, mixer, n):
  key = (config, _registered(config), mixer is None, n)
  if key not in checked:
    real_check_mixer(config, mixer, n)
    checked.add(key)


# Cache of the shapes of all parameters, by model.

real_shapes = building.shapes
trees = {}


@functools.wraps(real_shapes)
def _shapes(model):
  key = (
    type(model),
    model,
    _registered(model.config),
    jax.config.jax_enable_x64,
  )
  if key not in trees:
    trees[key] = real_shapes(model)
  # Return a copy, because the caller may change it.
  return jax.tree.map(lambda leaf: leaf, trees[key])


# Cache of the shape of each parameter. In every call of a model, Flax traces
# its initialiser to compare the shape with the given parameter.

real_param = scope.Scope.param
shapes = {}


class _Impure(Exception):
  """Error for a function that closes over a value that may change."""


def _identify(value):
  """Returns a key that equal pure functions and constants share."""
  # Identify a function by its code, closure and defaults.
  if isinstance(value, functools.partial):
    parts = (value.args, tuple(sorted(value.keywords.items())))
    return ("partial", _identify(value.func), _identify(parts))
  if isinstance(value, tuple):
    return tuple(map(_identify, value))
  if isinstance(value, types.FunctionType):
    cells = value.__closure__ or ()
    closed = tuple(_identify(cell.cell_contents) for cell in cells)
    defaults = tuple(sorted((value.__kwdefaults__ or {}).items()))
    found = (value.__defaults__ or (), defaults)
    return (value.__code__, closed, _identify(found))
  if isinstance(value, PURE):
    return (type(value), value)
  raise _Impure


def _like(shape):
  """Returns an array of the given shape that takes no memory."""
  return np.broadcast_to(np.int8(0), shape.shape)


@functools.wraps(real_param)
def _param(self, name, init, *args, **kwargs):
  if not self.has_variable("params", name):
    return real_param(self, name, init, *args, **kwargs)
  options = {k: v for k, v in kwargs.items() if k != "unbox"}
  try:
    made = (_identify(args), _identify(tuple(sorted(options.items()))))
    key = (_identify(init), made, jax.config.jax_enable_x64)
  except _Impure:
    return real_param(self, name, init, *args, **kwargs)
  if key not in shapes:
    shapes[key] = jax.eval_shape(
      lambda: init(jax.random.key(0), *args, **options)
    )
  like = jax.tree.map(_like, shapes[key])
  unbox = {k: v for k, v in kwargs.items() if k == "unbox"}
  return real_param(self, name, lambda key: like, **unbox)


# Cache of compiled steps, by model, optimiser and layout.


def _optimizer(c):
  """Returns a key of the fields and functions that define an optimiser."""
  fields = configs.plain(c.as_dict())
  names = ("optimizer", "schedule", "total_steps")
  return (
    json.dumps([fields[name] for name in names], sort_keys=True),
    optim.OPTIMIZERS.get(fields["optimizer"].get("name")),
    optim.SCHEDULES.get(fields["schedule"].get("name")),
  )


real_compile_step = trainer.Trainer._compile


def _compile_step(self):
  c = self.run.config
  leaves, tree = jax.tree.flatten(self.state)
  step = self._make_step()
  # Replace the optimiser, a pair of functions, by the key that defines it.
  fields = {k: v for k, v in step.keywords.items() if k != "tx"}
  key = (
    "train",
    (step.func, steps._forward, c.parallel, self.layout),
    tuple(sorted(fields.items())),
    _registered(self.model.config),
    _modes(),
    _optimizer(c),
    (tree, tuple((x.shape, x.dtype) for x in leaves)),
  )
  if key not in PROGRAMS:
    PROGRAMS[key] = real_compile_step(self)
  return PROGRAMS[key]


real_init_evaluator = evaluate.Evaluator.__init__


@functools.wraps(real_init_evaluator)
def _init_evaluator(self, model, mode, batch_size, lengths, layout=None):
  layout = layout or evaluate.compilers.layout()
  real_init_evaluator(self, model, mode, batch_size, lengths, layout)
  programs = (self.prepare, self.step, self._place)
  code = (*_registered(model.config), losses.MAX_ANSWER)
  key = ("evaluate", model, code, _modes(), mode, layout)
  self.prepare, self.step, self._place = PROGRAMS.setdefault(key, programs)


def _initial_state(self):
  c, code = self.config, _registered(self.model.config)
  key = ("state", self.model, code, _modes(), c.ema_decay > 0, _optimizer(c))
  if key not in PROGRAMS:
    create = self._create(self.tx)
    PROGRAMS[key] = jax.jit(create, static_argnums=0)
  return PROGRAMS[key](c.seed)
