"""Long convolutions of tokens, by kernels that are sums of powers."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxformers.foundations import platforms
from jaxformers.models import parallel
from jaxformers.models.mixers.state_space import exponential
from jaxformers.models.segments import is_packed, last_number, tokens
from jaxformers.scan import Pair, times

Transform = Callable[[jax.Array], jax.Array]
LONGEST = 1 << 16  # Squares of smaller positions fit into uint32.


def sum_powers(log: Pair, weight: Pair, n: int) -> jax.Array:
  """Returns k_l = Re sum_j weight_j exp(l log_j) for l < n, [d, n].

  Let l = i c + j. The powers of exponents i c and of exponents j are computed
  separately and joined by a product, so the memory per state grows as sqrt(n).

  Args:
    log: logarithms of the bases, a pair of [d, N].
    weight: weights of the powers, a pair of [d, N].
    n: length of the kernel.
  """
  # Choose a power of two near sqrt(n) as c.
  chunk = 1 << max(((n - 1).bit_length() + 1) // 2, 0)
  count = -(-n // chunk)
  far_steps = jnp.arange(count, dtype=log.real.dtype) * chunk
  near_steps = jnp.arange(chunk, dtype=log.real.dtype)
  far, near = (_powers(log, steps) for steps in (far_steps, near_steps))
  far = times(Pair(*(part[..., None] for part in weight)), far)
  # Re sum_j x_j y_j, as one product over the real and imaginary parts.
  kernel = jnp.einsum(
    "dmi,dmj->dij",
    jnp.concatenate([far.real, -far.imag], 1),
    jnp.concatenate(near, 1),
    precision=jax.lax.Precision.HIGHEST,
  )
  return kernel.reshape(kernel.shape[0], -1)[:, :n]


def _powers(log: Pair, steps: jax.Array) -> Pair:
  """Returns exp(steps log), a pair of [d, N, number of steps]."""
  return exponential(
    Pair(*(part[..., None] * steps[None, None] for part in log))
  )


def convolve(
  x: jax.Array, kernel: jax.Array, backward: jax.Array | None = None
) -> jax.Array:
  """Returns y_t = sum_l k_l x_(t-l) + sum_l k'_l x_(t+l), for l >= 0.

  Args:
    x: tokens, [b, n, d]; padding is 0 and at the end.
    kernel: kernel k of earlier tokens, [d, n].
    backward: kernel k' of later tokens, [d, n]; None to leave out its sum.

  Returns:
    The outputs [b, n, d] in the dtype of x.
  """
  b, n = x.shape[:2]
  size = platforms.ring_size(n)
  # Transform along the last axis, which is faster on CPUs.
  x_last = jnp.swapaxes(x, 1, 2)
  spectrum = platforms.by_device(lambda x, _: jnp.fft.rfft(x, size), x_last)
  response = jnp.fft.rfft(on_ring(kernel, backward, size=size))
  spectrum = spectrum * parallel.for_samples(response, b)
  y = platforms.by_device(lambda s, _: jnp.fft.irfft(s, size), spectrum)
  return jnp.swapaxes(y[..., :n], 1, 2).astype(x.dtype)


def on_ring(
  kernel: jax.Array, backward: jax.Array | None = None, *, size: int
) -> jax.Array:
  """Returns the kernels of both directions as one circular kernel, [d, size].

  The negative lags of `backward` are at the end of the ring. A convolution
  of at most n tokens is a part of the circular convolution, so its norm is at
  most the greatest modulus of the Fourier transform of the ring.

  Args:
    kernel, backward: kernels k and k' as in `convolve`.
    size: number of places of the ring, at least 2 n - 1.
  """
  # Put lag l at place l, and lag -l at place size - l.
  n = kernel.shape[1]
  ring = jnp.pad(kernel, ((0, 0), (0, size - n)))
  if backward is not None:
    ring = ring.at[:, 0].add(backward[:, 0])
    ring = ring.at[:, size - n + 1 :].add(jnp.flip(backward[:, 1:], 1))
  return ring


def transform_real(x: jax.Array) -> jax.Array:
  """Returns the Fourier transform of real x [d, n] -> [d, n // 2 + 1].

  On a TPU it is a `chirp_transform` if n is a slow number of points.
  """
  n = x.shape[1]
  if not platforms.is_slow_size(n) or n > LONGEST:
    return jnp.fft.rfft(x)
  transform = chirp_transform(jnp.full((1,), n, jnp.int32), n, x.dtype)
  padded = jnp.pad(x, ((0, 0), (0, chirp_size(2 * n - 1) - n)))
  spectrum = transform(jax.lax.complex(padded, jnp.zeros_like(padded))[None])
  return spectrum[0, :, : n // 2 + 1]


def chirp_transform(lengths: jax.Array, n: int, dtype: jnp.dtype) -> Transform:
  """Returns a function that Fourier transforms each sample at its own length.

  The function maps arrays [b, C, size] to arrays of the same shape. It is a
  convolution with a chirp (Bluestein 1970), so the rings of one batch may have
  any lengths. All arrays have the size of the convolution, because XLA on CPUs
  computes padded arrays six times slower.

  Args:
    lengths: length of each sample, int32 [b], at least 1.
    n: greatest length.
    dtype: real dtype of the chirp.
  """
  size = chirp_size(2 * n - 1)
  place = jnp.arange(size, dtype=jnp.uint32)[None]
  count = lengths.astype(jnp.uint32)[:, None]
  # The chirp exp(-i pi k^2 / length) for k < n, and its conjugate on a ring.
  distance = jnp.minimum(place, size - place)
  chirp = root_of_unity((distance * distance) % (2 * count), 2 * count, dtype)
  ring = jnp.fft.fft(jnp.conj(chirp))[:, None]
  chirp = jnp.where(place < count, chirp, 0)[:, None]

  # X_f = chirp_f sum_k (x_k chirp_k) conj(chirp_(f-k))
  def transform(x: jax.Array) -> jax.Array:
    return chirp * jnp.fft.ifft(jnp.fft.fft(x * chirp) * ring)

  return transform


def chirp_size(least: int) -> int:
  """Returns the least number 2^k or 3 2^k that is at least `least`."""
  power = 1 << (least - 1).bit_length()
  return 3 * power // 4 if 3 * power // 4 >= least else power


def root_of_unity(
  numerator: jax.Array, denominator: jax.Array, dtype: jnp.dtype
) -> jax.Array:
  """Returns exp(-2 pi i numerator / denominator) for reduced integers."""
  share = numerator.astype(dtype) / denominator.astype(dtype)
  angle = -2 * jnp.pi * share
  return jax.lax.complex(jnp.cos(angle), jnp.sin(angle))


def to_front(x: jax.Array, mask: jax.Array) -> jax.Array:
  """Moves the tokens of each sample to the front, and sets padding to 0.

  Masked positions between tokens then do not count as lags.

  Args:
    x: tokens, [b, n, d].
    mask: bool [b, n], True at tokens; or numbers of packed rows.

  Returns:
    The tokens of each sample in their order, [b, n, d].
  """
  mask = tokens(mask)
  return _reorder(jnp.where(mask[..., None], x, 0), mask, back=False)


def front_mask(mask: jax.Array) -> jax.Array:
  """Returns the mask or the numbers of tokens that `to_front` has moved."""
  if is_packed(mask):
    return numbers_to_front(mask, mask)
  return jnp.arange(mask.shape[1])[None] < mask.sum(1)[:, None]


def numbers_to_front(numbers: jax.Array, mask: jax.Array) -> jax.Array:
  """Moves the numbers of tokens to the front, int32 [b, n].

  Behind the tokens, the row belongs to its last example, whose number is
  negative there. It may have no token, after a reset at padding.

  Args:
    numbers: numbers of packed rows.
    mask: mask or numbers of the tokens, [b, n].
  """
  moved = to_front(numbers[..., None], mask)[..., 0]
  return jnp.where(moved == 0, -last_number(numbers)[:, None], moved)


def move_back(y: jax.Array, mask: jax.Array) -> jax.Array:
  """Inverts `to_front`: moves tokens y [b, n, d] back to their positions."""
  return _reorder(y, tokens(mask), back=True)


def _reorder(x: jax.Array, mask: jax.Array, *, back: bool) -> jax.Array:
  """Moves tokens [b, n, d] to the front or back, if there are any to move."""

  # A stable sort puts tokens before padding; sorting its result inverts it.
  def take(x: jax.Array, mask: jax.Array) -> jax.Array:
    order = jnp.argsort(~mask, axis=1, stable=True)
    if back:
      order = jnp.argsort(order, axis=1, stable=True)
    return jnp.take_along_axis(x, order[..., None], 1)

  def reorder(rows: tuple[jax.Array, jax.Array], _: None) -> jax.Array:
    # The tokens are at the front if no token follows a masked position.
    mask = rows[1]
    is_whole = (mask[:, 1:] <= mask[:, :-1]).all()
    return jax.lax.cond(is_whole, lambda x, _: x, take, *rows)

  return platforms.by_device(reorder, (x, mask))
