"""Parameters that the tests of several packages begin with.

A compiled `init` takes seconds for each model, most of them for random numbers.
Here each parameter is drawn by itself, whose program all models share, and the
forward pass is traced alone. The numbers are those of `init`.
"""

import contextlib
import functools

import jax
import pytest
from flax.core import scope


def params(module, *args, seed=0, train=False, **kwargs):
  """Parameters of `module.init(jax.random.key(seed), *args, **kwargs)`."""
  key, made = jax.random.key(seed), []

  def trace(args):
    made.append(module.init(key, *args, train=train, **kwargs).get("params"))

  with _drawn_at_once():
    jax.eval_shape(trace, args)
  # In the order of names, as a compiled `init` returns them.
  return jax.tree.map(lambda leaf: leaf, made[0])


@contextlib.contextmanager
def _drawn_at_once():
  """Keys and parameters are computed while the rest is traced."""
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
