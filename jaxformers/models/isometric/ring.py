"""All-pass filters on a ring of tokens: linear maps that keep every norm.

A section is h_t = lambda h_(t-m) + s x_t, y_t = s h_(t-m) - conj(lambda) x_t
with s = sqrt(1 - |lambda|^2) and the dilation m, on a complex channel. Its
transfer function (z - conj(lambda)) / (1 - lambda z), z the delay by m tokens,
has modulus 1 at every frequency. If the last tokens are followed by the first,
a sequence of n tokens has n frequencies, so |y| = |x| for every n, and the
inverse is the adjoint. Sections in cascade multiply their transfer functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.errors import UserError
from jaxformers.models.mixers.convolution import move_back, to_front

# |lambda| <= exp(-SLOWEST): where it is 1, the closed ring divides by 0.
SLOWEST = 1e-3
LONGEST = 1 << 16  # Squares of places are exact integers below it.


class Sections(NamedTuple):
  """Parameters of S sections in cascade on C complex channels.

  Attributes:
    decay: float32 [S, C], log of -log |lambda| beyond `SLOWEST`.
    angle: float32 [S, C], the angle of lambda.
  """

  decay: jax.Array
  angle: jax.Array

  def eigenvalues(self) -> jax.Array:
    """Returns lambda, complex [S, C]."""
    log = jax.lax.complex(-(SLOWEST + jnp.exp(self.decay)), self.angle)
    return jnp.exp(log)


def spread_dilations(d: int, length: int) -> tuple[int, ...]:
  """Returns dilations from 1 to an eighth of the length, in even ratios.

  About one for each power of two, as many as divide d / 4, for a group of
  channels has both directions.

  Args:
    d: number of channels.
    length: greatest number of tokens.

  Raises:
    UserError: for a number of channels that is not a multiple of 4.
  """
  if d % 4:
    raise UserError(
      f"d_model={d}: filters read complex channels in both directions, so "
      "choose a multiple of 4."
    )
  longest = min(max(length // 8, 1), LONGEST // 2 - 1)
  count = max(k for k in range(1, longest.bit_length() + 1) if d // 4 % k == 0)
  ratios = np.geomspace(1, longest, count)
  return tuple(round(ratio) for ratio in ratios.tolist())


def delays(dilations: tuple[int, ...], sections: int) -> np.ndarray:
  """Returns the index of the dilation of each section and group, int [S, G].

  The C channels are G groups, one for each dilation. A group has its own
  dilation in the first section, and takes the others in turn.

  Args:
    dilations: G dilations.
    sections: number S of sections.
  """
  count = len(dilations)
  return (np.arange(count)[None] + np.arange(sections)[:, None]) % count


def _unit(
  numerator: jax.Array, denominator: jax.Array, dtype: jnp.dtype
) -> jax.Array:
  """Returns exp(-2 pi i numerator / denominator) for reduced integers."""
  share = numerator.astype(dtype) / denominator.astype(dtype)
  angle = -2 * jnp.pi * share
  return jax.lax.complex(jnp.cos(angle), jnp.sin(angle))


def _scaled(z: jax.Array, factor: jax.Array) -> jax.Array:
  """Returns complex numbers times real ones."""
  return jax.lax.complex(z.real * factor, z.imag * factor)


def transfer(
  sections: Sections, dilations: tuple[int, ...], lengths: jax.Array, n: int
) -> jax.Array:
  """Returns the transfer function at the frequencies of each length.

  Half of the groups read backwards: every other channel.

  Args:
    sections: S sections on C channels.
    dilations: G dilations; G divides C.
    lengths: int32 [b], at least 1.
    n: greatest length.

  Returns:
    Complex [b, C, n] of modulus 1; without meaning from the length on.
  """
  count, channels = sections.angle.shape
  groups = len(dilations)
  frequency = jnp.arange(n, dtype=jnp.uint32)[None, None]
  size = lengths.astype(jnp.uint32)[:, None, None]
  steps = jnp.asarray(dilations, jnp.uint32)[None, :, None]
  # The delay of each dilation at each frequency, [b, G, n].
  delay = _unit((frequency * steps) % size, size, sections.angle.dtype)
  delay = delay[:, :, None, None]
  # Channels are [G, C / 2G, 2]: forwards, then backwards.
  delay = jnp.concatenate([delay, jnp.conj(delay)], 3)
  eigenvalues = sections.eigenvalues().reshape(count, groups, -1, 2)
  product = jnp.ones((), eigenvalues.dtype)
  denominator = product
  for index, factor in zip(delays(dilations, count), eigenvalues, strict=True):
    z = delay[:, index]
    product = product * z
    denominator = denominator * (1 - factor[None, ..., None] * z)
  # (z - conj a) / (1 - a z) is z conj(1 - a z) / (1 - a z) where |z| = 1.
  square = jnp.square(denominator.real) + jnp.square(denominator.imag)
  y = _scaled(product * jnp.square(jnp.conj(denominator)), 1 / square)
  return y.reshape(len(lengths), channels, n)


def _full(
  sections: Sections,
  x: jax.Array,
  lengths: jax.Array,
  dilations: tuple[int, ...],
  inverse: bool,
) -> jax.Array:
  """Filters x, complex [b, C, n], all of it tokens."""
  del lengths
  n = x.shape[-1]
  response = transfer(sections, dilations, jnp.full((1,), n, jnp.int32), n)
  response = (jnp.conj(response) if inverse else response).astype(x.dtype)
  return jnp.fft.ifft(response * jnp.fft.fft(x))


def _short(
  sections: Sections,
  x: jax.Array,
  lengths: jax.Array,
  dilations: tuple[int, ...],
  inverse: bool,
) -> jax.Array:
  """Filters x, complex [b, C, n], of which the first `lengths` are tokens.

  The Fourier transform of each length is a convolution with a chirp (Bluestein
  1970), so one batch has rings of any lengths.
  """
  n = x.shape[-1]
  # All arrays have the size of the convolution: XLA on CPUs computes what it
  # pads six times slower.
  size = _fast_size(2 * n - 1)
  place = jnp.arange(size, dtype=jnp.uint32)[None]
  twice = 2 * lengths.astype(jnp.uint32)[:, None]
  # exp(-i pi k^2 / length), for k from 0 to n - 1, and its conjugate on a ring.
  distance = jnp.minimum(place, size - place)
  chirp = _unit((distance * distance) % twice, twice, x.real.dtype)
  ring = jnp.fft.fft(jnp.conj(chirp))[:, None]
  inside = place < lengths.astype(jnp.uint32)[:, None]
  chirp = jnp.where(inside, chirp, 0)[:, None]

  def transform(x: jax.Array) -> jax.Array:
    return chirp * jnp.fft.ifft(jnp.fft.fft(x * chirp) * ring)

  response = transfer(sections, dilations, lengths, size)
  response = (jnp.conj(response) if inverse else response).astype(x.dtype)
  x = jnp.pad(x, ((0, 0), (0, 0), (0, size - n)))
  # The transform back is the conjugate of that of the conjugate.
  y = jnp.conj(transform(jnp.conj(response * transform(x))))[..., :n]
  return _scaled(y, 1 / lengths[:, None, None].astype(y.real.dtype))


def _fast_size(least: int) -> int:
  """Returns the least 2^k or 3 2^k that is not below a number."""
  power = 1 << (least - 1).bit_length()
  return 3 * power // 4 if 3 * power // 4 >= least else power


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _apply(
  sections: Sections,
  x: jax.Array,
  lengths: jax.Array,
  dilations: tuple[int, ...],
  inverse: bool,
) -> jax.Array:
  def run(form: Callable[..., jax.Array]) -> jax.Array:
    return form(sections, x, lengths, dilations, inverse)

  is_full = (lengths == x.shape[-1]).all()
  return jax.lax.cond(is_full, lambda: run(_full), lambda: run(_short))


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
  sections, x, lengths = kept

  # Each branch makes its own spectrum again, so that neither keeps one.
  def pull(form: Callable[..., jax.Array]) -> tuple[Sections, jax.Array]:
    def filtered(sections: Sections, x: jax.Array) -> jax.Array:
      return form(sections, x, lengths, dilations, inverse)

    return jax.vjp(filtered, sections, x)[1](g)

  is_full = (lengths == x.shape[-1]).all()
  grads = jax.lax.cond(is_full, lambda: pull(_full), lambda: pull(_short))
  return *grads, None


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

  The first half of the channels is the real part of the complex ones, and the
  second the imaginary part. Where all lengths are n this is one pair of Fourier
  transforms of n points, whatever the number of sections; else four of 2 n.

  Args:
    x: [b, n, d].
    sections: on d / 2 complex channels.
    mask: [b, n], True at tokens; padding and holes are left out.
    dilations: of the groups of channels; 2 len(dilations) divides d / 2.
    inverse: True for the adjoint, which undoes the filter.

  Returns:
    [b, n, d] in the type of x, 0 at padding.

  Raises:
    UserError: for more than 65,536 tokens.
  """
  n, d = x.shape[1:]
  if n > LONGEST:
    raise UserError(f"A ring of {n} tokens: give at most {LONGEST}.")
  if n == 0:
    return x
  tokens, moved = to_front(x, mask)
  lengths = mask.sum(1).astype(jnp.int32)
  tokens = jnp.swapaxes(tokens.astype(_wide(x)), 1, 2)
  z = jax.lax.complex(tokens[:, : d // 2], tokens[:, d // 2 :])
  # An empty sequence is a ring of one zero.
  z = _apply(sections, z, jnp.maximum(lengths, 1), tuple(dilations), inverse)
  y = jnp.concatenate([z.real, z.imag], 1)
  y = move_back(jnp.swapaxes(y, 1, 2), moved)
  return jnp.where(mask[..., None], y, 0).astype(x.dtype)


def _wide(x: jax.Array) -> jnp.dtype:
  return jnp.promote_types(x.dtype, jnp.float32)
