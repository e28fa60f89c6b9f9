"""Linear recurrences: every form gives the states of a plain loop."""

import itertools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas

from jaxformers import scan
from jaxformers.foundations import platforms
from jaxformers.scan import linear_scan
from jaxformers.training import programs
from jaxformers.training.layout import Layout
from tests.marks import long_except

# Shapes of b: channels of one and of two axes, one step, several segments.
SHAPES = [(2, 37, 3), (1, 1, 2), (2, 20, 2, 2)]
FORMS = sorted(scan.FORMS)


@pytest.fixture(autouse=True, scope="module")
def short_parts():
  """Segments of 16 steps and chunks of 8, so that few steps have several."""
  # Compiled programs keep the sizes of the file before, and of this one.
  jax.clear_caches()
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(scan, "SEGMENT", 16)
    patch.setattr(scan, "CHUNK", 8)
    yield
  jax.clear_caches()


def loop(a, b, mask=None, start=None, *, reverse=False):
  """The recurrence, one step after another in NumPy."""
  h = np.zeros(b[:, 0].shape, np.result_type(a, b)) if start is None else start
  states = np.zeros(b.shape, np.result_type(a, b, h))
  n = b.shape[1]
  for t in reversed(range(n)) if reverse else range(n):
    factor = a if a.ndim < b.ndim else a[:, t]
    new = factor * h + b[:, t]
    if mask is not None:
      new = np.where(mask[:, t].reshape(-1, *(1,) * (b.ndim - 2)), new, h)
    states[:, t] = h = new
  return states, h


def scanned(a, b, *, mask=None, resets=None, initial=None, **options):
  """`linear_scan` as one program, traced anew for what a test has patched."""

  def run(a, b, mask, resets, initial):
    return linear_scan(
      a, b, mask=mask, resets=resets, initial=initial, **options
    )

  return jax.jit(run)(a, b, mask, resets, initial)


def draw(rng, shape, *, is_complex):
  x = rng.uniform(-0.7, 0.7, shape)
  return x + 1j * rng.uniform(-0.7, 0.7, shape) if is_complex else x


def case(shape, *, is_complex, varies, is_masked):
  rng = np.random.default_rng(0)
  a = draw(rng, shape if varies else shape[2:], is_complex=is_complex)
  b = draw(rng, shape, is_complex=is_complex)
  start = draw(rng, (shape[0], *shape[2:]), is_complex=is_complex)
  mask = rng.random(shape[:2]) < 0.7 if is_masked else None
  if is_masked:
    mask[0] = False  # A sample without a step.
  return a, b, mask, start


# Complex numbers, factors of every step, and a mask, for each form that has
# them; others than these need --long.
KINDS = [
  (form, *kind)
  for form in FORMS
  for kind in itertools.product((False, True), repeat=3)
  if form != "fft" or not any(kind[1:])
]
SHORT = [
  kind
  for kind in KINDS
  if kind[0] == "fft" or kind[1:] in ((True, False, True), (False, True, False))
]
kinds = pytest.mark.parametrize("kind", long_except(SHORT, KINDS), ids=str)


@kinds
@pytest.mark.parametrize("shape", long_except(SHAPES[:1], SHAPES), ids=str)
def test_linear_scan_states_are_those_of_a_loop(kind, shape, monkeypatch):
  form, is_complex, varies, is_masked = kind
  a, b, mask, start = case(
    shape, is_complex=is_complex, varies=varies, is_masked=is_masked
  )
  # As one complex array, and backwards as pairs of real ones.
  cases = (("cpu", False, start), ("gpu", True, None))
  with jax.enable_x64(True):
    for backend, reverse, first in cases:
      monkeypatch.setattr(jax, "default_backend", lambda name=backend: name)
      want = loop(a, b, mask, first, reverse=reverse)
      options = {"mask": mask, "initial": first, "reverse": reverse}
      got = scanned(a, b, **options, form=form)
      chex.assert_trees_all_close(got, want, atol=1e-12, rtol=0)
  single = np.complex64 if is_complex else np.float32
  a, b, start = (x.astype(single) for x in (a, b, start))
  got = scanned(a, b, mask=mask, initial=start, form=form)
  want = loop(*(np.asarray(x, complex) for x in (a, b)), mask, start)
  want = want if is_complex else jax.tree.map(np.real, want)
  chex.assert_trees_all_close(got, want, atol=5e-6, rtol=0)


@pytest.mark.parametrize("is_complex", [False, True])
def test_linear_scan_by_the_fft_of_a_tpu_is_a_loop(is_complex, monkeypatch):
  monkeypatch.setattr(scan.platforms, "on_tpu", lambda: True)
  a, b, _, start = case(
    (2, 67, 3), is_complex=is_complex, varies=False, is_masked=False
  )
  with jax.enable_x64(True):
    got = linear_scan(a, b, initial=start, form="fft")
  want = loop(a, b, None, start)
  chex.assert_trees_all_close(got, want, atol=1e-12, rtol=0)


@pytest.mark.parametrize("form", ["scan", "associative"])
def test_linear_scan_with_constant_factor_needs_no_rank_promotion(form, strict):
  b = jnp.ones((2, 5, 4, 3))

  def total(a, b):
    return linear_scan(a, b, form=form)[0].sum()

  grads = jax.jit(jax.grad(total, (0, 1)))(jnp.full((3,), 0.5), b)
  chex.assert_trees_all_equal_shapes(grads, (jnp.ones(3), b))


@kinds
@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_linear_scan_gradients_match_finite_differences(
  kind, backend, monkeypatch
):
  monkeypatch.setattr(jax, "default_backend", lambda: backend)
  form, is_complex, varies, is_masked = kind
  a, b, mask, start = case(
    SHAPES[0], is_complex=is_complex, varies=varies, is_masked=is_masked
  )
  rng = np.random.default_rng(1)
  weights = [draw(rng, x.shape, is_complex=is_complex) for x in (b, start)]

  def loss(a, b, start):
    states = scanned(a, b, mask=mask, initial=start, form=form)
    return sum((w * x).real.sum() for w, x in zip(weights, states, strict=True))

  with jax.enable_x64(True):
    args = [a, b, start]
    steps = [draw(rng, x.shape, is_complex=is_complex) for x in args]
    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(*args)
    size = 1e-6
    loss = jax.jit(loss)
    ends = [
      loss(*(x + sign * size * d for x, d in zip(args, steps, strict=True)))
      for sign in (1, -1)
    ]
    want = (ends[0] - ends[1]) / (2 * size)
    pairs = zip(map(np.asarray, gradients), steps, strict=True)
    got = sum((g * d).real.sum() for g, d in pairs)
    assert float(got) == pytest.approx(float(want), rel=1e-7)


@pytest.mark.parametrize("form", sorted({*FORMS} - {"fft"}))
@pytest.mark.parametrize("varies", [False, True])
def test_linear_scan_skips_masked_steps(form, varies):
  a, b, _, _ = case((2, 20, 3), is_complex=True, varies=varies, is_masked=False)
  kept = np.array([1, 4, 5, 13])
  mask = np.zeros((2, 20), bool)
  mask[:, kept] = True
  few = a[:, kept] if varies else a
  want, last = scanned(few, b[:, kept], form=form)
  # Not even numbers that are not finite come through, nor into gradients.
  b = np.where(mask[..., None], b, np.nan)
  a = np.where(mask[..., None], a, np.nan) if varies else a
  states, got = scanned(a, b, mask=mask, form=form)
  chex.assert_trees_all_close(np.asarray(states)[:, kept], want, atol=1e-6)
  chex.assert_trees_all_close(got, last, atol=1e-6)

  def loss(a, b):
    return jnp.abs(scanned(a, b, mask=mask, form=form)[0][:, kept]).sum()

  chex.assert_tree_all_finite(jax.jit(jax.grad(loss, (0, 1)))(a, b))


@pytest.mark.parametrize("form", ["associative", "chunked", "scan"])
@pytest.mark.parametrize("varies", [False, True])
def test_linear_scan_begins_anew_at_resets(form, varies):
  shape = (2, 37, 3)
  a, b, _, start = case(shape, is_complex=True, varies=varies, is_masked=False)
  # The second sequence resets at other steps, of which one is masked.
  cuts = ([9, 10, 26], [0, 20])
  mask = np.random.default_rng(2).random(shape[:2]) < 0.7
  resets = np.zeros(shape[:2], bool)
  for row, at in enumerate(cuts):
    resets[row, at] = True
  mask[1, 20] = False

  def in_parts(a, b, start, reverse):
    rows, ends = [], []
    for row, at in enumerate(cuts):
      one = slice(row, row + 1)
      bounds = [0, *(k + reverse for k in at if 0 < k + reverse < 37), 37]
      h = start[one] * (not resets[row, -1 if reverse else 0])
      pieces = []
      for low, high in list(itertools.pairwise(bounds))[:: 1 - 2 * reverse]:
        piece, h = linear_scan(
          a[one, low:high] if varies else a,
          b[one, low:high],
          mask=mask[one, low:high],
          initial=h,
          reverse=bool(reverse),
          form="scan",
        )
        pieces.append(piece)
        last, h = h, jnp.zeros_like(h)
      rows.append(jnp.concatenate(pieces[:: 1 - 2 * reverse], 1))
      ends.append(last)
    return jnp.concatenate(rows), jnp.concatenate(ends)

  rng = np.random.default_rng(1)
  weights = [draw(rng, x.shape, is_complex=True) for x in (b, start)]

  def gradients(run):
    def loss(*arrays):
      results = run(*arrays)
      parts = zip(weights, results, strict=True)
      return sum((w * x).real.sum() for w, x in parts), results

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))

  with jax.enable_x64(True):
    for reverse in (0, 1):

      def whole(a, b, start, reverse=reverse):
        options = {"resets": resets, "reverse": bool(reverse), "form": form}
        return linear_scan(a, b, mask=mask, initial=start, **options)

      def parts(a, b, start, reverse=reverse):
        return in_parts(a, b, start, reverse)

      got, want = (gradients(run)(a, b, start) for run in (whole, parts))
      chex.assert_trees_all_close(got, want, atol=1e-12)
  # Numbers that are not finite do not cross a reset.
  b[:, :9] = np.nan

  def after(a):
    states, _ = linear_scan(a, b, resets=resets, form=form)
    return sum(jnp.abs(row).sum() for row in (states[0, 9:], states[1, 20:]))

  chex.assert_tree_all_finite(jax.grad(after)(a))
  a = a.copy()
  if varies:
    a[:, :9] = np.nan
  states, _ = scanned(a, b, resets=resets, form=form)
  assert np.isfinite(states[0, 9:]).all()
  assert np.isfinite(states[1, 20:]).all()


@pytest.mark.parametrize("form", FORMS)
def test_linear_scan_computes_half_precision_in_float32(form):
  rng = np.random.default_rng(0)
  a = jnp.full(3, 0.999, jnp.bfloat16)
  b = jnp.asarray(rng.uniform(size=(1, 2_000, 3)), jnp.bfloat16)
  states, last = scanned(a, b, form=form)
  assert (states.dtype, last.dtype) == (jnp.bfloat16, jnp.float32)
  want, _ = loop(np.asarray(a, float), np.asarray(b, float))
  chex.assert_trees_all_close(last, want[:, -1], rtol=1e-5)
  chex.assert_trees_all_close(states, want, rtol=2**-8)


@pytest.mark.parametrize("form", FORMS)
def test_linear_scan_of_pairs_equals_complex_numbers(form):
  a, b, _, start = case(
    (2, 20, 3), is_complex=True, varies=False, is_masked=False
  )
  want, last = scanned(a, b, initial=start, form=form)
  a, b, start = ((x.real, x.imag) for x in (a, b, start))
  got, end = scanned(a, b, initial=start, form=form)
  got, end = (np.asarray(x[0]) + 1j * np.asarray(x[1]) for x in (got, end))
  chex.assert_trees_all_close(got, want, atol=1e-6)
  chex.assert_trees_all_close(end, last, atol=1e-6)
  # Complex factors make complex states of real numbers.
  states, _ = scanned(a, b[0], form=form)
  assert jnp.iscomplexobj(states)


@pytest.mark.parametrize("form", sorted({*FORMS} - {"fft"}))
@pytest.mark.slow
def test_linear_scan_backward_pass_stores_no_states(form):
  a, b, _, _ = case((2, 64, 5), is_complex=False, varies=False, is_masked=False)
  _, pull = jax.vjp(lambda a, b: linear_scan(a, b, form=form)[0], a, b)
  kept = sum(x.size for x in jax.tree.leaves(pull))
  # b itself, the factors, and the state before each of four segments.
  assert kept <= b.size + a.size + 4 * 2 * 5


@pytest.mark.slow
def test_linear_scan_auto_form_gives_the_same_states(monkeypatch):
  a, b, mask, _ = case(
    (2, 20, 3), is_complex=True, varies=False, is_masked=True
  )
  want = scanned(a, b, mask=mask, form="scan")
  # The kernel for TPUs runs on this machine, too, if it is interpreted.
  call = pallas.pallas_call
  monkeypatch.setattr(
    pallas, "pallas_call", lambda *a, **k: call(*a, **k | {"interpret": True})
  )
  for backend in ("cpu", "gpu", "tpu"):
    monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
    chex.assert_trees_all_close(scanned(a, b, mask=mask), want, atol=1e-6)
    chex.assert_trees_all_close(
      linear_scan(a, b), scanned(a, b, form="scan"), atol=1e-6
    )


def test_the_kernel_is_not_chosen_with_64_bits(monkeypatch):
  """Its compiler refuses integers of 64 bits, and all of float64."""
  monkeypatch.setattr(platforms, "backend", lambda: "tpu")
  assert scan._fastest() == "kernel"
  with jax.enable_x64(True):
    assert scan._fastest() == "associative"
    with pytest.raises(ValueError, match='"kernel" computes in float32'):
      linear_scan(jnp.ones(3), jnp.ones((1, 2, 3)), form="kernel")


@pytest.mark.parametrize("form", scan.FORMS)
@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 4, 0)])
def test_arrays_without_numbers_have_no_states(form, shape):
  states, last = linear_scan(jnp.float32(0.5), jnp.ones(shape), form=form)
  assert (states.shape, last.shape) == (shape, (shape[0], shape[2]))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
  "shape",
  [
    (8, 13, 128),
    (16, 21, 2, 128),
    (2, 13, 2, 8, 256),
    (3, 13, 300),
    (3, 13, 4, 5),
    (3, 5, 300),
    (130, 9, 8),
    (1, 3, 1),
  ],
)
def test_the_kernel_cuts_steps_and_states_into_blocks(
  monkeypatch, shape, reverse
):
  """Registers filled by states or not, and a last block that lacks steps."""
  monkeypatch.setattr(scan, "KERNEL_STEPS", 8)
  a, b, mask, start = case(shape, is_complex=True, varies=False, is_masked=True)

  def run(form):
    def states(a, b, start):
      return scanned(a, b, mask=mask, initial=start, reverse=reverse, form=form)

    y, pull = jax.vjp(states, a, b, start)
    return y, pull(jax.tree.map(jnp.cos, y))

  chex.assert_trees_all_close(run("kernel"), run("scan"), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_kernel_is_transposed_twice():
  a, b, _, _ = case((2, 20, 3), is_complex=False, varies=True, is_masked=False)

  def run(x):
    return linear_scan(a, x, form="kernel")[0]

  _, pull = jax.vjp(run, b)
  _, push = jax.vjp(lambda g: pull(g)[0], jnp.zeros_like(b))
  chex.assert_trees_all_close(push(b)[0], run(b), atol=1e-5)


@pytest.mark.parametrize(
  ("shapes", "options", "message"),
  [
    (((3,), (2, 9, 3)), {"form": "tree"}, "form.*'tree'.*auto, scan"),
    (((4,), (2, 9, 3)), {}, r"\ba\b.*\(4,\).*\(2, 9, 3\)"),
    (((2, 8, 3), (2, 9, 3)), {}, r"\(2, 8, 3\).*\(3,\)"),
    (((2, 1, 3), (2, 9, 3)), {}, r"\(2, 1, 3\).*\(3,\)"),
    (((3,), (2, 0, 3)), {}, r"\bb\b.*\(2, 0, 3\)"),
    (
      ((3,), (2, 9, 3)),
      {"mask": np.ones((2, 8), bool)},
      r"mask.*\(2, 8\).*\(2, 9\)",
    ),
    (
      ((3,), (2, 9, 3)),
      {"resets": np.ones((9,), bool)},
      r"resets.*\(9,\).*\(2, 9\)",
    ),
    (
      ((3,), (2, 9, 3)),
      {"resets": np.ones((2, 9), bool), "form": "kernel"},
      "'kernel' takes no resets",
    ),
    (((2, 9, 3), (2, 9, 3)), {"form": "fft"}, 'form="fft".*same a'),
    (
      ((3,), (2, 9, 3)),
      {"form": "fft", "mask": np.ones((2, 9), bool)},
      'form="fft".*no mask',
    ),
  ],
)
def test_linear_scan_refuses_mismatched_arguments(shapes, options, message):
  a, b = (np.ones(shape) for shape in shapes)
  with pytest.raises(ValueError, match=message):
    linear_scan(a, b, **options)


@pytest.mark.parametrize("form", long_except(("chunked",), FORMS))
@pytest.mark.slow
def test_linear_scan_mixes_real_and_complex_arguments(form, monkeypatch):
  _, b, _, _ = case((2, 20, 3), is_complex=True, varies=False, is_masked=False)
  a = np.array([0.5, -0.3, 0.9])
  gradients = {}
  for backend in ("cpu", "gpu"):
    monkeypatch.setattr(jax, "default_backend", lambda name=backend: name)
    for key, args in (("real a", (a, b)), ("complex a", (a + 0j, b.real))):
      states, _ = scanned(*args, form=form)
      chex.assert_trees_all_close(states, loop(*args)[0], atol=1e-6)

      def loss(a, b):
        return jnp.abs(scanned(a, b, form=form)[0]).sum()

      gradients[backend, key] = jax.jit(jax.grad(loss, (0, 1)))(*args)
  for key in ("real a", "complex a"):
    on_cpu, on_gpu = (gradients[backend, key] for backend in ("cpu", "gpu"))
    chex.assert_trees_all_close(on_cpu, on_gpu, atol=1e-4)
    assert jnp.iscomplexobj(on_cpu[0]) == (key == "complex a")


@pytest.mark.parametrize("form", long_except(("scan",), FORMS))
def test_linear_scan_broadcasts_factors_and_start_over_channels(
  form, monkeypatch
):
  _, b, _, start = case(
    (2, 20, 2, 3), is_complex=False, varies=False, is_masked=False
  )
  for a in (np.float32(0.9), np.array([0.5, -0.3, 0.9])):
    states, _ = scanned(a, b, form=form)
    chex.assert_trees_all_close(states, loop(a, b)[0], atol=1e-6)
  # A complex start makes complex states of real numbers.
  for backend in ("cpu", "gpu"):
    monkeypatch.setattr(jax, "default_backend", lambda name=backend: name)
    begin = start + 1j
    states, _ = scanned(a, b, initial=begin, form=form)
    chex.assert_trees_all_close(states, loop(a, b, None, begin)[0], atol=1e-6)
  # So do integers make numbers with fractions.
  states, _ = scanned(0.5, np.ones((1, 3, 1), int), form=form)
  chex.assert_trees_all_close(states[0, :, 0], jnp.array([1.0, 1.5, 1.75]))


@pytest.mark.parametrize("form", long_except(("scan", "chunked"), FORMS))
def test_linear_scan_keeps_the_angle_of_long_rotations(form):
  a, b = np.exp(np.array([3.1j])), np.zeros((1, 4_000, 1))
  states, _ = scanned(a, b, initial=np.ones((1, 1)), form=form)
  want = np.exp(3.1j * np.arange(1, 4_001))
  chex.assert_trees_all_close(np.asarray(states)[0, :, 0], want, atol=5e-4)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("varies", [False, True])
@pytest.mark.parametrize(
  "mesh", ["data:2,sequence:2", "sequence:4", "sequence:2,model:2"]
)
def test_steps_may_be_split_over_devices(mesh, varies, reverse):
  """Devices exchange a state each, and no steps."""
  shape = (2, 400, 3)
  a, b, mask, start = case(
    shape, is_complex=True, varies=varies, is_masked=True
  )
  resets = np.random.default_rng(1).random(shape[:2]) < 0.05
  layout = Layout.of(mesh, jax.devices()[:4])

  def run(a, b, start):
    def states(a, b, start):
      return linear_scan(
        a, b, mask=mask, resets=resets, initial=start, reverse=reverse
      )

    y, pull = jax.vjp(states, a, b, start)
    return y, pull(jax.tree.map(jnp.cos, y))

  split = layout.sharding("data", "sequence")
  placed = (
    jax.device_put(a, split if varies else layout.sharding()),
    jax.device_put(b, split),
    jax.device_put(start, layout.sharding("data")),
  )
  program = jax.jit(layout.traced(run)).lower(*placed).compile()
  want = jax.jit(run)(a, b, start)
  chex.assert_trees_all_close(program(*placed), want, rtol=1e-4, atol=1e-5)
  sent = programs.count(program.as_text()).collectives
  # They send less than the steps of one device and of one part of a number.
  steps = math.prod(shape) // layout.mesh.shape["sequence"]
  assert sum(each.bytes for each in sent) < 4 * steps / layout.parts


@pytest.mark.parametrize("mesh", ["data:2,sequence:2", "sequence:4"])
@pytest.mark.parametrize("reverse", [False, True])
def test_steps_may_be_split_after_a_slice_of_them(mesh, reverse):
  layout = Layout.of(mesh, jax.devices()[:4])
  b = np.random.default_rng(0).normal(size=(1, 2, 40, 3)).astype(np.float32)

  def run(b):
    return linear_scan(jnp.float32(0.9), b[0], reverse=reverse)[0]

  found = jax.jit(layout.traced(run))(jax.device_put(b, layout.sharding()))
  chex.assert_trees_all_close(found, jax.jit(run)(b), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("place", [0, -1])
def test_a_step_is_put_into_a_slice_that_devices_split(place, adds):
  layout = Layout.of("sequence:4", jax.devices()[:4])
  x = np.random.default_rng(0).normal(size=(1, 2, 40, 3)).astype(np.float32)
  y = np.ones((2, 3), np.float32)

  def run(x):
    z = scan._put(x[0], place, y, adds=adds)
    split = layout.sharding(None, "sequence")
    return jax.lax.with_sharding_constraint(z, split)

  found = jax.jit(layout.traced(run))(jax.device_put(x, layout.sharding()))
  want = x[0].copy()
  want[:, place] = want[:, place] + y if adds else y
  chex.assert_trees_all_equal(np.asarray(found), want)


@pytest.mark.parametrize("mesh", ["model:4", "data:2,model:2"])
def test_the_kernel_runs_alike_on_all_devices_of_the_axis_model(mesh):
  """Also its gradient is not summed over them."""
  shape = (2, 40, 3)
  a, b, _, start = case(shape, is_complex=True, varies=True, is_masked=False)
  layout = Layout.of(mesh, jax.devices()[:4])

  def run(a, b, start):
    y, pull = jax.vjp(
      lambda *args: linear_scan(*args[:2], initial=args[2], form="kernel"),
      *(a, b, start),
    )
    return y, pull(jax.tree.map(jnp.cos, y))

  arrays = jax.device_put((a, b, start), layout.sharding("data"))
  program = jax.jit(layout.traced(run)).lower(*arrays).compile()
  want = jax.jit(run)(a, b, start)
  chex.assert_trees_all_close(program(*arrays), want, rtol=1e-5, atol=1e-6)
  assert not programs.count(program.as_text()).collectives


def test_resets_forget_states_of_other_devices_that_are_not_finite():
  b = np.ones((1, 8, 1), np.float32)
  b[0, 1] = np.inf
  resets = np.isin(np.arange(8), (0, 3))[None]
  layout = Layout.of("sequence:4", jax.devices()[:4])
  placed = jax.device_put(b, layout.sharding(None, "sequence"))

  def run(b):
    start = jnp.full((1, 1), jnp.inf)
    return linear_scan(jnp.float32(0.5), b, resets=resets, initial=start)

  found = jax.jit(layout.traced(run))(placed)
  assert np.isfinite(found[0][0, [0, *range(3, 8)]]).all()
  chex.assert_trees_all_close(found, run(b))
