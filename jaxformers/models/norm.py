"""Norms of tokens."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxformers.foundations.registry import Registry
from jaxformers.models.parallel import column_sums, row_sums, sum_over_devices
from jaxformers.models.reductions import wide

NORMS: Registry = Registry("norm")
STATISTICS = "statistics"  # Collection of the sums of a batch.
RUNNING = "running_"  # Beginning of the names of averages among parameters.
MOMENTUM = 0.95  # Share of an average that a step keeps; S5's.
# Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467, equation 4.
NORMS.register("rms")(nn.RMSNorm)


@NORMS.register("layer")
class LayerNorm(nn.Module):
  """Normalises tokens to mean 0 and variance 1, then scales and shifts them.

  As `nn.LayerNorm`, in at least float32, but the backward pass computes nothing
  again: it keeps the normalised tokens. So JAX cannot differentiate it forwards
  (`jax.jvp`).

  Source: Ba et al. 2016, https://arxiv.org/abs/1607.06450, equation 4.

  Attributes:
    epsilon: constant that is added to the variance.
  """

  epsilon: float = 1e-5

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    x = wide(jnp.asarray(x))
    shape = x.shape[-1:]
    scale = self.param("scale", nn.initializers.ones, shape)
    bias = self.param("bias", nn.initializers.zeros, shape)
    scale, bias = scale.astype(x.dtype), bias.astype(x.dtype)
    return _normalize(self.epsilon, x, scale, bias)


@NORMS.register("scale")
class ScaleNorm(nn.Module):
  """Divides tokens by the root of their mean square, times one parameter.

  Source: Nguyen and Salazar 2019, https://arxiv.org/abs/1910.05895, section
  2.2, by the mean in place of the sum, as in Mega's code.

  Attributes:
    epsilon: constant that is added to the mean square.
  """

  epsilon: float = 1e-5

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    x = wide(jnp.asarray(x))
    scale = self.param("scale", nn.initializers.ones, ()).astype(x.dtype)
    square = row_sums(jnp.square(x)) / x.shape[-1]
    return scale * x * jax.lax.rsqrt(square + self.epsilon)


@NORMS.register("batch")
class BatchNorm(nn.Module):
  """Normalises channels over the tokens of all samples, and scales and shifts.

  Training has the mean and variance of the batch, over all devices; evaluation
  running averages of them, so that it depends on no batch mate. What it breaks,
  and no other norm of this package does: in training a sample depends on its
  batch mates, and parts of a batch (`config.accumulate`) are normalised apart.

  The averages are leaves of the parameters, `running_mean` and
  `running_variance`, without a gradient: so they are saved, resumed and
  averaged as parameters are. A training step moves them by what this module
  sows into the collection `statistics`: see `move_averages`.

  Source: Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167, algorithms 1
  and 2, over the tokens that are not padding.

  Attributes:
    epsilon: constant that is added to the variance.
  """

  reads_batch: ClassVar[bool] = True

  epsilon: float = 1e-5

  @nn.compact
  def __call__(
    self, x: jax.Array, *, mask: jax.Array, train: bool
  ) -> jax.Array:
    x = wide(jnp.asarray(x))
    shape, ones = x.shape[-1:], nn.initializers.ones
    scale = self.param("scale", ones, shape).astype(x.dtype)
    bias = self.param("bias", nn.initializers.zeros, shape).astype(x.dtype)
    mean, variance = (
      jax.lax.stop_gradient(self.param(name, init, shape)).astype(x.dtype)
      for name, init in (
        (f"{RUNNING}mean", nn.initializers.zeros),
        (f"{RUNNING}variance", ones),
      )
    )
    centred = x - _along(mean, x)
    if train:
      # Sums of what is left of the running mean, which cancel less.
      kept = jnp.where(mask[..., None], centred, 0)
      squares = column_sums(jnp.square(kept))
      sums = mask.sum(dtype=x.dtype), column_sums(kept), squares
      self.sow(STATISTICS, "sums", sums, reduce_fn=lambda _, new: new)
    if train and self.reads_batch:
      count, total, _ = sum_over_devices(sums)
      count = jnp.maximum(count, 1)
      # The variance in a second pass, for tokens that differ little.
      centred = centred - _along(total / count, x)
      kept = jnp.where(mask[..., None], centred, 0)
      variance = sum_over_devices(column_sums(jnp.square(kept))) / count
    unit = centred * _along(jax.lax.rsqrt(variance + self.epsilon), x)
    return _along(scale, x) * unit + _along(bias, x)


@NORMS.register("running")
class RunningNorm(BatchNorm):
  """Normalises channels by `BatchNorm`'s running averages, in training too.

  So a sample depends on no batch mate, and training has the affine map of
  evaluation. There is no gradient through the averages: for features that are
  bounded by themselves, such as pooled vectors of isometric layers.
  """

  reads_batch: ClassVar[bool] = False


def _moments(
  sums: tuple[jax.Array, jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
  """Returns mean and variance of a count, a sum and a sum of squares."""
  count, total, squares = sums
  count = jnp.maximum(count, 1)
  mean = total / count
  return mean, jnp.maximum(squares / count - jnp.square(mean), 0)


def move_averages(params: Any, statistics: Any) -> Any:
  """Returns parameters with running averages moved towards a batch's.

  Args:
    params: tree of parameters.
    statistics: the collection `statistics` of a training step, summed over
      devices and parts of the batch.
  """
  flat = flatten_dict(params)
  for (*path, _), sums in flatten_dict(statistics).items():
    offset, variance = _moments(sums)
    # The sums are of what was left of the running mean.
    mean = flat[*path, f"{RUNNING}mean"] + offset
    for kind, new in (("mean", mean), ("variance", variance)):
      name = (*path, f"{RUNNING}{kind}")
      flat[name] = MOMENTUM * flat[name] + (1 - MOMENTUM) * new
  return unflatten_dict(flat)


def normalize(
  norm: nn.Module, x: jax.Array, *, mask: jax.Array, train: bool
) -> jax.Array:
  """Returns the norm of tokens x [b, n, d], any of `NORMS`."""
  if isinstance(norm, BatchNorm):
    return norm(x, mask=mask, train=train)
  return norm(x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normalize(
  epsilon: float, x: jax.Array, scale: jax.Array, bias: jax.Array
) -> jax.Array:
  return _forward(epsilon, x, scale, bias)[0]


def _forward(
  epsilon: float, x: jax.Array, scale: jax.Array, bias: jax.Array
) -> tuple[jax.Array, Any]:
  d = x.shape[-1]
  centred = x - row_sums(x) / d
  inverse = jax.lax.rsqrt(row_sums(jnp.square(centred)) / d + epsilon)
  unit = centred * inverse
  return _along(scale, x) * unit + _along(bias, x), (unit, inverse, scale)


def _backward(_: float, kept: Any, g: jax.Array) -> tuple[jax.Array, ...]:
  unit, inverse, scale = kept
  # The norm takes out the mean of a token and its part along itself.
  slope = g * _along(scale, g)
  taken = row_sums(slope) + unit * row_sums(slope * unit)
  dx = (slope - taken / g.shape[-1]) * inverse
  return dx, column_sums(g * unit), column_sums(g)


_normalize.defvjp(_forward, _backward)


def _along(vector: jax.Array, x: jax.Array) -> jax.Array:
  """Returns a vector [d] as [1, ..., 1, d], to combine with x [..., d]."""
  return jnp.expand_dims(vector, range(x.ndim - 1))
