"""State of a run: arrays that a step updates, and what the loop remembers."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from jaxformers.models import Model


@flax.struct.dataclass
class TrainState:
  """State that a step updates.

  Random keys and data order are functions of seed and step, so they are not
  stored.

  Attributes:
    step: int32 scalar, the number of updates made.
    params: tree of parameters, float32.
    opt_state: state of the optimiser; None for a state that is only scored.
    average: exponential moving average of params over the steps; None if
      `config.ema_decay` is 0.
  """

  step: jax.Array
  params: Any
  opt_state: Any
  average: Any = None

  @property
  def scored(self) -> Any:
    """The parameters that are evaluated: the average, if there is one."""
    return self.params if self.average is None else self.average

  def without_optimizer(self) -> TrainState:
    """Returns the part of the state that evaluation needs."""
    return dataclasses.replace(self, opt_state=None)


@dataclasses.dataclass
class LoopState:
  """Memory of the training loop; plain JSON, saved with every checkpoint.

  Attributes:
    window: sums since the last log line.
    best: step and score of the best evaluation so far; {} before the first.
    worse: number of evaluations since the best one.
    train_seconds, wall_seconds: times of all successive starts of the run, up
      to the checkpoint.
  """

  window: dict[str, float] = dataclasses.field(default_factory=dict)
  best: dict[str, float] = dataclasses.field(default_factory=dict)
  worse: int = 0
  train_seconds: float = 0.0
  wall_seconds: float = 0.0


def create(
  model: Model,
  tx: optax.GradientTransformation | None,
  seed: int,
  *,
  averaged: bool = False,
) -> TrainState:
  """Returns the state of step 0, a pure function of the seed.

  Args:
    model: from `models.build`.
    tx: optimiser; None for a state that is only scored.
    seed: seed of the parameters.
    averaged: True to keep an average of the parameters.
  """
  ids = model.example()
  params = model.init(jax.random.key(seed), ids, train=False)["params"]
  # A copy, because a step donates the memory of both to its result.
  average = jax.tree.map(jnp.copy, params) if averaged else None
  opt_state = None if tx is None else tx.init(params)
  return TrainState(jnp.zeros((), jnp.int32), params, opt_state, average)
