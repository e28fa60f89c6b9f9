"""Recurrences computed step by step in NumPy, to test recurrent mixers."""

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import erf

from jaxformers.models.mixer import MIXERS
from tests import initial
from tests.test_matrix_states import loop

B, N, D = 3, 19, 6


def inputs(n=N):
  """Returns x [B, n, D] and a mask with gaps, padding and a single token."""
  x = np.random.default_rng(0).normal(size=(B, n, D))
  mask = np.arange(n)[None] < np.array([[n], [n - 4], [1]])
  mask[1, [0, 5, 6]] = False
  return x, mask


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def silu(x):
  return x * sigmoid(x)


def softplus(x):
  return np.log1p(np.exp(x))


def gelu(x):
  return x * (1 + erf(x / np.sqrt(2))) / 2


def gelu_tanh(x):
  return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2


def linear(params, x):
  return x @ params["kernel"] + params.get("bias", 0)


def convolved(params, u):
  """A causal convolution of four tokens, channel by channel."""
  padded = np.concatenate([np.zeros((3, u.shape[1])), u])
  taps = [params["conv"][k] * padded[k : k + len(u)] for k in range(4)]
  return sum(taps) + params.get("conv_bias", 0)


def rms(x, scale=1.0):
  """Divides by the root mean square of the last axis."""
  return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-5) * scale


def by_heads(x, h):
  return x.reshape(len(x), h, -1)


def read(q, k, v, *, log_decay=None, beta=None, reverse=False):
  """Returns S_t^T q_t of all tokens, [n, h, V], one write after another.

  q is [n, h, K]; k and v may have an axis of writes after the tokens.
  """
  if k.ndim == 3:
    k, v = k[:, None], v[:, None]
    beta = None if beta is None else beta[:, None]
  arrays = (q, k, v, beta, log_decay)
  q, k, v, beta, log_decay = (None if a is None else a[None] for a in arrays)
  start = np.zeros((1, *q.shape[2:], v.shape[-1]))
  return loop(q, k, v, beta, log_decay, None, None, start, reverse)[0][0]


def gated(form, activation, params, y):
  """Applies the gate after a recurrence."""
  g = activation(y)
  if form == "none":
    return g
  gate = sigmoid(linear(params["gate"], g))
  if form == "full":
    return linear(params["value"], g) * gate
  return (g if form == "half1" else y) * gate


def tokens_of(x, mask):
  """Returns the tokens of each sample, [length, D]."""
  return [row[keep] for row, keep in zip(x, mask, strict=True)]


def lay_back(rows, mask):
  """Inverts `tokens_of`, with 0 at padding."""
  y = np.zeros((*mask.shape, rows[0].shape[-1]))
  for i, row in enumerate(rows):
    y[i, mask[i]] = row
  return y


def states(a, drive):
  """Returns all states of h_t = a_t h_(t-1) + drive_t, from h = 0.

  a and drive are [length, ...].
  """
  h, out = np.zeros(drive.shape[1:], drive.dtype), []
  for factor, step in zip(np.broadcast_to(a, drive.shape), drive, strict=True):
    h = factor * h + step
    out.append(h)
  return np.stack(out)


def check(name, want, options, *, shift=0.3, n=N, atol=5e-6, residual=False):
  """Checks that a mixer equals `want(params, tokens)` on every sample.

  The tolerance is 1e-10 in float64 and `atol` in float32. The parameters are
  moved away from their initial values, which may be zero.
  """
  x, mask = inputs(n)
  params = start(name, options, shift)
  for dtype, tolerance in ((jnp.float64, 1e-10), (jnp.float32, atol)):
    with jax.enable_x64(dtype == jnp.float64):
      mixer = MIXERS[name](dtype=dtype, **options)
      tokens = jnp.asarray(x, dtype)
      cast = jax.tree.map(lambda a, t=dtype: jnp.asarray(a, t), params)

      @jax.jit
      def apply(params, tokens, mask, mixer=mixer):
        kw = {"residual": tokens[..., ::-1]} if residual else {}
        kw |= {"mask": mask, "carry": None, "train": False}
        return mixer.apply({"params": params}, tokens, **kw)[0]

      y = apply(cast, tokens, jnp.asarray(mask))
      assert y.dtype == dtype
    rows = [want(params, row) for row in tokens_of(x, mask)]
    np.testing.assert_allclose(
      np.asarray(y)[mask], lay_back(rows, mask)[mask], atol=tolerance, rtol=0
    )


def start(name, options, shift):
  """Returns initial parameters of a mixer plus random shifts, float64."""
  mixer, rng = MIXERS[name](**options), np.random.default_rng(1)

  def moved(leaf):
    return np.asarray(leaf, np.float64) + shift * rng.normal(size=leaf.shape)

  return jax.tree.map(moved, init(mixer, D))


def init(mixer, d):
  """Returns initial parameters of a mixer of d channels."""
  x = np.zeros((1, 4, d), jnp.result_type(float))
  return initial.params(mixer, x, mask=np.ones((1, 4), bool), carry=None)
