"""Long convolutions of tokens with kernels that are sums of powers."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxformers.models.mixers.state_space import exponential
from jaxformers.scan import Pair, times


def sum_powers(log: Pair, weight: Pair, n: int) -> jax.Array:
  """Returns k_l = Re sum_j weight_j exp(l log_j) for l < n, [d, n].

  l is i c + j: the powers of both parts are made apart, and joined by a
  product, so that the memory grows as the root of n for each state.

  Args:
    log, weight: pairs of [d, N].
    n: length of the kernel.
  """
  chunk = 1 << max(((n - 1).bit_length() + 1) // 2, 0)
  count = -(-n // chunk)
  far_steps = jnp.arange(count, dtype=log.real.dtype) * chunk
  near_steps = jnp.arange(chunk, dtype=log.real.dtype)
  far, near = (_powers(log, steps) for steps in (far_steps, near_steps))
  far = times(Pair(*(part[..., None] for part in weight)), far)
  # Re(x y) is one product over the real and imaginary parts of all states.
  kernel = jnp.einsum(
    "dmi,dmj->dij",
    jnp.concatenate([far.real, -far.imag], 1),
    jnp.concatenate(near, 1),
    precision=jax.lax.Precision.HIGHEST,
  )
  return kernel.reshape(kernel.shape[0], -1)[:, :n]


def _powers(log: Pair, steps: jax.Array) -> Pair:
  """Returns exp(steps log), a pair of [d, N, steps]."""
  return exponential(
    Pair(*(part[..., None] * steps[None, None] for part in log))
  )


def convolve(
  x: jax.Array, kernel: jax.Array, backward: jax.Array | None = None
) -> jax.Array:
  """Returns y_t = sum_l k_l x_(t-l), plus sum_l k'_l x_(t+l), l from 0.

  Args:
    x: [b, n, d], 0 at padding, which is at the end.
    kernel: k, [d, n].
    backward: k', [d, n]; None for none.

  Returns:
    [b, n, d] in the type of x.
  """
  n = x.shape[1]
  size = 2 * n
  # Transforms run along the last axis, where CPUs are fast.
  spectrum = jnp.fft.rfft(jnp.swapaxes(x, 1, 2), size)
  spectrum = spectrum * jnp.fft.rfft(on_ring(kernel, backward))[None]
  y = jnp.fft.irfft(spectrum, size)[..., :n]
  return jnp.swapaxes(y, 1, 2).astype(x.dtype)


def on_ring(kernel: jax.Array, backward: jax.Array | None = None) -> jax.Array:
  """Returns kernels of n lags as one of a ring of 2 n, [d, 2 n].

  Lags below 0 are at the end of the ring, which is long enough for them. The
  convolution of n tokens or fewer is a part of that of the ring, so its norm is
  at most the greatest modulus of the ring's Fourier transform.

  Args:
    kernel, backward: as for `convolve`.
  """
  n = kernel.shape[1]
  ring = jnp.pad(kernel, ((0, 0), (0, n)))
  if backward is not None:
    ring = ring.at[:, 0].add(backward[:, 0])
    ring = ring.at[:, n + 1 :].add(jnp.flip(backward[:, 1:], 1))
  return ring


def to_front(
  x: jax.Array, mask: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  """Moves tokens before padding, which becomes 0: holes are no lags.

  Args:
    x: [b, n, d].
    mask: [b, n], True at tokens.

  Returns:
    The tokens of each sample in their order, [b, n, d]; and what `move_back`
    needs: whether there is no hole, and the mask.
  """
  x = jnp.where(mask[..., None], x, 0)
  is_whole = (mask[:, 1:] <= mask[:, :-1]).all()
  return _reorder(x, mask, is_whole, back=False), (is_whole, mask)


def move_back(y: jax.Array, moved: tuple[jax.Array, jax.Array]) -> jax.Array:
  """Undoes `to_front` for y [b, n, d]."""
  is_whole, mask = moved
  return _reorder(y, mask, is_whole, back=True)


def _reorder(
  x: jax.Array, mask: jax.Array, is_whole: jax.Array, *, back: bool
) -> jax.Array:
  """Moves tokens [b, n, d] to the front or back, unless nothing moves."""

  def take(x: jax.Array) -> jax.Array:
    order = jnp.argsort(~mask, axis=1, stable=True)
    if back:
      order = jnp.argsort(order, axis=1, stable=True)
    return jnp.take_along_axis(x, order[..., None], 1)

  return jax.lax.cond(is_whole, lambda x: x, take, x)
