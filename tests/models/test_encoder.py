import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models.encoder import Embedding, sinusoids


def test_sinusoids_are_vaswanis():
  table = sinusoids(50, 8)
  for p in (0, 3, 49):
    for i in range(4):
      angle = p / 10_000 ** (2 * i / 8)
      np.testing.assert_allclose(table[p, 2 * i], np.sin(angle), atol=1e-6)
      np.testing.assert_allclose(table[p, 2 * i + 1], np.cos(angle), atol=1e-6)


def test_every_position_has_a_row_of_its_own():
  rows = sinusoids(4096, 16)
  assert len(np.unique(rows, axis=0)) == 4096


def test_concatenation_is_injective_in_token_and_position():
  embed = Embedding(5, 7, 8, concatenate=True)
  ids = jnp.array([[t] * 7 for t in range(5)])
  x, _ = embed.init_with_output(jax.random.key(0), ids)
  rows = np.asarray(x).reshape(-1, 8)
  distances = np.linalg.norm(rows[:, None] - rows[None], axis=-1)
  assert distances[~np.eye(len(rows), dtype=bool)].min() > 0.1


def test_the_sum_is_token_plus_position():
  embed = Embedding(5, 7, 8, positions="learned")
  ids = jnp.array([[1, 2, 3]])
  x, variables = embed.init_with_output(jax.random.key(0), ids)
  params = variables["params"]
  want = params["tokens"]["embedding"][ids[0]] + params["positions"][:3]
  np.testing.assert_allclose(x[0], want, atol=1e-6)


def test_what_cannot_be_embedded():
  ids = jnp.ones((1, 9), jnp.int32)
  with pytest.raises(ValueError, match="9 tokens.*max_len=7"):
    Embedding(5, 7, 8, positions="learned").init(jax.random.key(0), ids)
  with pytest.raises(ValueError, match="d_model=7 is odd"):
    Embedding(5, 9, 7, concatenate=True).init(jax.random.key(0), ids)
  with pytest.raises(ValueError, match="positions 'rotary'.*learned, sinusoid"):
    Embedding(5, 9, 8, positions="rotary").init(jax.random.key(0), ids)
