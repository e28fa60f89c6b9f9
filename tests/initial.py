"""Fast initialisation of parameters for tests.

A compiled `init` takes seconds for each model, mostly for random numbers. Here
each parameter is drawn by a separate program, which all models share, and the
forward pass is only traced. The numbers are equal to the numbers of `init`.
"""

import contextlib
import functools

import jax
import pytest
from flax.core import scope


def params(module, *args, seed=0, train=False, **kwargs):
  """Returns the parameters of `module.init(key(seed), *args, **kwargs)`."""
  key, made = jax.random.key(seed), []

  def trace(args):
    made.append(module.init(key, *args, train=train, **kwargs).get("params"))

  with _drawn_at_once():
    jax.eval_shape(trace, args)
  # Sort by name, as a compiled `init` does.
  return jax.tree.map(lambda leaf: leaf, made[0])


@contextlib.contextmanager
def _drawn_at_once():
  """Computes keys and parameters while the forward pass is traced."""
  make_rng, param = scope.Scope.make_rng, scope.Scope.param

  @functools.wraps(make_rng)
  def make_rng_at_once(self, *args):
    with jax.ensure_compile_time_eval():
      return make_rng(self, *args)

  @functools.wraps(param)
  def param_at_once(self, name, init, *args, **kwargs):
    def draw(*args, **kwargs):
      with jax.ensure_compile_time_eval():
        return init(*args, **kwargs)

    return param(self, name, draw, *args, **kwargs)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(scope.Scope, "make_rng", make_rng_at_once)
    patch.setattr(scope.Scope, "param", param_at_once)
    yield
