"""Step sizes: a token of size s acts as s equal tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.foundations.errors import UserError
from jaxformers.models.mixer import MIXERS
from jaxformers.models.streams import Stream
from jaxformers.models.variables import make_variables
from tests.marks import slow_except
from tests.models.mixers import sequential
from tests.models.mixers.oracle import small_sizes
from tests.models.test_cache import build, start

N = 9
NAMES = sorted(n for n in MIXERS if getattr(MIXERS[n], "has_step_sizes", False))
# Mixers whose inputs of a step do not depend on earlier tokens.
LINEAR = [name for name in NAMES if name != "mamba"]


def sizes(shape=(2, N)):
  return np.random.default_rng(3).uniform(0.2, 2.5, shape).astype(np.float32)


def run(name, options, x, mask, steps, **changes):
  """Outputs of a mixer in float64, [b, n, d]."""
  options = small_sizes(name) | options
  params = sequential.start(name, options, 0.05)
  params = {k: changes.get(k, lambda v: v)(v) for k, v in params.items()}
  variables = {"params": params}
  with jax.enable_x64(True):
    if steps is not None:
      variables["step_sizes"] = {"s": jnp.asarray(steps, jnp.float64)}
    apply = functools.partial(
      MIXERS[name](dtype=jnp.float64, **options).apply, carry=None, train=False
    )
    return np.asarray(jax.jit(apply)(variables, x, mask=mask)[0])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", slow_except(("s5",), LINEAR))
def test_integer_sizes_repeat_tokens(name, causal):
  # One sequence with a hole, and the same sequence with repeated tokens.
  repeats = np.array([2, 1, 3, 1, 4, 1, 2, 1, 1])
  x = np.random.default_rng(0).normal(size=(1, N, sequential.D))
  mask = np.ones((1, N), bool)
  mask[0, 3] = False
  options = {"causal": causal}
  got = run(name, options, x, mask, repeats[None])
  repeated = [np.repeat(array, repeats, 1) for array in (x, mask)]
  want = run(name, options, *repeated, None)
  ends = np.cumsum(repeats) - 1
  if causal or name == "s4d":
    # The backward direction of S4D reads later tokens only.
    np.testing.assert_allclose(got[mask], want[:, ends][mask], atol=1e-10)
    return
  # Both directions of the others read all of the present token.
  flip = {
    key: lambda c, axis=axis: np.roll(c, c.shape[axis] // 2, axis)
    for key, axis in (("C", 1), ("C_re", 1), ("C_im", 1))
  }
  names = {"C1": "C2", "C2": "C1"}
  if name == "s5":
    params = sequential.start(name, small_sizes(name) | options, 0.05)
    flip = {key: lambda _, o=params[o]: o for key, o in names.items()}
  turned = run(
    name, options, x[:, ::-1], mask[:, ::-1], repeats[None, ::-1], **flip
  )
  np.testing.assert_allclose(turned[:, ::-1][mask], got[mask], atol=1e-10)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", slow_except(("s4d",), NAMES))
def test_sizes_of_one_change_nothing(name, causal):
  if name == "mamba" and not causal:
    pytest.skip("Mamba is always causal.")
  x, mask = sequential.inputs()
  options = {"causal": causal}
  want, got = (
    run(name, options, x, mask, steps) for steps in (None, np.ones(mask.shape))
  )
  np.testing.assert_allclose(got[mask], want[mask], atol=1e-10)
  # Other sizes change the results, and sizes at padding do not.
  steps = sizes(mask.shape)
  one, other = (
    run(name, options, x, mask, np.where(mask, steps, fill))
    for fill in (1.0, 7.0)
  )
  np.testing.assert_allclose(one[mask], other[mask], atol=1e-10)
  assert np.abs(one - want)[mask].max() > 1e-3


def test_sizes_multiply_the_steps_of_mamba():
  x, mask = sequential.inputs()
  mask[:] = True
  options = {"expansion": 1}
  # Without the tokens, the steps are softplus(step_bias).
  scale = 1.7
  steps = np.full(mask.shape, scale)
  got = run("mamba", options, x, mask, steps, **constant(1))
  want = run("mamba", options, x, mask, None, **constant(scale))
  np.testing.assert_allclose(got, want, atol=1e-10)


def constant(factor):
  """Changes of Mamba's parameters that make all its steps `factor`."""
  return {
    "step": np.zeros_like,
    "step_bias": lambda b: np.full_like(b, np.log(np.expm1(factor))),
  }


@pytest.mark.parametrize(
  "name", slow_except(("lru",), ["lru", "mamba", "s4d", "s5", "linoss"])
)
def test_packed_rows_and_streams_have_step_sizes(name):
  model = build(name, positions="none")
  params = start(model)
  rng = np.random.default_rng(1)
  ids, steps = rng.integers(1, 11, (2, N)), sizes()
  apply = functools.partial(model.apply, train=False)
  apply = jax.jit(apply, static_argnames="sizes")
  want = apply({"params": params}, ids, step_sizes=steps)
  row = apply(
    {"params": params},
    ids.reshape(1, -1),
    segments=np.repeat([[1, 2]], N, 1),
    sizes=(2, N),
    step_sizes=steps.reshape(1, -1),
  )
  np.testing.assert_allclose(row.reshape(want.shape), want, atol=2e-5)
  stream = Stream(model, make_variables(model, params))
  for part in (slice(0, 1), slice(1, 6), slice(6, N)):
    found = stream.feed(ids[:, part], step_sizes=steps[:, part])
    np.testing.assert_allclose(found, want[:, part], atol=2e-5)
  # Padding between tokens moves the sizes of the tokens, too.
  holes = np.insert(ids, 4, 0, axis=1)
  moved = np.insert(steps, 4, np.nan, axis=1)
  found = apply({"params": params}, holes, step_sizes=moved)
  np.testing.assert_allclose(np.delete(found, 4, 1), want, atol=2e-5)


def test_results_are_differentiable_in_step_sizes():
  model = build("lru", positions="none")
  params = start(model)
  ids = np.random.default_rng(1).integers(1, 11, (1, N))

  @jax.jit
  def loss(steps):
    y = model.apply({"params": params}, ids, train=False, step_sizes=steps)
    return y[0, -1, 1:4].sum()

  steps = jnp.asarray(sizes((1, N)))
  direction = np.random.default_rng(2).normal(size=(1, N)).astype(np.float32)
  change = loss(steps + 1e-2 * direction) - loss(steps - 1e-2 * direction)
  got = (jax.grad(loss)(steps) * direction).sum()
  np.testing.assert_allclose(got, change / 2e-2, rtol=2e-2)


def test_sizes_at_padding_have_no_gradient():
  model = build("lru", positions="none")
  ids = np.array([[3, 0, 5, 2, 0]])

  @jax.jit
  def loss(params, steps):
    y = model.apply({"params": params}, ids, train=False, step_sizes=steps)
    return y[0, 3, 1:4].sum()

  steps = jnp.array([[1.0, np.nan, 0.5, 2.0, np.inf]])
  grads = jax.grad(loss, argnums=(0, 1))(start(model), steps)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
  assert not grads[1][0, [1, 4]].any() and grads[1][0, [0, 2, 3]].all()


@pytest.mark.parametrize(
  ("name", "steps", "text"),
  [
    ("lru", np.ones((1, 3)), r"step_sizes have the shape \(1, 3\)"),
    ("lru", -np.ones((2, N)), "step size is -1.0"),
    ("lru", np.full((2, N), np.nan), "step size is nan"),
    ("lru", np.full((2, N), 1e39), "step size is inf"),
    ("lru", np.ones((2, N), complex), "type complex128.*a number for each"),
    ("lru", [[1.0], [1.0, 2.0]], r"shape \(\).*a number for each"),
    ("rglru", np.ones((2, N)), "'rglru' has no step sizes.*choose one of.*lru"),
  ],
)
def test_wrong_step_sizes_are_refused(name, steps, text):
  model = build(name, positions="none")
  ids = np.ones((2, N), np.int32)
  with pytest.raises(UserError, match=text):
    model.apply({"params": {}}, ids, train=False, step_sizes=steps)


def test_certified_s4d_has_no_step_sizes():
  mixer = MIXERS["s4d"](certified=True, max_len=N, state_size=4)
  with pytest.raises(UserError, match="certified=True.*step_sizes"):
    mixer.apply(
      {"params": {}, "step_sizes": {"s": sizes()}},
      np.zeros((2, N, 4), np.float32),
      mask=np.ones((2, N), bool),
      carry=None,
      train=False,
    )
