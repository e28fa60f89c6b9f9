"""Linear recurrences h_t = a_t h_(t-1) + b_t of real or complex numbers.

`linear_scan` needs nothing of this package but JAX. It has several forms, which
give one result but for rounding, at different speeds. Its backward pass stores
one state for each `SEGMENT` steps.

Complex numbers are pairs of real arrays inside, since accelerators compute and
compile these faster; on CPUs they are complex arrays, for the same reason.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformers.foundations.registry import check_keywords

SEGMENT = 1_024  # Steps whose states the backward pass holds at a time.
CHUNK = 32  # Steps of a chunk, all of which run at the same time.


class Pair(NamedTuple):
  """Real and imaginary part of numbers; no imaginary part for real ones."""

  real: jax.Array
  # None for real numbers. `| Any`, since most callers have complex ones.
  imag: jax.Array | Any = None


def _map(function: Any, *pairs: Pair) -> Pair:
  """Applies a function to the parts of pairs, all of which have the same."""
  return jax.tree.map(function, *pairs)


def times(x: Pair, y: Pair) -> Pair:
  """Returns the products of numbers."""
  if x.imag is None and y.imag is None:
    return Pair(x.real * y.real)
  if x.imag is None:
    return Pair(x.real * y.real, x.real * y.imag)
  if y.imag is None:
    return Pair(x.real * y.real, x.imag * y.real)
  real = x.real * y.real - x.imag * y.imag
  return Pair(real, x.real * y.imag + x.imag * y.real)


def _plus(x: Pair, y: Pair) -> Pair:
  return _map(jnp.add, x, y)


def _adjoint(x: Pair) -> Pair:
  """Returns the factor by which a gradient goes back through a product.

  JAX's gradient with respect to a complex array is the conjugate of that with
  respect to its parts.
  """
  return x if x.imag is None else Pair(x.real, -x.imag)


def _merge(x: Pair) -> Pair:
  """Returns complex numbers as one array, as if they were real."""
  return x if x.imag is None else Pair(jax.lax.complex(*x))


def _ones_where(keep: jax.Array | None, a: Pair) -> Pair:
  """Returns a where `keep`, and 1 elsewhere."""
  if keep is None:
    return a
  imag = None if a.imag is None else jnp.where(keep, a.imag, 0)
  return Pair(jnp.where(keep, a.real, 1), imag)


def _beside(x: Pair, y: Pair) -> Pair:
  """Returns x with axes in front, as many as y has."""
  lift = (1,) * (y.real.ndim - x.real.ndim)
  return _map(lambda part: part.reshape(lift + part.shape), x)


def _cut(x: jax.Array, length: int, axis: int) -> jax.Array:
  """Cuts the steps of x [batch, n, ...] into parts, the last filled with 0.

  Args:
    x: an array, with axes [batch, parts, length, ...] after the cut.
    length: steps of a part.
    axis: axis that is moved to the front: 1 for the parts, 2 for their steps.
  """
  rest = -x.shape[1] % length
  filled = jnp.pad(x, ((0, 0), (0, rest), *[(0, 0)] * (x.ndim - 2)))
  parts = filled.reshape(x.shape[0], -1, length, *x.shape[2:])
  return jnp.moveaxis(parts, axis, 0)


def _join(x: jax.Array, n: int, axis: int) -> jax.Array:
  """Undoes `_cut`, for n steps."""
  x = jnp.moveaxis(x, 0, axis)
  return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :n]


@check_keywords
def linear_scan(
  a: Any,
  b: Any,
  *,
  mask: jax.Array | None = None,
  initial: Any = None,
  reverse: bool = False,
  form: str = "auto",
) -> tuple[Any, Any]:
  """Returns all states of h_t = a_t h_(t-1) + b_t, and the last one.

  A step that `mask` leaves out changes nothing: its state is that of the step
  before. States are computed in float32 at least; those of all steps are
  returned in the type of `b`.

  The backward pass computes the states anew, `SEGMENT` steps at a time, and
  keeps none but those between the segments. There is no forward-mode
  differentiation.

  Args:
    a: factors; [...] for the same in every step, or [batch or 1, n, ...]. Real
      or complex arrays, or pairs (real, imaginary) of arrays.
    b: what is added, [batch, n, ...], likewise.
    mask: bool [batch, n], False at steps to leave out; None for all True.
    initial: state before the first step, [batch, ...]; None for 0.
    reverse: True to begin with the last step.
    form: "scan", one step after another; "associative", a tree of depth log n;
      "chunked", chunks of steps side by side, then from chunk to chunk, for
      factors of which `CHUNK` in a row do not overflow; "fft", a convolution
      with the powers of a, for the same a with |a| <= 1 in every step and no
      mask, whose errors are relative to the largest state; or "auto", the
      fastest of the first two for the device at hand.

  Returns:
    The states [batch, n, ...], and the last state [batch, ...], that of step 0
    with `reverse`. Both are complex if an argument is, and pairs if `b` is one.

  Raises:
    ValueError: for an unknown form, shapes that do not go together, or the form
      "fft" where it does not apply.
  """
  factor, added = _pair(a), _pair(b)
  start = _pair(0.0 if initial is None else initial)
  mask = None if mask is None else jnp.asarray(mask)
  _check(factor, added, mask, form)
  shape, dtype = added.real.shape, added.real.dtype
  wide = jnp.promote_types(dtype, jnp.float32)
  dtype = dtype if jnp.issubdtype(dtype, jnp.floating) else wide
  factor, added, start = _promote(factor, added, start, wide)
  start = _map(lambda x: jnp.broadcast_to(x, (shape[0], *shape[2:])), start)
  # Constant factors have every axis of a state.
  if _is_constant(factor, added):
    factor = _map(
      lambda x: x.reshape((1,) * (len(shape) - 2 - x.ndim) + x.shape), factor
    )
  # A step that is left out adds nothing, whatever its numbers are.
  keep = None
  if mask is not None:
    keep = mask.reshape(*mask.shape, *(1,) * (len(shape) - 2))
    added = _map(lambda x: jnp.where(keep, x, 0), added)
  if reverse:
    added, keep = jax.tree.map(lambda x: jnp.flip(x, 1), (added, keep))
    if not _is_constant(factor, added):
      factor = _map(lambda x: jnp.flip(x, 1), factor)
  if form == "auto":
    form = _fastest()
  if form != "fft" and jax.default_backend() == "cpu":
    factor, added, start = map(_merge, (factor, added, start))
  states = _states(form, factor, added, keep, start)
  last = _map(lambda x: x[:, -1], states)
  if reverse:
    states = _map(lambda x: jnp.flip(x, 1), states)
  return _unpair(states, dtype, b), _unpair(last, wide, b)


def _promote(
  factor: Pair, added: Pair, start: Pair, dtype: Any
) -> tuple[Pair, Pair, Pair]:
  """Returns all in one dtype, and with an imaginary part if any has one.

  Factors stay real where they are.
  """
  is_complex = any(x.imag is not None for x in (factor, added, start))
  factor, added, start = (
    _map(lambda x: x.astype(dtype), x) for x in (factor, added, start)
  )
  return factor, _complete(added, is_complex), _complete(start, is_complex)


def _pair(x: Any) -> Pair:
  if isinstance(x, tuple):
    return Pair(*jnp.broadcast_arrays(*x))
  x = jnp.asarray(x)
  if jnp.iscomplexobj(x):
    return Pair(x.real, x.imag)
  return Pair(x)


def _unpair(x: Pair, dtype: Any, like: Any) -> Any:
  """Returns numbers in the caller's form, their parts in a type."""
  if x.imag is None and not jnp.iscomplexobj(x.real):
    return x.real.astype(dtype)
  if not isinstance(like, tuple):
    return jax.lax.complex(*x) if x.imag is not None else x.real
  if x.imag is None:
    x = Pair(x.real.real, x.real.imag)
  return _map(lambda part: part.astype(dtype), x)


def _complete(x: Pair, is_complex: bool) -> Pair:
  if is_complex and x.imag is None:
    return Pair(x.real, jnp.zeros_like(x.real))
  return x


def _is_constant(a: Pair, b: Pair) -> bool:
  return a.real.ndim < b.real.ndim


def _check(a: Pair, b: Pair, mask: jax.Array | None, form: str) -> None:
  shape = b.real.shape
  if form not in ("auto", *FORMS):
    raise ValueError(f"Unknown form {form!r}: choose auto, {', '.join(FORMS)}.")
  if len(shape) < 2 or shape[1] < 1:
    raise ValueError(
      f"b has the shape {shape}: give [batch, n, ...] with n > 0."
    )
  is_constant = _is_constant(a, b)
  wanted = shape[2:] if is_constant else shape
  try:
    fits = jnp.broadcast_shapes(a.real.shape, wanted) == wanted
  except ValueError:
    fits = False
  if not fits or (not is_constant and a.real.shape[1] != shape[1]):
    raise ValueError(
      f"a has the shape {a.real.shape} and b {shape}: give a as {shape[2:]}, "
      f"the same in every step, or as {shape}."
    )
  if mask is not None and mask.shape != shape[:2]:
    raise ValueError(f"mask has the shape {mask.shape}: give {shape[:2]}.")
  if form == "fft" and not (is_constant and mask is None):
    raise ValueError(
      'form="fft" is for the same a in every step, and no mask: choose another.'
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _states(
  form: str, a: Pair, b: Pair, keep: jax.Array | None, start: Pair
) -> Pair:
  """Returns the states of all steps; b is 0 at steps that are left out."""
  return FORMS[form](a, b, keep, start)


def _states_forward(
  form: str, a: Pair, b: Pair, keep: jax.Array | None, start: Pair
) -> tuple[Pair, Any]:
  states = FORMS[form](a, b, keep, start)
  # Keep the state before each segment.
  n = b.real.shape[1]
  length = _segment(form, n)
  before = _map(
    lambda h, s: jnp.concatenate(
      [s[:, None], h[:, length - 1 : n - 1 : length]], 1
    ),
    states,
    start,
  )
  return states, (a, b, keep, before)


def _segment(form: str, n: int) -> int:
  return n if form == "fft" or n <= SEGMENT else SEGMENT


def _states_backward(form: str, kept: Any, g: Pair) -> tuple[Any, ...]:
  a, b, keep, before = kept
  n = b.real.shape[1]
  length = _segment(form, n)
  is_constant, is_loop = _is_constant(a, b), form == "scan"
  fixed = a if is_constant else None
  # The last segment is filled up with steps that change nothing.
  if n % length and keep is None:
    keep = jnp.ones((1, n, *(1,) * (b.real.ndim - 2)), bool)

  # A loop has steps as its first axis: left behind the batch, XLA would move
  # them in every segment, which is slow for complex numbers.
  def cut(x: jax.Array) -> jax.Array:
    if not is_loop:
      return _cut(x, length, 1)
    x = jnp.moveaxis(x, 1, 0)
    x = jnp.pad(x, ((0, -n % length), *[(0, 0)] * (x.ndim - 1)))
    return x.reshape(-1, length, *x.shape[1:])

  def join(x: jax.Array) -> jax.Array:
    if not is_loop:
      return _join(x, n, 1)
    return jnp.moveaxis(x.reshape(-1, *x.shape[2:])[:n], 0, 1)

  backward = (
    _loop_backward if is_loop else functools.partial(_segment_backward, form)
  )

  def step(carry: Any, segment: Any) -> tuple[Any, Any]:
    after, total = carry
    da, db, after = backward(fixed, after, segment)
    if is_constant:
      return (after, _plus(total, da)), (None, db)
    return (after, total), (da, db)

  after = _map(lambda x: jnp.zeros_like(x[:, 0]), before)
  total = None if fixed is None else _map(jnp.zeros_like, fixed)
  starts = _map(lambda x: jnp.moveaxis(x, 1, 0), before)
  steps = (None if is_constant else a, b, keep, g)
  (dstart, total), (da, db) = jax.lax.scan(
    step, (after, total), (starts, *jax.tree.map(cut, steps)), reverse=True
  )
  da = total if is_constant else _map(join, da)
  return da, _map(join, db), None, dstart


def _segment_backward(
  form: str, fixed: Pair | None, after: Pair, segment: Any
) -> tuple[Pair, Pair, Pair]:
  """Returns the gradients of a segment, and of the state before it.

  Args:
    form: name of the form.
    fixed: factor of all steps, or None.
    after: gradient of the segment's last state, from the steps behind it.
    segment: the state before it; factors of its steps, or None; what is added;
      the steps that count; and the gradient of the states.
  """
  before, factors, b, keep, g = segment
  a = factors if fixed is None else fixed
  run = FORMS[form]
  states = run(a, b, keep, before)
  earlier = _map(
    lambda h, s: jnp.concatenate([s[:, None], h[:, :-1]], 1), states, before
  )
  # Gradients go backwards: each step multiplies by the factor of the next one.
  flip = functools.partial(jnp.flip, axis=1)

  def shift(x: jax.Array, fill: Any) -> jax.Array:
    end = jnp.full_like(x[:, :1], fill)
    return flip(jnp.concatenate([x[:, 1:], end], 1))

  # The last step of the segment takes `after` as it is.
  gradient = _map(flip, g)
  first = _map(lambda x, y: x.at[:, 0].add(y), gradient, after)
  if fixed is None:
    imag = None if a.imag is None else shift(a.imag, 0)
    factor = Pair(shift(a.real, 1), imag)
  else:
    factor = a
  kept = None if keep is None else shift(keep, False)
  zero = _map(jnp.zeros_like, before)
  lam = _map(flip, run(_adjoint(factor), first, kept, zero))
  effective = times(lam, _adjoint(earlier))
  if keep is not None:
    effective = _map(lambda x: jnp.where(keep, x, 0), effective)
  da = _reduce(effective, a, is_constant=fixed is not None)
  # Gradient of the state before the segment.
  head = None if keep is None else keep[:, 0]
  decay = a if fixed is not None else _map(lambda x: x[:, 0], a)
  last = _map(lambda x: x[:, 0], lam)
  out = times(_adjoint(_beside(_ones_where(head, decay), last)), last)
  return da, lam, out


def _loop_backward(
  fixed: Pair | None, after: Pair, segment: Any
) -> tuple[Pair, Pair, Pair]:
  """Returns what `_segment_backward` does; steps are the first axis here."""
  before, factors, b, keep, g = segment

  def forward(h: Pair, args: Any) -> tuple[Pair, Pair]:
    return _advance(fixed, h, args), h

  def backward(carry: Any, args: Any) -> tuple[Any, Any]:
    after, total = carry
    factor, kept, gradient, earlier = args
    factor = factor if fixed is None else fixed
    lam = _plus(gradient, after)
    effective = times(lam, _adjoint(earlier))
    if kept is not None:
      effective = _map(lambda x: jnp.where(kept, x, 0), effective)
    factor = _beside(_ones_where(kept, factor), lam)
    after = times(_adjoint(factor), lam)
    if fixed is None:
      return (after, None), (lam, effective)
    return (after, _plus(total, effective)), (lam, None)

  _, earlier = jax.lax.scan(forward, before, (factors, b, keep))
  total = None if fixed is None else _map(jnp.zeros_like, before)
  (out, total), (lam, effective) = jax.lax.scan(
    backward, (after, total), (factors, keep, g, earlier), reverse=True
  )
  if fixed is None or total is None:  # Both, or neither.
    return _reduce(effective, factors, is_constant=False), lam, out
  total = _map(lambda x: x[None], total)
  return _reduce(total, fixed, is_constant=True), lam, out


def _reduce(x: Pair, like: Pair, *, is_constant: bool) -> Pair:
  """Returns sums of x [batch, n, ...] in the shape of the factors."""

  def add(part: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    if jnp.iscomplexobj(part) and not jnp.iscomplexobj(like.real):
      part = part.real
    if is_constant:
      part = part.sum((0, 1))
    axes = [k for k, size in enumerate(shape) if size == 1 < part.shape[k]]
    return part.sum(tuple(axes), keepdims=True)

  imag = None if like.imag is None else add(x.imag, like.imag.shape)
  return Pair(add(x.real, like.real.shape), imag)


_states.defvjp(_states_forward, _states_backward)


def _advance(fixed: Pair | None, h: Pair, args: Any) -> Pair:
  """Returns the state after h.

  Args:
    fixed: factor of all steps, or None.
    h: a state.
    args: factor of the step, or None; what is added; and where it counts.
  """
  factor, added, kept = args
  factor = _ones_where(kept, factor if fixed is None else fixed)
  return _plus(times(_beside(factor, h), h), added)


def _scan(a: Pair, b: Pair, keep: jax.Array | None, start: Pair) -> Pair:
  """One step after another."""
  fixed = a if _is_constant(a, b) else None

  def step(h: Pair, args: Any) -> tuple[Pair, Pair]:
    h = _advance(fixed, h, args)
    return h, h

  steps = (a if fixed is None else None, b, keep)
  leading = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), steps)
  _, states = jax.lax.scan(step, start, leading)
  return _map(lambda x: jnp.moveaxis(x, 0, 1), states)


def _associative(a: Pair, b: Pair, keep: jax.Array | None, start: Pair) -> Pair:
  """A tree of depth log n."""
  shape = b.real.shape
  factor = _ones_where(keep, a)
  factor = _map(lambda x: jnp.broadcast_to(x, shape), factor)
  head = _plus(
    times(_map(lambda x: x[:, 0], factor), start),
    _map(lambda x: x[:, 0], b),
  )
  b = _map(lambda x, y: x.at[:, 0].set(y), b, head)

  def combine(x: Any, y: Any) -> Any:
    return times(y[0], x[0]), _plus(times(y[0], x[1]), y[1])

  _, states = jax.lax.associative_scan(combine, (factor, b), axis=1)
  return states


def _chunked(a: Pair, b: Pair, keep: jax.Array | None, start: Pair) -> Pair:
  """Chunks of steps side by side, then from chunk to chunk."""
  is_constant = _is_constant(a, b)
  # [CHUNK, batch, chunks, ...].
  cut = functools.partial(_cut, length=CHUNK, axis=2)
  steps = jax.tree.map(cut, (None if is_constant else a, b, keep))

  def step(carry: Any, args: Any) -> tuple[Any, Any]:
    h, decay = carry
    factor, added, kept = args
    factor = _ones_where(kept, a if is_constant else factor)
    carry = _plus(times(factor, h), added), times(factor, decay)
    return carry, carry

  zero = _map(lambda x: jnp.zeros_like(x[0]), steps[1])
  # Products of the factors so far: one for all chunks where they are the same.
  first = a if is_constant else _map(lambda x: x[0], steps[0])
  if keep is not None:
    first = _map(lambda x: x * jnp.ones_like(steps[2][0], x.dtype), first)
  one = _ones_where(jnp.zeros((), bool), first)
  (ends, decays), (local, decay) = jax.lax.scan(step, (zero, one), steps)

  # From chunk to chunk.
  def pass_on(h: Pair, args: Any) -> tuple[Pair, Pair]:
    end, factor = args
    return _plus(times(factor if factor is not None else decays, h), end), h

  leading = _map(lambda x: jnp.moveaxis(x, 1, 0), ends)
  varies = decays.real.ndim == ends.real.ndim
  factors = _map(lambda x: jnp.moveaxis(x, 1, 0), decays) if varies else None
  _, before = jax.lax.scan(pass_on, start, (leading, factors))
  before = _map(lambda x: jnp.moveaxis(x, 0, 1)[None], before)
  if not varies:
    decay = _map(lambda x: x[:, None, None], decay)
  states = _plus(local, times(decay, before))
  join = functools.partial(_join, n=b.real.shape[1], axis=2)
  return _map(join, states)


def _fft(a: Pair, b: Pair, keep: jax.Array | None, start: Pair) -> Pair:
  """A convolution with the powers of a."""
  del keep
  n = b.real.shape[1]
  # The powers a to a^n are states without anything added, [n, ...].
  one = _complete(Pair(jnp.ones_like(a.real[None])), a.imag is not None)
  nothing = _map(lambda x: jnp.zeros((1, n, *x.shape), x.dtype), a)
  powers = _map(lambda x: x[0], _associative(a, nothing, None, one))
  kernel = _map(lambda x, y: jnp.concatenate([x, y[:-1]]), one, powers)
  if b.imag is None:
    spectrum = jnp.fft.rfft(b.real, 2 * n, axis=1) * jnp.fft.rfft(
      kernel.real, 2 * n, axis=0
    )
    states = Pair(jnp.fft.irfft(spectrum, 2 * n, axis=1)[:, :n])
  else:
    kernel = _complete(kernel, True)
    spectrum = jnp.fft.fft(jax.lax.complex(*b), 2 * n, axis=1) * jnp.fft.fft(
      jax.lax.complex(*kernel), 2 * n, axis=0
    )
    result = jnp.fft.ifft(spectrum, axis=1)[:, :n]
    states = Pair(result.real, result.imag)
  decay = _map(lambda x: x[None], powers)
  return _plus(states, times(decay, _map(lambda x: x[:, None], start)))


FORMS = {
  "scan": _scan,
  "associative": _associative,
  "chunked": _chunked,
  "fft": _fft,
}


def _fastest() -> str:
  """Returns the name of the fastest form for the device at hand."""
  return "scan" if jax.default_backend() == "cpu" else "associative"
