import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models.mixers.linformer import linformer
from tests.models.mixers.oracle import (
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

SMALL = {"rank": 6}


def formula(q, k, v, mask, by_k, by_v):
  k, v = (a * mask[:, None, :, None] for a in (k, v))
  k, v = by_k[..., :N] @ k, by_v[..., :N] @ v
  return weigh(q @ k.swapaxes(-1, -2) / E**0.5, True) @ v


@pytest.mark.parametrize("train_projection", [True, False])
@pytest.mark.parametrize("share_key_value", [True, False])
@pytest.mark.parametrize("share_heads", [True, False])
def test_linformer_is_its_formula(
  share_heads, share_key_value, train_projection
):
  q, k, v = heads()
  shape = (5, 16) if share_heads else (H, 5, 16)
  by_k, by_v = np.random.default_rng(1).normal(size=(2, *shape))
  arrays = {"project_keys": by_k}
  if not share_key_value:
    arrays["project_values"] = by_v
  want = formula(q, k, v, tokens(), by_k, arrays.get("project_values", by_k))
  tools = [None, given(**arrays)]
  agree(
    linformer,
    (q, k, v),
    want,
    param=tools[train_projection],
    draw=tools[not train_projection],
    max_len=16,
    rank=5,
    share_heads=share_heads,
    share_key_value=share_key_value,
    train_projection=train_projection,
  )


def test_linformer_with_identity_of_full_rank_is_softmax():
  q, k, v = heads()
  mask = np.ones((2, N), bool)
  eye = given(project_keys=np.eye(N), project_values=np.eye(N))
  options = {"rank": N, "max_len": N, "share_heads": True}
  want = dense(q, k, v, mask[:, None])
  agree(linformer, (q, k, v), want, mask, param=eye, draw=None, **options)


@pytest.mark.parametrize("rank", [0, 9])
def test_linformer_refuses_a_rank_out_of_range(rank):
  x = jnp.ones((1, 1, 4, 2))
  tools = dict.fromkeys(("draw", "dropout", "param"))
  call = functools.partial(linformer, x, x, x, max_len=4, **tools)
  with pytest.raises(ValueError, match=f"rank={rank} .*max_len=4"):
    call(mask=jnp.ones((1, 4), bool), rank=rank)
