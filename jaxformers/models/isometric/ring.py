"""All-pass filters on a ring of tokens: linear maps that preserve every norm.

A section is h_t = lambda h_(t-m) + s x_t, y_t = s h_(t-m) - conj(lambda) x_t
on a complex channel, with s = sqrt(1 - |lambda|^2) and the dilation m. With z
the delay by m tokens, its transfer function (z - conj(lambda)) / (1 - lambda z)
has modulus 1 at every frequency. On a ring the first token follows the last, so
a sequence of n tokens has n frequencies. Therefore |y| = |x| for every n, and
the inverse is the adjoint. The transfer function of a cascade is the product of
the transfer functions of its sections.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.foundations import platforms
from jaxformers.foundations.errors import UserError
from jaxformers.models.mixers.allpass import Sections
from jaxformers.models.mixers.convolution import (
  LONGEST,
  Transform,
  chirp_size,
  chirp_transform,
  move_back,
  root_of_unity,
  to_front,
)


def spread_dilations(d: int, length: int) -> tuple[int, ...]:
  """Returns dilations from 1 to an eighth of the length, in equal ratios.

  The number of dilations is the greatest divisor of d / 4 that is at most one
  per power of two. It divides d / 4 because each group of complex channels has
  both directions.

  Args:
    d: number of channels.
    length: greatest number of tokens.

  Raises:
    UserError: if `d` is not a multiple of 4.
  """
  if d % 4:
    raise UserError(
      f"d_model={d}: filters read complex channels in both directions. Choose "
      "a multiple of 4."
    )
  # Choose the greatest number that divides d / 4.
  longest = min(max(length // 8, 1), LONGEST // 2 - 1)
  count = max(k for k in range(1, longest.bit_length() + 1) if d // 4 % k == 0)
  ratios = np.geomspace(1, longest, count)
  return tuple(round(ratio) for ratio in ratios.tolist())


def delays(dilations: tuple[int, ...], sections: int) -> np.ndarray:
  """Returns the index of the dilation of each section and group, int [S, G].

  The C channels are cut into G groups, one per dilation. Group g has dilation
  (g + s) mod G in section s.

  Args:
    dilations: the G dilations.
    sections: number S of sections.
  """
  count = len(dilations)
  return (np.arange(count)[None] + np.arange(sections)[:, None]) % count


def _scaled(z: jax.Array, factor: jax.Array) -> jax.Array:
  """Returns the product of complex z and real `factor`."""
  return jax.lax.complex(z.real * factor, z.imag * factor)


class Grid(NamedTuple):
  """Frequencies of a batch of rings.

  Attributes:
    delays: for each section, exp(-i w m) for the dilations m of the channels
      and the frequencies w of each length; the conjugate for channels that read
      backwards. Complex arrays [b, G, 1, 2, n], or [b, C, n] on a TPU.
    axes: axes of the channels, (G, C / 2G, 2) or (C,).
  """

  delays: list[jax.Array]
  axes: tuple[int, ...]

  def by_channel(self, x: jax.Array) -> jax.Array:
    """Returns values of sections [S, C] as [S, *axes, 1]."""
    return x.reshape(-1, *self.axes, 1)


def _grid(
  sections: Sections, dilations: tuple[int, ...], lengths: jax.Array, n: int
) -> Grid:
  """Returns the first n frequencies of rings whose lengths are given, [b].

  Frequency f of a ring of length l is w = 2 pi f / l.
  """
  # exp(-2 pi i f m / length), reduced mod length as exact integers, [b, G, n].
  frequency = jnp.arange(n, dtype=jnp.uint32)[None, None]
  size = lengths.astype(jnp.uint32)[:, None, None]
  steps = jnp.asarray(dilations, jnp.uint32)[None, :, None]
  delay = root_of_unity((frequency * steps) % size, size, sections.angle.dtype)
  count, channels = sections.angle.shape
  groups = len(dilations)
  order = delays(dilations, count)
  if platforms.on_tpu():
    # Copy the delays of groups to channels by products with 0 and 1. The
    # compiler would copy all arrays with an axis of 2, to join it with others.
    chosen = np.eye(groups, dtype=delay.real.dtype)[order]
    chosen = chosen.repeat(channels // groups, 1)
    sign = (1 - 2 * (np.arange(channels) % 2)).astype(chosen.dtype)[:, None]
    copy = functools.partial(jnp.einsum, "cg,bgn->bcn", precision="highest")
    each = [
      jax.lax.complex(copy(row, delay.real), copy(sign * row, delay.imag))
      for row in chosen
    ]
    return Grid(each, (channels,))
  # Append the conjugate for the channels that read backwards.
  pairs = jnp.stack([delay, jnp.conj(delay)], 2)[:, :, None]
  axes = groups, channels // 2 // groups, 2
  return Grid([pairs[:, index] for index in order], axes)


def transfer(sections: Sections, grid: Grid) -> jax.Array:
  """Returns the transfer function at the frequencies of each length.

  Every other channel reads backwards.

  Args:
    sections: S sections on C channels; the number of dilations divides C / 2.
    grid: frequencies of a batch of rings.

  Returns:
    Complex [b, C, n] of modulus 1; undefined at indices of at least the length.
  """
  # Multiply z and 1 - lambda z over all sections.
  eigenvalues = grid.by_channel(sections.eigenvalues())
  product = denominator = jnp.ones((), eigenvalues.dtype)
  for z, factor in zip(grid.delays, eigenvalues, strict=True):
    product = product * z
    denominator = denominator * (1 - factor[None] * z)
  # With |z| = 1, (z - conj(a)) / (1 - a z) = z conj(1 - a z) / (1 - a z), which
  # is z conj(1 - a z)^2 / |1 - a z|^2.
  square = jnp.square(denominator.real) + jnp.square(denominator.imag)
  y = _scaled(product * jnp.square(jnp.conj(denominator)), 1 / square)
  return y.reshape(y.shape[0], -1, y.shape[-1])


def _gradient_of_phases(
  sections: Sections, grid: Grid, slope: jax.Array
) -> Sections:
  """Returns the gradient with respect to the sections, from one of the phases.

  The phase of a section is arg z - 2 arg(1 - a z). With a z = r exp(i p) its
  derivative with respect to r is 2 sin p / |1 - a z|^2, and its derivative with
  respect to the angle of a is 2 r (cos p - r) / |1 - a z|^2.

  Args:
    sections, grid: sections and frequencies, as in `transfer`.
    slope: gradient with respect to the phases of `transfer`, real [b, C, n].
  """
  # Arrange the gradient by the axes of the channels.
  slope = slope.reshape(slope.shape[0], *grid.axes, slope.shape[-1])
  eigenvalues = sections.eigenvalues()
  sizes = jnp.abs(eigenvalues)
  by_size, by_angle = [], []
  for z, factor, r in zip(
    grid.delays,
    grid.by_channel(eigenvalues),
    grid.by_channel(sizes),
    strict=True,
  ):
    # Compute a z and |1 - a z|^2, then sum over samples and frequencies.
    turned = factor[None] * z
    square = jnp.square(1 - turned.real) + jnp.square(turned.imag)
    weight = 2 * slope / square
    sine = (weight * turned.imag).sum((0, -1))
    cosine = (weight * (turned.real - jnp.square(r)[None])).sum((0, -1))
    by_size.append(sine.ravel())
    by_angle.append(cosine.ravel())
  # The sums with r sin p, the imaginary part of a z, are derivatives with
  # respect to log r = -SLOWEST - exp(decay).
  by_decay = -jnp.exp(sections.decay) * jnp.stack(by_size)
  return Sections(by_decay, jnp.stack(by_angle))


def _by_length(
  x: jax.Array,
  lengths: jax.Array,
  function: Callable[[Transform, jax.Array, int], Any],
) -> Any:
  """Calls `function(transform, lengths, size)` with the fastest transform.

  This is a plain FFT if all lengths are n, and `chirp_transform` otherwise. On
  a TPU it is the latter also if an FFT of n points is slow.

  Args:
    x: complex array [b, C, n], which gives shape and dtype.
    lengths: length of each sample, int32 [b], at least 1.
    function: function of the Fourier transform, of the lengths ([1] if all are
      n, else [b]), and of the size of the arrays of the transform.
  """
  n = x.shape[-1]

  def at_own_lengths() -> Any:
    transform = chirp_transform(lengths, n, x.real.dtype)
    return function(transform, lengths, chirp_size(2 * n - 1))

  if platforms.is_slow_size(n):
    return at_own_lengths()
  # The condition is evaluated at run time, and only one branch runs.
  greatest = jnp.full((1,), n, jnp.int32)
  return jax.lax.cond(
    (lengths == n).all(),
    lambda: function(jnp.fft.fft, greatest, n),
    at_own_lengths,
  )


def _conjugate_if(z: jax.Array, is_inverse: bool) -> jax.Array:
  return jnp.conj(z) if is_inverse else z


def _fill(x: jax.Array, size: int) -> jax.Array:
  return jnp.pad(x, ((0, 0), (0, 0), (0, size - x.shape[-1])))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _apply(
  sections: Sections,
  x: jax.Array,
  lengths: jax.Array,
  dilations: tuple[int, ...],
  inverse: bool,
) -> jax.Array:
  """Filters complex x [b, C, n]; sample i has the first lengths[i] tokens."""

  def apply(rows: tuple[jax.Array, jax.Array], sections: Sections) -> jax.Array:
    x, lengths = rows

    def run(transform: Transform, lengths: jax.Array, size: int) -> jax.Array:
      grid = _grid(sections, dilations, lengths, size)
      response = _conjugate_if(transfer(sections, grid), inverse)
      # Multiply the spectrum by the response, and transform back.
      spectrum = response.astype(x.dtype) * transform(_fill(x, size))
      # The inverse transform of s is conj(transform(conj(s))) / length.
      y = jnp.conj(transform(jnp.conj(spectrum)))[..., : x.shape[-1]]
      return _scaled(y, 1 / lengths.astype(y.real.dtype)[:, None, None])

    return _by_length(x, lengths, run)

  return platforms.by_device(apply, (x, lengths), sections)


def _apply_forward(
  sections: Sections,
  x: jax.Array,
  lengths: jax.Array,
  dilations: tuple[int, ...],
  inverse: bool,
) -> tuple[jax.Array, tuple[Sections, jax.Array, jax.Array]]:
  y = _apply(sections, x, lengths, dilations, inverse)
  return y, (sections, x, lengths)


def _apply_backward(
  dilations: tuple[int, ...],
  inverse: bool,
  kept: tuple[Sections, jax.Array, jax.Array],
  g: jax.Array,
) -> tuple[Sections, jax.Array, None]:
  """Returns the gradients with respect to the sections and to x.

  The gradient with respect to x is the transposed filter of g. The spectra are
  recomputed, since the forward pass stores only x.
  """
  sections, x, lengths = kept

  def differentiate(
    rows: tuple[jax.Array, jax.Array, jax.Array], sections: Sections
  ) -> tuple[Sections, jax.Array]:
    x, lengths, g = rows

    def run(
      transform: Transform, lengths: jax.Array, size: int
    ) -> tuple[Sections, jax.Array]:
      grid = _grid(sections, dilations, lengths, size)
      response = _conjugate_if(transfer(sections, grid), inverse)
      # Transform the gradient, and multiply by the response.
      back = jnp.conj(transform(jnp.conj(_fill(g, size))))
      back = _scaled(back, 1 / lengths.astype(x.real.dtype)[:, None, None])
      back = response.astype(x.dtype) * back
      # The response is exp(i phase), whose derivative is i exp(i phase).
      slope = -(back * transform(_fill(x, size))).imag
      # If all samples share the frequencies, sum over them first.
      if lengths.shape[0] == 1:
        slope = slope.sum(0, keepdims=True)
      slope = (-slope if inverse else slope).astype(sections.angle.dtype)
      grads = _gradient_of_phases(sections, grid, slope)
      return grads, transform(back)[..., : x.shape[-1]]

    grads, back = _by_length(x, lengths, run)
    return jax.tree.map(lambda grad: grad[None], grads), back

  grads, back = platforms.by_device(differentiate, (x, lengths, g), sections)
  return jax.tree.map(lambda grad: grad.sum(0), grads), back, None


_apply.defvjp(_apply_forward, _apply_backward)


def ring_filter(
  x: jax.Array,
  sections: Sections,
  mask: jax.Array,
  dilations: tuple[int, ...],
  *,
  inverse: bool = False,
) -> jax.Array:
  """Filters every channel of the tokens, which form a ring without padding.

  The first half of the channels is the real part of d / 2 complex channels, and
  the second half is the imaginary part. For any number of sections this takes
  two Fourier transforms of n points if all lengths are n and
  `_by_length` takes them, and four of about 2 n points otherwise.

  Args:
    x: tokens, [b, n, d].
    sections: parameters of the sections on d / 2 complex channels.
    mask: bool [b, n], True at tokens; masked positions are not on the ring.
    dilations: dilations in tokens, one per group of channels; their number
      divides d / 4.
    inverse: True for the adjoint, which inverts the filter.

  Returns:
    The filtered tokens [b, n, d] in the dtype of x, 0 at padding.

  Raises:
    UserError: if there are more than 65,536 positions.
  """
  n, d = x.shape[1:]
  if n > LONGEST:
    raise UserError(f"A ring of {n} tokens: give at most {LONGEST}.")
  if n == 0:
    return x
  # Move tokens before padding, and pair channels: complex [b, d / 2, n].
  tokens = to_front(x, mask)
  lengths = mask.sum(1).astype(jnp.int32)
  tokens = jnp.swapaxes(tokens.astype(_wide(x)), 1, 2)
  z = jax.lax.complex(tokens[:, : d // 2], tokens[:, d // 2 :])
  # Filter; an empty sequence is a ring of one zero.
  z = _apply(sections, z, jnp.maximum(lengths, 1), tuple(dilations), inverse)
  # Restore the channels and the positions.
  y = jnp.concatenate([z.real, z.imag], 1)
  y = move_back(jnp.swapaxes(y, 1, 2), mask)
  return jnp.where(mask[..., None], y, 0).astype(x.dtype)


def _wide(x: jax.Array) -> jnp.dtype:
  return jnp.promote_types(x.dtype, jnp.float32)
