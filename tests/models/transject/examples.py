"""Arrays and small encoders for the tests of TransJect."""

import functools

import flax
import jax
import jax.numpy as jnp
import numpy as np

from jaxformers import models
from tests import draws, initial


def normal(seed, *shape):
  return draws.normal(seed, shape)


def prefix(lengths, n):
  return jnp.arange(n)[None] < jnp.asarray(lengths)[:, None]


@functools.cache  # Compile once for all examples of a property test.
def build(num_layers, num_experts, d, sigma="eigenvalues", gating="paper"):
  return models.build(
    "transject",
    vocab_size=30,
    max_len=24,
    num_classes=2,
    d_model=d,
    num_layers=num_layers,
    mixer={"num_experts": num_experts, "sigma": sigma, "gating": gating},
  )


@functools.cache
def compiled(model):
  """Returns the compiled `apply` of a model, which returns hidden states."""
  kw = {"mutable": ["intermediates"], "train": False}
  return jax.jit(functools.partial(model.apply, **kw))


def encoder(num_layers, num_experts, alpha, seed=0, d=8, **mixer):
  """Returns a model, parameters with every |tanh r| = alpha, and ids."""
  model = build(num_layers, num_experts, d, **mixer)
  ids = draws.integers(seed, (2, 12), 1, 30)
  params = initial.params(model, ids, seed=seed)
  flat = flax.traverse_util.flatten_dict(params)
  for path, leaf in flat.items():
    if path[-1] == "alpha":
      flat[path] = jnp.full_like(leaf, np.arctanh(alpha))
    elif path[-1] == "bias" and leaf.shape == (2, d):
      flat[path] = normal(seed, 2, d)
  return model, flax.traverse_util.unflatten_dict(flat), ids
