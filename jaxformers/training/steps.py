"""The training step and the evaluation step, as pure functions.

Static arguments are keyword-only; `trainer` binds them, and `compilers`
compiles the step once. Under pmap, `axis_name` names the axis of the sums over
devices; under jit over a mesh, the compiler adds these sums.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from jaxformers.models import Model
from jaxformers.models.bounds import nearest_wrong
from jaxformers.models.norm import STATISTICS, move_averages
from jaxformers.models.variables import Placement, make_variables
from jaxformers.training.layout import token_axis
from jaxformers.training.losses import LOSSES, Batch, Sums, sown_losses
from jaxformers.training.state import TrainState

T = TypeVar("T")


class Margin(NamedTuple):
  """Certified training against replaced tokens; see `bounds.nearest_wrong`.

  Attributes:
    tokens: number of replaced tokens; 0 turns it off.
    weight: weight of the certified loss; the remainder is plain cross-entropy.
    loss: form of the certified loss; see `certified_loss`.
  """

  tokens: int = 0
  weight: float = 1.0
  loss: str = "fixed"


NO_MARGIN = Margin()
# Key of the arrays of examples in the results, next to the sums.
COLLECTED = "collected"


def _margin_loss(
  variables: Any,
  logits: jax.Array,
  batch: Batch,
  model: Model,
  margin: Margin,
) -> jax.Array:
  """Returns weight (certified loss - cross-entropy) of each example, [b]."""
  targets = batch["targets"]
  # Raise the wrong logits by what replaced tokens can change, [b, c].
  raised = nearest_wrong(
    model, variables, logits, batch["inputs"], targets, margin.tokens
  )
  before = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
  after = certified_loss(logits, raised, targets, margin.loss)
  return margin.weight * (after - before)


# Least share of a margin that EMMA asks of an example.
LEAST_SHARE = 0.01
# Temperature and exponent of logit annealing, from the code of its authors.
TEMPERATURE, FOCUS = 0.75, 5.0


def certified_loss(
  logits: jax.Array, raised: jax.Array, targets: jax.Array, form: str
) -> jax.Array:
  """Returns the certified loss of each example, float32 [b].

  "fixed" is the cross-entropy of the worst-case logits, which asks every
  example for the whole margin (Tsuzuku et al. 2018, equation 4). "emma" asks an
  example for no more of the margin to each class than it has, and at least for
  1 % (EMMA, Hu et al. 2023, https://arxiv.org/abs/2301.12549). "annealed" is
  the loss of logit annealing, T (1 - p)^5 (-log p), of the probability p of the
  right class at the temperature T = 0.75 (Lai et al. 2025,
  https://arxiv.org/abs/2505.15174), here of worst-case logits, whose margin
  follows from the weights; the authors subtract 2 from the logit of the class.

  Args:
    logits: logits of the inputs, [b, c].
    raised: worst-case logits, see `bounds.nearest_wrong`, [b, c].
    targets: right classes, int32 [b].
    form: name in `bounds.MARGIN_LOSSES`.
  """
  if form == "emma":
    rise = raised - logits
    room = jnp.take_along_axis(logits, targets[:, None], 1) - logits
    # The label's own logit is not raised.
    share = jnp.clip(room / jnp.maximum(rise, 1e-9), LEAST_SHARE, 1)
    raised = logits + jax.lax.stop_gradient(share) * rise
  if form != "annealed":
    return optax.softmax_cross_entropy_with_integer_labels(raised, targets)
  loss = optax.softmax_cross_entropy_with_integer_labels(
    raised / TEMPERATURE, targets
  )
  return TEMPERATURE * (-jnp.expm1(-loss)) ** FOCUS * loss


def _forward(
  variables: Any,
  batch: Batch,
  key: jax.Array,
  model: Model,
  smoothing: float,
  margin: Margin,
  sizes: tuple[int, int],
  axis_name: str | None,
) -> tuple[jax.Array, Sums]:
  """Returns the sum to minimise over a batch, and the sums to report.

  If the loss of an example depends on the batch, the sums are over all devices.
  """
  # Run the model, and collect its sown losses and batch statistics.
  objective = LOSSES[model.objective]
  packed: dict[str, Any] = {}
  if "segments" in batch:
    packed = {"segments": batch["segments"], "sizes": sizes}
  output, sown = model.apply(
    variables,
    *(batch[name] for name in objective.inputs),
    train=True,
    rngs={"dropout": key, "random": jax.random.fold_in(key, 1)},
    mutable=["losses", STATISTICS],
    **packed,
  )
  if packed and model.is_pooled:
    # The examples of all rows become one list.
    output = output.reshape(-1, *output.shape[2:])
    batch = batch | {k: batch[k].ravel() for k in ("targets", "weights")}
  # Add the sown losses and the certified loss, [b].
  extra = sown_losses(sown.get("losses", {}), len(batch["weights"]))
  if margin.tokens:
    extra = extra + _margin_loss(variables, output, batch, model, margin)
  # Contrastive losses compare the examples of all devices.
  if objective.sees_batch and axis_name is not None:
    output, batch, extra = _gather((output, batch, extra), axis_name)
  objective, sums = objective.sums(output, batch, extra, smoothing)
  if packed:
    numbers = batch["segments"]
    sums["places"] = jnp.float32(numbers.size)
    sums["tokens"] = (numbers > 0).sum().astype(jnp.float32)
  # Running averages of norms need sums over the batch, too.
  statistics = sown.get(STATISTICS)
  return objective, sums | ({STATISTICS: statistics} if statistics else {})


def _gather(tree: T, axis_name: str) -> T:
  """Concatenates arrays [b, ...] of all devices that pmap maps over."""
  return jax.lax.all_gather(tree, axis_name, tiled=True)


def _sum_parts(
  part: Callable[[Batch, jax.Array], T],
  batch: Batch,
  key: jax.Array,
  count: int,
) -> T:
  """Returns the sum of part(batch, key) over equal parts of a batch."""
  if count == 1:
    return part(batch, key)
  # Take rows of every device for each part, so that the batch is not moved.
  parts = jax.tree.map(
    lambda x: x.reshape((-1, count, *x.shape[1:])).swapaxes(0, 1), batch
  )
  # Sum over the parts, in a loop that holds one part at a time.
  keys = jax.random.split(key, count)
  shapes = jax.eval_shape(part, jax.tree.map(lambda x: x[0], parts), key)
  zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

  def add(total: T, args: tuple[Batch, jax.Array]) -> tuple[T, None]:
    return jax.tree.map(jnp.add, total, part(*args)), None

  return jax.lax.scan(add, zeros, (parts, keys))[0]


def nearest_divisor(number: int, wanted: float, most: int) -> int:
  """Returns the divisor of a number, up to `most`, nearest to `wanted`.

  The distance is the ratio of the two.
  """
  divisors = (k for k in range(1, most + 1) if number % k == 0)
  return min(divisors, key=lambda k: abs(math.log(k / wanted)))


def count_parts(batch: Batch, most: int, longest: int) -> int:
  """Returns the number of parts of a batch.

  A part has about as many tokens as a part of the longest batch, maybe more.

  Args:
    batch: batch with as many rows as the longest one.
    most: number of parts of the longest batch.
    longest: length of the longest batch.
  """
  inputs = batch["inputs"]
  length = inputs.shape[token_axis(inputs)]
  return nearest_divisor(len(inputs), most * length / longest, most)


def train_step(
  state: TrainState,
  batch: Batch,
  *,
  model: Model,
  tx: optax.GradientTransformation,
  seed: int,
  accumulate: int = 1,
  longest: int = 0,
  smoothing: float = 0.0,
  margin: Margin = NO_MARGIN,
  sizes: tuple[int, int] = (0, 0),
  ema_decay: float = 0.0,
  placement: Placement | None = None,
  axis_name: str | None = None,
) -> tuple[TrainState, Sums]:
  """Returns the state after one update from one batch.

  Args:
    state: state of step t; dropout keys are a function of (seed, t).
    batch: `inputs`, `targets` and `weights`; see the model's objective in
      `losses`.
    model: model from `models.build`.
    tx: optimiser.
    seed: seed of the run.
    accumulate: number of parts that the batch is split into; must divide b.
    longest: length of the batches that have `accumulate` parts; shorter ones
      have fewer, see `count_parts`. 0: all have `accumulate`.
    smoothing: share of the target that is spread over all classes.
    margin: options of certified training.
    sizes: greatest number of examples of a packed row, and of tokens of an
      example; used for batches with `segments`.
    ema_decay: decay of the average of parameters that is evaluated; 0 for no
      average.
    placement: placement of parameters on a mesh; None for one device.
    axis_name: axis that pmap maps over, or None.

  Returns:
    The state of step t + 1, and the sums of the objective.
  """
  # Dropout keys depend on seed, step and device.
  key = jax.random.fold_in(jax.random.key(seed), state.step)
  if axis_name is not None:
    key = jax.random.fold_in(key, jax.lax.axis_index(axis_name))
  # Compute the orthogonal matrices and other variables once for all parts.
  # `pull` carries their gradients back to the parameters, also once.
  variables, pull = jax.vjp(
    lambda params: make_variables(model, params, placement), state.params
  )
  loss = functools.partial(
    _forward,
    model=model,
    smoothing=smoothing,
    margin=margin,
    sizes=sizes,
    axis_name=axis_name,
  )
  # Sum the gradients over all parts of the batch.
  part = functools.partial(jax.grad(loss, has_aux=True), variables)
  if longest:
    accumulate = count_parts(batch, accumulate, longest)
  grads, sums = _sum_parts(part, batch, key, accumulate)
  grads = pull(grads)[0]
  # Sum over the devices of pmap.
  if axis_name is not None and LOSSES[model.objective].sees_batch:
    # Every device has computed the loss of the whole batch: take the mean.
    grads = jax.lax.pmean(grads, axis_name)
    if STATISTICS in sums:
      sums[STATISTICS] = jax.lax.psum(sums[STATISTICS], axis_name)
  elif axis_name is not None:
    grads, sums = jax.lax.psum((grads, sums), axis_name)
  # Divide once, by the number of examples of the whole batch.
  count = jnp.maximum(sums["count"], 1)
  grads = jax.tree.map(lambda g: g / count, grads)
  # Update the parameters and their average.
  updates, opt_state = tx.update(grads, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  if statistics := sums.pop(STATISTICS, None):
    params = move_averages(params, statistics, state.params)
  average = None
  if ema_decay:
    average = optax.incremental_update(params, state.average, 1 - ema_decay)
  return TrainState(state.step + 1, params, opt_state, average), sums


def eval_step(
  variables: Any, batch: Batch, *, model: Model, axis_name: str | None = None
) -> Sums:
  """Returns the sums of the objective over one batch, without dropout.

  Args:
    variables: from `make_variables`, computed once for the whole evaluation.
    batch: see `train_step`; examples of weight 0 do not count.
    model: model from `models.build`.
    axis_name: axis that pmap maps over, or None.

  Returns:
    The sums. If the objective has `collect`, also its arrays for all examples
    of the batch, with their `weights`, under `COLLECTED`.
  """
  # Run the model without dropout.
  objective = LOSSES[model.objective]
  inputs = [batch[name] for name in objective.inputs]
  output = model.apply(variables, *inputs, train=False)
  extra = jnp.zeros(len(batch["weights"]), jnp.float32)
  # Sum the objective over the batch, and over the devices of pmap.
  if objective.sees_batch and axis_name is not None:
    output, batch, extra = _gather((output, batch, extra), axis_name)
  _, sums = objective.sums(output, batch, extra, 0.0)
  if axis_name is not None and not objective.sees_batch:
    sums = jax.lax.psum(sums, axis_name)
  if objective.collect is None:
    return sums
  # Collect the rows of all devices; under jit the compiler joins them.
  rows = objective.collect(output, batch) | {"weights": batch["weights"]}
  if axis_name is not None and not objective.sees_batch:
    rows = _gather(rows, axis_name)
  return sums | {COLLECTED: rows}
