"""The mixer contract, and the one module that projects around attention.

A mixer is a Linen module whose call is

    mixer(x, *, mask, carry, train) -> (y, carry)

with x and y [b, n, d], mask [b, n] (True at tokens) and carry any pytree that
is handed from layer to layer, None before the first. What stands at masked
positions never reaches the others; a sample does not depend on its batch
mates; appending padding changes nothing.

A mixer without parameters of its own is a function of heads: see `attention`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers import orthogonal
from jaxformers.registry import Registry

MIXERS: Registry = Registry("mixer")


def masked_max(x: jax.Array, mask: jax.Array) -> jax.Array:
  """The maximum over the tokens of x [b, n, d] where mask [b, n] -> [b, d].

  Zero for a sample without tokens.
  """
  lowest = jnp.finfo(x.dtype).min
  top = jnp.where(mask[..., None], x, lowest).max(1)
  return jnp.where(mask.any(1)[:, None], top, 0)


def masked_mean(x: jax.Array, mask: jax.Array) -> jax.Array:
  """The mean over the tokens of x [b, n, d] where mask [b, n] -> f32 [b, d].

  Zero for a sample without tokens.
  """
  total = jnp.where(mask[..., None], x.astype(jnp.float32), 0).sum(1)
  return total / jnp.maximum(mask.sum(1), 1)[:, None].astype(jnp.float32)


def rotation(
  module: nn.Module, name: str, shape: tuple[int, ...], mapping: str
) -> jax.Array:
  """The orthogonal matrices of a parameter of a module, float32 `shape`.

  Read from the collection `rotations` where the caller provides it (see
  `orthogonal.rotations`), so that a step maps every matrix of a model in one
  call; otherwise mapped here, with the same result.

  Args:
    module: the Linen module that owns the parameter, inside its call.
    name: the parameter's name, which ends in "_skew".
    shape: [..., d, d].
    mapping: "cayley" or "expm".
  """
  if module.has_variable("rotations", name):
    return module.get_variable("rotations", name)
  return orthogonal.MAPS[mapping](
    module.param(name, orthogonal.initializer, shape)
  )


class Attention(nn.Module):
  """Projects to heads, attends, projects back: x [b, n, d] -> [b, n, d].

  Attributes:
    attend: `attend(q, k, v, *, mask, carry, dropout, **options)`, with q, k, v
      [b, h, n, e] and dropout a function for the attention weights.
    options: keyword arguments of `attend`.
    num_heads: h; must divide d. ValueError if not.
    use_bias: whether the four projections have biases (Skyformer: yes; LRA:
      no).
    dropout_rate: of the attention weights, in training.
    dtype: compute type; parameters are float32.
  """

  attend: Callable[..., tuple[jax.Array, Any]]
  options: Any = None
  num_heads: int = 2
  use_bias: bool = True
  dropout_rate: float = 0.0
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self, x: jax.Array, *, mask: jax.Array, carry: Any, train: bool
  ) -> tuple[jax.Array, Any]:
    d = x.shape[-1]
    if d % self.num_heads:
      raise ValueError(
        f"num_heads={self.num_heads} does not divide d_model={d}: choose a "
        "number of heads that does."
      )
    project = functools.partial(
      nn.DenseGeneral,
      features=(self.num_heads, d // self.num_heads),
      use_bias=self.use_bias,
      kernel_init=nn.initializers.xavier_uniform(),
      dtype=self.dtype,
    )
    q, k, v = (
      jnp.swapaxes(project(name=name)(x), 1, 2)
      for name in ("query", "key", "value")
    )
    dropout = nn.Dropout(self.dropout_rate, deterministic=not train)
    y, carry = self.attend(
      q, k, v, mask=mask, carry=carry, dropout=dropout, **(self.options or {})
    )
    y = nn.DenseGeneral(
      d,
      axis=(-2, -1),
      use_bias=self.use_bias,
      kernel_init=nn.initializers.xavier_uniform(),
      dtype=self.dtype,
      name="out",
    )(jnp.swapaxes(y, 1, 2))
    return y, carry


def attention(name: str, **options: Any) -> Callable[[Any], Any]:
  """Registers `attend(q, k, v, *, mask, carry, dropout, **options)` as mixer.

  Args:
    name: under which a config finds it.
    **options: defaults of the function's own keyword arguments; a config may
      override them, and no others, beside the attributes of `Attention`.
  """

  def add(attend: Callable[..., Any]) -> Callable[..., Any]:
    def mixer(**given: Any) -> Attention:
      own = {key: given.pop(key, value) for key, value in options.items()}
      return Attention(attend=attend, options=own, **given)

    fields = [f for f in Attention.__dataclass_fields__ if f not in _WIRING]
    mixer.options = tuple(options) + tuple(fields)
    MIXERS.register(name)(mixer)
    return attend

  return add


_WIRING = ("attend", "options", "parent", "name")
