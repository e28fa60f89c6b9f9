import jax
import jax.numpy as jnp

from jaxformers import models
from jaxformers.models import cost


def test_products_are_counted_and_loops_counted_out():
  a, b = jnp.ones((2, 3, 5)), jnp.ones((2, 5, 7))
  one = 2 * 2 * 3 * 5 * 7
  assert cost.flops(lambda a, b: a @ b, a, b) == one

  def loop(a, b):
    return jax.lax.map(lambda _: jax.jit(jnp.matmul)(a, b), jnp.arange(4))

  assert cost.flops(loop, a, b) == 4 * one
  again = jax.checkpoint(lambda a, b: jnp.sin(a @ b))
  assert cost.flops(again, a, b) == one


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


def test_a_transformer_by_hand():
  n, d, mlp, layers = 40, 8, 128, 2
  products = 4 * n * d * d + 2 * n * n * d + 2 * n * d * mlp
  got = cost.of(build("transformer", n), n)
  assert got.flops == 2 * (layers * products + d * 3)
  assert got.parameters == models.size(build("transformer", n))
  # The weights of two heads in two layers, at the least.
  assert got.activations > 4 * layers * 2 * n * n


def test_what_is_kept_grows_as_it_should():
  def kept(name, n, **mixer):
    return cost.of(build(name, n, mixer=mixer), n).activations

  assert kept("transformer", 2048) > 3.5 * kept("transformer", 1024)
  few = kept("local", 1024, block_size=16)
  assert 1.9 * few < kept("local", 2048, block_size=16) < 2.1 * few


def test_orthogonal_maps_are_left_out():
  """Two products in attention and two in the feed-forward, each d^2 a token.

  One expert has no gate.
  """
  n, d = 8, 8
  model = build("random_transject", n, mixer={"num_experts": 1})
  got = cost.of(model, n).flops
  assert got == 2 * (2 * n * 4 * d * d + d * 3)
