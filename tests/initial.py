"""Parameters that the tests of several packages begin with."""

import jax


def params(model, ids, seed=0):
  """Of a model, by one compiled call that leaves the forward pass out."""
  init = jax.jit(lambda key, ids: model.init(key, ids, train=False)["params"])
  return init(jax.random.key(seed), ids)
