"""Models and batches for the tests of training."""

import functools

import jax
import numpy as np

from jaxformers import models
from jaxformers.training import state, steps
from tests import optimizers


def batch():
  """Returns a batch of eight rows of ten ids below 12, with three classes."""
  rng = np.random.default_rng(0)
  return {
    "inputs": rng.integers(1, 12, (8, 10)).astype(np.int32),
    "targets": rng.integers(0, 3, 8).astype(np.int32),
    "weights": np.ones(8, np.float32),
  }


def setup(name, optimizer, learning_rate, **options):
  """Returns a two-layer model, its state, a batch and its train step."""
  model = models.build(
    name,
    vocab_size=12,
    max_len=10,
    num_classes=3,
    d_model=8,
    num_layers=2,
    pool="mean",
    **options,
  )
  tx, _ = optimizers.build(
    {"name": optimizer},
    {"name": "constant", "learning_rate": learning_rate},
    10,
  )
  start = jax.jit(functools.partial(state.create, model, tx))(0)
  # Move away from the ReZero start, where most gradients vanish.
  params = jax.tree.map(lambda p: p if p.ndim else p + 0.5, start.params)
  step = functools.partial(steps.train_step, model=model, tx=tx, seed=0)
  return model, start.replace(params=params), batch(), step
