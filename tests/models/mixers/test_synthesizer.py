import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models.dropout import Dropout
from jaxformers.models.mixers.synthesizer import KINDS, synthesizer
from tests.models.mixers.oracle import (
  B,
  E,
  H,
  N,
  agree,
  dense,
  given,
  heads,
  tokens,
  weigh,
)

pytestmark = pytest.mark.slow  # Not in REPRESENTATIVES.

SMALL = {"kind": "dense+factorized_random+dot"}

LEN = 15  # Of which 12 are used; factorised into 4 and 4.


def arrays():
  rng = np.random.default_rng(1)
  shapes = {
    "random": (H, LEN, LEN),
    "fixed_random": (H, LEN, LEN),
    "factorized_random_1": (H, LEN, 3),
    "factorized_random_2": (H, LEN, 3),
    "dense_hidden": (B, H, N, E),
    "dense_kernel": (H, E, LEN),
    "dense_bias": (H, LEN),
    "query": (B, H, N, E),
    "key": (B, H, N, E),
    "mixture": (2,),
  }
  for i in (1, 2):
    shapes[f"factorized_dense_{i}_hidden"] = (B, H, N, E)
    shapes[f"factorized_dense_{i}_kernel"] = (H, E, 4)
    shapes[f"factorized_dense_{i}_bias"] = (H, 4)
  return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def logits(a):
  """The logits of every kind, by the formulas."""

  def maps(name):
    hidden = np.maximum(a[f"{name}_hidden"], 0)
    return hidden @ a[f"{name}_kernel"] + a[f"{name}_bias"][:, None]

  first, second = maps("factorized_dense_1"), maps("factorized_dense_2")
  outer = [first[..., j % 4] * second[..., j // 4] for j in range(N)]
  low = a["factorized_random_1"] @ a["factorized_random_2"].swapaxes(1, 2)
  return {
    "random": a["random"][:, :N, :N],
    "fixed_random": a["fixed_random"][:, :N, :N],
    "factorized_random": low[:, :N, :N],
    "dense": maps("dense")[..., :N],
    "factorized_dense": np.stack(outer, -1),
    "dot": a["query"] @ a["key"].swapaxes(-1, -2) / E**0.5,
  }


def check(kind, want, causal=False, own=None):
  given_ = given(**(own or arrays()))
  (v,) = heads(1)
  seen = tokens()[:, None, None]
  if causal:
    seen = seen & np.tril(np.ones((N, N), bool))
  scores = np.broadcast_to(want, (B, H, N, N))
  agree(
    synthesizer,
    (v,),
    weigh(scores, seen) @ v,
    param=given_,
    draw=given_,
    project=given_,
    max_len=LEN,
    kind=kind,
    factor=3,
    causal=causal,
  )


@pytest.mark.parametrize("kind", KINDS)
def test_synthesizer_kinds_are_their_formula(kind):
  check(kind, logits(arrays())[kind], causal=kind == "dense")


def test_synthesizer_masks_shared_logits_where_causal():
  check("random", logits(arrays())["random"], causal=True)


@pytest.mark.parametrize("excess", [30, 60, 300])
def test_synthesizer_ignores_large_logits_of_padding(excess):
  """Exponentials below the maximum of all keys would vanish at tokens."""
  own = arrays()
  padding = np.flatnonzero(~tokens().all(0))
  own["random"][:, :, padding] = excess
  check("random", own["random"][:, :N, :N], own=own)

  def total(random, v):
    y = synthesizer(
      v,
      mask=jnp.asarray(tokens()),
      dropout=Dropout(),
      param=lambda *_: random,
      draw=None,
      project=None,
      max_len=LEN,
    )
    return jnp.where(tokens()[:, None, :, None], y, 0).sum()

  (v,) = heads(1)
  arguments = [jnp.asarray(a, jnp.float32) for a in (own["random"], v)]
  slopes = jax.grad(total, (0, 1))(*arguments)
  chex.assert_tree_all_finite(slopes)
  assert jnp.abs(slopes[0]).max() > 1e-3


def test_synthesizer_mixture_is_convex():
  own = arrays()
  first, second = np.exp(own["mixture"]) / np.exp(own["mixture"]).sum()
  of = logits(own)
  check("random+dot", first * of["random"] + second * of["dot"])


def test_synthesizer_with_query_key_logits_is_softmax():
  q, k, v = heads()
  drawn = np.zeros((H, N, N))
  drawn[:] = q[0] @ k[0].swapaxes(-1, -2) / E**0.5
  one = given(random=drawn)
  want = dense(q, k, v, np.ones((1, N), bool))[:1]
  y = synthesizer(
    jnp.asarray(v[:1], jnp.float32),
    mask=jnp.ones((1, N), bool),
    dropout=Dropout(),
    param=one,
    draw=None,
    project=None,
    max_len=N,
  )
  np.testing.assert_allclose(y, want, atol=5e-6)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"kind": "vanilla"}, "synthesizer.*'vanilla'.*factorized_dense"),
    ({"kind": "dot+dot"}, r"kind='dot\+dot'"),
    ({"factor": 0}, "factor=0"),
  ],
)
def test_synthesizer_refuses_wrong_options(options, message):
  x = jnp.ones((1, 1, 4, 2))
  tools = dict.fromkeys(("dropout", "param", "draw", "project"))
  call = functools.partial(synthesizer, x, max_len=4, **tools)
  with pytest.raises(ValueError, match=message):
    call(mask=jnp.ones((1, 4), bool), **options)
