import chex
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import models
from jaxformers.analysis.certificates.ascent import adversarial, ascend
from tests import draws, initial
from tests.assertions import assert_between

IDS = draws.integers(0, (3, 9), 1, 20, end=6)


def build(name, alpha=2.0, num_layers=2, **mixer):
  model = models.build(
    name,
    vocab_size=20,
    max_len=9,
    num_classes=3,
    d_model=8,
    num_layers=num_layers,
    mixer={"num_experts": 2, **mixer} if "transject" in name else mixer,
  )
  params = initial.params(model, IDS, seed=1)
  for i in range(num_layers):
    layer = params["encoder"][f"layer_{i}"]
    if "residual" in layer:
      layer["residual"]["alpha"] = jnp.float32(alpha)
      layer["mixer"]["gate"] = 300 * layer["mixer"]["gate"]
  return model, params


def test_ascent_finds_the_singular_values_of_a_matrix():
  m = draws.normal(0, (5, 5))
  start = draws.normal(1, (20, 5))

  def ratio(u):
    return jnp.linalg.norm(u @ m, axis=-1) / jnp.linalg.norm(u, axis=-1)

  values = np.linalg.svd(m, compute_uv=False)
  high = ascend(ratio, start, sign=1.0, steps=300)
  low = ascend(ratio, start, sign=-1.0, steps=300)
  chex.assert_trees_all_close(high.max(), values[0], rtol=1e-3)
  chex.assert_trees_all_close(low.min(), values[-1], rtol=2e-2)
  assert high.shape == (20,)


def test_ascend_keeps_the_extreme_over_all_steps():
  def ratio(x):
    return 2 + jnp.sin(x)

  start = jnp.linspace(-3, 3, 9)
  extremes = [
    ascend(ratio, start, sign=1.0, steps=k, rate=2.0) for k in (1, 7, 40)
  ]
  chex.assert_trees_all_equal(extremes[0], ratio(start))
  assert_between(extremes[1], extremes[0], extremes[2])


@pytest.mark.long
def test_the_certified_gate_keeps_sequences_apart_and_the_papers_does_not():
  a = np.tanh(2.0) / 2
  low, high = (1 - a) ** 4, (1 + a) ** 4
  model, params = build("random_transject", gating="certified")
  extremes = adversarial(model, params, IDS, steps=60)
  for kind in ("tokens", "sequences"):
    assert_between(extremes[kind], low, high)
    assert extremes[kind][0] < extremes[kind][1]
  assert extremes["tokens"][1] > 1.2  # And it did look for them.
  model, params = build("random_transject")
  extremes = adversarial(model, params, IDS, steps=60)
  assert_between(extremes["tokens"], low, high)
  assert extremes["tokens"][0] < extremes["tokens"][1]
  assert extremes["sequences"][1] > high


@pytest.mark.slow
@pytest.mark.long
def test_adversarial_searches_any_encoder():
  model, params = build("transformer", num_heads=2)
  extremes = adversarial(model, params, IDS, steps=20)
  assert extremes["tokens"][0] < 1 < extremes["tokens"][1]
  chex.assert_tree_all_finite(extremes)


def test_adversarial_refuses_sequences_of_one_token():
  model, params = build("transject")
  with pytest.raises(ValueError, match="tokens.*pairs"):
    adversarial(model, params, IDS[:, :1], steps=5)
