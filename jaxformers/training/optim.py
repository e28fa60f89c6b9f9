"""Learning-rate schedules of the published protocols, and optimisers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxformers import orthogonal
from jaxformers.errors import UserError
from jaxformers.registry import Registry, call
from jaxformers.training.riemannian import riemannian

SCHEDULES: Registry = Registry("schedule")
OPTIMIZERS: Registry = Registry("optimizer")


@SCHEDULES.register("constant")
def constant(learning_rate: float, warmup_steps: int = 0) -> optax.Schedule:
  """learning_rate, after a linear rise from 0 over warmup_steps."""
  return lambda step: learning_rate * _warmup(step, warmup_steps)


@SCHEDULES.register("rsqrt")
def rsqrt(learning_rate: float, warmup_steps: int) -> optax.Schedule:
  """LRA's constant * linear_warmup * rsqrt_decay for its text tasks.

  learning_rate min(1, step / warmup) / sqrt(max(step, warmup)): the peak is
  learning_rate / sqrt(warmup_steps), 1.58e-3 for ListOps.
  """
  low = max(warmup_steps, 1)
  return lambda step: (
    learning_rate
    * _warmup(step, warmup_steps)
    / jnp.sqrt(jnp.maximum(_float(step), low))
  )


@SCHEDULES.register("cosine")
def cosine(
  learning_rate: float, warmup_steps: int, total_steps: int
) -> optax.Schedule:
  """LRA's constant * linear_warmup * cosine_decay for its image tasks.

  A linear rise over warmup_steps, then half a cosine down to 0 at total_steps.
  """
  rest = max(total_steps - warmup_steps, 1)

  def schedule(step: jax.Array) -> jax.Array:
    progress = jnp.clip((_float(step) - warmup_steps) / rest, 0, 1)
    decay = 0.5 * (1 + jnp.cos(math.pi * progress))
    return learning_rate * _warmup(step, warmup_steps) * decay

  return schedule


@SCHEDULES.register("linear")
def linear(
  learning_rate: float, warmup_steps: int, total_steps: int
) -> optax.Schedule:
  """A linear rise over warmup_steps, then a linear decay to 0 at total_steps.

  Source: Devlin et al. 2019, https://arxiv.org/abs/1810.04805, appendix A.2.
  Differs from their code: the decay begins at the end of the rise, not at step
  0, so that the rate does not jump there.
  """
  rest = max(total_steps - warmup_steps, 1)

  def schedule(step: jax.Array) -> jax.Array:
    decay = jnp.clip((total_steps - _float(step)) / rest, 0, 1)
    return learning_rate * _warmup(step, warmup_steps) * decay

  return schedule


@SCHEDULES.register("polynomial")
def polynomial(
  learning_rate: float, power: float, end: float, total_steps: int
) -> optax.Schedule:
  """Segmenter's: (rate - end) (1 - step / total)^power + end."""
  return optax.polynomial_schedule(learning_rate, end, power, total_steps)


@SCHEDULES.register("onecycle")
def onecycle(
  learning_rate: float, warmup_steps: int, total_steps: int
) -> optax.Schedule:
  """Skyformer's: PyTorch's OneCycleLR with linear annealing.

  From learning_rate / 25 up to learning_rate at step warmup_steps - 1, and
  down to learning_rate / 250,000 at step total_steps - 1, both linearly.
  """
  return _triangle(
    warmup_steps,
    total_steps,
    low=learning_rate / 25,
    high=learning_rate,
    end=learning_rate / 25e4,
  )


def onecycle_momentum(warmup_steps: int, total_steps: int) -> optax.Schedule:
  """The first beta that goes with `onecycle`: 0.95 to 0.85 and back.

  Nobody chose it: cycle_momentum is OneCycleLR's default, so Skyformer's Adam
  never runs at the 0.9 of its configuration.
  """
  return _triangle(warmup_steps, total_steps, low=0.95, high=0.85, end=0.95)


def _triangle(
  warmup_steps: int, total_steps: int, *, low: float, high: float, end: float
) -> optax.Schedule:
  peak, last = max(warmup_steps - 1, 0), total_steps - 1
  return lambda step: jnp.interp(
    _float(step),
    jnp.array([0.0, peak, max(last, peak + 1)], jnp.float32),
    jnp.array([low if peak else high, high, end], jnp.float32),
  )


def _float(step: jax.Array) -> jax.Array:
  return jnp.asarray(step, jnp.float32)


def _warmup(step: jax.Array, warmup_steps: int) -> jax.Array:
  if not warmup_steps:
    return jnp.float32(1)
  return jnp.minimum(1, _float(step) / warmup_steps)


def decayed(params: Any) -> Any:
  """Which parameters weight decay shrinks: kernels and embeddings.

  Not norms and scalars (fewer than two axes), biases, gates and positions (by
  name), and not what rotations are of, whose size is an angle.

  Returns:
    A tree of booleans of the structure of params.
  """

  def shrinks(path: Any, leaf: Any) -> bool:
    name = str(getattr(path[-1], "key", path[-1]))
    kept = name.endswith(
      ("bias", "gate", "positions")
    ) or orthogonal.is_parameter(path)
    return leaf.ndim > 1 and not kept

  return jax.tree_util.tree_map_with_path(shrinks, params)


@OPTIMIZERS.register("adam")
def adam(
  schedule: optax.Schedule,
  *,
  b1: float | optax.Schedule = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  weight_decay: float = 0.0,
) -> optax.GradientTransformation:
  """Adam, with decoupled weight decay times the learning rate if any."""
  if callable(b1):
    # Older versions of optax take a schedule for b1 only in this way.
    scale = optax.inject_hyperparams(
      optax.scale_by_adam, static_args=("b2", "eps")
    )(b1=b1, b2=b2, eps=eps)
  else:
    scale = optax.scale_by_adam(b1, b2, eps)
  steps = [scale]
  if weight_decay:
    steps.append(optax.add_decayed_weights(weight_decay, mask=decayed))
  return optax.chain(*steps, optax.scale_by_learning_rate(schedule))


@OPTIMIZERS.register("sgd")
def sgd(
  schedule: optax.Schedule,
  *,
  momentum: float = 0.0,
  weight_decay: float = 0.0,
) -> optax.GradientTransformation:
  """Gradient descent, with decoupled weight decay times the learning rate."""
  steps = [optax.trace(momentum)] if momentum else []
  if weight_decay:
    steps.append(optax.add_decayed_weights(weight_decay, mask=decayed))
  return optax.chain(*steps, optax.scale_by_learning_rate(schedule))


def ends_with_run(name: str) -> bool:
  """Returns True for a schedule whose rates depend on the run's last step."""
  return "total_steps" in inspect.signature(SCHEDULES[name]).parameters


def build(
  optimizer: Mapping[str, Any], schedule: Mapping[str, Any], total_steps: int
) -> tuple[optax.GradientTransformation, optax.Schedule]:
  """The optimiser and the schedule of `config.optimizer`, `config.schedule`.

  Args:
    optimizer: `name` in `OPTIMIZERS`, `clip_value` (each gradient's entries)
      and `clip_norm` (all of them together), both 0 for none, `cycle_momentum`
      (with the schedule "onecycle" only), and the optimiser's own options.
    schedule: `name` in `SCHEDULES` and its own options.
    total_steps: where the schedule ends.

  Matrices that are kept orthogonal move on their group: see `riemannian`.

  Raises:
    UserError: for an unknown name or option.
  """
  options = dict(schedule)
  name = options.pop("name", "")
  if ends_with_run(name):
    options["total_steps"] = total_steps
  rate = call(f"schedule {name!r}", SCHEDULES[name], options)
  own = dict(optimizer)
  kind = own.pop("name", "")
  clip_value, clip_norm = own.pop("clip_value", 0), own.pop("clip_norm", 0)
  if own.pop("cycle_momentum", False):
    if name != "onecycle":
      raise UserError(
        f"cycle_momentum goes with the schedule 'onecycle', not {name!r}."
      )
    own["b1"] = onecycle_momentum(options["warmup_steps"], total_steps)
  make = OPTIMIZERS[kind]
  tx = call(f"optimizer {kind!r}", make, own | {"schedule": rate})
  clips = []
  if clip_value:
    clips.append(optax.clip(clip_value))
  if clip_norm:
    clips.append(optax.clip_by_global_norm(clip_norm))
  return riemannian(optax.chain(*clips, tx)), rate
