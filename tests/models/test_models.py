"""What holds for every registered model, from ids to logits."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import models, orthogonal
from jaxformers.models.mixer import POSITION_WEIGHTS
from tests import draws, initial
from tests.marks import slow_except
from tests.models.mixers.oracle import small_sizes

# One for each block and kind of variable; the mixers have tests of their own.
NAMES = (
  "random_transject",
  "transformer",
  "transformer_rezero",
  "transject",
)
SIZES = dict(
  vocab_size=20, max_len=24, num_classes=3, d_model=8, num_layers=2, head_dim=4
)


@functools.cache
def plain(name):
  return make(name, mixer={})


def make(name, **options):
  if not options:
    return plain(name)
  pool = "max" if "transject" in name else "mean"
  model = models.build(name, pool=pool, **SIZES, **options)
  ids = draws.integers(0, (3, 10), 1, 20)
  seen = np.arange(10)[None] < np.array([[10], [6], [1]])
  ids = jax.device_put(np.where(seen, ids, 0))
  params = init(model, ids)
  params = jax.tree.map(lambda p: p if p.ndim else p + 0.5, params)
  return model, params, ids


def init(model, ids):
  return initial.params(model, ids, seed=1)


@functools.cache
def compiled(model):
  return jax.jit(functools.partial(model.apply, train=False))


@functools.cache
def sloped(model):
  """The compiled gradient of the sum of squared logits."""
  return jax.jit(
    jax.grad(lambda params, ids: jnp.square(logits(model, params, ids)).sum())
  )


def logits(model, params, ids):
  return compiled(model)({"params": params}, ids)


@pytest.fixture(
  params=slow_except(("transject",), NAMES, ("transformer", "transject"))
)
def name(request):
  return request.param


@pytest.mark.parametrize(
  "name",
  slow_except(("s5",), sorted(models.MODELS), ("mega", "s5", "transject")),
)
def test_every_model_has_logits_and_a_gradient(name, strict):
  """Traced, not run: the mixers' own tests run them all."""
  pool = "max" if "transject" in name else "mean"
  mixer = small_sizes(models.MODELS[name].mixer)
  model = models.build(name, pool=pool, mixer=mixer, **SIZES)
  params, ids = models.shapes(model), jax.ShapeDtypeStruct((3, 10), jnp.int32)
  chex.assert_shape(
    jax.eval_shape(functools.partial(logits, model), params, ids), (3, 3)
  )
  grads = jax.eval_shape(
    jax.grad(lambda params, ids: logits(model, params, ids).sum()), params, ids
  )
  chex.assert_trees_all_equal_shapes(grads, params)


def test_model_parameters_all_have_a_gradient(name, strict):
  model, params, ids = make(name)
  grads = sloped(model)(params, ids)
  still = [
    jax.tree_util.keystr(path)
    for path, leaf in jax.tree_util.tree_flatten_with_path(grads)[0]
    if not np.any(leaf)
  ]
  # A bias of the keys moves all scores of a query alike.
  assert all("key" in path and "bias" in path for path in still), still


def test_model_logits_do_not_depend_on_padding(name, strict):
  model, params, ids = make(name)
  longer = jnp.pad(ids, ((0, 0), (0, 14)))
  chex.assert_trees_all_close(
    logits(model, params, ids), logits(model, params, longer), atol=1e-5
  )


def test_model_logits_do_not_depend_on_batch_mates(name, strict):
  model, params, ids = make(name)
  y = logits(model, params, ids)
  chex.assert_trees_all_close(
    y[1:2], logits(model, params, ids[1:2]), atol=1e-5
  )


def test_model_logits_depend_on_tokens(name):
  model, params, ids = make(name)
  other = ids.at[0, 2].set(ids[0, 2] % 19 + 1)
  assert not np.allclose(
    logits(model, params, ids)[0], logits(model, params, other)[0]
  )


def test_model_evaluation_repeats_and_half_precision_is_near(name):
  model, params, ids = make(name)
  y = logits(model, params, ids)
  chex.assert_trees_all_equal(y, logits(model, params, ids))
  half, _, _ = make(name, dtype="bfloat16")
  z = logits(half, params, ids)
  assert z.dtype == jnp.float32
  chex.assert_trees_all_close(y, z, atol=0.1)


def test_model_rotations_stay_orthogonal_in_half_precision(name):
  model, params, _ = make(name, dtype="bfloat16")
  for q in jax.tree.leaves(orthogonal.rotations(params, model.orthogonal_map)):
    assert q.dtype == jnp.float32
    assert float(orthogonal.orthogonality_defect(q).max()) <= 5e-6


@pytest.mark.slow
def test_model_small_residual_steps_survive_half_precision():
  """Between layers x is float32, or a step of 1e-3 would be rounded away."""

  def change(dtype):
    model, params, ids = make("transject", dtype=dtype)
    params = jax.tree.map(lambda p: p if p.ndim else 0 * p + 1e-3, params)
    apply = functools.partial(
      model.apply, train=False, mutable=["intermediates"]
    )
    _, state = jax.jit(apply)({"params": params}, ids)
    hidden = state["intermediates"]["encoder"]["hidden"]
    return hidden[-1] - hidden[0]

  full, half = change("float32"), change("bfloat16")
  assert jnp.linalg.norm(full - half) < 0.05 * jnp.linalg.norm(full)


@pytest.mark.parametrize(
  "mapping", slow_except(("expm",), sorted(orthogonal.MAPS), ("cayley", "expm"))
)
@pytest.mark.slow
def test_model_gradient_reaches_parameters_of_every_map(mapping):
  model, params, ids = make("transject", orthogonal_map=mapping)

  def loss(params):
    return jnp.sum(logits(model, params, ids) ** 2)

  grads = jax.jit(jax.grad(loss))(params)
  chex.assert_tree_all_finite(grads)
  skews = [
    leaf
    for path, leaf in jax.tree_util.tree_flatten_with_path(grads)[0]
    if orthogonal.is_skew(path)
  ]
  assert all(np.any(leaf) for leaf in skews)


@pytest.mark.slow
def test_model_gradients_are_finite_at_the_rezero_start(name):
  model, _, ids = make(name)
  params = init(model, ids)
  grads = jax.jit(jax.grad(lambda p: logits(model, p, ids).sum()))(params)
  chex.assert_tree_all_finite(grads)
  if "transject" in name:
    layers = grads["encoder"]
    assert all(layers[f"layer_{i}"]["residual"]["alpha"] != 0 for i in (0, 1))


def test_mixer_defaults_apply_where_a_mixer_has_the_option():
  """And has none of its own; what a config says of the mixer comes first."""

  def heads_of(name, **options):
    return models.build(name, **SIZES, **options).config.mixer_options()

  shared = {"mixer_defaults": {"num_heads": 4, "dropout_rate": 0.1}}
  assert heads_of("transformer", **shared)["num_heads"] == 4
  assert heads_of("transformer", **shared)["dropout_rate"] == 0.1
  assert "dropout_rate" not in heads_of("performer", **shared)
  assert "num_heads" not in heads_of("transject", **shared)
  given = heads_of("transformer", mixer={"num_heads": 1}, **shared)
  assert given["num_heads"] == 1
  biased = {"mixer_defaults": {"use_bias": True}}  # Its own default is False.
  assert "use_bias" not in heads_of("linearized", **biased)
  with pytest.raises(ValueError, match="mixer_defaults.*'num_head'.*num_heads"):
    heads_of("transformer", mixer_defaults={"num_head": 4})


def test_rezero_model_with_norms_ends_in_a_norm():
  """As TransJect's baseline; without them there is none at all."""
  for use_norm in (False, True):
    _, params, _ = make("transformer_rezero", block={"use_norm": use_norm})
    assert ("norm" in params["encoder"]) == use_norm


def test_model_head_dropout_acts_in_training_only():
  plain, params, ids = make("transformer")
  dropping = make("transformer", head_dropout_rate=0.5)[0]
  chex.assert_trees_all_equal_shapes(models.shapes(dropping), params)
  want = logits(plain, params, ids)
  chex.assert_trees_all_equal(logits(dropping, params, ids), want)

  @jax.jit
  def apply(key):
    rngs = {"dropout": jax.random.key(key)}
    return dropping.apply({"params": params}, ids, train=True, rngs=rngs)

  for key in (0, 1):
    assert np.abs(apply(key) - want).max() > 1e-3


def test_shapes_equal_those_of_init(name):
  model, params, _ = make(name)
  chex.assert_trees_all_equal_shapes(models.shapes(model), params)
  assert models.size(model) == sum(p.size for p in jax.tree.leaves(params))


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"name": "transjct"}, "model.*'transjct'.*'transject'"),
    ({"pool": "min"}, "pool.*'min'.*first, max, mean"),
    ({"dtype": "float16"}, "dtype.*'float16'.*bfloat16, float32"),
    ({"num_layers": 0}, "num_layers=0"),
    ({"d_model": 0}, "d_model=0"),
    ({"max_len": 0}, "max_len=0"),
    ({"num_classes": 0}, "num_classes=0.*'classification'"),
    ({"head_dim": -4}, "head_dim=-4"),
    ({"embedding": {"init_std": float("inf")}}, "embedding.init_std=inf"),
    ({"block": {"final_norm": True}}, "block.*'injective'.*'final_no"),
    (
      {"name": "transformer", "block": {"mlp_dim": -1}},
      "block.mlp_dim=-1",
    ),
    ({"orthogonal_map": "qr"}, "map.*'qr'"),
    (
      {"mixer": {"num_heads": 2}},
      "mixer.*'transject'.*'num_heads'.*num_experts",
    ),
    ({"block": {"mlp_dim": 2}}, "block.*'injective'.*'mlp_dim'"),
    # Values are checked too, before there are data.
    (
      {"name": "transformer", "mixer": {"num_heads": 3}},
      "num_heads=3.*d_model=8",
    ),
    ({"name": "linformer", "mixer": {"rank": 25}}, "rank=25.*max_len=24"),
    ({"name": "local", "mixer": {"block_size": 0}}, "block_size=0"),
    (
      {"name": "nystromformer", "mixer": {"num_landmarks": 0}},
      "num_landmarks=0",
    ),
    (
      {"name": "nystromformer", "mixer": {"num_landmarks": 25}},
      "num_landmarks=25.*1.*max_len=24",
    ),
    ({"name": "local", "mixer": {"causal": "no"}}, "causal='no'.*bool"),
    ({"name": "local", "mixer": {"block_size": 4.0}}, "block_size=4.0.*int"),
    (
      {"name": "local", "mixer": {"dropout_rate": 1.5}},
      r"dropout_rate=1.5.*\[0, 1\)",
    ),
    (
      {"name": "synthesizer", "mixer": {"redraw": True}},
      "seed=0.*redraw=True",
    ),
    (
      {"name": "performer", "mixer": {"dropout_rate": 0.1}},
      "mixer.*'performer'.*'dropout_rate'.*num_features",
    ),
    (
      {"name": "bigbird", "mixer": {"causal": True}},
      "'bigbird'.*causal.*kernelized, linear, linearized",
    ),
    (
      {"name": "random_transject", "mixer": {"sigma": "eigenvalues"}},
      "mixer.*'transject'.*'sigma'",
    ),
  ],
)
def test_build_refuses_wrong_options(options, message):
  with pytest.raises(ValueError, match=message):
    models.build(**({"name": "transject"} | SIZES | options))


@pytest.mark.slow
def test_model_reads_the_inputs_of_a_pair_apart(name, strict):
  """Two inputs go through one encoder; neither sees the other."""
  model = models.build(name, **SIZES, num_inputs=2, interaction="concat")
  pairs = draws.integers(0, (3, 2, 10), 1, 20)
  params = init(model, pairs)
  params = jax.tree.map(lambda p: p if p.ndim else p + 0.5, params)
  run = jax.jit(functools.partial(logits, model))
  y = run(params, pairs)
  chex.assert_shape(y, (3, 3))
  # The gradient of what the first gives says nothing of the second.
  head = params["head"]["hidden"]["kernel"]
  halves = head.at[8:].set(0)
  params["head"]["hidden"]["kernel"] = halves
  other = pairs.at[:, 1].set(jnp.flip(pairs[:, 1], 1) % 19 + 1)
  chex.assert_trees_all_close(run(params, pairs), run(params, other), atol=1e-5)


@pytest.mark.slow
def test_model_with_class_token_is_finite_for_empty_sequences(name, strict):
  model = models.build(name, pool="cls", **SIZES)
  ids = jnp.array([[3, 4, 0, 0], [0, 0, 0, 0]])
  params = init(model, ids)
  chex.assert_trees_all_equal(
    params["encoder"]["embedding"]["cls"],
    jnp.zeros_like(params["encoder"]["embedding"]["cls"]),
  )
  params = jax.tree.map(lambda p: p if p.ndim else p + 0.5, params)
  y = logits(model, params, ids)
  longer = logits(model, params, jnp.pad(ids, ((0, 0), (0, 20))))
  chex.assert_trees_all_close(y, longer, atol=1e-5)
  assert jnp.isfinite(y).all()  # Also where there is nothing but it.


@pytest.mark.slow
def test_model_reads_zero_in_real_numbers_as_a_token(name, strict):
  sizes = SIZES | {"vocab_size": 0}
  model = models.build(name, pool="mean", **sizes)
  x = draws.normal(0, (2, 6))
  params = init(model, x)
  params = jax.tree.map(lambda p: p if p.ndim else p + 0.5, params)
  zeros = x.at[:, 3].set(0)
  y, z = (logits(model, params, v) for v in (x, zeros))
  chex.assert_shape(y, (2, 3))
  assert jnp.abs(y - z).max() > 1e-6
  assert model.example().dtype == jnp.float32


@pytest.mark.slow
def test_weights_that_grow_with_the_length_are_declared():
  """Such weights are untrained beyond the length of training.

  The number of filters of `allpass` grows, too, but each acts on all tokens.
  """
  grown = set()
  one_of_each = {variant.mixer: n for n, variant in models.MODELS.items()}
  for mixer, name in one_of_each.items():
    sizes = [
      jax.tree.map(
        lambda x: x.shape,
        models.shapes(
          models.build(
            name,
            **SIZES | {"max_len": n, "num_layers": 1},
            mixer=small_sizes(mixer),
          )
        ),
      )
      for n in (24, 96)
    ]
    if sizes[0] != sizes[1]:
      grown.add(mixer)
  assert grown - {"allpass"} == POSITION_WEIGHTS
