"""Linear recurrences h_t = a_t h_(t-1) + b_t of real or complex numbers.

`linear_scan` is independent of the models of this package. It has several
forms, which differ in speed and give equal results up to rounding. Between the
passes it stores at most one state per `SEGMENT` steps.

Accelerators compute and compile pairs of real arrays faster than complex
arrays, so complex numbers are pairs there. CPUs are faster with complex arrays,
so pairs are merged into complex arrays there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformers.foundations import platforms
from jaxformers.foundations.registry import check_keywords

SEGMENT = 1_024  # Steps whose states the backward pass holds at a time.
KERNEL_STEPS = 128  # Steps whose numbers the kernel holds at a time.
# Rows of its memory between two rows of one step: an odd number, so that a TPU
# reads the 8 rows of a step at once.
STRIDE = KERNEL_STEPS + 1
CHUNK = 32  # Steps per chunk of the form "chunked"; chunks run in parallel.


class Pair(NamedTuple):
  """Real and imaginary parts of an array of numbers.

  Attributes:
    real: the real parts, or a merged complex array (see `_merge`).
    imag: the imaginary parts; None for real numbers.
  """

  real: jax.Array
  # `| Any` spares callers with complex numbers a check for None.
  imag: jax.Array | Any = None


class Flags(NamedTuple):
  """Steps that are not plain steps of the recurrence.

  Attributes:
    keep: bool [batch, n, 1...], False at steps that copy the state before them;
      None if there are none.
    fresh: bool [batch, n, 1...], True at steps before which the state is set
      to 0; None if there are none.
  """

  keep: jax.Array | None = None
  fresh: jax.Array | None = None


def _forget(fresh: jax.Array | None, h: Pair) -> Pair:
  """Returns 0 where `fresh` is True, also if h is not finite there, else h."""
  if fresh is None:
    return h
  return _map(lambda x: jnp.where(fresh, 0, x), h)


def _map(function: Any, *pairs: Pair) -> Pair:
  """Applies `function` to the real and to the imaginary parts separately.

  Either all pairs have an imaginary part, or none has.
  """
  return jax.tree.map(function, *pairs)


def times(x: Pair, y: Pair) -> Pair:
  """Returns the elementwise product x y."""
  if x.imag is None and y.imag is None:
    return Pair(x.real * y.real)
  if x.imag is None:
    return Pair(x.real * y.real, x.real * y.imag)
  if y.imag is None:
    return Pair(x.real * y.real, x.imag * y.real)
  # (a + b i) (c + d i) = (a c - b d) + (a d + b c) i
  real = x.real * y.real - x.imag * y.imag
  return Pair(real, x.real * y.imag + x.imag * y.real)


def _plus(x: Pair, y: Pair) -> Pair:
  return _map(jnp.add, x, y)


def _adjoint(x: Pair) -> Pair:
  """Returns the factor of the gradient in the backward pass of y -> x y.

  This is the conjugate of x for pairs. For a complex array it is x itself,
  since JAX's gradient with respect to a complex array is the conjugate of the
  gradient with respect to its real and imaginary parts.
  """
  return x if x.imag is None else Pair(x.real, -x.imag)


def _merge(x: Pair) -> Pair:
  """Packs both parts into one complex array, in the field `real`."""
  return x if x.imag is None else Pair(jax.lax.complex(*x))


def _ones_where(keep: jax.Array | None, a: Pair) -> Pair:
  """Returns a where `keep` is True, and 1 elsewhere."""
  if keep is None:
    return a
  imag = None if a.imag is None else jnp.where(keep, a.imag, 0)
  return Pair(jnp.where(keep, a.real, 1), imag)


def _beside(x: Pair, y: Pair) -> Pair:
  """Prepends axes of size one until x has the rank of y."""
  lift = (1,) * (y.real.ndim - x.real.ndim)
  return _map(lambda part: part.reshape(lift + part.shape), x)


def _cut(x: jax.Array, length: int, axis: int) -> jax.Array:
  """Cuts the steps of x into parts and moves one of the two axes to the front.

  The last part is padded with 0.

  Args:
    x: array [batch, n, ...], which becomes [batch, parts, length, ...].
    length: number of steps of a part.
    axis: axis that is moved to the front: 1 for the parts, 2 for their steps.
  """
  rest = -x.shape[1] % length
  filled = jnp.pad(x, ((0, 0), (0, rest), *[(0, 0)] * (x.ndim - 2)))
  parts = filled.reshape(x.shape[0], -1, length, *x.shape[2:])
  return jnp.moveaxis(parts, axis, 0)


def _join(x: jax.Array, n: int, axis: int) -> jax.Array:
  """Inverts `_cut`: returns [batch, n, ...]."""
  x = jnp.moveaxis(x, 0, axis)
  return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :n]


@check_keywords
def linear_scan(
  a: Any,
  b: Any,
  *,
  mask: jax.Array | None = None,
  resets: jax.Array | None = None,
  initial: Any = None,
  reverse: bool = False,
  form: str = "auto",
) -> tuple[Any, Any]:
  """Returns all states of h_t = a_t h_(t-1) + b_t, and the last state.

  A masked step copies the state of the step before it. States are computed in
  the dtype of `b`, in float32 at least, and returned in the dtype of `b`.

  The forward pass stores the states between segments of `SEGMENT` steps; the
  backward pass recomputes the other states, one segment at a time. The forms
  "fft" and "kernel" store none and recompute all at once, which is faster on
  TPUs. There is no forward-mode differentiation.

  If the mesh axis `sequence` splits the steps, each device scans its own, three
  times, and all devices exchange one state and one product of factors.

  Args:
    a: factors, [...] if they are equal in every step, or [batch or 1, n, ...];
      a real or complex array, or a pair (real, imaginary) of arrays.
    b: added terms, [batch, n, ...]; a real or complex array, or a pair.
    mask: bool [batch, n], False at steps to skip; None for all True.
    resets: bool [batch, n], True at steps, also masked ones, before which the
      state is set to 0, in the order of processing; None for no resets. States
      before a reset have no effect after it, even if they are not finite.
    initial: state before the first step, [batch, ...]; None for 0.
    reverse: True to begin with the last step.
    form: algorithm, one of these. "scan" runs one step after another.
      "associative" combines steps in a tree of depth log n. "chunked" runs
      chunks of steps in parallel, then combines the chunks one after another;
      products of `CHUNK` factors must not overflow. "kernel" runs one step
      after another in a Pallas kernel for TPUs; other devices interpret it,
      slowly. "fft" convolves b with the powers of a; it needs factors that are
      equal in every step with |a| <= 1, and no mask, and its errors are
      relative to the largest state. "kernel" and "fft" take no resets. "auto"
      is "scan" on a CPU, "kernel" on TPUs if there are no resets,
      `jax_enable_x64` is off and a device has all steps or a part of equal
      size, and "associative" otherwise.

  Returns:
    The states [batch, n, ...], and the state after the last step [batch, ...],
    which is step 0 with `reverse`. Both are complex if any argument is complex,
    and pairs if `b` is a pair.

  Raises:
    ValueError: if the form is unknown, if the shapes do not fit, or if the form
      "fft" or "kernel" does not apply, such as a kernel for float64 on a TPU.

  Example:
    A running sum with the factor 1 / 2, for one sequence of three steps:

    >>> import jax.numpy as jnp
    >>> states, last = linear_scan(jnp.float32(0.5), jnp.ones((1, 3)))
    >>> states.tolist(), last.tolist()
    ([[1.0, 1.5, 1.75]], [1.75])
  """
  factor, added = _pair(a), _pair(b)
  start = _pair(0.0 if initial is None else initial)
  mask, resets = jax.tree.map(jnp.asarray, (mask, resets))
  _check(factor, added, mask, resets, form)
  # Promote everything to one dtype, and broadcast the first state.
  shape, dtype = added.real.shape, added.real.dtype
  wide = jnp.promote_types(dtype, jnp.float32)
  dtype = dtype if jnp.issubdtype(dtype, jnp.floating) else wide
  factor, added, start = _promote(factor, added, start, wide)
  start = _map(lambda x: jnp.broadcast_to(x, (shape[0], *shape[2:])), start)
  # Give constant factors the rank of a state.
  if _is_constant(factor, added):
    factor = _map(
      lambda x: x.reshape((1,) * (len(shape) - 2 - x.ndim) + x.shape), factor
    )
  # Masked steps add 0, also where b is not finite.
  flags: Flags = jax.tree.map(
    lambda x: x.reshape(*x.shape, *(1,) * (len(shape) - 2)), Flags(mask, resets)
  )
  if flags.keep is not None:
    added = _map(lambda x: jnp.where(flags.keep, x, 0), added)
  run = functools.partial(_run, form, reverse)
  if form not in ("fft", "kernel") and platforms.splits_tokens(*shape[:2]):
    states = _over_devices(run, reverse, factor, added, flags, start)
  else:
    states = run(factor, added, flags, start)
  last = _map(lambda x: x[:, 0 if reverse else -1], states)
  return _unpair(states, dtype, b), _unpair(last, wide, b)


def _run(
  form: str, reverse: bool, a: Pair, b: Pair, flags: Flags, start: Pair
) -> Pair:
  """Returns the states of a recurrence, by a form or "auto"."""
  has_resets = flags.fresh is not None
  form = _resolve(form, b.real.shape, has_resets=has_resets)
  run: Any = functools.partial(_forwards, form)
  if reverse:
    run = _from_end(form, run)
  return run(a, b, flags, start)


def _over_devices(
  run: Callable[..., Pair],
  reverse: bool,
  a: Pair,
  b: Pair,
  flags: Flags,
  start: Pair,
) -> Pair:
  """Returns the states where the mesh splits the steps over devices.

  Each device computes its last state from the state 0, and the product of its
  factors; all devices exchange these, and each runs its steps from the state
  before them.

  Args:
    run: function of a, b, flags and the first state.
    reverse: True if `run` begins with the last step.
    a, b, flags, start: arguments of `_forwards`.
  """
  shape, place = b.real.shape, -1 if reverse else 0
  is_constant = _is_constant(a, b)
  if not is_constant:
    a = _map(lambda x: jnp.broadcast_to(x, shape), a)
  if platforms.backend() == "cpu":
    a, b, start = map(_merge, (a, b, start))
  return platforms.by_device(
    functools.partial(_run_local, run, reverse),
    (None if is_constant else a, _add_start(a, b, flags, start, place), flags),
    a if is_constant else None,
    token_axis=1,
  )


def _add_start(
  a: Pair, b: Pair, flags: Flags, start: Pair, place: int = 0
) -> Pair:
  """Returns b with the share of the first state in the term of one step.

  Args:
    a, b, flags, start: arguments of `_forwards`.
    place: index of the step that is processed first, 0 or -1.
  """
  at_first: Any = jax.tree.map(lambda x: x[:, place], (b, flags))
  factor = a if _is_constant(a, b) else _map(lambda x: x[:, place], a)
  factor = _ones_where(at_first[1].keep, factor)
  head = _plus(times(factor, _forget(at_first[1].fresh, start)), at_first[0])
  return _map(lambda x, y: _put(x, place, y), b, head)


def _put(
  x: jax.Array, place: int, y: jax.Array, *, adds: bool = False
) -> jax.Array:
  """Returns x [batch, n, ...] with y [batch, ...] as one step, or added to it.

  Where the mesh splits the steps, this is a select: XLA splits a scatter into
  a slice of an array wrongly (jax 0.10.2).
  """
  if platforms.keeps_tokens():
    step = x.at[:, place]
    return step.add(y) if adds else step.set(y)
  n = x.shape[1]
  steps = jnp.arange(n).reshape(1, n, *(1,) * (x.ndim - 2))
  new = x + y[:, None] if adds else y[:, None]
  return jnp.where(steps == place % n, new, x)


def _run_local(
  run: Callable[..., Pair], reverse: bool, local: Any, fixed: Pair | None
) -> Pair:
  """Returns the states of the steps of one device: see `_over_devices`.

  Args:
    run, reverse: arguments of `_over_devices`.
    local: factors (or None), added terms and flags of the device's steps.
    fixed: factor of all steps, or None if factors differ.
  """
  varying, b, flags = local
  factor = varying if fixed is None else fixed
  zero = _map(lambda x: jnp.zeros_like(x[:, 0]), b)
  unit = zero._replace(real=jnp.ones_like(zero.real))
  # The last state is `gain` times the first one, plus `end`.
  end, gain = (
    _map(lambda x: x[:, 0 if reverse else -1], run(factor, terms, flags, first))
    for terms, first in ((b, zero), (_map(jnp.zeros_like, b), unit))
  )
  is_cut = None if flags.fresh is None else flags.fresh.any(1)
  devices = jax.tree.map(
    lambda x: jax.lax.all_gather(x, platforms.SEQUENCE), (gain, end, is_cut)
  )

  def step(h: Pair, args: Any) -> tuple[Pair, Pair]:
    gain, end, is_cut = args
    return _plus(times(gain, _forget(is_cut, h)), end), h

  _, before = jax.lax.scan(step, zero, devices, reverse=reverse)
  place = jax.lax.axis_index(platforms.SEQUENCE)
  return run(factor, b, flags, _map(lambda x: x[place], before))


def _forwards(form: str, a: Pair, b: Pair, flags: Flags, start: Pair) -> Pair:
  """Returns the states of a recurrence that begins with the first step."""
  if form not in ("fft", "kernel") and platforms.backend() == "cpu":
    a, b, start = map(_merge, (a, b, start))
  return _states(form, a, b, flags, start)


def _from_end(form: str, run: Callable[..., Pair]) -> Callable[..., Pair]:
  """Returns the function that begins with the last step, for a form.

  Args:
    form: name of the form.
    run: function of a, b, flags and the first state that begins with the first
      step.
  """
  return _kernel_from_end if form == "kernel" else functools.partial(_flip, run)


def _flip(
  run: Callable[..., Pair], a: Pair, b: Pair, flags: Flags, start: Pair
) -> Pair:
  """Returns the states from the last step, by `run` on flipped steps."""
  flip = functools.partial(jnp.flip, axis=1)
  factor = a if _is_constant(a, b) else _map(flip, a)
  added, flags = jax.tree.map(flip, (b, flags))
  return _map(flip, run(factor, added, flags, start))


@jax.custom_vjp
def _kernel_from_end(a: Pair, b: Pair, flags: Flags, start: Pair) -> Pair:
  """Returns `_flip` of the form "kernel", without copies of the steps."""
  return _kernel(a, b, flags, start, reverse=True)


def _kernel_from_end_forward(*args: Any) -> tuple[Pair, Any]:
  return _kernel_from_end(*args), args


def _kernel_from_end_backward(args: Any, g: Pair) -> tuple[Any, ...]:
  a, b, flags, start = args
  run = functools.partial(_states, "kernel")
  _, pull = jax.vjp(lambda a, b, h: _flip(run, a, b, flags, h), a, b, start)
  da, db, dstart = pull(g)
  return da, db, None, dstart


_kernel_from_end.defvjp(_kernel_from_end_forward, _kernel_from_end_backward)


def _promote(
  factor: Pair, added: Pair, start: Pair, dtype: Any
) -> tuple[Pair, Pair, Pair]:
  """Casts all arguments to `dtype`, and makes all complex if any is complex.

  Real factors stay real.
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
  """Returns x as an array or a pair, as the caller gave `like`.

  Real numbers and the parts of a pair are cast to `dtype`.
  """
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


def _check(
  a: Pair,
  b: Pair,
  mask: jax.Array | None,
  resets: jax.Array | None,
  form: str,
) -> None:
  # Check the form and the rank of b.
  shape = b.real.shape
  if form not in ("auto", *FORMS):
    raise ValueError(f"Unknown form {form!r}: choose auto, {', '.join(FORMS)}.")
  if len(shape) < 2 or shape[1] < 1:
    raise ValueError(
      f"b has the shape {shape}: give [batch, n, ...] with n > 0."
    )
  # Check that a broadcasts to the shape of a state, or of b.
  is_constant = _is_constant(a, b)
  wanted = shape[2:] if is_constant else shape
  try:
    fits = jnp.broadcast_shapes(a.real.shape, wanted) == wanted
  except ValueError:
    fits = False
  if not fits or (not is_constant and a.real.shape[1] != shape[1]):
    raise ValueError(
      f"a has the shape {a.real.shape} and b {shape}: give a as {shape[2:]}, "
      f"equal in every step, or as {shape}."
    )
  # Check mask and resets, and the conditions of the forms.
  for name, flags in (("mask", mask), ("resets", resets)):
    if flags is not None and flags.shape != shape[:2]:
      raise ValueError(f"{name} has the shape {flags.shape}: give {shape[:2]}.")
  if form in ("fft", "kernel") and resets is not None:
    raise ValueError(f"form={form!r} takes no resets: choose another.")
  if form == "kernel" and b.real.dtype == jnp.float64 and platforms.on_tpu():
    raise ValueError('form="kernel" computes in float32 on a TPU: use "auto".')
  if form == "fft" and not (is_constant and mask is None):
    raise ValueError(
      'form="fft" needs the same a in every step, and no mask: choose another.'
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _states(form: str, a: Pair, b: Pair, flags: Flags, start: Pair) -> Pair:
  """Returns the states of all steps; b is 0 at masked steps."""
  return FORMS[form](a, b, flags, start)


def _states_forward(
  form: str, a: Pair, b: Pair, flags: Flags, start: Pair
) -> tuple[Pair, Any]:
  states = FORMS[form](a, b, flags, start)
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
  return states, (a, b, flags, before)


def _segment(form: str, n: int) -> int:
  return n if form in ("fft", "kernel") or n <= SEGMENT else SEGMENT


def _states_backward(form: str, kept: Any, g: Pair) -> tuple[Any, ...]:
  a, b, flags, before = kept
  n = b.real.shape[1]
  length = _segment(form, n)
  is_constant, is_loop = _is_constant(a, b), form == "scan"
  fixed = a if is_constant else None
  # Pad the last segment with masked steps.
  if n % length and flags.keep is None:
    ones = jnp.ones((1, n, *(1,) * (b.real.ndim - 2)), bool)
    flags = flags._replace(keep=ones)

  # The form "scan" moves the steps to the first axis here, once. Otherwise XLA
  # would move them in every segment, which is slow for complex numbers.
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

  # The carry is the gradient of the state between segments, and the sum of the
  # gradients of constant factors.
  def step(carry: Any, segment: Any) -> tuple[Any, Any]:
    after, total = carry
    da, db, after = backward(fixed, after, segment)
    if is_constant:
      return (after, _plus(total, da)), (None, db)
    return (after, total), (da, db)

  # Run from the last segment to the first.
  after = _map(lambda x: jnp.zeros_like(x[:, 0]), before)
  total = None if fixed is None else _map(jnp.zeros_like, fixed)
  starts = _map(lambda x: jnp.moveaxis(x, 1, 0), before)
  steps = (None if is_constant else a, b, flags, g)
  (dstart, total), (da, db) = jax.lax.scan(
    step, (after, total), (starts, *jax.tree.map(cut, steps)), reverse=True
  )
  da = total if is_constant else _map(join, da)
  return da, _map(join, db), None, dstart


def _segment_backward(
  form: str, fixed: Pair | None, after: Pair, segment: Any
) -> tuple[Pair, Pair, Pair]:
  """Returns the gradients of a segment's a and b, and of the state before it.

  lambda_t = g_t + conj(a_(t+1)) lambda_(t+1) is the gradient of h_t. Then
  da_t = lambda_t conj(h_(t-1)) and db_t = lambda_t.

  Args:
    form: name of the form.
    fixed: factor of all steps, or None if factors differ.
    after: gradient of the last state of the segment, from the steps after it.
    segment: tuple of the state before the segment, the factors of its steps (or
      None), the added terms, the flags of its steps, and the gradient of its
      states.
  """
  before, factors, b, flags, g = segment
  a = factors if fixed is None else fixed
  # JAX cannot differentiate a kernel.
  run = functools.partial(_states, form) if form == "kernel" else FORMS[form]
  # Recompute the states; `earlier` holds h_(t-1) at step t.
  states = run(a, b, flags, before)
  earlier = _map(
    lambda h, s: jnp.concatenate([s[:, None], h[:, :-1]], 1), states, before
  )
  earlier = _forget(flags.fresh, earlier)

  # From the last step, step t multiplies the gradient by the factor of t + 1.
  def shift(x: jax.Array, fill: Any) -> jax.Array:
    end = jnp.full_like(x[:, :1], fill)
    return jnp.concatenate([x[:, 1:], end], 1)

  # Add `after` to the gradient of the last state.
  added = _map(lambda x, y: _put(x, -1, y, adds=True), g, after)
  if fixed is None:
    imag = None if a.imag is None else shift(a.imag, 0)
    factor = Pair(shift(a.real, 1), imag)
  else:
    factor = a
  # Run the recurrence of lambda.
  later = jax.tree.map(lambda x: shift(x, False), flags)
  zero = _map(jnp.zeros_like, before)
  lam = _from_end(form, run)(_adjoint(factor), added, later, zero)
  effective = _effective(lam, earlier, flags)
  da = _reduce(effective, a, is_constant=fixed is not None)
  # The gradient of the state before the segment is conj(a_0) lambda_0.
  head: Flags = jax.tree.map(lambda x: x[:, 0], flags)
  decay = a if fixed is not None else _map(lambda x: x[:, 0], a)
  last = _map(lambda x: x[:, 0], lam)
  out = times(_adjoint(_beside(_ones_where(head.keep, decay), last)), last)
  return da, lam, _forget(head.fresh, out)


def _effective(lam: Pair, earlier: Pair, flags: Flags) -> Pair:
  """Returns the gradients lambda_t conj(h_(t-1)) of the factors of steps."""
  effective = times(lam, _adjoint(earlier))
  # States that no result depends on are not finite at times before a reset.
  if flags.fresh is not None:
    parts = jax.tree.leaves(lam)
    is_used = functools.reduce(jnp.logical_or, [part != 0 for part in parts])
    effective = _map(lambda x: jnp.where(is_used, x, 0), effective)
  # Masked steps do not use their factors.
  if flags.keep is not None:
    effective = _map(lambda x: jnp.where(flags.keep, x, 0), effective)
  return effective


def _loop_backward(
  fixed: Pair | None, after: Pair, segment: Any
) -> tuple[Pair, Pair, Pair]:
  """Computes `_segment_backward` by loops over steps, which are the first axis.

  Both loops run over single steps, as in the form "scan".
  """
  before, factors, b, flags, g = segment

  def forward(h: Pair, args: Any) -> tuple[Pair, Pair]:
    return _advance(fixed, h, args), _forget(args[-1].fresh, h)

  # The carry is conj(a_(t+1)) lambda_(t+1), and the sum of the gradients of
  # constant factors.
  def backward(carry: Any, args: Any) -> tuple[Any, Any]:
    after, total = carry
    factor, at_step, gradient, earlier = args
    factor = factor if fixed is None else fixed
    lam = _plus(gradient, after)
    effective = _effective(lam, earlier, at_step)
    factor = _beside(_ones_where(at_step.keep, factor), lam)
    after = _forget(at_step.fresh, times(_adjoint(factor), lam))
    if fixed is None:
      return (after, None), (lam, effective)
    return (after, _plus(total, effective)), (lam, None)

  # Recompute the states h_(t-1), then run backwards through the steps.
  _, earlier = jax.lax.scan(forward, before, (factors, b, flags))
  total = None if fixed is None else _map(jnp.zeros_like, before)
  (out, total), (lam, effective) = jax.lax.scan(
    backward, (after, total), (factors, flags, g, earlier), reverse=True
  )
  if fixed is None or total is None:  # `total` is None exactly if `fixed` is.
    return _reduce(effective, factors, is_constant=False), lam, out
  total = _map(lambda x: x[None], total)
  return _reduce(total, fixed, is_constant=True), lam, out


def _reduce(x: Pair, like: Pair, *, is_constant: bool) -> Pair:
  """Sums x [batch, n, ...] over the axes along which factors are broadcast.

  Args:
    x: gradients of the factor of every step.
    like: factors, whose shape the sums get.
    is_constant: True if the factors have no axes [batch, n].
  """

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
  """Returns the state of the step after h.

  Args:
    fixed: factor of all steps, or None if factors differ.
    h: state before the step.
    args: tuple of the factor of the step (or None), the added term, and the
      flags of the step.
  """
  factor, added, flags = args
  factor = _ones_where(flags.keep, factor if fixed is None else fixed)
  h = _forget(flags.fresh, h)
  return _plus(times(_beside(factor, h), h), added)


def _scan(a: Pair, b: Pair, flags: Flags, start: Pair) -> Pair:
  """Runs one step after another."""
  fixed = a if _is_constant(a, b) else None

  def step(h: Pair, args: Any) -> tuple[Pair, Pair]:
    h = _advance(fixed, h, args)
    return h, h

  steps = (a if fixed is None else None, b, flags)
  leading = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), steps)
  _, states = jax.lax.scan(step, start, leading)
  return _map(lambda x: jnp.moveaxis(x, 0, 1), states)


def _associative(a: Pair, b: Pair, flags: Flags, start: Pair) -> Pair:
  """Combines steps in a tree of depth log n."""
  shape = b.real.shape
  factor = _ones_where(flags.keep, a)
  factor = _map(lambda x: jnp.broadcast_to(x, shape), factor)
  b = _add_start(factor, b, flags, start)

  # h -> a h + b, then h -> a' h + b', is h -> (a' a) h + (a' b + b'). A reset
  # in the second step forgets a, b and everything before.
  def combine(x: Any, y: Any) -> Any:
    factor, added, fresh = x
    if fresh is not None:
      factor, added = _forget(y[2], factor), _forget(y[2], added)
      fresh = fresh | y[2]
    return times(y[0], factor), _plus(times(y[0], added), y[1]), fresh

  steps = (factor, b, flags.fresh)
  _, states, _ = jax.lax.associative_scan(combine, steps, axis=1)
  return states


def _chunked(a: Pair, b: Pair, flags: Flags, start: Pair) -> Pair:
  """Runs chunks in parallel, then passes states from chunk to chunk."""
  is_constant = _is_constant(a, b)
  # Cut the steps into chunks, [CHUNK, batch, chunks, ...].
  cut = functools.partial(_cut, length=CHUNK, axis=2)
  steps = jax.tree.map(cut, (None if is_constant else a, b, flags))

  # Run step i of all chunks at once, from states 0; `decay` is the product of
  # the factors since the start of the chunk, and `past` is True after a reset.
  def step(carry: Any, args: Any) -> tuple[Any, Any]:
    h, decay, past = carry
    factor, added, flags = args
    factor = _ones_where(flags.keep, a if is_constant else factor)
    h = _plus(times(factor, _forget(flags.fresh, h)), added)
    decay = times(factor, decay)
    if past is not None:
      past = past | flags.fresh
      decay = decay if is_constant else _forget(past, decay)
    carry = h, decay, past
    return carry, carry

  zero = _map(lambda x: jnp.zeros_like(x[0]), steps[1])
  # Chunks share one product of factors if factors are constant and unmasked.
  first = a if is_constant else _map(lambda x: x[0], steps[0])
  by_row = flags.fresh is not None and not is_constant
  if flags.keep is not None or by_row:
    rows = jax.tree.leaves(steps[2])[0][0]
    first = _map(lambda x: x * jnp.ones_like(rows, x.dtype), first)
  unit = _ones_where(jnp.zeros((), bool), first)
  never = None
  if flags.fresh is not None:
    never = jnp.zeros_like(steps[2].fresh[0])
  (ends, decays, cuts), (local, decay, past) = jax.lax.scan(
    step, (zero, unit, never), steps
  )

  # Compute the state before each chunk from the end of the chunk before it.
  def pass_on(h: Pair, args: Any) -> tuple[Pair, Pair]:
    end, factor, fresh = args
    factor = decays if factor is None else factor
    return _plus(times(factor, _forget(fresh, h)), end), h

  leading, forgets = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (ends, cuts))
  varies = decays.real.ndim == ends.real.ndim
  factors = _map(lambda x: jnp.moveaxis(x, 1, 0), decays) if varies else None
  _, before = jax.lax.scan(pass_on, start, (leading, factors, forgets))
  # Add the share of the state before the chunk to the states of all steps.
  before = _map(lambda x: jnp.moveaxis(x, 0, 1)[None], before)
  if not varies:
    decay = _map(lambda x: x[:, None, None], decay)
  states = _plus(local, times(decay, _forget(past, before)))
  join = functools.partial(_join, n=b.real.shape[1], axis=2)
  return _map(join, states)


def _fft(a: Pair, b: Pair, flags: Flags, start: Pair) -> Pair:
  """Convolves b with the powers of a."""
  del flags
  n = b.real.shape[1]
  size = platforms.ring_size(n)
  # The powers a to a^n, [n, ...], are the states that start at 1 and add 0.
  unit = _complete(Pair(jnp.ones_like(a.real[None])), a.imag is not None)
  nothing = _map(lambda x: jnp.zeros((1, n, *x.shape), x.dtype), a)
  powers = _map(lambda x: x[0], _associative(a, nothing, Flags(), unit))
  # The kernel is 1, a, ..., a^(n-1).
  kernel = _map(lambda x, y: jnp.concatenate([x, y[:-1]]), unit, powers)
  if b.imag is None:
    spectrum = jnp.fft.rfft(b.real, size, axis=1) * jnp.fft.rfft(
      kernel.real, size, axis=0
    )
    states = Pair(jnp.fft.irfft(spectrum, size, axis=1)[:, :n])
  else:
    kernel = _complete(kernel, True)
    spectrum = jnp.fft.fft(jax.lax.complex(*b), size, axis=1) * jnp.fft.fft(
      jax.lax.complex(*kernel), size, axis=0
    )
    result = jnp.fft.ifft(spectrum, axis=1)[:, :n]
    states = Pair(result.real, result.imag)
  # Add the share of the first state, a^(t+1) h_(-1).
  decay = _map(lambda x: x[None], powers)
  return _plus(states, times(decay, _map(lambda x: x[:, None], start)))


def _kernel(
  a: Pair, b: Pair, flags: Flags, start: Pair, *, reverse: bool = False
) -> Pair:
  """Runs one step after another in a Pallas kernel for TPUs.

  The state stays in registers. Without a kernel, every step of a loop is a
  separate program, and every level of a tree writes all numbers again.
  """
  factor = _map(
    lambda x: jnp.broadcast_to(x, b.real.shape), _ones_where(flags.keep, a)
  )
  return platforms.by_device(
    lambda rows, _: _run_kernel(*rows, reverse=reverse),
    (factor, b, start),
    repeats=True,
  )


class _Blocks(NamedTuple):
  """Blocks of the numbers of all steps, for the kernel.

  A block has some steps of 8 rows and 128 lanes, which are a register. The last
  two axes of a state are the rows and lanes if they fill registers. Otherwise
  the rows are rows of the batch, and the lanes entries of a state, if these
  fill registers. Otherwise the states of the batch are joined, and the steps
  are the last axis, because XLA keeps arrays of narrow layers in this order;
  see `_run_kernel` for states of several axes and for few steps.

  Attributes:
    shape: shape of the numbers, [batch, n, ...].
    reverse: True to begin with the last step.
  """

  shape: tuple[int, ...]
  reverse: bool

  @property
  def width(self) -> int:
    """Number of entries of a state of one row of the batch."""
    return math.prod(self.shape[2:])

  @property
  def groups(self) -> int:
    """Number of groups of 8 rows of a state that fills registers, else 0."""
    *rows, lanes = self.shape[2:] or (1,)
    fills = math.prod(rows) % 8 == lanes % 128 == 0
    return math.prod(rows) // 8 if fills else 0

  @property
  def rows_fill_registers(self) -> bool:
    """True if rows of the batch and entries of a state fill registers.

    Axes of a state are not merged into lanes, which would move its entries.
    """
    is_flat = len(self.shape) == 3
    return is_flat and self.shape[0] % 8 == self.width % 128 == 0

  @property
  def length(self) -> int:
    """Number of steps of a block."""
    return min(KERNEL_STEPS, self.shape[1])

  @property
  def parts(self) -> int:
    """Number of blocks of steps. The last one may have missing steps."""
    return -(-self.shape[1] // self.length)

  def split(self, x: jax.Array) -> jax.Array:
    """Cuts numbers [batch, n, ...] into rows and lanes.

    Returns:
      [batch, n, 8 groups, lanes], or [tiles, 8, n, width], if they fill
      registers. Otherwise [tiles, rows, 128, n], with fewer rows for few
      states.
    """
    n = x.shape[1]
    if self.groups:
      return x.reshape(*x.shape[:2], -1, self.shape[-1])
    if self.rows_fill_registers:
      return x.reshape(-1, 8, n, self.width)
    x = jnp.moveaxis(x, 1, -1).reshape(-1, n)
    rows = min(8, -(-len(x) // 128))
    x = jnp.pad(x, ((0, -len(x) % (128 * rows)), (0, 0)))
    return x.reshape(-1, rows, 128, n)

  def join(self, x: jax.Array) -> jax.Array:
    """Inverts `split`."""
    if self.groups or self.rows_fill_registers:
      return x.reshape(self.shape)
    batch, n, *rest = self.shape
    x = x.reshape(-1, n)[: batch * self.width].reshape(batch, *rest, n)
    return jnp.moveaxis(x, -1, 1)

  def split_state(self, x: jax.Array) -> jax.Array:
    """Returns a state [batch, ...] as [tiles, rows, lanes]."""
    if self.groups:
      return x.reshape(-1, 8, self.shape[-1])
    x = self.split(x[:, None])
    return x.reshape(*x.shape[:2], -1)

  def turn(self, x: jax.Array) -> jax.Array:
    """Exchanges the two axes of x if the steps are last."""
    return x if self.rows_fill_registers else x.T

  def specs(self, rows: int) -> tuple[Any, Any]:
    """Returns the shapes of a block of steps, and of the state before it."""
    from jax.experimental import pallas  # Slow to import, and for TPUs only.

    def place(i: jax.Array, j: jax.Array, t: jax.Array) -> tuple[Any, ...]:
      t = self.parts - 1 - t if self.reverse else t
      if self.groups:
        # Operators would ask which TPU this process has.
        group = jnp.int32(self.groups)
        return jax.lax.div(i, group), t, jax.lax.rem(i, group), j
      return (i, 0, t, j) if self.rows_fill_registers else (i, 0, j, t)

    sides = (
      (rows, self.length, 128)
      if self.rows_fill_registers
      else (rows, 128, self.length)
    )
    sides = (self.length, 8, 128) if self.groups else sides
    return (
      pallas.BlockSpec((1, *sides), place),
      pallas.BlockSpec((1, rows, 128), lambda i, j, t: (i, 0, j)),
    )

  def loop(self, t: jax.Array, step: Callable[..., Pair], h: Pair) -> Pair:
    """Returns the state after the steps of a block.

    Args:
      t: number of the block, in the order of processing.
      step: function of the number of a step in its block, and of the state.
      h: state before the block.
    """
    missing = self.parts * self.length - self.shape[1]
    # No state depends on missing steps at the end.
    if not self.reverse or not missing:
      unroll = math.gcd(self.length, 4)
      return jax.lax.fori_loop(0, self.length, step, h, unroll=unroll)
    return jax.lax.fori_loop(
      jnp.where(t == 0, missing, 0), self.length, step, h
    )


def _run_kernel(factor: Pair, b: Pair, start: Pair, *, reverse: bool) -> Pair:
  """Returns the states of the rows of one device, [batch, n, ...].

  Args:
    factor: factors of all steps, [batch, n, ...].
    b: added terms, [batch, n, ...].
    start: state before the first step, [batch, ...].
    reverse: True to begin with the last step.
  """
  from jax.experimental import pallas  # Slow to import, and for TPUs only.
  from jax.experimental.pallas import tpu

  blocks = _Blocks(b.real.shape, reverse)
  is_joined = not (blocks.groups or blocks.rows_fill_registers)
  if is_joined and (b.real.ndim > 3 or b.real.shape[1] < KERNEL_STEPS):
    # Steps that are last would be moved twice, or not fill the lanes.
    join, part = _join_states(b.real.shape)
    first = _map(lambda x: join(x[:, None])[:, 0], start)
    factor, b = jax.tree.map(join, (factor, b))
    return _map(part, _run_kernel(factor, b, first, reverse=reverse))
  steps = jax.tree.map(blocks.split, (factor, b))
  first = _map(blocks.split_state, start)
  tiles, rows, lanes = first.real.shape
  of_steps, once = blocks.specs(rows)
  memory = tpu.VMEM((8 * STRIDE, 128), first.real.dtype)
  (states,) = pallas.pallas_call(
    functools.partial(_run_block, blocks),
    out_shape=jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), steps[1:]
    ),
    grid=(tiles, lanes // 128, blocks.parts),
    in_specs=(
      jax.tree.map(lambda x: of_steps, steps),
      _map(lambda x: once, first),
    ),
    out_specs=jax.tree.map(lambda x: of_steps, steps[1:]),
    scratch_shapes=[
      [] if blocks.groups else jax.tree.map(lambda x: memory, steps),
      jax.tree.map(lambda x: tpu.VMEM((8, 128), x.dtype), first),
    ],
    interpret=platforms.backend() != "tpu",
  )(steps, first)
  return _map(blocks.join, states)


def _join_states(
  shape: tuple[int, ...],
) -> tuple[Callable[..., jax.Array], Callable[..., jax.Array]]:
  """Returns functions that join the states of a batch to registers, and back.

  The first one maps [batch, n, ...] to [1, n, rows, 128], with a multiple of 8
  rows, and the second one inverts it for `shape`.
  """

  def join(x: jax.Array) -> jax.Array:
    x = jnp.moveaxis(x, 0, 1).reshape(1, x.shape[1], -1)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % 1_024)))
    return x.reshape(1, x.shape[1], -1, 128)

  def part(x: jax.Array) -> jax.Array:
    batch, n, *rest = shape
    x = x.reshape(n, -1)[:, : batch * math.prod(rest)]
    return jnp.moveaxis(x.reshape(n, batch, *rest), 0, 1)

  return join, part


def _run_block(
  blocks: _Blocks,
  steps: tuple[Pair, Pair],
  first: Pair,
  out: Pair,
  memory: Sequence[Pair],
  state: Pair,
) -> None:
  """Runs the steps of a block in the kernel, which has references to arrays.

  Args:
    blocks: the blocks.
    steps: factors and added terms of the block.
    first: state before the first step of all, [1, rows, 128].
    out: states of the block, which are written.
    memory: memory for `steps`, each [8 STRIDE, 128]; none if a step of `steps`
      is a register.
    state: memory for the state between blocks, [8, 128].
  """
  from jax.experimental import pallas

  t, rows = pallas.program_id(2), first.real.shape[1]

  def write(ref: Any, x: Any, place: Any = ...) -> None:
    ref[place] = x

  @pallas.when(t == 0)
  def _begin() -> None:
    _map(lambda ref, x: write(ref, x[0], slice(rows)), state, first)

  # A step is every row number STRIDE of the memory, which is one register.
  def of_row(i: int) -> Any:
    return pallas.ds(i * STRIDE, blocks.length), slice(None)

  def load(tile: Any, ref: Any) -> None:
    for i in range(rows):
      tile[of_row(i)] = blocks.turn(ref[0, i])

  def store(ref: Any, tile: Any) -> None:
    for i in range(rows):
      ref[0, i] = blocks.turn(tile[of_row(i)])

  def step(t: jax.Array, h: Pair) -> Pair:
    t = blocks.length - 1 - t if blocks.reverse else t
    rows = pallas.ds(t, 8, stride=STRIDE), slice(None)
    place = rows if memory else (0, t)
    at_t = functools.partial(_map, lambda ref: ref[place])
    h = _plus(times(at_t(factor), h), at_t(added))
    _map(lambda ref, x: write(ref, x, place), result, h)
    return h

  if memory:
    jax.tree.map(load, tuple(memory), steps)
  factor, added = memory or steps
  result = added if memory else out  # States replace added terms.
  h = blocks.loop(t, step, _map(lambda ref: ref[...], state))
  _map(write, state, h)
  if memory:
    _map(store, out, added)


FORMS = {
  "scan": _scan,
  "associative": _associative,
  "chunked": _chunked,
  "kernel": _kernel,
  "fft": _fft,
}


def _resolve(form: str, shape: tuple[int, ...], *, has_resets: bool) -> str:
  """Returns the name of the form of `linear_scan` for a shape of b."""
  if not math.prod(shape):  # Nothing to cut into parts.
    return "scan"
  if form != "auto":
    return form
  fastest = _fastest()
  return "associative" if fastest == "kernel" and has_resets else fastest


def _fastest() -> str:
  """Returns the name of the fastest form for the current device."""
  if platforms.has_kernels() and platforms.keeps_tokens():
    return "kernel"
  return "scan" if platforms.backend() == "cpu" else "associative"
