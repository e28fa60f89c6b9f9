import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models import embedding
from jaxformers.models.embedding import Embedding, sinusoids, sinusoids_2d


def test_sinusoids_are_the_published_formula():
  table = sinusoids(50, 8)
  for p in (0, 3, 49):
    for i in range(4):
      angle = p / 10_000 ** (2 * i / 8)
      np.testing.assert_allclose(table[p, 2 * i], np.sin(angle), atol=1e-6)
      np.testing.assert_allclose(table[p, 2 * i + 1], np.cos(angle), atol=1e-6)


def test_sinusoids_rows_are_unique():
  rows = sinusoids(4096, 16)
  assert len(np.unique(rows, axis=0)) == 4096


def test_long_sequences_compute_their_sinusoids(monkeypatch):
  n = 2**17
  monkeypatch.setattr(embedding, "LARGEST_TABLE", 5 * n - 1)
  embed = Embedding(2, n, 10, concatenate=True)  # Five channels of positions.
  ids = jnp.zeros((1, n), jnp.int32)
  params = embed.init(jax.random.key(0), ids[:, :1])
  rows = jax.jit(embed.apply)(params, ids)[0, :, 5:]
  np.testing.assert_allclose(rows, sinusoids(n, 5), atol=1e-6)
  text = jax.jit(embed.apply).lower(params, ids).as_text()
  assert len(text) < 1e6  # The program holds no table of all positions.
  # Decoding has the same positions.
  places = jnp.asarray([[0, 4_095, 4_096, n - 1, n, 2 * n - 1, 2**22]])
  found = embed._positions_at(places, 5, None)[0]
  chex.assert_trees_all_close(
    found[:-1], sinusoids(2 * n, 5)[places[0, :-1]], atol=1e-5
  )
  assert np.isnan(found[-1]).all()  # After 1,024 blocks.


def test_sinusoids_2d_separate_rows_and_columns():
  table = sinusoids_2d(1024, 16).reshape(32, 32, 16)
  np.testing.assert_array_equal(table[3, :, :8], table[3, :1, :8].repeat(32, 0))
  np.testing.assert_array_equal(table[:, 3, 8:], table[:1, 3, 8:].repeat(32, 0))
  np.testing.assert_array_equal(table[..., :8], table[..., 8:].swapaxes(0, 1))
  # Four images to a wave, and eight pixels: sine, then cosine.
  np.testing.assert_allclose(table[16, 0, 0], np.sin(np.pi / 4), atol=1e-6)
  np.testing.assert_allclose(table[8, 0, 3], np.sin(2 * np.pi), atol=1e-6)
  np.testing.assert_allclose(table[4, 0, 7], np.cos(np.pi), atol=1e-6)
  assert len(np.unique(table.reshape(-1, 16), axis=0)) == 1024


def test_embedding_gives_the_class_token_no_position():
  embed = Embedding(5, 16, 8, positions="sinusoid_2d", cls=True)
  ids = jnp.ones((1, 16), jnp.int32)
  x, variables = embed.init_with_output(jax.random.key(0), ids)
  np.testing.assert_array_equal(x[0, 0], np.zeros(8))
  token = variables["params"]["tokens"]["embedding"][1]
  np.testing.assert_allclose(x[0, 1:], token + sinusoids_2d(16, 8), atol=1e-6)


def test_embedding_concatenation_is_injective():
  embed = Embedding(5, 7, 8, concatenate=True)
  ids = jnp.array([[t] * 7 for t in range(5)])
  x, _ = embed.init_with_output(jax.random.key(0), ids)
  rows = np.asarray(x).reshape(-1, 8)
  distances = np.linalg.norm(rows[:, None] - rows[None], axis=-1)
  assert distances[~np.eye(len(rows), dtype=bool)].min() > 0.1


def test_tokens_without_positions_have_all_channels():
  embed = Embedding(5, 9, 8, concatenate=True, positions="none")
  ids = jnp.array([[3, 1, 3]], jnp.int32)
  params = embed.init(jax.random.key(0), ids)
  table = params["params"]["tokens"]["embedding"]
  assert table.shape == (5, 8)
  chex.assert_trees_all_equal(embed.apply(params, ids), table[ids])


def test_embedding_sum_is_token_plus_position():
  embed = Embedding(5, 7, 8, positions="learned")
  ids = jnp.array([[1, 2, 3]])
  x, variables = embed.init_with_output(jax.random.key(0), ids)
  params = variables["params"]
  want = params["tokens"]["embedding"][ids[0]] + params["positions"][:3]
  np.testing.assert_allclose(x[0], want, atol=1e-6)


def test_embedding_refuses_wrong_sizes_and_positions():
  ids = jnp.ones((1, 9), jnp.int32)
  for positions in ("learned", "sinusoid_2d"):
    with pytest.raises(ValueError, match="9 tokens.*max_len=7"):
      Embedding(5, 7, 8, positions=positions).init(jax.random.key(0), ids)
  for max_len, d in ((10, 8), (9, 6)):
    with pytest.raises(ValueError, match=f"{max_len} positions.*{d} channels"):
      Embedding(5, max_len, d, positions="sinusoid_2d").init(
        jax.random.key(0), ids
      )
  with pytest.raises(ValueError, match="d_model=7.*even"):
    Embedding(5, 9, 7, concatenate=True).init(jax.random.key(0), ids)
  with pytest.raises(ValueError, match="positions.*'rotary'.*learned, none"):
    Embedding(5, 9, 8, positions="rotary").init(jax.random.key(0), ids)


@pytest.mark.parametrize("concatenate", [False, True])
@pytest.mark.slow
def test_embedding_init_std_is_obeyed(concatenate):
  def deviation(**options):
    embed = Embedding(500, 8, 32, concatenate=concatenate, **options)
    params = embed.init(jax.random.key(0), jnp.ones((1, 8), jnp.int32))
    return params["params"]["tokens"]["embedding"].std()

  np.testing.assert_allclose(deviation(init_std=0.3), 0.3, rtol=0.05)
  default = 1.0 if concatenate else 0.02
  np.testing.assert_allclose(deviation(), default, rtol=0.05)


def test_missing_channels_of_a_time_series_are_zero():
  embed = Embedding(0, 8, 4, positions="none")
  x = np.random.default_rng(0).normal(size=(1, 3, 2)).astype(np.float32)
  params = embed.init(jax.random.key(0), x)
  holes = x.copy()
  holes[0, 1, 0] = holes[0, 2] = np.nan
  want = embed.apply(params, np.nan_to_num(holes))
  np.testing.assert_array_equal(embed.apply(params, holes), want)
  kernel = params["params"]["values"]["kernel"]
  assert kernel.shape == (2, 4)
  np.testing.assert_allclose(want[0, 1], holes[0, 1, 1] * kernel[1], rtol=1e-6)
