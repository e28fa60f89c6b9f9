import jax
import jax.numpy as jnp
import pytest

from jaxformers import models
from jaxformers.models import cost


def test_operations_counts_products_times_loop_length():
  a, b = jnp.ones((2, 3, 5)), jnp.ones((2, 5, 7))
  one = 2 * 2 * 3 * 5 * 7
  assert cost.operations(lambda a, b: a @ b, a, b) == (one, 0)

  def loop(a, b):
    return jax.lax.map(lambda _: jax.jit(jnp.matmul)(a, b), jnp.arange(4))

  assert cost.operations(loop, a, b) == (4 * one, 0)
  again = jax.checkpoint(lambda a, b: jnp.sin(a @ b))
  assert cost.operations(again, a, b) == (one, 2 * 3 * 7)


def test_operations_counts_float_arithmetic_only():
  a, i = jnp.ones((2, 3)), jnp.arange(3)
  counted = cost.operations(lambda a, i: (a * a + 1).sum() + a[0, i + 1], a, i)
  assert counted == (0, 6 + 6 + 6 + 3)


def test_count_cost_of_neutreno_adds_three_operations_an_entry():
  """Appendix G.4: little beside the products, and not nothing."""
  n, d, layers = 40, 8, 2
  plain, neutreno = (
    cost.count_cost(build(name, n), n) for name in ("transformer", "neutreno")
  )
  assert neutreno.flops == plain.flops
  assert neutreno.elementwise - plain.elementwise == 3 * (layers - 1) * n * d


def build(name, max_len, **options):
  return models.build(
    name,
    vocab_size=20,
    max_len=max_len,
    num_classes=3,
    d_model=8,
    num_layers=2,
    positions="sinusoid",
    **options,
  )


def test_count_cost_of_a_transformer_by_hand():
  n, d, mlp, layers = 40, 8, 128, 2
  products = 4 * n * d * d + 2 * n * n * d + 2 * n * d * mlp
  got = cost.count_cost(build("transformer", n), n)
  assert got.flops == 2 * (layers * products + d * 3)
  assert got.parameters == models.size(build("transformer", n))
  # The weights of two heads in two layers, at the least.
  assert got.activations > 4 * layers * 2 * n * n


@pytest.mark.slow
def test_count_cost_memory_grows_as_documented():
  def kept(name, n, **mixer):
    return cost.count_cost(build(name, n, mixer=mixer), n).activations

  many, few = (kept("linformer", n, rank=n) for n in (2048, 1024))
  assert many > 3.5 * few
  few = kept("transformer", 1024)
  assert 1.9 * few < kept("transformer", 2048) < 2.1 * few
  few = kept("local", 1024, block_size=16)
  assert 1.9 * few < kept("local", 2048, block_size=16) < 2.1 * few


def test_count_cost_leaves_out_orthogonal_maps():
  """Two products in attention and two in the feed-forward, each d^2 a token.

  One expert has no gate.
  """
  n, d = 8, 8
  model = build("random_transject", n, mixer={"num_experts": 1})
  got = cost.count_cost(model, n).flops
  assert got == 2 * (2 * n * 4 * d * d + d * 3)
