"""State of a run: the arrays that a step updates, and the loop's records."""

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
  """Arrays that a training step updates.

  Random keys and the order of the data follow from seed and step, so they are
  not stored.

  Attributes:
    step: int32 scalar, the number of updates made.
    params: tree of parameters, float32.
    opt_state: state of the optimiser; None for a state that is only evaluated.
    average: exponential moving average of params over the steps; None if
      `config.ema_decay` is 0.
  """

  step: jax.Array
  params: Any
  opt_state: Any
  average: Any = None

  @property
  def scored(self) -> Any:
    """Parameters to evaluate: the average, if there is one."""
    return self.params if self.average is None else self.average

  def without_optimizer(self) -> TrainState:
    """Returns the part of the state that evaluation needs."""
    return dataclasses.replace(self, opt_state=None)


@dataclasses.dataclass
class LoopState:
  """State of the training loop as plain JSON, saved with every checkpoint.

  Attributes:
    window: sums over the steps since the last log line.
    best: step and score of the best evaluation so far; {} before the first.
    worse: number of evaluations since the best one.
    train_seconds, wall_seconds: total times of all processes that worked on the
      run one after the other, up to the checkpoint.
    commits: commits of the code of these processes, without repetitions.
  """

  window: dict[str, float] = dataclasses.field(default_factory=dict)
  best: dict[str, float] = dataclasses.field(default_factory=dict)
  worse: int = 0
  train_seconds: float = 0.0
  wall_seconds: float = 0.0
  commits: list[str] = dataclasses.field(default_factory=list)


def create(
  model: Model,
  tx: optax.GradientTransformation | None,
  seed: int,
  *,
  averaged: bool = False,
) -> TrainState:
  """Returns the state of step 0, which depends only on the seed.

  Args:
    model: model from `models.build`.
    tx: optimiser; None for a state that is only evaluated.
    seed: seed of the parameters.
    averaged: True to keep an exponential moving average of the parameters.
  """
  ids = model.example()
  params = model.init(jax.random.key(seed), ids, train=False)["params"]
  # Copy the parameters, because a step donates the memory of both trees.
  average = jax.tree.map(jnp.copy, params) if averaged else None
  opt_state = None if tx is None else tx.init(params)
  return TrainState(jnp.zeros((), jnp.int32), params, opt_state, average)
