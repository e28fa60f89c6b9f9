"""Normalisation layers."""

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
from jaxformers.models.segments import tokens

NORMS: Registry = Registry("norm")
STATISTICS = "statistics"  # Collection of the sums over a batch.
RUNNING = "running_"  # Prefix of the names of running averages.
MOMENTUM = 0.95  # Momentum of the running averages, as in S5.
# RMSNorm: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467, eq. 4.
NORMS.register("rms")(nn.RMSNorm)


@NORMS.register("layer")
class LayerNorm(nn.Module):
  """Normalises tokens to mean 0 and variance 1, then scales and shifts them.

  It computes `nn.LayerNorm` in at least float32. Differs from it: the forward
  pass stores the normalised tokens, so that the backward pass recomputes
  nothing. For this reason forward-mode differentiation (`jax.jvp`) is not
  available.

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
  """Divides tokens by their root mean square, and multiplies by one parameter.

  Source: Nguyen and Salazar 2019, https://arxiv.org/abs/1910.05895, section
  2.2. Differs from it: divides by the root of the mean of squares, not of their
  sum, as in Mega's code.

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
  """Normalises channels over the tokens of all samples, then scales and shifts.

  Training uses the mean and variance of the batch, over all devices. Evaluation
  uses running averages of them. Unlike every other norm here, a sample depends
  on the rest of its batch during training. Under gradient accumulation
  (`config.accumulate`), the parts of a batch are normalised separately.

  The running averages are entries of the parameters, `running_mean` and
  `running_variance`, without a gradient. So they are saved, restored and
  averaged like parameters. This module sows sums over the batch into the
  collection `statistics`, from which a training step updates the averages: see
  `move_averages`.

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
    # Read the running averages.
    mean, variance = (
      jax.lax.stop_gradient(self.param(name, init, shape)).astype(x.dtype)
      for name, init in (
        (f"{RUNNING}mean", nn.initializers.zeros),
        (f"{RUNNING}variance", ones),
      )
    )
    centred = x - _along(mean, x)
    if train:
      # Sum deviations from the running mean to reduce cancellation.
      kept = jnp.where(mask[..., None], centred, 0)
      squares = column_sums(jnp.square(kept))
      sums = mask.sum(dtype=x.dtype), column_sums(kept), squares
      self.sow(STATISTICS, "sums", sums, reduce_fn=lambda _, new: new)
    if train and self.reads_batch:
      count, total, _ = sum_over_devices(sums)
      count = jnp.maximum(count, 1)
      # Compute the variance in a second pass, for accuracy with tokens that
      # differ little.
      centred = centred - _along(total / count, x)
      kept = jnp.where(mask[..., None], centred, 0)
      variance = sum_over_devices(column_sums(jnp.square(kept))) / count
    # y = scale (x - mean) / sqrt(variance + epsilon) + bias.
    unit = centred * _along(jax.lax.rsqrt(variance + self.epsilon), x)
    return _along(scale, x) * unit + _along(bias, x)


@NORMS.register("running")
class RunningNorm(BatchNorm):
  """Normalises channels by running averages, also in training.

  A sample does not depend on the rest of its batch, and training uses the same
  affine map as evaluation. Gradients do not pass through the averages, so the
  norm suits features that are bounded without it, such as pooled vectors of
  isometric layers.
  """

  reads_batch: ClassVar[bool] = False


def _moments(
  sums: tuple[jax.Array, jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
  """Returns mean and variance from (count, sum, sum of squares)."""
  count, total, squares = sums
  count = jnp.maximum(count, 1)
  mean = total / count
  return mean, jnp.maximum(squares / count - jnp.square(mean), 0)


def move_averages(params: Any, statistics: Any, before: Any) -> Any:
  """Returns parameters with running averages updated by a batch.

  average = MOMENTUM average + (1 - MOMENTUM) batch average.

  Args:
    params: tree of parameters.
    statistics: collection `statistics` of a training step, summed over devices
      and parts of the batch.
    before: parameters before the step, of which the averages are taken: an
      optimiser may have changed them.
  """
  flat, old = flatten_dict(params), flatten_dict(before)
  for (*path, _), sums in flatten_dict(statistics).items():
    offset, variance = _moments(sums)
    # The sums are sums of deviations from the running mean: add it.
    mean = old[*path, f"{RUNNING}mean"] + offset
    for kind, new in (("mean", mean), ("variance", variance)):
      name = (*path, f"{RUNNING}{kind}")
      flat[name] = MOMENTUM * old[name] + (1 - MOMENTUM) * new
  return unflatten_dict(flat)


def normalize(
  norm: nn.Module, x: jax.Array, *, mask: jax.Array, train: bool
) -> jax.Array:
  """Returns the normalised tokens x [b, n, d], for any norm of `NORMS`."""
  if isinstance(norm, BatchNorm):
    return norm(x, mask=tokens(mask), train=train)
  return norm(x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normalize(
  epsilon: float, x: jax.Array, scale: jax.Array, bias: jax.Array
) -> jax.Array:
  return _forward(epsilon, x, scale, bias)[0]


def _forward(
  epsilon: float, x: jax.Array, scale: jax.Array, bias: jax.Array
) -> tuple[jax.Array, Any]:
  # unit = (x - mean) / sqrt(variance + epsilon); y = scale unit + bias.
  d = x.shape[-1]
  centred = x - row_sums(x) / d
  inverse = jax.lax.rsqrt(row_sums(jnp.square(centred)) / d + epsilon)
  unit = centred * inverse
  return _along(scale, x) * unit + _along(bias, x), (unit, inverse, scale)


def _backward(_: float, kept: Any, g: jax.Array) -> tuple[jax.Array, ...]:
  unit, inverse, scale = kept
  # dx = (s - mean(s) - unit mean(s unit)) / deviation, with s = g scale.
  slope = g * _along(scale, g)
  taken = row_sums(slope) + unit * row_sums(slope * unit)
  dx = (slope - taken / g.shape[-1]) * inverse
  return dx, column_sums(g * unit), column_sums(g)


_normalize.defvjp(_forward, _backward)


def _along(vector: jax.Array, x: jax.Array) -> jax.Array:
  """Returns a vector [d] as [1, ..., 1, d], to combine with x [..., d]."""
  return jnp.expand_dims(vector, range(x.ndim - 1))
