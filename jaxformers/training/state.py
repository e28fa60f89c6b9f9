"""What a run carries from step to step."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from jaxformers.models import Classifier


@flax.struct.dataclass
class TrainState:
  """Step, parameters and optimiser; keys and data order follow from the step.

  Attributes:
    step: int32 scalar, the number of updates made.
    params: the tree of parameters, float32.
    opt_state: of the optimiser.
  """

  step: jax.Array
  params: Any
  opt_state: Any


def create(
  model: Classifier, tx: optax.GradientTransformation, seed: int
) -> TrainState:
  """The state of step 0; a pure function of the seed."""
  ids = model.example()
  params = model.init(jax.random.key(seed), ids, train=False)["params"]
  return TrainState(jnp.zeros((), jnp.int32), params, tx.init(params))
