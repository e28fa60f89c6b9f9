"""Adaptive input and softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models import adaptive
from jaxformers.models.adaptive import AdaptiveEmbedding, Softmax
from tests import draws

D, CUTS = 8, (5, 11)
SIZES = (5, 6, 9)


def softmax(div_value=2, cuts=CUTS):
  keys = iter(jax.random.split(jax.random.key(0), 20))

  def normal(*shape):
    return jax.random.normal(next(keys), shape)

  sizes = SIZES if cuts else (20,)
  widths = [D // div_value**i for i in range(len(sizes))]
  return Softmax(
    tuple(normal(n, w) for n, w in zip(sizes, widths, strict=True)),
    tuple(normal(w, D) if w < D else None for w in widths),
    tuple(normal(n) for n in sizes),
    normal(len(cuts), D),
    normal(len(cuts)),
  )


@pytest.mark.parametrize("div_value", [1, 2])
@pytest.mark.slow
def test_log_probabilities_of_all_words_sum_to_one(div_value, strict):
  h = draws.normal(1, (3, 4, D))
  log_p = adaptive.log_probabilities(softmax(div_value), h)
  assert log_p.shape == (3, 4, 20)
  np.testing.assert_allclose(jnp.exp(log_p).sum(-1), 1, atol=1e-5)
  assert (jnp.exp(log_p[..., 0]) == 0).all()


@pytest.mark.slow
def test_log_probabilities_of_a_cluster_are_a_product_of_softmaxes():
  s, h = softmax(), draws.normal(1, (D,))
  tables = [np.asarray(t, np.float64) for t in s.tables]
  own = tables[1] @ (np.asarray(s.projections[1], np.float64) @ h)
  own = np.exp(own + s.biases[1])
  head = np.exp(tables[0] @ h + s.biases[0])[1:]
  clusters = np.exp(np.asarray(s.clusters) @ h + s.cluster_bias)
  share = clusters[0] / (head.sum() + clusters.sum())
  want = np.log(share * own[2] / own.sum())
  got = adaptive.log_probabilities(s, h)[CUTS[0] + 2]
  np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("chunk", [1 << 24, 20])
@pytest.mark.parametrize("cuts", [CUTS, ()])
@pytest.mark.slow
def test_log_likelihood_equals_log_probabilities_at_the_targets(
  monkeypatch, chunk, cuts
):
  monkeypatch.setattr(adaptive, "CHUNK", chunk)  # Pieces of two tokens.
  s, h = softmax(1, cuts), draws.normal(1, (13, D))
  targets = draws.integers(2, (13,), 1, 20)
  targets = targets.at[3].set(0)
  weights = jnp.ones(13).at[jnp.array([3, 7])].set(0)

  def few(s, h):
    return adaptive.log_likelihood(s, h, targets, weights)

  def all_words(s, h):
    log_p = adaptive.log_probabilities(s, h)
    own = jnp.take_along_axis(log_p, targets[:, None], 1)[:, 0]
    return jnp.where(weights > 0, own, 0)

  def both(s, h):
    def slope(f):
      return jax.grad(lambda s, h: jnp.sin(f(s, h)).sum(), (0, 1))(s, h)

    return (few(s, h), slope(few)), (all_words(s, h), slope(all_words))

  (y, got), (z, want) = jax.jit(both)(s, h)
  np.testing.assert_allclose(y, z, atol=1e-5)
  for one, other in zip(
    jax.tree.leaves(got), jax.tree.leaves(want), strict=True
  ):
    np.testing.assert_allclose(one, other, atol=2e-5)


def test_adaptive_embedding_has_a_table_for_each_cluster():
  embed = AdaptiveEmbedding(20, D, CUTS, 2, jax.nn.initializers.normal(1.0))
  ids = jnp.arange(20)[None]
  params = embed.init(jax.random.key(0), ids)["params"]
  shapes = {name: leaf.shape for name, leaf in params.items()}
  assert shapes == {
    "table_0": (5, 8),
    "table_1": (6, 4),
    "table_2": (9, 2),
    "project_1": (4, 8),
    "project_2": (2, 8),
  }
  x = embed.apply({"params": params}, ids)[0]
  np.testing.assert_allclose(x[4], params["table_0"][4], atol=1e-6)
  want = params["table_2"][3] @ params["project_2"]
  np.testing.assert_allclose(x[14], want, atol=1e-6)


def test_adaptive_embedding_refuses_wrong_cutoffs():
  with pytest.raises(ValueError, match=r"cutoffs=\(5, 30\).*20"):
    adaptive.edges(20, (5, 30))
  with pytest.raises(ValueError, match=r"cutoffs=\(5, 5\)"):
    adaptive.edges(20, (5, 5))
  embed = AdaptiveEmbedding(20, D, CUTS, 3, jax.nn.initializers.zeros)
  with pytest.raises(ValueError, match="div_value=3"):
    embed.init(jax.random.key(0), jnp.ones((1, 2), jnp.int32))
