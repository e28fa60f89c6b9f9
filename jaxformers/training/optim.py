"""Learning-rate schedules of the published protocols, and optimisers."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxformers import orthogonal
from jaxformers.config import Choice
from jaxformers.foundations import ranges
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import (
  Count,
  Factor,
  Fraction,
  PositiveCount,
  PositiveShare,
  Scale,
  Weight,
)
from jaxformers.foundations.registry import Registry, call, choose, unknown
from jaxformers.models.kinds import KINDS, UNDECAYED
from jaxformers.training.caps import CAPS, cap_weights
from jaxformers.training.muon import scale_by_muon
from jaxformers.training.riemannian import riemannian

Tx: TypeAlias = optax.GradientTransformation
Rate: TypeAlias = optax.Schedule
Decays = Callable[[Any], Any]

SCHEDULES: Registry = Registry("schedule", is_open=True)
OPTIMIZERS: Registry = Registry("optimizer", is_open=True)
# Arguments of optimisers and schedules that `build_optimizer` passes and that
# no config sets.
BUILT = {"schedule", "decays", "total_steps"}
LAYER = re.compile(r"encoder/layer_(\d+)/")


@SCHEDULES.register("constant")
def constant(learning_rate: Factor, warmup_steps: Count = 0) -> Rate:
  """Returns a constant learning rate after a linear warm-up from 0."""
  if not warmup_steps:
    return lambda step: jnp.float32(learning_rate)
  return lambda step: (
    learning_rate * jnp.minimum(1, _float(step) / warmup_steps)
  )


@SCHEDULES.register("rsqrt")
def rsqrt(learning_rate: Factor, warmup_steps: Count) -> Rate:
  """Returns LRA's schedule of text tasks, an inverse square root of the step.

  The learning rate is
  learning_rate min(1, step / warmup) / sqrt(max(step, warmup)). Its peak is
  learning_rate / sqrt(warmup_steps), 1.58e-3 for ListOps.

  Source: `constant * linear_warmup * rsqrt_decay` of LRA's code.
  """
  rate, low = constant(learning_rate, warmup_steps), max(warmup_steps, 1)
  return lambda step: rate(step) / jnp.sqrt(jnp.maximum(_float(step), low))


@SCHEDULES.register("cosine")
def cosine(
  learning_rate: Factor, warmup_steps: Count, total_steps: PositiveCount
) -> Rate:
  """Returns LRA's schedule of image tasks, a cosine after a warm-up.

  The learning rate rises linearly over warmup_steps, then falls along half a
  cosine to 0 at total_steps.

  Source: `constant * linear_warmup * cosine_decay` of LRA's code. Differs from
  it: the cosine ends at total_steps, and LRA's warmup_steps later.
  """
  rate = constant(learning_rate, warmup_steps)
  rest = max(total_steps - warmup_steps, 1)

  def schedule(step: jax.Array) -> jax.Array:
    progress = jnp.clip((_float(step) - warmup_steps) / rest, 0, 1)
    return rate(step) * (0.5 * (1 + jnp.cos(math.pi * progress)))

  return schedule


@SCHEDULES.register("linear")
def linear(
  learning_rate: Factor, warmup_steps: Count, total_steps: PositiveCount
) -> Rate:
  """Returns a linear warm-up, followed by a linear decay to 0 at total_steps.

  Source: Devlin et al. 2019, https://arxiv.org/abs/1810.04805, appendix A.2.
  Differs from their code: the decay begins at the end of the warm-up, not at
  step 0, so that the learning rate does not jump there.
  """
  rate = constant(learning_rate, warmup_steps)
  rest = max(total_steps - warmup_steps, 1)
  return lambda step: (
    rate(step) * jnp.clip((total_steps - _float(step)) / rest, 0, 1)
  )


@SCHEDULES.register("polynomial")
def polynomial(
  learning_rate: Factor,
  power: Scale,
  end: Weight,
  total_steps: PositiveCount,
  warmup_steps: Count = 0,
) -> Rate:
  """Returns the polynomial schedule of Segmenter.

  The learning rate is
  (learning_rate - end) (1 - step / total_steps)^power + end. With warmup_steps,
  which Segmenter does not have, it is multiplied by a linear rise from 0 to 1.
  """
  rise = constant(1.0, warmup_steps)
  decay = optax.polynomial_schedule(learning_rate, end, power, total_steps)
  return lambda step: rise(step) * decay(step)


@SCHEDULES.register("onecycle")
def onecycle(
  learning_rate: Factor, warmup_steps: Count, total_steps: PositiveCount
) -> Rate:
  """Returns Skyformer's schedule: PyTorch's OneCycleLR, linear annealing.

  The learning rate rises linearly from learning_rate / 25 to learning_rate at
  step warmup_steps - 1. It then falls linearly to learning_rate / 250,000 at
  step total_steps - 1.
  """
  rates = (learning_rate / 25, learning_rate, learning_rate / 25e4)
  return _triangle(warmup_steps, total_steps, rates)


def onecycle_momentum(warmup_steps: int, total_steps: int) -> Rate:
  """Returns Adam's first beta under `onecycle`: 0.95 to 0.85 and back.

  OneCycleLR cycles it by default (cycle_momentum), so Skyformer's Adam never
  runs at the 0.9 of its configuration.
  """
  return _triangle(warmup_steps, total_steps, (0.95, 0.85, 0.95))


def _triangle(
  warmup_steps: int, total_steps: int, values: tuple[float, float, float]
) -> Rate:
  """Interpolates linearly between values at the start, peak and last step."""
  # Keep the three steps ascending, as interpolation requires.
  peak, last = max(warmup_steps - 1, 0), total_steps - 1
  # Without a warm-up, start at the value of the peak.
  steps = np.array([0.0, peak, max(last, peak + 1)], np.float32)
  rates = np.array([values[0 if peak else 1], *values[1:]], np.float32)
  return lambda step: jnp.interp(_float(step), steps, rates)


def _float(step: jax.Array) -> jax.Array:
  return jnp.asarray(step, jnp.float32)


class Groups(NamedTuple):
  """Options for groups of parameters, by the kinds that mixers declare.

  Attributes:
    kinds: function that maps the parameters to a tree of the names of their
      kinds, "" for none: `Model.kinds`.
    table: options by kind. `factor` multiplies the learning rate (default 1),
      and `decay` turns weight decay on or off (default: see `decayed`).
  """

  kinds: Callable[[Any], Any]
  table: Mapping[str, Mapping[str, Any]]

  def decayed(self, params: Any) -> Any:
    """Returns the mask of weight decay for all kinds; see `decayed`."""

    def is_decayed(kind: str, default: bool) -> bool:
      allowed = default and kind not in UNDECAYED
      return bool(self.table.get(kind, {}).get("decay", allowed))

    return jax.tree.map(is_decayed, self.kinds(params), decayed(params))

  def scale(self) -> Tx:
    """Returns a transformation that multiplies updates by the factors."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
      del params

      def scaled(kind: str, update: Any) -> Any:
        factor = self.table.get(kind, {}).get("factor", 1.0)
        return update if factor == 1 else update * factor

      return jax.tree.map(scaled, self.kinds(updates), updates), state

    def init(params: Any) -> Any:
      # Refuse a kind that the model does not have.
      kinds = {kind for kind in jax.tree.leaves(self.kinds(params)) if kind}
      for kind in self.table:
        choose("kind of parameter of this model", kind, kinds)
      return optax.EmptyState()

    return optax.GradientTransformation(init, update)


class Group(TypedDict, total=False):
  """Options of one kind of parameters; see `Groups`."""

  factor: Factor
  decay: bool


@dataclasses.dataclass(frozen=True)
class SharedOptions:
  """Options that every optimiser has.

  Attributes:
    clip_value, clip_norm: greatest magnitude of each entry of the gradient, and
      greatest norm of the whole gradient; 0 for no clipping. With the map
      "matrix" the gradient has the coordinates of rotations.
    cycle_momentum: True to vary Adam's first beta by `onecycle_momentum`; needs
      the schedule "onecycle".
    groups: see `Groups.table`.
    layer_decay: factor c by depth: the learning rate of layer i of L, counted
      from 0, is multiplied by c^(L - i), the embedding's by c^(L + 1), and a
      head's by 1 (Bao et al. 2021, BEiT, https://arxiv.org/abs/2106.08254; in
      ELECTRA's code the exponents of layers and embedding are one greater).
    cap: "soft" or "exact" to keep every kernel of a layer at a greatest norm,
      and rows of the embedding at a root mean square of 1; see `caps`. "" for
      no cap.
    cap_max: greatest norm of a kernel between vectors of root mean square 1.
    frozen: parts that are not trained, separated by commas, such as
      encoder/embedding,encoder/layer_0, or encoder. Running averages of
      normalisation layers are still updated.
  """

  clip_value: Weight = 0.0
  clip_norm: Weight = 0.0
  cycle_momentum: bool = False
  groups: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  layer_decay: PositiveShare = 1.0
  cap: str = ""
  cap_max: Scale = 1.0
  frozen: str = ""


SHARED_OPTIONS = tuple(f.name for f in dataclasses.fields(SharedOptions))


def _check_groups(table: Mapping[str, Mapping[str, Any]]) -> None:
  """Raises UserError for an unknown kind or option, or a wrong value."""
  for kind, options in table.items():
    choose("kind of config.optimizer.groups", kind, KINDS)
    path = f"config.optimizer.groups.{kind}"
    ranges.Range(dict).check(path, options)
    for option in options:
      choose(f"option of {path}", option, ranges.of(Group))
    ranges.check(Group, options, path)


def decayed(params: Any) -> Any:
  """Returns the mask of weight decay: True for kernels and embeddings.

  It is False for norms and scalars (fewer than two axes), biases, gates,
  positions and class tokens (by name), and parameters of rotations, whose size
  is an angle. `Groups` leaves out further kinds.

  Returns:
    A tree of booleans with the structure of params.
  """

  def is_decayed(path: Any, leaf: Any) -> bool:
    name = str(getattr(path[-1], "key", path[-1]))
    is_kept = name == "cls" or name.endswith(("bias", "gate", "positions"))
    return leaf.ndim > 1 and not is_kept and not orthogonal.is_parameter(path)

  return jax.tree_util.tree_map_with_path(is_decayed, params)


@OPTIMIZERS.register("adam")
def adam(
  schedule: Rate,
  decays: Decays,
  *,
  b1: Fraction | Rate = 0.9,
  b2: Fraction = 0.999,
  eps: PositiveShare = 1e-8,
  weight_decay: Weight = 0.0,
) -> Tx:
  """Returns Adam with decoupled weight decay, times the learning rate."""
  # With a constant b1, the state holds no hyperparameters.
  make = optax.scale_by_adam
  if callable(b1):
    # Older versions of optax accept a schedule for b1 only in this way.
    make = optax.inject_hyperparams(make, static_args=("b2", "eps"))
  steps = [make(b1=b1, b2=b2, eps=eps)]
  return _with_decay(steps, weight_decay, schedule, decays)


# AdamW is Adam with PyTorch's default weight decay.
# Source: Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101.
OPTIMIZERS.register("adamw")(functools.partial(adam, weight_decay=0.01))


@OPTIMIZERS.register("sgd")
def sgd(
  schedule: Rate,
  decays: Decays,
  *,
  momentum: Fraction = 0.0,
  weight_decay: Weight = 0.0,
) -> Tx:
  """Returns gradient descent with momentum, and weight decay as in `adam`."""
  steps = [optax.trace(momentum)] if momentum else []
  return _with_decay(steps, weight_decay, schedule, decays)


@OPTIMIZERS.register("muon")
def muon(
  schedule: Rate,
  decays: Decays,
  *,
  beta: Fraction = 0.95,
  consistent_rms: Weight = 0.2,
  adam_factor: Factor = 1.0,
  adam_b1: Fraction = 0.9,
  adam_b2: Fraction = 0.999,
  weight_decay: Weight = 0.0,
) -> Tx:
  """Returns Muon for matrices, and Adam for the rest; decay as in `adam`.

  With the default scale a step has the size of a step of Adam, so that learning
  rates of Adam are a good start. See `scale_by_muon`.
  """
  step = scale_by_muon(
    beta=beta,
    consistent_rms=consistent_rms,
    adam_factor=adam_factor,
    adam_b1=adam_b1,
    adam_b2=adam_b2,
  )
  return _with_decay([step], weight_decay, schedule, decays)


def _with_decay(
  steps: list[Tx], decay: float, schedule: Rate, decays: Decays
) -> Tx:
  """Chains steps, decoupled weight decay if any, and the learning rate."""
  # Decay after the moments, so that the moments do not include it.
  if decay:
    steps = [*steps, optax.add_decayed_weights(decay, mask=decays)]
  return optax.chain(*steps, optax.scale_by_learning_rate(schedule))


def _names(path: Any) -> str:
  """Returns the path of a parameter, such as "encoder/layer_0/up/kernel"."""
  return jax.tree_util.keystr(path, simple=True, separator="/")


def depth(path: str, num_layers: int) -> int:
  """Returns the depth of a parameter: 0 in the embedding, L + 1 in a head.

  Layer i of the encoder, counted from 0, has depth i + 1.

  Args:
    path: path of the parameter.
    num_layers: number of layers L of the encoder.
  """
  if path.startswith("encoder/embedding/"):
    return 0
  match = LAYER.match(path)
  return int(match[1]) + 1 if match else num_layers + 1


def scale_by_path(factor: Callable[[str, int], float]) -> Tx:
  """Returns a transformation that multiplies updates by factors of their path.

  Args:
    factor: function of a parameter's path and the number of layers of the
      encoder.
  """

  def update(updates: Any, state: Any, params: Any = None) -> Any:
    del params
    # Count the layers of the encoder.
    paths = [_names(p) for p, _ in jax.tree_util.tree_leaves_with_path(updates)]
    matches = filter(None, map(LAYER.match, paths))
    num_layers = 1 + max((int(match[1]) for match in matches), default=-1)

    # Multiply every update by the factor of its path.
    def scaled(path: Any, update: Any) -> Any:
      value = factor(_names(path), num_layers)
      return update if value == 1 else update * value

    return jax.tree_util.tree_map_with_path(scaled, updates), state

  return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


def _check_frozen(prefixes: Sequence[str]) -> Tx:
  """Returns a transformation that raises UserError for an unused prefix."""

  def init(params: Any) -> Any:
    paths = [_names(p) for p, _ in jax.tree_util.tree_leaves_with_path(params)]
    choices = {path.rpartition("/")[0] for path in paths}
    for prefix in prefixes:
      if not any(is_below(path, prefix) for path in paths):
        raise unknown("part of config.optimizer.frozen", prefix, choices)
    return optax.EmptyState()

  return optax.GradientTransformation(init, lambda u, state, _=None: (u, state))


def is_below(path: str, prefix: str) -> bool:
  """Returns True if a path lies in a part of a model: encoder/layer_0."""
  return f"{path}/".startswith(f"{prefix.rstrip('/')}/")


def ends_with_run(name: str) -> bool:
  """Returns True if learning rates depend on the last step of the run."""
  return "total_steps" in inspect.signature(SCHEDULES[name]).parameters


def _no_kinds(params: Any) -> Any:
  return jax.tree.map(lambda _: "", params)


def check_options(optimizer: Choice, schedule: Choice) -> None:
  """Raises UserError for an unknown name or option, or a value out of range.

  Args:
    optimizer: name and options of the optimiser, including `SharedOptions`.
    schedule: name and options of the schedule.
  """
  # Check the options of the schedule.
  rate = SCHEDULES[schedule.name]
  _check_options("schedule", schedule.name, rate, schedule.options)
  # Check the options of the optimiser, first those that all optimisers have.
  shared, options = _split_options(optimizer)
  ranges.check(SharedOptions, shared, "config.optimizer")
  _check_groups(shared.get("groups", {}))
  if shared.get("cap"):
    choose("config.optimizer.cap", shared["cap"], CAPS)
  elif "cap_max" in shared:
    raise UserError(
      f"config.optimizer.cap_max={shared['cap_max']} needs a cap: set "
      f"config.optimizer.cap to {' or '.join(CAPS)}, or leave it out."
    )
  name = optimizer.name
  if shared.get("cycle_momentum") and not _accepts(OPTIMIZERS[name], "b1"):
    raise UserError(
      f"config.optimizer.cycle_momentum=true varies b1, but {name!r} has "
      "none: choose adam, or set it to false."
    )
  _check_options("optimizer", name, OPTIMIZERS[name], options)


def _accepts(function: Callable[..., Any], option: str = "") -> bool:
  """Returns True if a function takes an option, or **options of any name."""
  parameters = inspect.signature(function).parameters
  is_open = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
  return is_open or option in parameters


def _split_options(
  optimizer: Choice,
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Splits options into `SharedOptions` and options of the chosen optimiser."""
  shared = {k: v for k, v in optimizer.options.items() if k in SHARED_OPTIONS}
  specific = {k: v for k, v in optimizer.options.items() if k not in shared}
  return shared, specific


def build_optimizer(
  optimizer: Choice,
  schedule: Choice,
  total_steps: int,
  kinds: Callable[[Any], Any] = _no_kinds,
) -> tuple[Tx, Rate]:
  """Returns the optimiser and the schedule of a config.

  Matrices that stay orthogonal are updated on their group: see `riemannian`.

  Args:
    optimizer: name in `OPTIMIZERS`, `SharedOptions`, and options of the named
      optimiser.
    schedule: name in `SCHEDULES`, and options of the named schedule.
    total_steps: last step of the run.
    kinds: function of the parameters; see `Groups`.

  Raises:
    UserError: for an unknown name or option, or a value out of its range.
  """
  check_options(optimizer, schedule)
  # Build the schedule.
  rate_options, name = dict(schedule.options), schedule.name
  if ends_with_run(name):
    rate_options["total_steps"] = total_steps
  rate = call(f"schedule {name!r}", SCHEDULES[name], rate_options)
  # Split the options of the optimiser.
  taken, options = _split_options(optimizer)
  kind, shared = optimizer.name, SharedOptions(**taken)
  # Cycle Adam's first beta together with the learning rate.
  if shared.cycle_momentum:
    if name != "onecycle":
      raise UserError(
        f"config.optimizer.cycle_momentum=true needs the schedule "
        f"'onecycle', not {name!r}: set it to false."
      )
    warmup_steps = rate_options["warmup_steps"]
    options["b1"] = onecycle_momentum(warmup_steps, total_steps)
  # Build the optimiser, with the mask of its weight decay.
  groups = Groups(kinds, shared.groups)
  frozen = [part for part in shared.frozen.split(",") if part]
  options |= {"schedule": rate, "decays": groups.decayed}
  tx = call(f"optimizer {kind!r}", OPTIMIZERS[kind], options)
  # Clip gradients, for the map "matrix" in the coordinates of rotations.
  clips = [optax.clip(shared.clip_value)] if shared.clip_value else []
  if shared.clip_norm:
    clips.append(optax.clip_by_global_norm(shared.clip_norm))
  # Scale the updates by the kind and by the depth of parameters.
  scales = [groups.scale()] if shared.groups else []
  if shared.layer_decay != 1:
    factor = functools.partial(_layer_factor, shared.layer_decay)
    scales.append(scale_by_path(factor))
  # Scale before the Riemannian step, so that matrices stay orthogonal.
  tx = riemannian(optax.chain(*clips, tx, *scales))
  if shared.cap:
    tx = optax.chain(tx, cap_weights(shared.cap, shared.cap_max))
  if not frozen:
    return tx, rate

  def trained(path: str, _: int = 0) -> float:
    return float(not any(is_below(path, part) for part in frozen))

  # Frozen parts count neither for the clipped norm nor for weight decay.
  mask = scale_by_path(trained)
  return optax.chain(_check_frozen(frozen), mask, tx, mask), rate


def _check_options(
  kind: str, name: str, function: Callable[..., Any], options: Mapping[str, Any]
) -> None:
  """Raises UserError for an unknown option, or a value out of its range.

  Args:
    kind: "optimizer" or "schedule".
    name: name of the optimiser or the schedule.
    function: registered function; it also takes the arguments `BUILT`.
    options: options of the config.
  """
  is_optimizer = kind == "optimizer"
  ranges.check(function, options, f"config.{kind}")
  accepted = inspect.signature(function).parameters
  if _accepts(function):
    return
  for option, value in options.items():
    if is_optimizer and option in ("lr", "learning_rate"):
      raise UserError(
        f"config.optimizer.{option}={value} does not exist: set "
        "config.schedule.learning_rate instead."
      )
    choices = {*accepted, *(SHARED_OPTIONS if is_optimizer else ())} - BUILT
    choose(f"option of {kind} {name!r}", option, choices)


def _layer_factor(decay: float, path: str, num_layers: int) -> float:
  """Returns decay^(L + 1 - depth), a parameter's learning-rate factor."""
  return decay ** (num_layers + 1 - depth(path, num_layers))
