"""Blocks with a mixer and a free feed-forward: Pre-LN, Post-LN and ReZero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import (
  Deviation,
  Fraction,
  PositiveShare,
  Size,
  SmallCount,
)
from jaxformers.foundations.registry import choose
from jaxformers.models.activations import ACTIVATIONS
from jaxformers.models.blocks.contract import BLOCKS
from jaxformers.models.dropout import make_dropout
from jaxformers.models.mixer import kernel_init
from jaxformers.models.norm import NORMS, normalize
from jaxformers.models.parallel import dot_general, product
from jaxformers.models.variables import semi_orthogonal


def dense(
  x: jax.Array, width: int, name: str, init_std: float, dtype: Any
) -> jax.Array:
  """Returns a linear map of x [b, n, d] with a bias, inside a module.

  Args:
    x: tokens.
    width: number of channels of the result.
    name: name of the parameters.
    init_std: standard deviation of the kernel at the start; 0 for Xavier's.
    dtype: compute type.
  """
  return nn.Dense(
    width,
    kernel_init=kernel_init(init_std),
    dtype=dtype,
    dot_general=dot_general,
    name=name,
  )(x)


class TwoBranches(nn.Module):
  """x + r mixer(norm x), then x + r W2 GELU(W1 norm x), r = 1 and a LayerNorm.

  The form that blocks with a free feed-forward share; dropout on each branch.

  Attributes:
    mixer: makes the mixer; called with a name.
    num_layers: number L of layers of the encoder.
    layer: index of this layer, from 0.
    mlp_dim: width of the feed-forward.
    activation: activation of the feed-forward, "gelu" or "relu".
    dropout_rate: dropout after the mixer, inside and after the feed-forward.
    drop_path_rate: share of samples of which the last layer drops a branch in
      training; the first drops none, and those between rise linearly
      (stochastic depth, Huang et al. 2016, as in DeiT).
    norm_type: in `NORMS`, of every norm of the encoder.
    norm_epsilon: epsilon of every norm.
    init_std: standard deviation of the feed-forward's kernels at the start; 0
      for Xavier's.
    orthogonal: True for kernels of the feed-forward with orthonormal rows (W1)
      and columns (W2), made of rotations (`semi_orthogonal`); `mlp_dim` must
      then be a multiple of d, or d one of it.
    orthogonal_map: name of the map to rotations, in `orthogonal.MAPS`.
    dtype: compute type; parameters and LayerNorm are float32.
  """

  concatenate_positions: ClassVar[bool] = False
  in_turn: ClassVar[tuple[str, ...]] = ("up", "down")  # See `variables`.

  mixer: Callable[..., nn.Module]
  num_layers: SmallCount
  layer: int = 0
  mlp_dim: Size = 128
  activation: str = "gelu"
  dropout_rate: Fraction = 0.0
  drop_path_rate: Fraction = 0.0
  norm_type: str = "layer"
  norm_epsilon: PositiveShare = 1e-5
  init_std: Deviation = 0.0
  orthogonal: bool = False
  orthogonal_map: str = "cayley"
  dtype: Any = jnp.float32

  def scale(self) -> jax.Array | float:
    """Returns r, the weight of both branches."""
    return 1.0

  def norm(self, x: jax.Array, name: str, **tokens: Any) -> jax.Array:
    """Returns the input of a branch: the norm of x.

    Args:
      x: [b, n, d].
      name: name of the norm.
      **tokens: `mask` and `train`, for norms that see other samples.
    """
    norm = NORMS[self.norm_type](self.norm_epsilon, name=name)
    return normalize(norm, x, **tokens)

  def end(self, x: jax.Array, name: str, **tokens: Any) -> jax.Array:
    """Returns x after a branch was added to it; arguments as for `norm`."""
    del name, tokens
    return x

  def dropout_rates(self) -> tuple[float, float]:
    """Returns the rates after the mixer and inside the feed-forward."""
    return self.dropout_rate, self.dropout_rate

  def inputs(self, x: jax.Array) -> dict[str, jax.Array]:
    """Returns what the mixer takes besides its branch's input x."""
    del x
    return {}

  @nn.compact
  def __call__(
    self, x: jax.Array, *, mask: jax.Array, carry: Any, train: bool
  ) -> tuple[jax.Array, Any]:
    def dropout(x: jax.Array, rate: float = self.dropout_rate) -> jax.Array:
      return make_dropout(self, rate, train=train)(x)

    after_mixer, inside = self.dropout_rates()
    path = self._drop_path(train)
    activation = ACTIVATIONS[choose("activation", self.activation, ACTIVATIONS)]
    r = self.scale()
    # Add the mixer's branch.
    tokens = {"mask": mask, "train": train}
    y = self.norm(x, "norm_mixer", **tokens)
    y, carry = self.mixer(name="mixer")(
      y, mask=mask, carry=carry, train=train, **self.inputs(x)
    )
    x = x + r * path(dropout(y, after_mixer)).astype(x.dtype)
    x = self.end(x, "norm_mixer", **tokens)
    # Add the feed-forward's branch.
    y = self._dense(self.norm(x, "norm_mlp", **tokens), self.mlp_dim, "up")
    y = self._dense(dropout(activation(y), inside), x.shape[-1], "down")
    y = path(dropout(y)).astype(x.dtype)
    return self.end(x + r * y, "norm_mlp", **tokens), carry

  def _dense(self, x: jax.Array, width: int, name: str) -> jax.Array:
    """Returns a linear map of x [b, n, d] to [b, n, width], with a bias."""
    if self.orthogonal and self.init_std:
      raise UserError(
        f"init_std={self.init_std} is for normal kernels, and "
        "orthogonal=True draws rotations: leave one of the two out."
      )
    if not self.orthogonal:
      return dense(x, width, name, self.init_std, self.dtype)
    shape = (x.shape[-1], width)
    kernel = semi_orthogonal(self, name, shape, self.orthogonal_map)
    bias = self.param(f"{name}_bias", nn.initializers.zeros, (width,))
    y = product(x.astype(self.dtype), kernel.astype(self.dtype))
    return y + bias.astype(self.dtype)

  def _drop_path(self, train: bool) -> Callable[[jax.Array], jax.Array]:
    """Drops a branch of some samples as a whole, and scales the others."""
    if not 0 <= self.drop_path_rate < 1:
      raise UserError(
        f"drop_path_rate={self.drop_path_rate} is not in [0, 1): it is the "
        "share of samples of which the last layer drops a branch."
      )
    rate = self.drop_path_rate * self.layer / max(self.num_layers - 1, 1)
    return nn.Dropout(rate, broadcast_dims=(1, 2), deterministic=not train)


class NormPlaced(TwoBranches):
  """`TwoBranches` with the norm before a branch, or after it was added.

  Attributes:
    norm_first: False for the norm after it.

  The others are those of `TwoBranches`.
  """

  norm_first: bool = True

  @property
  def final_norm(self) -> bool:
    """True if a norm ends the encoder: if none has yet."""
    return self.norm_first

  def norm(self, x: jax.Array, name: str, **tokens: Any) -> jax.Array:
    """Returns the norm of x, or x itself."""
    return super().norm(x, name, **tokens) if self.norm_first else x

  def end(self, x: jax.Array, name: str, **tokens: Any) -> jax.Array:
    """Returns x, or its norm."""
    return x if self.norm_first else super().norm(x, name, **tokens)


@BLOCKS.register("pre_norm")
class PreNorm(NormPlaced):
  """x + mixer(LN x), then x + W2 GELU(W1 LN x), with dropout on each branch.

  Source: the trunk that LRA and Skyformer share. LayerNorm with epsilon 1e-5
  and exact GELU as in Skyformer (LRA: 1e-6 and Flax's tanh form).

  Attributes:
    norm_first: False for LN(x + mixer(x)) and LN(x + W2 GELU(W1 x)), the
      Transformer as it was first published (Vaswani et al. 2017) and BERT's.

  The others are those of `TwoBranches`.
  """


@BLOCKS.register("gated")
class Gated(NormPlaced):
  """Mega's layer: its update gate mixes x and the heads; then W2 SiLU(W1 x).

  The mixer returns u (h - x) for the x before the norm, which is added to x. It
  drops out h itself.

  Source: Ma et al. 2023, https://arxiv.org/abs/2209.10655, equation 14.

  Attributes:
    hidden_dropout_rate: dropout inside the feed-forward; `dropout_rate` is that
      after it.

  The others are those of `NormPlaced` and `TwoBranches`.
  """

  hidden_dropout_rate: Fraction = 0.0
  activation: str = "silu"
  init_std: Deviation = 0.02
  norm_first: bool = False

  def dropout_rates(self) -> tuple[float, float]:
    """Returns no dropout after the mixer, and that of the feed-forward."""
    return 0.0, self.hidden_dropout_rate

  def inputs(self, x: jax.Array) -> dict[str, jax.Array]:
    """Returns x before the norm."""
    return {"residual": x}


@BLOCKS.register("rezero")
class ReZero(TwoBranches):
  """x + r mixer(x), then x + r W2 GELU(W1 x); r is a scalar that starts at 0.

  Source: Bachlechner et al. 2021, https://arxiv.org/abs/2003.04887, equation 9:
  no LayerNorm, one r for both branches of a layer. The baseline in TransJect's
  code keeps all of Pre-LN's (`use_norm`). Differs from it: a LayerNorm there
  divides by the unbiased deviation plus 1e-6, here by the root of the variance
  plus 1e-5.

  Attributes:
    use_norm: True for a LayerNorm before each branch and one at the end of
      the encoder.

  The others are those of `TwoBranches`.
  """

  use_norm: bool = False

  @property
  def final_norm(self) -> bool:
    """True if a LayerNorm ends the encoder."""
    return self.use_norm

  def scale(self) -> jax.Array:
    """Returns r, a parameter of the layer."""
    return self.param("residual", nn.initializers.zeros, ())

  def norm(self, x: jax.Array, name: str, **tokens: Any) -> jax.Array:
    """Returns x itself, unless `use_norm`."""
    return super().norm(x, name, **tokens) if self.use_norm else x
