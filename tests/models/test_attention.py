"""The mixer contract, for every registered mixer."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jaxformers import models, orthogonal
from jaxformers.models import attention, mixers
from jaxformers.models.config import field_names
from jaxformers.models.mixer import MIXERS
from jaxformers.models.mixers import flash
from tests import draws, initial
from tests.marks import REPRESENTATIVES, slow_except
from tests.models.mixers.oracle import small_sizes

NAMES = sorted(MIXERS)
B, N, D, MAX_LEN = 4, 17, 16, 40
DRAWING = [n for n in NAMES if "redraw" in getattr(MIXERS[n], "options", ())]
# A rounded query may change its bucket or its rank, and then its whole row.
SELECTING = ("informer", "reformer")


def wiring(name, max_len):
  """Returns the options that a model fills in; modules may lack max_len."""
  return {"max_len": max_len} if "max_len" in field_names(MIXERS[name]) else {}


def build(name, **options):
  return MIXERS[name](**wiring(name, MAX_LEN) | small_sizes(name) | options)


def inputs():
  """x [B, N, D], and a mask with padding at the end and a hole."""
  x = draws.normal(0, (B, N, D))
  mask = jnp.arange(N)[None] < jnp.array([[N], [9], [1], [N]])
  return x, mask.at[1, 2].set(False)


@pytest.fixture(autouse=True, scope="module")
def short_blocks():
  """Exact attention takes its tokens in blocks, as long sequences do."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(flash, "BLOCK", 8)
    yield


@functools.cache
def make(name, **options):
  """A mixer, its variables, and its compiled y of (variables, x, mask)."""
  mixer = build(name, **options)
  x, mask = inputs()
  params = initial.params(mixer, x, mask=mask, carry=None, seed=1)
  # Nothing may hide behind a zero start.
  params = jax.tree.map(lambda p: p if p.ndim else p + 0.5, params)

  @jax.jit
  def apply(variables, x, mask):
    return mixer.apply(variables, x, mask=mask, carry=None, train=False)[0]

  return mixer, {"params": params}, apply


@functools.cache
def sloped(name):
  """A compiled sum of y * weights, and its gradient with respect to x."""
  apply = make(name)[2]

  def weighed(x, variables, mask, weights):
    return (apply(variables, x, mask) * weights).sum()

  return jax.jit(jax.value_and_grad(weighed))


def at_tokens(y, mask):
  return jnp.where(mask[..., None], y, 0)


@pytest.fixture(params=slow_except(REPRESENTATIVES, NAMES))
def name(request):
  return request.param


# One mixer of each kind, for what takes long or seldom differs.
SOME = ("bigbird", "linear", "local", "mega", "s5", "softmax", "transject")
QUICK = ("mega", "softmax", "transject")
some = pytest.mark.parametrize("name", slow_except(QUICK, NAMES, SOME))


def test_registry_lists_every_mixer_module():
  assert {"softmax", "transject"} <= set(NAMES)
  helpers = {"blocked", "convolution", "flash", "landmarks", "recurrence"}
  helpers |= {"matrix_state", "scores", "state_space"}
  modules = {MIXERS[name].__module__.rpartition(".")[2] for name in NAMES}
  # TransJect has a package of its own.
  assert set(mixers.__all__) == modules - {"block"} | helpers


def test_mixer_keeps_shape_and_evaluation_repeats(name, strict):
  mixer, variables, apply = make(name)
  x, mask = inputs()
  y = apply(variables, x, mask)
  chex.assert_equal_shape([x, y])
  chex.assert_trees_all_equal(y, apply(variables, x, mask))

  # What it carries it also takes.
  def twice(x):
    kw = {"mask": mask, "train": False}
    y, carry = mixer.apply(variables, x, carry=None, **kw)
    return mixer.apply(variables, y, carry=carry, **kw)[0]

  assert jax.eval_shape(twice, x).shape == x.shape


def test_masked_tokens_are_never_read(name, strict):
  _, variables, apply = make(name)
  x, mask = inputs()
  y, z = (
    apply(variables, jnp.where(mask[..., None], x, pad), mask)
    for pad in (0.0, 1e3)
  )
  chex.assert_trees_all_close(at_tokens(y, mask), at_tokens(z, mask), atol=1e-5)


def test_mixer_ignores_appended_padding(name, strict):
  _, variables, apply = make(name)
  x, mask = inputs()
  y = apply(variables, x, mask)
  x = jnp.pad(x, ((0, 0), (0, 12), (0, 0)), constant_values=7.0)
  z = apply(variables, x, jnp.pad(mask, ((0, 0), (0, 12))))[:, :N]
  chex.assert_trees_all_close(at_tokens(y, mask), at_tokens(z, mask), atol=1e-5)


def test_mixer_does_not_depend_on_batch_mates(name, strict):
  _, variables, apply = make(name)
  x, mask = inputs()
  y = apply(variables, x, mask)
  z = apply(variables, x.at[1].multiply(-3), mask)
  others = jnp.array([0, 2, 3])
  chex.assert_trees_all_close(y[others], z[others], atol=1e-6)
  assert not np.allclose(y[1], z[1], atol=1e-3)


@some
def test_mixer_gradient_reaches_every_token(name):
  """Nothing of a sample is dropped: a gradient reaches all its tokens."""
  _, variables, _ = make(name)
  x, mask = inputs()
  weights = np.where(mask[..., None], draws.normal(3, x.shape), 0)
  _, grad = sloped(name)(x, variables, mask, weights)
  chex.assert_tree_all_finite(grad)
  reached = jnp.abs(grad).max(-1) > 0
  assert (reached == mask).all()


@some
def test_mixer_does_not_recompile_at_the_second_call(name):
  _, variables, apply = make(name)
  x, mask = inputs()
  apply(variables, x, mask)
  before = apply._cache_size()
  jax.block_until_ready(apply(variables, 2 * x, mask))
  assert apply._cache_size() == before


@some
def test_mixer_is_the_same_over_devices_and_under_pmap(name, strict):
  _, variables, apply = make(name)
  x, mask = inputs()
  y = apply(variables, x, mask)
  mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,))
  rows = jax.NamedSharding(mesh, jax.P("data"))
  z = apply(variables, jax.device_put(x, rows), jax.device_put(mask, rows))
  assert len(z.sharding.device_set) == 4
  chex.assert_trees_all_close(y, z, atol=1e-5)
  mapped = jax.vmap(lambda x, mask: apply(variables, x[None], mask[None])[0])
  z = mapped(x, mask)
  chex.assert_trees_all_close(at_tokens(y, mask), at_tokens(z, mask), atol=1e-5)


@some
def test_mixer_half_precision_is_near_float32(name):
  _, variables, apply = make(name)
  _, _, half = make(name, dtype=jnp.bfloat16)
  x, mask = inputs()
  y = apply(variables, x, mask)
  z = half(variables, x.astype(jnp.bfloat16), mask)
  assert z.dtype == jnp.bfloat16
  off = jnp.abs(at_tokens(y - z.astype(y.dtype), mask))
  assert (jnp.median(off) if name in SELECTING else off.max()) < 0.1


@some
def test_mixer_is_finite_for_a_sample_without_tokens(name):
  _, variables, _ = make(name)
  x, mask = inputs()
  value, grad = sloped(name)(x, variables, np.zeros_like(mask), np.ones_like(x))
  chex.assert_tree_all_finite((value, grad))


# Options that change the arithmetic of a mixer's gradient.
NUMERICAL = [
  *(
    pytest.param(*case.values, {}, marks=case.marks)
    for case in slow_except(QUICK, NAMES, SOME)
  ),
  ("linear", {"causal": True}),
  # The causal form of others is another mask.
  *(
    pytest.param(name, {"causal": True}, marks=pytest.mark.long)
    for name in models.causal_mixers()
    if name != "linear"
  ),
  ("transject", {"sigma": "learned", "gating": "certified"}),
  *(
    pytest.param(*case, marks=pytest.mark.slow)
    for case in (
      ("kernelized", {"normalize": True}),
      ("linformer", {"share_key_value": True, "share_heads": True}),
      ("nystromformer", {"inverse_init": "batch"}),
      ("performer", {"epsilon": 1e-4}),
      ("performer", {"epsilon": 1e-2}),
      ("reformer", {"same_bucket": False, "correct_duplicates": False}),
      ("skyformer", {"inverse_init": "batch", "gamma": 0.5}),
      ("softmax", {"symmetric": True}),
      ("softmax", {"feat_scale": True}),
      ("softmax", {"orthogonal": True, "orthogonal_map": "householder"}),
      ("synthesizer", {"kind": "factorized_dense"}),
      ("transject", {"reconstruction_weight": 0.1}),
    )
  ),
]


@pytest.mark.parametrize(("name", "options"), NUMERICAL)
def test_mixer_gradients_match_finite_differences(name, options):
  """In float64, along a random direction of the parameters and of x."""
  # TransJect's Sigma and gate stay in float32.
  step, rtol = (1e-3, 1e-3) if name == "transject" else (1e-6, 1e-5)
  mixer, variables, _ = make(name, **options)
  x, mask = inputs()
  with jax.enable_x64(True):
    mixer = mixer.clone(dtype=jnp.float64)
    wide = functools.partial(np.asarray, dtype=np.float64)
    point = (jax.tree.map(wide, variables), wide(x))
    leaves, tree = jax.tree.flatten(point)
    way = tree.unflatten(
      draws.normal(i, a.shape, float) for i, a in enumerate(leaves)
    )

    @jax.jit
    def value_and_slope(step):
      def f(point):
        y, _ = mixer.apply(*point, mask=mask, carry=None, train=False)
        return jnp.sin(at_tokens(y, mask)).sum()

      moved = jax.tree.map(lambda a, u: a + step * u, point, way)
      value, grad = jax.value_and_grad(f)(moved)
      return value, sum(
        jnp.vdot(g, u)
        for g, u in zip(*map(jax.tree.leaves, (grad, way)), strict=True)
      )

    up, down = (value_and_slope(s)[0] for s in (step, -step))
    _, slope = value_and_slope(0.0)
    np.testing.assert_allclose((up - down) / (2 * step), slope, rtol=rtol)


@pytest.mark.parametrize(
  "name", slow_except(("local", "mega", "softmax"), models.causal_mixers())
)
def test_causal_mixer_does_not_see_later_tokens(name, strict):
  _, variables, apply = make(name, causal=True)
  x, mask = inputs()
  y = apply(variables, x, mask)
  for at in (1, 6, 13):
    z = apply(variables, x.at[:, at:].multiply(-3), mask)
    before = mask & (jnp.arange(N) < at)[None]
    chex.assert_trees_all_close(
      at_tokens(y, before), at_tokens(z, before), atol=1e-6
    )
    after = (mask & (jnp.arange(N) >= at)[None])[0]
    assert (jnp.abs(y - z)[0].max(-1) > 1e-6)[after].all()


@pytest.mark.parametrize("name", slow_except(("performer",), DRAWING))
@pytest.mark.slow
def test_random_features_are_seeded_sown_and_replaceable(name):
  options = {"train_projection": False} if name == "linformer" else {}
  options |= {"kind": "fixed_random"} if name == "synthesizer" else {}
  x, mask = inputs()

  def run(seed, given=None, *, train=False, key=0, redraw=False):
    mixer, variables, _ = make(name, **options)
    mixer = mixer.clone(seed=seed, redraw=redraw)
    call = functools.partial(
      mixer.apply,
      mask=mask,
      carry=None,
      train=train,
      rngs={"random": jax.random.key(key)},
      mutable=["random"],
    )
    variables = variables | ({"random": given} if given else {})
    (y, _), shown = jax.jit(call)(variables, x)
    return y, shown["random"]

  y, drawn = run(0)
  chex.assert_trees_all_equal(y, run(0, train=True, key=1)[0])
  other, drawn_otherwise = run(1)
  assert jnp.abs(y - other).max() > 1e-3
  # Two programs: one knows what was drawn as a constant, and rounds otherwise.
  close = functools.partial(chex.assert_trees_all_close, rtol=0, atol=2e-6)
  close(run(1, drawn)[0], y)
  close(run(0, drawn_otherwise)[0], other)
  # Anew in every training step, and in no evaluation.
  chex.assert_trees_all_equal(run(0, redraw=True, key=3)[0], y)
  one, two = (run(0, train=True, redraw=True, key=k)[0] for k in (1, 2))
  assert jnp.abs(one - two).max() > 1e-3


def test_given_random_features_must_have_the_drawn_shape():
  mixer, variables, _ = make("performer")
  x, mask = inputs()

  def run(random, **kw):
    kw = {"mask": mask, "carry": None, "train": False} | kw
    return mixer.apply(variables | {"random": random}, x, **kw)

  with pytest.raises(ValueError, match=r"'features'.*\(2, 3, 8\).*8, 8"):
    run({"features": jnp.ones((2, 3, 8))})
  with pytest.raises(ValueError, match="featurs .*'features'"):
    run({"featurs": jnp.ones((2, 8, 8))})
  mixer = mixer.clone(redraw=True)
  with pytest.raises(ValueError, match="rngs=.*redraw=False"):
    run({}, train=True)


def test_random_features_are_no_constants_of_the_program(monkeypatch):
  mixer, variables, _ = make("performer")
  x, mask = inputs()
  kw = {"mask": mask, "carry": None, "train": False}
  y, _ = jax.jit(functools.partial(mixer.apply, **kw))(variables, x)
  monkeypatch.setattr(attention, "LARGEST_CONSTANT", 1)
  z, _ = jax.jit(functools.partial(mixer.apply, **kw))(variables, x)
  chex.assert_trees_all_close(y, z, atol=1e-5)


@pytest.mark.slow
def test_layers_draw_different_random_features():
  model = models.build(
    "performer",
    vocab_size=9,
    max_len=8,
    num_classes=2,
    d_model=8,
    num_layers=2,
  )
  init = jax.jit(functools.partial(model.init, train=False))
  params = init(jax.random.key(0), model.example())["params"]
  apply = functools.partial(model.apply, train=False, mutable=["random"])
  _, shown = jax.jit(apply)({"params": params}, model.example())
  one, two = (
    shown["random"]["encoder"][f"layer_{i}"]["mixer"]["features"]
    for i in range(2)
  )
  assert jnp.abs(one - two).max() > 0.1


@pytest.mark.slow
def test_orthogonal_attention_has_rotations_as_projections():
  _, variables, apply = make("softmax", orthogonal=True)
  x, mask = inputs()
  skews = {k for k in variables["params"] if k.endswith("_skew")}
  assert skews == {"query_skew", "key_skew", "value_skew"}
  rotations = orthogonal.rotations(variables["params"], "cayley")
  plain = make("softmax")[0]
  params = {"out": variables["params"]["out"]}
  for name in ("query", "key", "value"):
    w = rotations[f"{name}_skew"]
    assert float(orthogonal.orthogonality_defect(w).max()) < 5e-6
    bias = variables["params"][f"{name}_bias"]
    params[name] = {"kernel": w.reshape(D, 2, D // 2), "bias": bias}
  kw = {"mask": mask, "carry": None, "train": False}
  z, _ = jax.jit(functools.partial(plain.apply, **kw))({"params": params}, x)
  chex.assert_trees_all_close(apply(variables, x, mask), z, atol=1e-5)


@pytest.mark.parametrize(
  ("signature", "message"),
  [
    (lambda q, x: q, "input.*'x'.*k, q, v"),
    (lambda q, *, train: q, "tool.*'train'.*carry, draw"),
  ],
)
def test_attention_decorator_refuses_wrong_signatures(signature, message):
  with pytest.raises(ValueError, match=message):
    attention.attention("never")(signature)
  assert "never" not in MIXERS


def test_attention_decorator_passes_a_carry_between_layers():
  @attention.attention("counting")
  def counting(v, *, carry, step=2):
    count = 0 if carry is None else carry
    return v, count + step

  try:
    mixer = MIXERS["counting"](step=3)
    assert "dropout_rate" not in MIXERS["counting"].options
    x, mask = inputs()
    kw = {"mask": mask, "train": False}
    params = mixer.init(jax.random.key(0), x, carry=None, **kw)["params"]
    assert set(params) == {"value", "out"}
    assert mixer.apply({"params": params}, x, carry=4, **kw)[1] == 7
  finally:
    MIXERS.pop("counting")


@pytest.mark.parametrize("name", ["kernelized", "softmax"])
def test_rotary_attention_depends_on_distances_only(name):
  """Tokens that are all three places further see each other as before."""
  _, variables, apply = make(name, rotary=True)
  _, _, plain = make(name)
  x, _ = inputs()
  mask = jnp.ones((B, N), bool)
  moved = jnp.pad(x, ((0, 0), (3, 0), (0, 0)), constant_values=7.0)
  y = apply(variables, x, mask)
  z = apply(variables, moved, jnp.pad(mask, ((0, 0), (3, 0))))[:, 3:]
  chex.assert_trees_all_close(y, z, atol=2e-5)
  assert jnp.abs(y - plain(variables, x, mask)).max() > 1e-2


def test_rotary_is_refused_without_queries_and_keys():
  with pytest.raises(ValueError, match="rotary=True.*none"):
    make("synthesizer", rotary=True)
  with pytest.raises(ValueError, match="rotary=True.*no multiple of 2"):
    make("softmax", rotary=True, head_size=3)


def test_attention_refuses_heads_that_do_not_divide_the_width():
  with pytest.raises(ValueError, match="num_heads=3.*d_model=16"):
    make("softmax", num_heads=3)


def test_mixer_refuses_sequences_beyond_max_len():
  with pytest.raises(ValueError, match="17 tokens.*max_len=9"):
    make("local", max_len=9)


@pytest.mark.parametrize("name", ["longformer", "softmax", "sparse"])
@pytest.mark.slow
def test_attention_dropout_acts_in_training_only(name):
  mixer, variables, _ = make(name, dropout_rate=0.5)
  mixer = mixer.clone(redraw=False)
  x, mask = inputs()

  @functools.partial(jax.jit, static_argnames="train")
  def drop(key, train):
    kw = {"mask": mask, "carry": None, "train": train}
    return mixer.apply(variables, x, rngs={"dropout": key}, **kw)[0]

  def apply(train, seed):
    return drop(jax.random.key(seed), train)

  chex.assert_trees_all_equal(apply(False, 0), apply(False, 1))
  assert not np.allclose(apply(True, 0), apply(True, 1))


@pytest.mark.parametrize("name", ["local", "sparse"])
@pytest.mark.slow
def test_blocked_mixers_drop_each_block_independently(name):
  options = {"num_summary": 0} if name == "sparse" else {}
  mixer, variables, _ = make(name, dropout_rate=0.5, **options)
  x = jnp.tile(draws.normal(0, (1, 4, D)), (1, 4, 1))
  kw = {"mask": jnp.ones((1, 16), bool), "carry": None}
  rngs = {"dropout": jax.random.key(2)}
  apply = functools.partial(mixer.apply, **kw)
  still = jax.jit(functools.partial(apply, train=False))(variables, x)[0]
  still = np.asarray(still).reshape(4, 4, D)
  chex.assert_trees_all_close(still, np.tile(still[:1], (4, 1, 1)), atol=1e-6)
  y = jax.jit(functools.partial(apply, train=True, rngs=rngs))(variables, x)[0]
  y = np.asarray(y).reshape(4, -1)
  apart = np.abs(y[:, None] - y[None]).max(-1) + np.eye(4)
  assert apart.min() > 1e-3


def largest(name, n):
  """Entries of the largest array that a forward pass makes, loops inside."""
  mixer = MIXERS[name](**wiring(name, n))
  x = jax.ShapeDtypeStruct((1, n, 64), jnp.float32)
  mask = jax.ShapeDtypeStruct((1, n), bool)

  def run(x, mask):
    kw = {"mask": mask, "carry": None, "train": False}
    return mixer.init_with_output(jax.random.key(0), x, **kw)[0][0]

  def walk(jaxpr):
    for equation in jaxpr.eqns:
      yield from (getattr(v.aval, "size", 0) for v in equation.outvars)
      for inner in jaxprs_in_params(equation.params):
        yield from walk(inner)

  return max(walk(jax.make_jaxpr(run)(x, mask).jaxpr))


@pytest.mark.parametrize("name", slow_except(REPRESENTATIVES, NAMES))
@pytest.mark.slow
def test_mixer_memory_grows_as_declared(name):
  few, many = largest(name, 4096), largest(name, 16_384)
  if getattr(MIXERS[name], "growth", "n") == "n^2":
    assert many >= 15 * few
  else:
    # Reformer: buckets in two factors; informer: ln n samples a token.
    assert many <= {"reformer": 5, "informer": 4.8}.get(name, 4.1) * few


def test_attention_uses_given_rotations():
  _, variables, apply = make("transject")
  x, mask = inputs()
  rotations = orthogonal.rotations(variables["params"], "cayley")
  y = apply(variables, x, mask)
  z = apply(variables | {"rotations": rotations}, x, mask)
  chex.assert_trees_all_close(y, z, atol=1e-6)
  turned = rotations | {"u_skew": -rotations["u_skew"]}
  z = apply(variables | {"rotations": turned}, x, mask)
  assert not np.allclose(y, z, atol=1e-3)
