"""All-pass filters in time: a nonexpansive (1-Lipschitz) mixer.

A section is h_t = lambda h_(t-m) + s x_t, y_t = s h_(t-m) - conj(lambda) x_t
on a complex channel, with s = sqrt(1 - |lambda|^2) and the dilation m. The
matrix [[lambda, s], [s, -conj(lambda)]] that maps (h_(t-m), x_t) to (h_t, y_t)
is unitary. Therefore the outputs and the last m states determine the inputs and
the first m states, and for any length the squared norm of the outputs and the
last states equals the squared norm of the inputs and the first states.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Interval, Length
from jaxformers.models.activations import elu
from jaxformers.models.cache import (
  check_causal,
  count_tokens,
  is_decoding,
  recall,
  remember,
)
from jaxformers.models.kinds import EIGENVALUES
from jaxformers.models.mixer import MIXERS
from jaxformers.models.mixers.convolution import move_back, to_front
from jaxformers.models.parallel import product
from jaxformers.models.reductions import wide
from jaxformers.models.variables import find_rotations, rotation
from jaxformers.models.variants import ALWAYS, MODELS, Variant
from jaxformers.scan import Pair, linear_scan, times

MODELS.register("allpass")(Variant("allpass", "contractive", bounded=ALWAYS))

# |lambda| <= exp(-SLOWEST) < 1: with |lambda| = 1 no input enters the state.
SLOWEST = 1e-3


class Sections(NamedTuple):
  """Parameters of S sections in cascade on C complex channels.

  Attributes:
    decay: log(-log |lambda| - SLOWEST), float32 [S, C].
    angle: angle of lambda, float32 [S, C].
  """

  decay: jax.Array
  angle: jax.Array

  def log(self) -> Pair:
    """Returns log lambda, a pair of [S, C]."""
    return Pair(-(SLOWEST + jnp.exp(self.decay)), self.angle)

  def eigenvalues(self) -> jax.Array:
    """Returns lambda, complex [S, C]."""
    return jnp.exp(jax.lax.complex(*self.log()))

  @classmethod
  def make(cls, module: nn.Module, shape: tuple[int, int]) -> Sections:
    """Creates the parameters `decay` and `angle` in the call of a module."""
    return cls(
      module.param("decay", nn.initializers.uniform(2.0), shape),
      module.param("angle", nn.initializers.uniform(2 * math.pi), shape),
    )


class Past(NamedTuple):
  """State of a section between two parts of a stream.

  Attributes:
    num_tokens: number of tokens so far, int32 [b].
    states: states h of the last m tokens, a pair of [b, m, C]; the state of
      token t is at index t mod m.
  """

  num_tokens: jax.Array
  states: Pair


def begin(batch: int, dilation: int, channels: int, dtype: Any) -> Past:
  """Returns the past of a stream before its first token."""
  zeros = jnp.zeros((batch, dilation, channels), dtype)
  return Past(jnp.zeros((batch,), jnp.int32), Pair(zeros, zeros))


def filter_causally(
  x: Pair, log: Pair, dilation: int, *, reverse: bool = False
) -> Pair:
  """Returns the outputs of a section whose first states are 0.

  Args:
    x: inputs, a pair of [b, n, C]; padding is 0 and at the end.
    log: log lambda, a pair of [C].
    dilation: dilation m of the section.
    reverse: True to read from the last token to the first.
  """
  n = x.real.shape[1]
  # Put token t into row t // m; each of the m columns is a separate recurrence.
  grid = _map(lambda part: _rows(part, dilation), x)
  y, _ = _run(grid, log, None, None, reverse=reverse)
  return _map(lambda part: _flat(part)[:, :n], y)


def filter_stream(
  x: Pair, log: Pair, past: Past, lengths: jax.Array
) -> tuple[Pair, Past]:
  """Returns the outputs for new tokens of a stream, and the past after them.

  Args:
    x: new tokens, a pair of [b, n, C].
    log: log lambda, a pair of [C].
    past: past before the new tokens; its states have the dilation as an axis.
    lengths: number of new tokens, int32 [b]; the rest of x is padding.
  """
  grid, at, is_token = _place(x, past, past.num_tokens, lengths)
  y, last = _run(grid, log, past.states, is_token)
  return _map(at, y), Past(past.num_tokens + lengths, last)


def undo_stream(
  y: Pair, log: Pair, past: Past, lengths: jax.Array
) -> tuple[Pair, Past]:
  """Inverts `filter_stream`: returns the inputs x and the past before them.

  (h_(t-m), x_t) is the adjoint matrix times (h_t, y_t). The inverse is thus a
  section with conj(lambda) that runs from the last token to the first, and
  starts with the last states of the forward section.

  Args:
    y: outputs of `filter_stream`, a pair of [b, n, C].
    log: log lambda, a pair of [C].
    past: past after the tokens of y.
    lengths: number of tokens of y, int32 [b].
  """
  before = past.num_tokens - lengths
  grid, at, is_token = _place(y, past, before, lengths)
  # Run the section with conj(lambda) backwards.
  x, first = _run(
    grid, Pair(log.real, -log.imag), past.states, is_token, reverse=True
  )
  return _map(at, x), Past(before, first)


def _place(
  x: Pair, past: Past, before: jax.Array, lengths: jax.Array
) -> tuple[Pair, Any, jax.Array]:
  """Puts tokens into rows of m: token t of the stream is in column t mod m.

  Returns:
    The rows, a pair of [b, rows, m, C]; a function that takes the tokens out of
    such an array, [b, n, C]; and a mask of the rows, bool [b, rows, m], True at
    tokens.
  """
  n, m = x.real.shape[1], past.states.real.shape[1]
  # Shift the tokens of each sample so that its first is at column t mod m.
  size = -(-(n + m - 1) // m) * m
  first = (before % m)[:, None]
  source = jnp.arange(size)[None] - first
  is_token = (source >= 0) & (source < lengths[:, None])
  source = jnp.clip(source, 0, n - 1)[..., None]
  target = (jnp.arange(n)[None] + first)[..., None]

  def put(part: jax.Array) -> jax.Array:
    return _rows(jnp.take_along_axis(part, source, 1), m)

  def at(part: jax.Array) -> jax.Array:
    return jnp.take_along_axis(_flat(part), target, 1)

  return _map(put, x), at, is_token.reshape(is_token.shape[0], -1, m)


def _run(
  x: Pair,
  log: Pair,
  states: Pair | None,
  is_token: jax.Array | None,
  *,
  reverse: bool = False,
) -> tuple[Pair, Pair]:
  """Runs the m recurrences of a section in parallel.

  Args:
    x: inputs, a pair of [b, rows, m, C].
    log: log lambda, a pair of [C].
    states: first states, a pair of [b, m, C]; None for 0.
    is_token: bool [b, rows, m], False at steps to skip; None to skip none.
    reverse: True to begin with the last row.

  Returns:
    The outputs, a pair of [b, rows, m, C], undefined at skipped steps; and the
    last states, a pair of [b, m, C].
  """
  # lambda = exp(log lambda).
  dtype = x.real.dtype
  log = _map(lambda part: part.astype(dtype), log)
  size = jnp.exp(log.real)
  factor = Pair(size * jnp.cos(log.imag), size * jnp.sin(log.imag))
  # s = sqrt(1 - |lambda|^2), without cancellation near |lambda| = 1.
  other = jnp.sqrt(-jnp.expm1(2 * log.real))[None, None, None]
  drive = _map(lambda part: other * part, x)
  steps = factor
  # A skipped step has the factor 1 and adds 0.
  if is_token is not None:
    keep = is_token[..., None]
    drive = _map(lambda part: jnp.where(keep, part, 0), drive)
    shape = x.real.shape
    steps = Pair(
      jnp.where(keep, jnp.broadcast_to(factor.real, shape), 1),
      jnp.where(keep, jnp.broadcast_to(factor.imag, shape), 0),
    )
  # h_t = lambda h_(t-m) + s x_t
  h, last = linear_scan(steps, drive, initial=states, reverse=reverse)

  def before(part: jax.Array, start: jax.Array) -> jax.Array:
    if reverse:
      return jnp.concatenate([part[:, 1:], start[:, None]], 1)
    return jnp.concatenate([start[:, None], part[:, :-1]], 1)

  if states is None:
    states = _map(lambda part: jnp.zeros_like(part[:, 0]), h)
  # y_t = s h_(t-m) - conj(lambda) x_t
  earlier = _map(before, h, states)
  minus = Pair(-factor.real[None, None, None], factor.imag[None, None, None])
  direct = times(minus, x)
  return _map(lambda a, b: other * a + b, earlier, direct), last


def _map(function: Any, *pairs: Pair) -> Pair:
  return jax.tree.map(function, *pairs)


def _rows(x: jax.Array, m: int) -> jax.Array:
  """Returns x [b, n, C] as [b, rows, m, C], padded with 0."""
  x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % m), (0, 0)))
  return x.reshape(x.shape[0], -1, m, x.shape[-1])


def _flat(x: jax.Array) -> jax.Array:
  return x.reshape(x.shape[0], -1, x.shape[-1])


def cascade_dilations(max_len: int) -> tuple[int, ...]:
  """Returns the dilations 1, 4, 16, ..., up to max_len / 8.

  For any eigenvalues, the mean delay of a section, weighted by energy, is m
  tokens. The mean delay of a cascade is the sum over its sections
  (docs/theory.md, section 11).
  """
  longest = max(max_len // 8, 1)
  return tuple(4**k for k in range(longest.bit_length()) if 4**k <= longest)


@MIXERS.register("allpass")
class AllPass(nn.Module):
  """ELU(F x + b), F a cascade of dilated all-pass filters between rotations.

  F preserves the energy of a sequence, except for the part that remains in the
  last states. Neither F, in any direction of time, nor ELU expands the distance
  of two sequences. The mixer is therefore allowed in the block `contractive`,
  which is injective and Lipschitz as a map of whole sequences. With
  `causal=True` this is a causal counterpart of TransJect.

  Source: new here; a section is the all-pass reverberator of Schroeder 1961
  (Natural sounding artificial reverberation), with complex coefficients.

  Attributes:
    causal: True to read only the present and earlier tokens; False to filter
      one half of the channels in each direction.
    dilations: dilations m of the sections in cascade; () for
      `cascade_dilations`.
    max_len: greatest number of tokens.
    orthogonal_map: name of the map to the rotations, in `orthogonal.MAPS`.
    dtype: compute type of products; parameters and filters are float32.
  """

  kinds: ClassVar[dict[str, str]] = {
    "decay": EIGENVALUES,
    "angle": EIGENVALUES,
  }
  has_step: ClassVar[bool] = True  # Decoding continues from a cache.
  is_bounded: ClassVar[bool] = True  # `gain` is a Lipschitz constant.
  distance: ClassVar[str] = "sequences"
  has_limit: ClassVar[bool] = False  # max_len sets only the dilations.

  causal: bool = False
  dilations: tuple[Annotated[int, Interval("[1, 2^15)")], ...] = ()
  max_len: Length = 1_024
  orthogonal_map: str = "cayley"
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self, x: jax.Array, *, mask: jax.Array, carry: Any, train: bool
  ) -> tuple[jax.Array, Any]:
    del train
    check_causal(self, causal=self.causal)
    d = x.shape[-1]
    least = 2 if self.causal else 4
    if d % least:
      raise UserError(
        f"{d} channels: all-pass filters read complex channels"
        + ("" if self.causal else " in both directions")
        + f". Choose a multiple of {least}."
      )
    # Create the parameters.
    dilations = self.dilations or cascade_dilations(self.max_len)
    sections = Sections.make(self, (len(dilations), d // 2))
    first, second = rotation(self, "mixing", (2, d, d), self.orthogonal_map)
    bias = self.param("bias", nn.initializers.zeros, (d,))
    # Rotate, filter in time, rotate, then apply ELU.
    y = product(x.astype(self.dtype), first.astype(self.dtype))
    y = self._filter(wide(y), sections, dilations, mask)
    y = product(y.astype(self.dtype), second.astype(self.dtype))
    return elu(y + bias.astype(y.dtype)[None, None]), carry

  def _filter(
    self,
    x: jax.Array,
    sections: Sections,
    dilations: tuple[int, ...],
    mask: jax.Array,
  ) -> jax.Array:
    """Filters the tokens, and skips masked positions between tokens."""
    x = to_front(x, mask)
    lengths = mask.sum(1).astype(jnp.int32)
    is_token = (jnp.arange(x.shape[1])[None] < lengths[:, None])[..., None]
    # The halves of the channels are real and imaginary parts.
    half = x.shape[-1] // 2
    y = Pair(x[..., :half], x[..., half:])
    if is_decoding(self):
      # All sections share one count of tokens.
      count = recall(self, "count")
      if count is None:
        count = jnp.zeros(lengths.shape, jnp.int32)
      count_tokens(self, mask)
    # Run the sections one after another.
    for i, m in enumerate(dilations):
      log = _map(lambda part, i=i: part[i], sections.log())
      if is_decoding(self):
        states = recall(self, f"states_{i}")
        if states is None:
          states = begin(x.shape[0], m, half, x.dtype).states
        y, past = filter_stream(y, log, Past(count, states), lengths)
        remember(self, f"states_{i}", past.states)
      elif self.causal:
        y = filter_causally(y, log, m)
      else:
        y = _both_ways(y, log, m)
      # Set padding to 0 again for the next section.
      y = _map(lambda part: jnp.where(is_token, part, 0), y)
    return move_back(jnp.concatenate(y, -1), mask)

  @nn.nowrap
  def gain(self, collections: Mapping[str, Any]) -> float:
    """Returns a Lipschitz constant for sequences with equal masks, in float64.

    This is the product of the spectral norms of the two rotations, since
    sections and ELU are nonexpansive. Rounding of the slowest eigenvalues is
    left out: a section in float32 was measured to add up to 1e-4 of a change
    over 32,768 tokens.

    Args:
      collections: variables of the mixer: `rotations`, or `params` if
        `rotations` are missing.
    """
    # Multiply the norms in float64.
    matrices = find_rotations(collections, self.orthogonal_map)
    (mixing,) = matrices.values()
    norms = np.linalg.norm(np.asarray(mixing, np.float64), 2, (-2, -1))
    return float(norms.prod())


def _both_ways(x: Pair, log: Pair, dilation: int) -> Pair:
  """Filters the first half of the channels forwards, the second backwards."""
  # Run each half of the channels with its own eigenvalues, then join them.
  half = x.real.shape[-1] // 2
  early, late = (
    filter_causally(
      _map(lambda part, c=c: part[..., c], x),
      _map(lambda part, c=c: part[c], log),
      dilation,
      reverse=is_late,
    )
    for c, is_late in ((slice(None, half), False), (slice(half, None), True))
  )
  return _map(lambda a, b: jnp.concatenate([a, b], -1), early, late)
