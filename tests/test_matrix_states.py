"""matrix_scan against loops over tokens and heads in NumPy."""

import functools
import itertools
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxformers import matrix_scan, matrix_states
from jaxformers.foundations import platforms
from tests.marks import slow_except

B, N, H, K, V = 2, 11, 2, 5, 3
CASES = list(itertools.product((1, 3), ("", "head", "channel"), (True, False)))


def loop(q, k, v, beta, log_decay, mask, resets, initial, reverse):
  """The recurrence of the docstring, one write at a time, in float64."""
  state, outputs = np.array(initial), np.zeros((*q.shape[:3], v.shape[-1]))
  tokens = range(q.shape[1])
  for b, t, h in itertools.product(
    range(len(q)), reversed(tokens) if reverse else tokens, range(q.shape[2])
  ):
    s = state[b, h]
    if resets is not None and resets[b, t]:
      s[:] = 0
    if mask is not None and not mask[b, t]:
      continue
    if log_decay is not None:
      rows = log_decay[b if len(log_decay) > 1 else 0, t, h]
      s *= np.exp(rows).reshape(-1, 1)
    for key, value, strength in zip(
      k[b, t, :, h],
      v[b, t, :, h],
      beta[b, t, :, h] if beta is not None else np.zeros(k.shape[2]),
      strict=True,
    ):
      if beta is None:
        s += np.outer(key, value)
      else:
        eye = np.eye(len(key))
        s[:] = (eye - strength * np.outer(key, key)) @ s
        s += strength * np.outer(key, value)
    outputs[b, t, h] = s.T @ q[b, t, h]
  return outputs, state


def draw(writes, decay, *, erases, shape=(B, N, H, K, V), seed=0):
  """Arguments of matrix_scan, with keys of norm 1, in float64."""
  b, n, h, size, width = shape
  rng = np.random.default_rng(seed)
  k = rng.normal(size=(b, n, writes, h, size))
  decays = {"head": (b, n, h), "channel": (1, n, h, size)}
  return {
    "q": rng.normal(size=(b, n, h, size)),
    "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
    "v": rng.normal(size=(b, n, writes, h, width)),
    "beta": 2 * rng.uniform(size=(b, n, writes, h)) if erases else None,
    "log_decay": -rng.exponential(size=decays[decay]) if decay else None,
    "initial": rng.normal(size=(b, h, size, width)),
  }


def run(arguments, dtype=jnp.float64, **options):
  with jax.enable_x64(dtype == jnp.float64):
    arrays = {
      name: None
      if x is None
      else jnp.asarray(x, x.dtype if x.dtype == bool else dtype)
      for name, x in arguments.items()
    }

    @jax.jit
    def apply(arrays):
      q, k, v = (arrays[name] for name in "qkv")
      rest = {name: x for name, x in arrays.items() if name not in "qkv"}
      return matrix_scan(q, k, v, **rest, **options)

    return jax.device_get(apply(arrays))


def gaps():
  """A mask with holes and a row without tokens, and resets, one at a hole."""
  mask = np.random.default_rng(1).uniform(size=(B, N)) < 0.7
  resets = np.random.default_rng(2).uniform(size=(B, N)) < 0.3
  mask[0, 4], resets[0, 4] = False, True
  return {"mask": mask, "resets": resets}


@pytest.mark.parametrize(
  ("writes", "decay", "erases"),
  [
    pytest.param(*case.values[0], marks=case.marks)
    for case in slow_except(
      [(1, "head", True), (3, "channel", True)],
      CASES,
      [(1, "channel", False), (3, "", True)],
    )
  ],
)
def test_every_form_equals_a_loop(writes, decay, erases, monkeypatch):
  arguments = draw(writes, decay, erases=erases)
  for reverse, extra in ((False, {}), (True, gaps()), (False, gaps())):
    wanted = loop(
      **arguments,
      mask=extra.get("mask"),
      resets=extra.get("resets"),
      reverse=reverse,
    )
    # Chunks of one token, chunks that do not divide 11 tokens, and one chunk.
    for form, chunk, on_tpu in (
      ("loop", 0, False),
      ("chunked", 1, False),
      ("chunked", 7, False),
      ("chunked", 0, False),
      # TPUs solve the triangular systems of chunks by products.
      ("chunked", 1, True),
      ("chunked", 7, True),
    ):
      monkeypatch.setattr(platforms, "on_tpu", lambda on=on_tpu: on)
      found = run(arguments | extra, form=form, chunk=chunk, reverse=reverse)
      for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
  ("writes", "decay", "erases", "reverse"),
  [(2, "channel", True, False), (1, "head", False, True)],
)
def test_gradients_equal_finite_differences(writes, decay, erases, reverse):
  arguments = draw(writes, decay, erases=erases, shape=(1, 5, 1, 3, 2))
  extra = {"mask": np.array([[True, True, False, True, True]])}
  extra["resets"] = np.array([[False, False, False, True, False]])
  weights = np.random.default_rng(3).normal(size=(1, 5, 1, 2))
  with jax.enable_x64(True):
    for form in ("chunked", "loop"):

      @jax.jit
      def loss(arrays, form=form):
        q, k, v = (arrays[name] for name in "qkv")
        rest = {name: x for name, x in arrays.items() if name not in "qkv"}
        options = {"form": form, "chunk": 2 * writes, "reverse": reverse}
        y, last = matrix_scan(q, k, v, **rest, **extra, **options)
        return (weights * jnp.sin(y)).sum() + jnp.sin(last).sum()

      arrays = jax.tree.map(jnp.asarray, arguments)
      modes = ["fwd", "rev"]
      check_grads(loss, (arrays,), order=1, modes=modes, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
  ("chunk", "on_tpu"), [(32, False), (64, False), (64, True)]
)
@pytest.mark.parametrize("beta", [1.0, 1.9, 2.0])
def test_repeated_keys_lose_no_digits(beta, chunk, on_tpu, monkeypatch):
  """Powers of the triangular matrix would have errors of 1e3 to 1e9 here."""
  monkeypatch.setattr(platforms, "on_tpu", lambda: on_tpu)
  arguments = draw(1, "", erases=True, shape=(1, 64, 1, 16, 4))
  for period in (1, 2):  # Equal keys, or two that alternate.
    keys = arguments["k"][:, np.arange(64) % period]
    changed = {"k": keys, "beta": np.full((1, 64, 1, 1), beta)}
    wanted = loop(**arguments | changed, mask=None, resets=None, reverse=False)
    found = run(arguments | changed, jnp.float32, chunk=chunk)
    # A loop in float32 has errors of 1e-6 to 2e-6 of the greatest output.
    atol = 1e-5 * np.abs(wanted[0]).max()
    for x, y in zip(found, wanted, strict=True):
      np.testing.assert_allclose(x, y, atol=atol, rtol=0)


def test_strong_decays_lose_no_digits():
  """Differences of running sums of logs would have errors of 1e-4 here."""
  arguments = draw(1, "head", erases=False, shape=(1, 32, 1, 4, 2))
  arguments["log_decay"][:, :16] = -1_000.0
  arguments["log_decay"][:, 16:] = -1e-3
  wanted = loop(**arguments, mask=None, resets=None, reverse=False)
  found = run(arguments, jnp.float32)
  for x, y in zip(found, wanted, strict=True):
    np.testing.assert_allclose(x, y, atol=5e-6, rtol=0)


@pytest.mark.slow
def test_parts_with_a_carried_state_equal_the_whole():
  arguments = draw(2, "head", erases=True)
  start = arguments.pop("initial")
  whole, last = run(arguments | {"initial": start}, chunk=8)
  outputs, state = [], start
  for first, end in ((0, 1), (1, 8), (8, N)):
    part = {
      name: None if x is None else x[:, first:end]
      for name, x in arguments.items()
    }
    y, state = run(part | {"initial": state}, chunk=8)
    outputs.append(y)
  np.testing.assert_allclose(np.concatenate(outputs, 1), whole, atol=1e-12)
  np.testing.assert_allclose(state, last, atol=1e-12)


def test_examples_in_one_row_do_not_see_each_other():
  """A row of two examples equals the examples alone, and so do gradients."""
  arguments = draw(1, "head", erases=True)
  del arguments["initial"]
  resets = np.arange(N)[None] == np.full((B, 1), 4)

  def loss(arrays, **options):
    q, k, v = (arrays[name] for name in "qkv")
    rest = {name: x for name, x in arrays.items() if name not in "qkv"}
    return jnp.sin(matrix_scan(q, k, v, **rest, **options)[0]).sum()

  gradient = jax.jit(jax.grad(loss))
  with jax.enable_x64(True):
    arrays = jax.tree.map(jnp.asarray, arguments)
    packed = jax.jit(jax.grad(lambda a: loss(a, resets=resets)))(arrays)
    for part in (slice(0, 4), slice(4, N)):
      alone = gradient({name: x[:, part] for name, x in arrays.items()})
      for name, x in alone.items():
        np.testing.assert_allclose(x, packed[name][:, part], atol=1e-10)


def test_states_are_float32_under_bfloat16():
  arguments = draw(1, "head", erases=True)
  outputs, last = run(arguments, jnp.bfloat16)
  assert outputs.dtype == jnp.bfloat16 and last.dtype == jnp.float32
  rounded = {
    name: np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)
    for name, x in arguments.items()
  }
  wanted = loop(**rounded, mask=None, resets=None, reverse=False)[1]
  np.testing.assert_allclose(last, wanted, atol=1e-5)


def test_masked_tokens_are_not_read():
  arguments = draw(2, "channel", erases=True)
  mask = gaps()["mask"]
  clean = run(arguments | {"mask": mask})
  for name in ("q", "k", "v", "beta"):
    arguments[name][~mask] = np.nan
  log_decay = np.broadcast_to(arguments["log_decay"], (B, N, H, K)).copy()
  log_decay[~mask] = np.nan
  dirty = run(arguments | {"mask": mask, "log_decay": log_decay})
  for x, y in zip(clean, dirty, strict=True):
    np.testing.assert_array_equal(x, y)
  assert (clean[0][~mask] == 0).all()


def test_backward_pass_stores_states_of_chunks_alone():
  """Its memory beside the arguments is one state per chunk of tokens."""
  n, size, width = 256, 8, 16
  arguments = draw(1, "head", erases=True, shape=(1, n, 1, size, width))
  arrays = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), arguments)

  def outputs(arrays):
    q, k, v = (arrays[name] for name in "qkv")
    rest = {name: x for name, x in arrays.items() if name not in "qkv"}
    return matrix_scan(q, k, v, **rest, chunk=32)[0]

  residuals = jax.eval_shape(lambda x: jax.vjp(outputs, x)[1], arrays)
  kept = sum(leaf.size for leaf in jax.tree.leaves(residuals))
  given = sum(leaf.size for leaf in jax.tree.leaves(arrays))
  states = n // 32 * size * width
  assert kept <= given + states + 64


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"form": "tree"}, r"Unknown form 'tree': choose auto, chunked, loop"),
    ({"q": np.ones((2, 3, 4))}, r"q has the shape \(2, 3, 4\).*give q as"),
    ({"v": np.ones((2, 3, 1, 4))}, r"v has the shape.*give \(2, 3, 1, 2, 4\)"),
    ({"q": np.ones((2, 3, 3, 4))}, r"k has the shape.*\(2, 3, 1, 3, 4\) or"),
    ({"k": np.ones((2, 3, 3, 4))}, r"q has the shape.*\(2, 3, 3, 4\) or"),
    ({"beta": np.ones((2, 3))}, r"beta has the shape.*give \(2, 3, 1, 2\)"),
    ({"log_decay": np.ones((2, 3, 2, 5))}, r"log_decay has the shape.*give"),
    ({"mask": np.ones((2, 4), bool)}, r"mask has the shape.*give \(2, 3\)"),
    ({"resets": np.ones(3, bool)}, r"resets has the shape.*give \(2, 3\)"),
    ({"initial": np.ones((2, 2, 4))}, r"initial has the shape.*give"),
    ({"chunk": -1}, r"chunk=-1.*give"),
    ({"decay": None}, r"decay.*log_decay"),
  ],
)
def test_wrong_arguments_are_named(change, message):
  shape = (2, 3, 2, 4)
  arguments = {"q": np.ones(shape), "k": np.ones(shape), "v": np.ones(shape)}
  with pytest.raises((ValueError, TypeError), match=message):
    matrix_scan(**arguments | change)


@pytest.mark.parametrize("form", ["chunked", "loop"])
@pytest.mark.parametrize("decay", ["", "head", "channel"])
@pytest.mark.parametrize("erases", [True, False])
def test_one_head_of_queries_and_keys_serves_all_heads(decay, erases, form):
  arguments = draw(2, decay, erases=erases)
  shared = {"q": arguments["q"][:, :, :1], "k": arguments["k"][..., :1, :]}
  copied = {name: np.repeat(x, H, -2) for name, x in shared.items()}
  actual = run(arguments | shared, form=form, chunk=8)
  expected = run(arguments | copied, form=form, chunk=8)
  chex.assert_trees_all_close(actual, expected, rtol=1e-12)


@pytest.mark.parametrize(
  ("rows", "size", "chunk"),
  [
    (128, 16, 64),
    (1_024, 16, 32),
    (1_024, 8, 32),
    (10**6, 16, 16),
    (8, 64, 16),
    (10**6, 24, 16),
  ],
)
def test_chunks_of_a_tpu_follow_the_states_of_a_device(
  monkeypatch, rows, size, chunk
):
  monkeypatch.setattr(platforms, "backend", lambda: "tpu")
  monkeypatch.setattr(platforms, "row_parts", lambda: 4)
  assert matrix_states._default_chunk(rows, size, is_fine=True) == chunk
  assert matrix_states._default_chunk(rows, size, is_fine=False) == 64


def trace(arguments, platform, **options):
  """The program of matrix_scan for a platform, as text."""
  with platforms.targeting(types.SimpleNamespace(platform=platform)):
    return str(jax.make_jaxpr(lambda x: run(x, **options))(arguments))


@pytest.mark.parametrize(
  ("decay", "size", "platform", "form"),
  [
    ("channel", 16, "cpu", "loop"),
    ("channel", 17, "cpu", "chunked"),
    ("channel", 16, "tpu", "chunked"),
    ("head", 32, "cpu", "chunked"),
  ],
)
def test_the_form_follows_device_and_sizes(decay, size, platform, form):
  arguments = draw(1, decay, erases=True, shape=(1, 3, 1, size, 2))
  program = functools.partial(trace, arguments, platform)
  other = "chunked" if form == "loop" else "loop"
  assert program() == program(form=form) != program(form=other)


@pytest.mark.parametrize(
  ("decay", "size", "platform", "chunk"),
  [
    ("channel", 17, "cpu", 8),
    ("channel", 17, "gpu", 16),
    ("channel", 16, "tpu", 64),
    ("channel", 32, "tpu", 32),
    ("channel", 99, "tpu", 16),
    ("head", 17, "cpu", 32),
    ("head", 17, "tpu", 64),
  ],
)
def test_the_chunk_follows_device_and_sizes(decay, size, platform, chunk):
  arguments = draw(1, decay, erases=True, shape=(1, 128, 1, size, 2))
  program = functools.partial(trace, arguments, platform)
  assert program() == program(chunk=chunk) != program(chunk=2 * chunk)
