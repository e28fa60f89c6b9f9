import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.models.mixers.softmax import softmax


def test_it_is_the_formula():
  q, k, v = (
    jax.random.normal(key, (2, 3, 6, 4))
    for key in jax.random.split(jax.random.key(0), 3)
  )
  mask = np.arange(6)[None] < np.array([[6], [4]])
  y, carry = softmax(
    q, k, v, mask=jnp.asarray(mask), carry="c", dropout=lambda w: w
  )
  assert carry == "c"
  q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
  for b in range(2):
    keep = mask[b]
    scores = np.exp(q[b] @ k[b].transpose(0, 2, 1)[..., keep] / 2)
    want = scores / scores.sum(-1, keepdims=True) @ v[b][:, keep]
    np.testing.assert_allclose(y[b], want, atol=5e-6)


def test_a_sample_without_tokens_stays_finite():
  q = jnp.ones((1, 1, 3, 2))
  mask = jnp.zeros((1, 3), bool)
  y, _ = softmax(q, q, q, mask=mask, carry=None, dropout=lambda w: w)
  assert np.isfinite(y).all()
