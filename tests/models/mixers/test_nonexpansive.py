"""Attention of Lipschitz constant 1: oracles, bounds, and what breaks them."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

from jaxformers import models
from jaxformers.analysis.certificates.ascent import ascend
from jaxformers.models.mixer import MIXERS
from jaxformers.models.mixers import nonexpansive
from tests.assertions import assert_between
from tests.marks import long_except
from tests.models.mixers import oracle

ROTATIONS = {"orthogonal": True, "orthogonal_output": True}


def test_ball_matches_numpy():
  q, k, v = oracle.heads()
  mask = oracle.tokens()
  sharpness, radius = np.array([0.5, 3.0]), np.array([0.7, 1.5])
  arrays = {"log_sharpness": np.log(sharpness), "log_radius": np.log(radius)}
  s, r = sharpness[:, None, None], 2 * radius[:, None, None]  # e = 4.
  for causal in (False, True):
    seen = mask[:, None] & (np.tri(oracle.N, dtype=bool) | (not causal))
    inside = [
      a * np.minimum(1, r / np.linalg.norm(a, axis=-1, keepdims=True))
      for a in (q, k, v)
    ]
    scores = s / r**2 * inside[0] @ inside[1].swapaxes(2, 3)
    want = oracle.weigh(scores, seen[:, None]) @ inside[2]
    want /= np.sqrt(2) * (1 + 2 * s)
    oracle.agree(
      nonexpansive.ball,
      (q, k, v),
      want,
      mask,
      param=oracle.given(**arrays),
      causal=causal,
    )


def test_l2_matches_numpy():
  (q,) = oracle.heads(1)
  mask = oracle.tokens()
  sharpness = np.array([0.5, 3.0])
  bound = scipy.optimize.brentq(lambda t: t * np.exp(t + 1) - 19, 0, 9)
  for causal in (False, True):
    seen = mask[:, None] & (np.tri(oracle.N, dtype=bool) | (not causal))
    apart = np.square(q[:, :, :, None] - q[:, :, None]).sum(-1)
    scores = -sharpness[:, None, None] * apart
    want = oracle.weigh(scores, seen[:, None]) @ q
    want /= np.sqrt(2) * (1 + 4 * bound)
    oracle.agree(
      nonexpansive.l2,
      (q,),
      want,
      mask,
      param=oracle.given(log_sharpness=np.log(sharpness)),
      max_len=20,
      causal=causal,
    )


def test_spread_bound_is_the_greatest_spread():
  """Found by a search; at n = 2 and 1,000 as another program printed it."""
  for n, t in ((1, 0.0), (2, 0.278), (1_000, 4.42)):
    assert nonexpansive.spread_bound(n) == pytest.approx(t, abs=5e-3)
  n = 6
  bound = nonexpansive.spread_bound(n)

  def spread(t):
    t = np.append(np.abs(t), 0)
    weights = np.exp(-t)
    return (weights * t).sum() / weights.sum()

  rng = np.random.default_rng(0)
  found = [
    -scipy.optimize.minimize(lambda t: -spread(t), rng.uniform(0, 4, n - 1)).fun
    for _ in range(20)
  ]
  assert_between(found, 0, bound, rtol=1e-9)
  assert max(found) == pytest.approx(bound, rel=1e-6)


def greatest(function, starts, d, n, scale, seed=0, steps=150):
  """Greatest ratio of T-distances that gradient ascent finds, per start."""

  def ratio(points):
    x, step = points["x"], points["step"]
    before = jnp.linalg.norm(step, axis=-1).max(-1)
    change = jax.jvp(jax.vmap(function), (x,), (step,))[1]
    return jnp.linalg.norm(change, axis=-1).max(-1) / before

  rng = np.random.default_rng(seed)
  draw = functools.partial(rng.normal, size=(starts, n, d))
  points = {"x": jnp.float32(scale * draw()), "step": jnp.float32(draw())}
  run = jax.jit(functools.partial(ascend, ratio, sign=1.0, steps=steps))
  return np.asarray(run(points))


def build(name, heads, sharpness, **options):
  """A mixer on 4 channels, its parameters, and it as a function of [n, d]."""
  mixer = MIXERS[name](num_heads=heads, max_len=5, **ROTATIONS, **options)
  call = {"mask": jnp.ones((1, 5), bool), "carry": None, "train": False}
  params = mixer.init(jax.random.key(heads), jnp.ones((1, 5, 4)), **call)
  params = params["params"] | {
    "log_sharpness": jnp.full((heads,), jnp.log(sharpness))
  }

  def function(x):
    mask = jnp.ones((1, len(x)), bool)
    return mixer.apply({"params": params}, x[None], **(call | {"mask": mask}))[
      0
    ][0]

  return mixer, params, function


@pytest.mark.parametrize("name", ["ball", "l2"])
@pytest.mark.parametrize("causal", long_except([False], [False, True]))
@pytest.mark.slow
def test_mixers_are_nonexpansive(name, causal):
  """240 searches of each mixer: near tokens, far ones, and 2 to 5 of them."""
  found = []
  for heads, sharpness in ((1, 1.0), (2, 0.3), (2, 6.0)):
    mixer, params, function = build(name, heads, sharpness, causal=causal)
    assert mixer.gain({"params": params}) == pytest.approx(1, abs=1e-6)
    for n, scale in ((2, 0.3), (5, 3.0)):
      ratios = greatest(function, 40, 4, n, scale, seed=n)
      assert_between(ratios, 0, 1, rtol=1e-5)
      found.append(ratios.max())
  # The constants are not idle.
  assert max(found) > 0.3


def test_a_gain_is_that_of_the_weights():
  """Rotations that are scaled scale the bound; sharpness weighs its parts."""
  mixer, params, _ = build("ball", 2, 3.0)
  rotations = {
    f"{name}_skew": size * np.eye(4)
    for name, size in (("query", 2), ("key", 3), ("value", 5), ("out", 7))
  }
  collections = {"params": params, "rotations": rotations}
  assert mixer.gain(collections) == pytest.approx(7 * (5 + 3 * (2 + 3)) / 7)
  mixer, params, _ = build("l2", 2, 3.0)
  assert mixer.gain({"params": params, "rotations": rotations}) == (
    pytest.approx(14)
  )


def test_only_constrained_attention_is_bounded():
  assert MIXERS["ball"]().is_bounded
  assert not MIXERS["ball"](orthogonal=False).is_bounded
  assert not MIXERS["ball"](orthogonal_output=False).is_bounded
  assert not MIXERS["ball"](fidelity=0.5).is_bounded
  assert not MIXERS["ball"](learn_fidelity=True).is_bounded
  assert not MIXERS["ball"](feat_scale=True).is_bounded
  assert not MIXERS["softmax"](**ROTATIONS).is_bounded
  for name in ("injective_transformer", "l2_transformer"):
    with pytest.raises(ValueError, match="fidelity"):
      models.build(
        name,
        vocab_size=5,
        max_len=4,
        num_classes=2,
        d_model=8,
        num_layers=1,
        mixer={"fidelity": 0.5},
      )


def l2_like(x, *, key=1.0, value=1.0, itself=True):
  """L2 attention of one head over its bound, with faults on request."""
  n = len(x)
  apart = jnp.square(x[:, None] - key * x[None]).sum(-1)
  scores = jnp.where(itself | ~jnp.eye(n, dtype=bool), -apart, -jnp.inf)
  # A free map of the values: other channels than those of the scores.
  values = x if value == 1 else value * jnp.roll(x, 1, -1) ** 2
  bound = 1 + 4 * nonexpansive.spread_bound(n)
  return jax.nn.softmax(scores, -1) @ values / bound


@pytest.mark.parametrize(
  "fault", [{"key": -1.0}, {"value": 2.0}, {"itself": False}], ids=str
)
def test_ascent_breaks_wrong_variants_of_l2_attention(fault):
  """Untied keys, values that are no function of scores, no diagonal."""
  right = greatest(l2_like, 20, 3, 4, 1.0)
  assert_between(right, 0, 1, rtol=1e-5)
  assert right.max() > 0.5
  wrong = greatest(functools.partial(l2_like, **fault), 20, 3, 4, 1.0)
  assert wrong.max() > 15


def test_projections_onto_balls_are_exact_and_have_finite_gradients():
  x = jnp.array([[0.0, 0], [3, 4], [0.3, 0.4]])
  y, gradient = jax.vjp(
    functools.partial(nonexpansive.into_ball, radius=jnp.float32(2)), x
  )
  want = [[0, 0], [0.6, 0.8], [0.15, 0.2]]
  chex.assert_trees_all_close(y, jnp.array(want), atol=1e-7)
  chex.assert_tree_all_finite(gradient(jnp.ones_like(y)))
