"""Matrices that mix streams, and the block around them."""

import functools
import itertools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import models
from jaxformers.foundations.errors import UserError
from jaxformers.models.blocks import streams
from jaxformers.models.blocks.two_branches import PreNorm
from jaxformers.models.mixer import MIXERS
from tests import draws, initial
from tests.marks import long_except

STOCHASTIC = ("sinkhorn", "permutations", "orthostochastic")
ORTHOGONAL = ("orthogonal", "mean_orthogonal")
S = 4


def draw(mixing, deviation, count=32, seed=0, s=S):
  """Matrices of a family for logits of a deviation, float64 [count, s, s]."""
  family = streams.MIXINGS[mixing]
  logits = deviation * draws.normal(seed, (count, *family.shape(s)), float)
  return np.asarray(family.matrix(logits))


@pytest.fixture
def float64():
  with jax.enable_x64(True):
    yield


@pytest.mark.parametrize("mixing", STOCHASTIC)
def test_stochastic_families_have_rows_and_columns_of_sum_one(mixing, float64):
  h = draw(mixing, 0.3)
  assert (h >= 0).all()
  np.testing.assert_allclose(h.sum(-2), 1, atol=1e-10)
  np.testing.assert_allclose(h.sum(-1), 1, atol=1e-10)
  assert np.linalg.norm(h, 2, (-2, -1)).max() <= 1 + 1e-10


def test_sinkhorn_is_not_exact_at_large_logits(float64):
  """Certificates need the other families, which are exact at any logits."""
  assert np.abs(draw("sinkhorn", 8).sum(-1) - 1).max() > 0.05
  assert np.linalg.norm(draw("sinkhorn", 16, 4_000), 2, (-2, -1)).max() > 1.1
  for mixing in ("permutations", "orthostochastic"):
    h = draw(mixing, 16)
    np.testing.assert_allclose(h.sum(-1), 1, atol=1e-10)
    np.testing.assert_allclose(h.sum(-2), 1, atol=1e-10)


@pytest.mark.parametrize("mixing", ORTHOGONAL)
def test_orthogonal_families_are_orthogonal_at_any_logits(mixing, float64):
  for deviation in (0.1, 1, 16):
    h = draw(mixing, deviation)
    np.testing.assert_allclose(
      h @ h.swapaxes(-1, -2), np.eye(S)[None].repeat(32, 0), atol=1e-10
    )
    if mixing == "mean_orthogonal":
      np.testing.assert_allclose(h.sum(-1), 1, atol=1e-10)
      np.testing.assert_allclose(h.sum(-2), 1, atol=1e-10)


def test_permutations_reach_every_vertex(float64):
  logits = 60 * jnp.eye(math.factorial(3))
  matrices = np.asarray(streams.permutations(logits)).round()
  want = [np.eye(3)[list(p)] for p in itertools.permutations(range(3))]
  np.testing.assert_array_equal(matrices, want)


@pytest.mark.parametrize("mixing", [*STOCHASTIC, *ORTHOGONAL])
def test_only_orthogonal_streams_stay_apart(mixing, float64):
  """Theory, section 19: the product of 64 layers."""
  product = functools.reduce(lambda a, b: b @ a, draw(mixing, 1.0, 64))
  values = np.linalg.svd(product, compute_uv=False)
  if mixing in STOCHASTIC:
    assert values[1] < 1e-6
    np.testing.assert_allclose(product, 1 / S, atol=1e-6)
  else:
    np.testing.assert_allclose(values, 1, atol=1e-10)


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("is_dynamic", [True, False])
@pytest.mark.parametrize("mixing", streams.MIXINGS)
def test_connection_is_its_formula(mixing, is_dynamic, float64):
  x = draws.normal(0, (2, 3, S, 5), float)
  module = streams.Connection(mixing, 6, is_dynamic)
  params = module.init(jax.random.key(0), x)["params"]
  leaves, tree = jax.tree.flatten(params)
  leaves = [p + draws.normal(i, p.shape, float) for i, p in enumerate(leaves)]
  params = jax.tree.unflatten(tree, leaves)
  pre, post, matrix = module.apply({"params": params}, x)
  p = jax.tree.map(np.asarray, params)
  shape = streams.MIXINGS[mixing].shape(S)
  y = np.zeros((2, 3, 2 * S + math.prod(shape)))
  scale = np.zeros(3)
  if is_dynamic:
    u = np.asarray(x).reshape(2, 3, -1)
    u = u / np.sqrt(np.square(u).mean(-1, keepdims=True) + 1e-6)
    y, scale = u @ p["stream_gate"], p["scale"]
  np.testing.assert_allclose(
    np.broadcast_to(pre, (2, 3, S)),
    sigmoid(p["pre_bias"] + scale[0] * y[..., :S]),
    atol=1e-10,
  )
  np.testing.assert_allclose(
    np.broadcast_to(post, (2, 3, S)),
    2 * sigmoid(p["post_bias"] + scale[1] * y[..., S : 2 * S]),
    atol=1e-10,
  )
  logits = scale[2] * y[..., 2 * S :].reshape(2, 3, *shape)
  want = streams.MIXINGS[mixing].matrix(p["mixing_bias"] + logits)
  np.testing.assert_allclose(
    np.broadcast_to(matrix, want.shape), want, atol=1e-10
  )


def test_a_branch_reads_and_is_added_to_the_streams(float64):
  x = draws.normal(0, (2, 3, S, 6), float)
  weights = draws.uniform(1, (2, 3, S)).astype(float)
  matrix = draw("permutations", 1.0, 6).reshape(2, 3, S, S)
  np.testing.assert_allclose(
    streams.weigh(weights, x), np.einsum("bns,bnsd->bnd", weights, x)
  )
  np.testing.assert_allclose(
    streams.mix(jnp.asarray(matrix), x),
    np.einsum("bnst,bntd->bnsd", matrix, x),
    atol=1e-12,
  )


def build(**block):
  return models.build(
    "transformer",
    vocab_size=20,
    max_len=9,
    num_classes=3,
    d_model=8,
    num_layers=3,
    block=block,
  )


IDS = draws.integers(0, (2, 9), 1, 20, end=6)


def test_one_stream_is_the_plain_block_to_the_bit():
  plain, one = build(), build(streams=1)
  params = initial.params(plain, IDS)
  chex.assert_trees_all_equal(params, initial.params(one, IDS))
  outputs = [
    m.apply({"params": params}, IDS, train=False) for m in (plain, one)
  ]
  chex.assert_trees_all_equal(*outputs)


def test_streams_start_near_the_plain_block():
  """Each branch reads and writes one stream most, and H is near I."""
  model = build(streams=3, mixing="permutations", dynamic=False)
  params = initial.params(model, IDS)
  _, state = model.apply(
    {"params": params}, IDS, train=False, mutable=["intermediates"]
  )
  layer = state["intermediates"]["encoder"]["layer_1"]
  matrix = layer["connect_mlp"]["mixing"][0]
  np.testing.assert_allclose(matrix[0, 0], np.eye(3), atol=2e-3)
  bias = params["encoder"]["layer_1"]["connect_mixer"]["pre_bias"]
  np.testing.assert_array_equal(bias, [-1, 1, -1])


@pytest.mark.parametrize(
  "mixing", long_except(("permutations", "mean_orthogonal"), streams.MIXINGS)
)
def test_all_parameters_of_streams_are_learned(mixing):
  model = build(streams=S, mixing=mixing)
  params = initial.params(model, IDS)
  # The gradient of a factor is 0 while the matrix behind it is 0.
  moved = jax.tree.map(lambda p: p + 0.01, params)

  @jax.jit
  def loss(params):
    y = model.apply({"params": params}, IDS, train=False)
    return (y * draws.normal(1, y.shape)).sum()

  slopes = jax.grad(loss)(moved)
  assert all(jnp.abs(s).max() > 0 for s in jax.tree.leaves(slopes["encoder"]))


def test_streams_of_a_decoder_see_no_later_token():
  model = models.build(
    "transformer",
    objective="language_model",
    vocab_size=20,
    max_len=9,
    d_model=8,
    num_layers=2,
    block={"streams": 2, "mixing": "orthogonal"},
  )
  params = initial.params(model, IDS)
  y, moved = (
    model.apply({"params": params}, ids, train=False)[0]
    for ids in (IDS, IDS.at[0, 5].set(1 + IDS[0, 5] % 19))
  )
  assert (y[:5] == moved[:5]).all()
  assert (y[5:] != moved[5:]).any()


def test_norm_scaling_and_norm_after_are_their_formulas():
  x, mask = draws.normal(0, (2, 5, 8)), jnp.ones((2, 5), bool)
  mixer = functools.partial(MIXERS["softmax"], num_heads=2)
  kw = {"mask": mask, "carry": None, "train": False}

  def run(**options):
    block = PreNorm(mixer, num_layers=4, layer=3, mlp_dim=16, **options)
    params = initial.params(block, x, mask=mask, carry=None)
    return params, lambda p: block.apply({"params": p}, x, **kw)[0]

  params, plain = run()
  # Scaling the norm by 1/2 in layer 4 is scaling its parameters.
  halved = dict(params)
  for name in ("norm_mixer", "norm_mlp"):
    halved[name] = jax.tree.map(lambda p: p / 2, params[name])
  _, scaled = run(norm_scaling=True)
  chex.assert_trees_all_close(scaled(params), plain(halved), atol=1e-6)
  # A norm after a branch makes the scale of its last kernel irrelevant.
  params, after = run(norm_after=True)
  assert "norm_mlp_after" in params
  double = params | {"down": jax.tree.map(lambda p: 2 * p, params["down"])}
  chex.assert_trees_all_close(after(double), after(params), atol=1e-3)
  assert jnp.abs(after(params) - x).max() > 0.1


@pytest.mark.parametrize(
  ("block", "message"),
  [
    ({"streams": 2, "norm_first": False}, "needs a norm before"),
    ({"norm_scaling": True, "norm_first": False}, "norm_scaling=True needs"),
    ({"norm_after": True, "norm_first": False}, "norm_after=True needs"),
    ({"streams": 6, "mixing": "permutations"}, "takes 2 to 5"),
    ({"streams": 2, "mixing": "mean_orthogonal"}, "takes 3 to 16"),
    ({"streams": 4, "mixing": "unknown"}, "mixing"),
    ({"mixing": "orthogonal"}, "no effect"),
    ({"dynamic": False}, "no effect"),
  ],
)
def test_options_without_sense_are_refused(block, message):
  with pytest.raises(UserError, match=message):
    initial.params(build(**block), IDS)


@pytest.mark.parametrize("block", [{"norm_after": True}, {"streams": 2}])
def test_gated_blocks_refuse_what_changes_their_sum(block):
  sizes = {"vocab_size": 20, "max_len": 12, "num_classes": 3}
  block = {"norm_first": True, **block}
  model = models.build("mega", d_model=8, num_layers=1, block=block, **sizes)
  with pytest.raises(UserError, match="returns the sum of x and u"):
    initial.params(model, IDS)
