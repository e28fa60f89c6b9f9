"""Attention by blocks of queries is attention by the whole n x n array."""

import functools

import chex
import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models.dropout import Dropout
from jaxformers.models.mixers import flash
from jaxformers.models.mixers import softmax as module
from jaxformers.models.mixers.kernelized import kernelized
from jaxformers.training import programs
from jaxformers.training.layout import Layout
from tests import draws

softmax = functools.partial(module.softmax, param=None)  # Without a sink.
N, E = 27, 4  # Three blocks of 8 queries, and a part of one.
EVEN = 26  # Tokens of which each of two devices has half.


@pytest.fixture(params=["one CPU", "elsewhere"])
def blocks(request, monkeypatch):
  """Blocks of 8 queries, and both forms of the loops."""
  monkeypatch.setattr(flash, "BLOCK", 8)
  monkeypatch.setattr(flash, "on_one_cpu", lambda: request.param == "one CPU")
  lengths, scan = [], flash._scan_blocks

  def watch(*args):
    lengths.append(args[-1].block)
    return scan(*args)

  monkeypatch.setattr(flash, "_scan_blocks", watch)
  yield
  assert set(lengths) <= {8, N}
  assert 8 in lengths


def draw(seed, count=4):
  return [draws.normal(10 * seed + i, (2, 3, N, E)) for i in range(count)]


def tokens(n=N):
  mask = np.ones((2, n), bool)
  mask[1, 3] = mask[1, 20:] = False
  return jnp.asarray(mask)


def pulled(attend, q, k, v, g):
  """The result at tokens, and the gradients of its product with g."""
  at = tokens(q.shape[2])[:, None, :, None]

  @jax.jit
  def run(q, k, v, g):
    y, pull = jax.vjp(lambda *x: jnp.where(at, attend(*x), 0), q, k, v)
    return y, pull(g)

  return run(q, k, v, g)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("attend", [softmax, kernelized])
def test_padded_keys_of_tpus_change_nothing(monkeypatch, attend, causal):
  monkeypatch.setattr(flash, "BLOCK", 8)
  monkeypatch.setattr(flash, "LANES", 16)
  call = functools.partial(
    attend, mask=tokens(), dropout=Dropout(), causal=causal
  )
  found = pulled(call, *draw(0))
  lengths = []

  def scan(step, carry, arrays, *args, **options):
    lengths.append(arrays[0].shape[-2])
    return plain(step, carry, arrays, *args, **options)

  plain = flash._scan_blocks
  monkeypatch.setattr(flash, "_scan_blocks", scan)
  monkeypatch.setattr(flash, "_pads_keys", lambda: True)
  chex.assert_trees_all_close(found, pulled(call, *draw(0)), atol=5e-6)
  assert set(lengths) == {32}


@pytest.fixture
def tpu(monkeypatch):
  """The form for TPUs, in blocks of 8 queries."""
  monkeypatch.setattr(flash, "BLOCK", 8)
  monkeypatch.setattr(flash, "LANES", 1)
  monkeypatch.setattr(flash, "LEAST_BLOCK", 2)
  monkeypatch.setattr(flash.platforms, "on_tpu", lambda: True)


@pytest.mark.parametrize(
  ("weights", "fitting"), [(5 * 6, (2, 4)), (10 * 3, (1, 8)), (3, (1, 2))]
)
@pytest.mark.parametrize("attend", [softmax, kernelized])
def test_fewer_rows_and_queries_of_a_tpu_change_nothing(
  monkeypatch, tpu, attend, weights, fitting
):
  call = functools.partial(
    attend, mask=tokens(), dropout=Dropout(), causal=True
  )
  with monkeypatch.context() as patch:
    patch.setattr(flash.platforms, "on_tpu", lambda: False)
    want = pulled(call, *draw(0))
  least = 8 if fitting == (1, 8) else 2
  monkeypatch.setattr(flash, "LEAST_BLOCK", least)
  monkeypatch.setattr(flash, "MOST_WEIGHTS", weights * N)
  assert flash._fitting(2, 3 * N) == fitting
  chex.assert_trees_all_close(pulled(call, *draw(0)), want, atol=5e-6)


@pytest.mark.parametrize(
  ("rows", "n", "fitting"),
  [
    (8, 1_024, (8, 256)),
    (64, 1_024, (64, 64)),
    (64, 2_048, (8, 256)),
    (6, 16_384, (1, 256)),
    (1, 2**18, (1, 64)),
  ],
)
def test_a_tpu_computes_few_rows_or_queries_at_a_time(
  monkeypatch, rows, n, fitting
):
  monkeypatch.setattr(flash.platforms, "on_tpu", lambda: True)
  assert flash._fitting(rows, 2 * n) == fitting
  monkeypatch.undo()
  assert flash._fitting(rows, 2 * n) == (rows, 256)


def test_dropout_of_a_tpu_follows_the_number_of_a_row(monkeypatch, tpu):
  """In equal blocks of queries, groups of rows and devices drop the same."""
  q, k, v, g = (jnp.broadcast_to(a[:1], (4, *a.shape[1:])) for a in even(3))
  dropout, mask = Dropout(0.4, jax.random.key(7)), jnp.ones((4, EVEN), bool)
  call = functools.partial(softmax, mask=mask, dropout=dropout)

  @jax.jit
  def run(q, k, v, g):
    y, pull = jax.vjp(call, q, k, v)
    return y, pull(g)

  want = run(q, k, v, g)
  # Rows that are equal drop other weights.
  assert len({row.tobytes() for row in np.asarray(want[0])}) == 4
  layout = Layout.of("data:2", jax.devices()[:2])
  placed = jax.device_put((q, k, v, g), layout.sharding("data"))
  spread = jax.jit(layout.traced(run.__wrapped__))
  chex.assert_trees_all_close(spread(*placed), want, atol=5e-6)
  monkeypatch.setattr(flash, "LEAST_BLOCK", 8)
  monkeypatch.setattr(flash, "MOST_WEIGHTS", 2 * 8 * 3 * EVEN)
  assert flash._fitting(4, 3 * EVEN) == (2, 8)
  grouped = jax.jit(lambda *x: run.__wrapped__(*x))
  chex.assert_trees_all_close(grouped(q, k, v, g), want, atol=5e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("attend", [softmax, kernelized])
def test_flash_attention_has_the_result_and_gradients_of_dense(
  blocks, monkeypatch, attend, causal
):
  call = functools.partial(
    attend, mask=tokens(), dropout=Dropout(), causal=causal
  )
  found = pulled(call, *draw(0))
  monkeypatch.setattr(flash, "BLOCK", N)
  chex.assert_trees_all_close(found, pulled(call, *draw(0)), atol=5e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_queries_in_blocks_see_the_keys_of_their_example(
  blocks, monkeypatch, causal
):
  numbers = np.repeat([1, 2, 3, 4], [5, 12, 9, 1])[None].repeat(2, 0)
  numbers = np.where(tokens(), numbers, -numbers)
  call = functools.partial(
    softmax, mask=jnp.asarray(numbers), dropout=Dropout(), causal=causal
  )
  found = pulled(call, *draw(0))
  monkeypatch.setattr(flash, "BLOCK", N)
  chex.assert_trees_all_close(found, pulled(call, *draw(0)), atol=5e-6)


def even(seed):
  return [a[:, :, :EVEN] for a in draw(seed)]


def over_tokens(mesh, attend, *arrays):
  """The compiled `pulled` with tokens split over devices, and its result."""
  layout = Layout.of(mesh, jax.devices()[:4])
  split = layout.sharding("data", None, "sequence")
  run = jax.jit(layout.traced(functools.partial(pulled, attend)))
  arrays = [jax.device_put(a, split) for a in arrays]
  program = run.lower(*arrays).compile()
  return program.as_text(), program(*arrays)


@pytest.mark.parametrize("mesh", ["data:2,sequence:2", "sequence:2,model:2"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("attend", [softmax, kernelized])
def test_queries_of_a_device_see_the_keys_of_all(
  monkeypatch, attend, causal, mesh
):
  monkeypatch.setattr(flash, "BLOCK", 8)
  numbers = np.repeat([1, 2, 3, 4], [5, 12, 8, 1])[None].repeat(2, 0)
  packed = np.where(tokens(EVEN), numbers, -numbers)
  for mask in (tokens(EVEN), jnp.asarray(packed)):
    call = functools.partial(
      attend, mask=mask, dropout=Dropout(), causal=causal
    )
    _, found = over_tokens(mesh, call, *even(0))
    chex.assert_trees_all_close(found, pulled(call, *even(0)), atol=5e-6)


def test_sinks_get_the_gradients_of_the_queries_of_all_devices(monkeypatch):
  monkeypatch.setattr(flash, "BLOCK", 8)
  sink, form = jnp.asarray([0.3, -1.0, 2.0]), flash.Form()

  def loss(sink, q, k, v, g):
    mask = tokens(EVEN)
    y = flash.attend(q, k, v, mask, Dropout(), form, sink)
    return (y * g).sum()

  run = jax.value_and_grad(loss)
  layout = Layout.of("data:2,sequence:2", jax.devices()[:4])
  placed = jax.device_put((sink, *even(0)), layout.sharding())
  found = jax.jit(layout.traced(run))(*placed)
  chex.assert_trees_all_close(found, run(sink, *even(0)), rtol=1e-4)


def test_queries_of_a_device_gather_keys_and_values_once_each_way(monkeypatch):
  monkeypatch.setattr(flash, "BLOCK", 2)
  call = functools.partial(softmax, mask=tokens(EVEN), dropout=Dropout())
  text, _ = over_tokens("data:2,sequence:2", call, *even(0))
  sent = programs.count(text).collectives
  # Forward: keys, values and mask; backward: again, and two sums.
  size = 3 * EVEN
  assert sum(each.bytes for each in sent) <= 6 * 4 * size * E + 2 * size
  assert {each.group for each in sent} == {2}
  assert {each.kind for each in sent} == {"all-gather", "reduce-scatter"}


@pytest.mark.parametrize("attend", [softmax, kernelized])
def test_dropout_differs_on_devices_and_is_the_same_in_the_backward_pass(
  monkeypatch, attend
):
  monkeypatch.setattr(flash, "BLOCK", 8)
  q, k, v, g = (jnp.broadcast_to(a[:1, :1], a.shape) for a in even(1))
  dropout, mask = Dropout(0.4, jax.random.key(7)), jnp.ones((2, EVEN), bool)
  call = functools.partial(attend, mask=mask, dropout=dropout)
  _, (y, (_, _, dv)) = over_tokens("data:2,sequence:2", call, q, k, v, g)
  # No two rows drop the same weights: their results differ.
  assert not np.isclose(y[0], y[1], atol=1e-6).all(-1).any()
  # The result is linear in the values, by the weights that were kept.
  assert float((y * g).sum()) == pytest.approx(float((dv * v).sum()), rel=1e-4)


@pytest.mark.parametrize("attend", [softmax, kernelized])
@pytest.mark.slow
def test_flash_dropout_is_the_same_in_the_backward_pass(blocks, attend):
  """Values that are one-hot show the weights, dropped ones too."""
  q, k, _, g = draw(1)
  eye = jnp.broadcast_to(jnp.eye(N), (2, 3, N, N))
  kw = {"mask": tokens()}
  off, dropout = Dropout(), Dropout(0.4, jax.random.key(7))
  both = jax.jit(
    lambda q, k: [attend(q, k, eye, dropout=d, **kw) for d in (off, dropout)]
  )
  weights, dropped = both(q, k)
  weights, dropped = np.asarray(weights), np.asarray(dropped)
  kept = dropped != 0
  chex.assert_trees_all_close(
    dropped, np.where(kept, weights / 0.6, 0), atol=1e-5
  )
  seen = np.broadcast_to(tokens()[:, None, None], kept.shape)
  assert kept[seen].mean() == pytest.approx(0.6, abs=0.03)
  # No two blocks, samples or heads have one dropout mask.
  rows = kept[0, :, :24].reshape(-1, 8, N)
  assert len({row.tobytes() for row in np.asarray(rows)}) == len(rows)
  # Gradients are those of the weights that were kept.
  v = draw(2)[0]

  def by_mask(q, k, v):
    weights = attend(q, k, eye, dropout=Dropout(), **kw)
    return jnp.where(kept, weights / 0.6, 0) @ v

  call = functools.partial(attend, dropout=dropout, **kw)
  chex.assert_trees_all_close(
    pulled(call, q, k, v, g), pulled(by_mask, q, k, v, g), atol=5e-6
  )


def test_flash_query_without_keys_has_uniform_weights(blocks):
  q, k, v, g = draw(3)
  mask = jnp.zeros((2, N), bool)
  call = functools.partial(softmax, mask=mask, dropout=Dropout())

  @jax.jit
  def run(q, k, v, g):
    y, pull = jax.vjp(call, q, k, v)
    return y, pull(g)[2]

  y, dv = run(q, k, v, g)
  v, g = np.asarray(v), np.asarray(g)
  mean = np.broadcast_to(v.mean(2, keepdims=True), v.shape)
  chex.assert_trees_all_close(y, mean, atol=1e-6)
  want = np.broadcast_to(g.mean(2, keepdims=True), v.shape)
  chex.assert_trees_all_close(dv, want, atol=1e-6)


def test_flash_large_scores_give_finite_gradients(blocks):
  q, k, v, g = draw(4)
  y, grads = pulled(
    functools.partial(softmax, mask=tokens(), dropout=Dropout()),
    1e3 * q,
    1e3 * k,
    v,
    g,
  )
  chex.assert_tree_all_finite((y, grads))


def test_flash_keeps_half_precision(blocks):
  q, k, v, g = draw(5)
  halves = [a.astype(jnp.bfloat16) for a in (q, k, v, g)]
  call = functools.partial(softmax, mask=tokens(), dropout=Dropout())
  found, want = pulled(call, *halves), pulled(call, q, k, v, g)
  assert {a.dtype for a in jax.tree.leaves(found)} == {jnp.dtype(jnp.bfloat16)}
  found = jax.tree.map(lambda a: a.astype(jnp.float32), found)
  chex.assert_trees_all_close(found, want, atol=0.05)


@pytest.mark.parametrize("attend", [softmax, kernelized])
def test_flash_memory_grows_linearly(monkeypatch, attend):
  """The greatest array of forward and backward pass has no axes n x n."""
  monkeypatch.setattr(flash, "BLOCK", 8)

  def loss(x):
    mask = jnp.ones(x.shape[::2], bool)
    return attend(x, x, x, mask=mask, dropout=Dropout()).sum()

  def largest(n):
    x = jax.ShapeDtypeStruct((1, 1, n, E), jnp.float32)
    jaxpr = jax.make_jaxpr(jax.grad(loss))(x)
    return max(sizes(jaxpr.jaxpr))

  def sizes(jaxpr):
    for equation in jaxpr.eqns:
      yield from (v.aval.size for v in equation.outvars)
      for inner in jax.extend.core.jaxprs_in_params(equation.params):
        yield from sizes(inner)

  assert largest(512) <= 2.2 * largest(256)


@pytest.mark.parametrize("causal", [False, True])
def test_flash_cudnn_path_equals_softmax(monkeypatch, causal):
  """JAX's own attention stands for cuDNN's here, in the type of the latter."""
  halves = [a[:, :, :26].astype(jnp.bfloat16) for a in draw(6)]
  q, k, v, g = (jnp.tile(a, (1, 1, 1, 2)) for a in halves)
  mask = tokens()[:, :26]
  at = mask[:, None, :, None]

  def call(q, k, v):
    y = softmax(q, k, v, mask=mask, dropout=Dropout(), causal=causal)
    return (jnp.where(at, y, 0) * g).astype(jnp.float32).sum(), y

  def grads(q, k, v):
    return jax.jit(jax.grad(call, (0, 1, 2), has_aux=True))(q, k, v)

  want = grads(q, k, v)
  monkeypatch.setattr(flash, "on_gpus", lambda capability: True)
  monkeypatch.setattr(flash, "CUDNN", "xla")
  found = grads(q, k, v)
  (dq, dk, dv), y = jax.tree.map(lambda a: a.astype(jnp.float32), found)
  (wq, wk, wv), w = jax.tree.map(lambda a: a.astype(jnp.float32), want)
  y, w = (jnp.where(at, a, 0) for a in (y, w))
  chex.assert_trees_all_close((dq, dk, dv, y), (wq, wk, wv, w), atol=0.06)
  # Several devices take their own rows.
  layout = Layout.of("data:2", jax.devices()[:2])
  spread = jax.jit(layout.traced(jax.grad(call, (0, 1, 2), has_aux=True)))
  rows = jax.device_put((q, k, v), layout.sharding("data"))
  assert "sdy.manual_computation" in spread.lower(*rows).as_text()
  chex.assert_trees_all_close(spread(*rows), found, atol=0.06)
  # cuDNN takes neither float32 nor dropout nor packed rows.
  mask, form = jnp.ones((2, 3), bool), flash.Form()
  assert flash._cudnn_takes(q, k, v, mask, Dropout(), form)
  wide = [a.astype(jnp.float32) for a in (q, k, v)]
  assert not flash._cudnn_takes(*wide, mask, Dropout(), form)
  dropout = Dropout(0.1, jax.random.key(0))
  assert not flash._cudnn_takes(q, k, v, mask, dropout, form)
  numbers = jnp.ones((2, 3), jnp.int32)
  assert not flash._cudnn_takes(q, k, v, numbers, Dropout(), form)
