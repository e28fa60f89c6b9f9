"""What a run carries from step to step."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from jaxformers.models import Model


@flax.struct.dataclass
class TrainState:
  """Step, parameters and optimiser; keys and data order follow from the step.

  Attributes:
    step: int32 scalar, the number of updates made.
    params: the tree of parameters, float32.
    opt_state: of the optimiser.
    average: of params over the steps, which decays exponentially; None where
      the config has none.
  """

  step: jax.Array
  params: Any
  opt_state: Any
  average: Any = None

  @property
  def scored(self) -> Any:
    """The parameters that are evaluated: the average, if there is one."""
    return self.params if self.average is None else self.average


def create(
  model: Model,
  tx: optax.GradientTransformation,
  seed: int,
  *,
  averaged: bool = False,
) -> TrainState:
  """The state of step 0; a pure function of the seed."""
  ids = model.example()
  params = model.init(jax.random.key(seed), ids, train=False)["params"]
  # A copy: a step gives the memory of both away.
  average = jax.tree.map(jnp.copy, params) if averaged else None
  return TrainState(jnp.zeros((), jnp.int32), params, tx.init(params), average)
