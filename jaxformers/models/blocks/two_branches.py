"""Blocks with a mixer and a feed-forward.

They are Pre-LN, Post-LN, ReZero, Mega's block, and averages without norms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import (
  Deviation,
  Fraction,
  Interval,
  PositiveShare,
  Size,
  SmallCount,
  refuse_unused,
)
from jaxformers.foundations.registry import choose
from jaxformers.models.activations import ACTIVATIONS, SLOPES
from jaxformers.models.blocks.contract import BLOCKS
from jaxformers.models.blocks.streams import MIXINGS, Connection, mix, weigh
from jaxformers.models.dropout import make_dropout
from jaxformers.models.mixer import kernel_init
from jaxformers.models.norm import NORMS, normalize
from jaxformers.models.parallel import dot_general, product
from jaxformers.models.variables import semi_orthogonal


def dense(
  x: jax.Array,
  width: int,
  name: str,
  init_std: float,
  dtype: Any,
  *,
  use_bias: bool = True,
) -> jax.Array:
  """Returns a linear map of x; call this inside a module's call.

  Args:
    x: tokens, [b, n, d].
    width: number of channels of the result.
    name: name of the parameters.
    init_std: standard deviation of the kernel at initialization; 0 for Xavier's
      initializer.
    dtype: compute type.
    use_bias: True for a bias.
  """
  return nn.Dense(
    width,
    use_bias=use_bias,
    kernel_init=kernel_init(init_std),
    dtype=dtype,
    dot_general=dot_general,
    name=name,
  )(x)


class Shares(NamedTuple):
  """Weights in the sums of a layer; see `TwoBranches.shares`.

  Attributes:
    x: weight of the input of a branch.
    mixer, mlp: weights of the mixer and of the feed-forward.
  """

  x: float
  mixer: Any
  mlp: Any

  def keep(self, x: jax.Array) -> jax.Array:
    """Returns x times its weight, without a product if the weight is 1."""
    return x if self.x == 1 else self.x * x


class TwoBranches(nn.Module):
  """Base class of blocks with a mixer and a feed-forward.

  x + r mixer(norm x), then x + r W2 GELU(W1 norm x), with dropout on each
  branch. In this class r = 1, and the norm is a LayerNorm by default.

  Attributes:
    mixer: factory of the mixer; called with a name.
    num_layers: number of layers L of the encoder.
    layer: index of this layer, from 0.
    mlp_dim: width of the feed-forward.
    activation: activation of the feed-forward, in `ACTIVATIONS`.
    dropout_rate: dropout rate after the mixer, inside and after the
      feed-forward.
    drop_path_rate: share of samples for which the last layer drops a branch in
      training. The rate increases linearly over the layers, from 0 in the first
      (stochastic depth, Huang et al. 2016, as in DeiT).
    norm_type: name of all norms of the encoder, in `NORMS`.
    norm_epsilon: epsilon of every norm.
    init_std: standard deviation of the feed-forward's kernels at
      initialization; 0 for Xavier's initializer.
    orthogonal: True for kernels of the feed-forward with orthonormal rows or
      columns, made of rotations (`semi_orthogonal`).
    orthogonal_map: name of the map to rotations, in `orthogonal.MAPS`.
    dtype: compute type; parameters and LayerNorm are float32.
  """

  concatenate_positions: ClassVar[bool] = False
  has_segments: ClassVar[bool] = True  # The mask may be numbers.
  use_bias: ClassVar[bool] = True  # True for biases in the feed-forward.
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

  @nn.nowrap
  def shares(self, r: Any) -> Shares:
    """Returns the weights of x, of the mixer and of the feed-forward.

    Args:
      r: result of `scale`.
    """
    return Shares(1.0, r, r)

  def norm(self, x: jax.Array, name: str, **tokens: Any) -> jax.Array:
    """Returns the input of a branch: the norm of x.

    Args:
      x: input of the block, [b, n, d].
      name: name of the norm.
      **tokens: `mask` and `train`, for norms that depend on other samples.
    """
    norm = NORMS[self.norm_type](self.norm_epsilon, name=name)
    return normalize(norm, x, **tokens)

  def end(self, x: jax.Array, name: str, **tokens: Any) -> jax.Array:
    """Returns x after a branch has been added; arguments as for `norm`."""
    del name, tokens
    return x

  def after(self, y: jax.Array, name: str, **tokens: Any) -> jax.Array:
    """Returns the output y of a branch, as it is added to x.

    Args:
      y: output of the branch, [b, n, d].
      name, **tokens: arguments of `norm`.
    """
    del name, tokens
    return y

  def connect(
    self, x: jax.Array, name: str, keep: Callable[[jax.Array], jax.Array]
  ) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Returns what a branch reads, and a function that adds its output.

    Args:
      x: input of the branch: tokens [b, n, d], or streams of tokens.
      name: name of the branch, "mixer" or "mlp".
      keep: function that weighs x in the sum.
    """
    del name
    return x, lambda y: keep(x) + y

  def dropout_rates(self) -> tuple[float, float]:
    """Returns the dropout rates after the mixer and inside the feed-forward."""
    return self.dropout_rate, self.dropout_rate

  def inputs(self, x: jax.Array) -> dict[str, jax.Array]:
    """Returns extra arguments of the mixer, besides the input of its branch."""
    del x
    return {}

  @nn.compact
  def __call__(
    self, x: jax.Array, *, mask: jax.Array, carry: Any, train: bool
  ) -> tuple[jax.Array, Any]:
    def dropout(x: jax.Array, rate: float = self.dropout_rate) -> jax.Array:
      return make_dropout(self, rate, train=train)(x)

    # Read the options of both branches.
    after_mixer, inside = self.dropout_rates()
    path = self._drop_path(train)
    activation = ACTIVATIONS[choose("activation", self.activation, ACTIVATIONS)]
    shares = self.shares(self.scale())
    # Add the branch of the mixer: x + r mixer(norm x).
    tokens = {"mask": mask, "train": train}
    read, add = self.connect(x, "mixer", shares.keep)
    y = self.norm(read, "norm_mixer", **tokens)
    y, carry = self.mixer(name="mixer")(
      y, mask=mask, carry=carry, train=train, **self.inputs(read)
    )
    y = self.after(y, "norm_mixer", **tokens)
    y = path(dropout(y, after_mixer)).astype(x.dtype)
    x = self.end(add(shares.mixer * y), "norm_mixer", **tokens)
    # Add the branch of the feed-forward: x + r W2 f(W1 norm x).
    read, add = self.connect(x, "mlp", shares.keep)
    y = self._dense(self.norm(read, "norm_mlp", **tokens), self.mlp_dim, "up")
    y = self._dense(dropout(activation(y), inside), x.shape[-1], "down")
    y = self.after(y, "norm_mlp", **tokens)
    y = path(dropout(y)).astype(x.dtype)
    return self.end(add(shares.mlp * y), "norm_mlp", **tokens), carry

  def _dense(self, x: jax.Array, width: int, name: str) -> jax.Array:
    """Returns a linear map of x [b, n, d] to [b, n, width]."""
    if self.orthogonal and self.init_std:
      raise UserError(
        f"init_std={self.init_std} applies to normal kernels, but "
        "orthogonal=True draws rotations: remove one of the two."
      )
    if not self.orthogonal:
      return dense(
        x, width, name, self.init_std, self.dtype, use_bias=self.use_bias
      )
    # Use a kernel with orthonormal rows or columns.
    shape = (x.shape[-1], width)
    kernel = semi_orthogonal(self, name, shape, self.orthogonal_map)
    y = product(x.astype(self.dtype), kernel.astype(self.dtype))
    if not self.use_bias:
      return y
    bias = self.param(f"{name}_bias", nn.initializers.zeros, (width,))
    return y + bias.astype(self.dtype)[None, None]

  def _drop_path(self, train: bool) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that drops a branch for some samples.

    The branches of the other samples are scaled by 1 / (1 - rate).
    """
    if not 0 <= self.drop_path_rate < 1:
      raise UserError(
        f"drop_path_rate={self.drop_path_rate} is not in [0, 1): give the "
        "share of samples for which the last layer drops a branch."
      )
    # Increase the rate linearly over the layers.
    rate = self.drop_path_rate * self.layer / max(self.num_layers - 1, 1)
    return nn.Dropout(rate, broadcast_dims=(1, 2), deterministic=not train)


class NormPlaced(TwoBranches):
  """Variant of `TwoBranches` with the norm before or after each branch.

  Attributes:
    norm_first: True for the norm before a branch; False for the norm after the
      branch has been added.
    norm_after: True for a second norm, of the output of a branch (Peri-LN, Kim
      et al. 2025, https://arxiv.org/abs/2502.02732). Needs norm_first.
    norm_scaling: True to multiply the norm before a branch by 1 / sqrt(l) in
      layer l, counted from 1 (LayerNorm scaling, Sun et al. 2025,
      https://arxiv.org/abs/2502.05795). Needs norm_first.
    streams: number of residual streams; more than 1 for hyper-connections, see
      `blocks.streams`. Needs norm_first.
    mixing: family of the matrices that mix the streams, in `MIXINGS`.
    dynamic: True if the weights of the streams depend on the token.

  The other attributes are documented in `TwoBranches`.
  """

  norm_first: bool = True
  norm_after: bool = False
  norm_scaling: bool = False
  streams: Annotated[int, Interval("[1, 16]")] = 1
  mixing: str = "sinkhorn"
  dynamic: bool = True

  @nn.nowrap
  def check(self) -> None:
    """Raises UserError for options that cannot be combined."""
    family = MIXINGS[choose("mixing", self.mixing, MIXINGS)]
    options = ("norm_after", "norm_scaling") if not self.norm_first else ()
    chosen = [f"{name}=True" for name in options if getattr(self, name)]
    if self.streams > 1 and not self.norm_first:
      chosen.append(f"streams={self.streams}")
    if chosen:
      raise UserError(
        f"{', '.join(chosen)} needs a norm before each branch, but norm_first "
        "is False: set block.norm_first=True."
      )
    if self.streams > 1 and not family.least <= self.streams <= family.most:
      raise UserError(
        f"streams={self.streams} does not suit mixing={self.mixing}, which "
        f"takes {family.least} to {family.most}: choose another number."
      )
    if self.streams == 1:
      reason = "there is one stream: set block.streams, or remove it."
      refuse_unused(self, ("mixing", "dynamic"), reason)

  @property
  def final_norm(self) -> bool:
    """True for a norm at the end of the encoder, which norm_first needs."""
    return self.norm_first

  def norm(self, x: jax.Array, name: str, **tokens: Any) -> jax.Array:
    """Returns the norm of x if norm_first, else x."""
    self.check()
    if not self.norm_first:
      return x
    y = super().norm(x, name, **tokens)
    return y * (self.layer + 1) ** -0.5 if self.norm_scaling else y

  def after(self, y: jax.Array, name: str, **tokens: Any) -> jax.Array:
    """Returns the norm of y if norm_after, else y."""
    if not self.norm_after:
      return y
    return super().norm(y, f"{name}_after", **tokens)

  def connect(
    self, x: jax.Array, name: str, keep: Callable[[jax.Array], jax.Array]
  ) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Returns a weighted sum of the streams, and a function that adds to all.

    Takes the arguments of `TwoBranches.connect`, with x [b, n, s, d].
    """
    if self.streams == 1:
      return super().connect(x, name, keep)
    connection = Connection(
      self.mixing, self.layer, self.dynamic, name=f"connect_{name}"
    )
    pre, post, matrix = connection(x)
    read = weigh(pre, x).astype(x.dtype)

    def add(y: jax.Array) -> jax.Array:
      written = post[..., None] * y[:, :, None]
      return (mix(matrix, keep(x)) + written).astype(x.dtype)

    return read, add

  def end(self, x: jax.Array, name: str, **tokens: Any) -> jax.Array:
    """Returns x if norm_first, else the norm of x."""
    return x if self.norm_first else super().norm(x, name, **tokens)


@BLOCKS.register("pre_norm")
class PreNorm(NormPlaced):
  """Pre-LN block: x + mixer(LN x), then x + W2 GELU(W1 LN x).

  Each branch has dropout.

  Source: the Transformer block of LRA and of Skyformer. LayerNorm has epsilon
  1e-5 and GELU is exact, as in Skyformer. Differs from LRA, which has epsilon
  1e-6 and Flax's tanh approximation of GELU.

  Attributes:
    norm_first: False for the Post-LN block, LN(x + mixer(x)), then
      LN(x + W2 GELU(W1 x)), as in the first Transformer (Vaswani et al. 2017)
      and in BERT.

  The other attributes are documented in `TwoBranches`.
  """


@BLOCKS.register("gated")
class Gated(NormPlaced):
  """Mega's layer: (1 - u) x + u h, then x + W2 SiLU(W1 x).

  The mixer returns u (h - x), with an update gate u, the output h of the heads
  and the input x before the norm. The block adds this to x. The mixer, not the
  block, applies dropout to h.

  Source: Ma et al. 2023, https://arxiv.org/abs/2209.10655, equation 14.

  Attributes:
    hidden_dropout_rate: dropout rate inside the feed-forward. `dropout_rate` is
      the dropout rate after the feed-forward.

  The other attributes are documented in `NormPlaced` and `TwoBranches`.
  """

  hidden_dropout_rate: Fraction = 0.0
  activation: str = "silu"
  init_std: Deviation = 0.02
  norm_first: bool = False

  @nn.nowrap
  def check(self) -> None:
    """Raises UserError for options with which (1 - u) x + u h does not hold."""
    super().check()
    reason = "this block's mixer returns the sum of x and u (h - x): remove it."
    refuse_unused(self, ("norm_after", "streams"), reason)

  def dropout_rates(self) -> tuple[float, float]:
    """Returns rate 0 after the mixer, and `hidden_dropout_rate`."""
    return 0.0, self.hidden_dropout_rate

  def inputs(self, x: jax.Array) -> dict[str, jax.Array]:
    """Returns x before the norm, as the argument `residual` of the mixer."""
    return {"residual": x}


@BLOCKS.register("rezero")
class ReZero(TwoBranches):
  """ReZero block: x + r mixer(x), then x + r W2 GELU(W1 x).

  r is a scalar parameter that starts at 0.

  Source: Bachlechner et al. 2021, https://arxiv.org/abs/2003.04887, equation 9:
  no LayerNorm, and one r for both branches of a layer. The baseline in
  TransJect's code keeps the LayerNorms of Pre-LN (`use_norm`). Differs from
  that code: its LayerNorm divides by the unbiased deviation plus 1e-6; here
  LayerNorm divides by the square root of (variance + 1e-5).

  Attributes:
    use_norm: True for a LayerNorm before each branch, and a LayerNorm at the
      end of the encoder.

  The other attributes are documented in `TwoBranches`.
  """

  use_norm: bool = False

  @property
  def final_norm(self) -> bool:
    """True for a LayerNorm at the end of the encoder."""
    return self.use_norm

  def scale(self) -> jax.Array:
    """Returns r, a scalar parameter of the layer."""
    return self.param("residual", nn.initializers.zeros, ())

  def norm(self, x: jax.Array, name: str, **tokens: Any) -> jax.Array:
    """Returns the LayerNorm of x if `use_norm`, else x."""
    if self.use_norm:
      return super().norm(x, name, **tokens)
    reason = "use_norm is False: set block.use_norm=True, or remove it."
    refuse_unused(self, ("norm_type", "norm_epsilon"), reason)
    return x


@BLOCKS.register("averaged")
class Averaged(TwoBranches):
  """Averages of x and its branches, without norms and biases.

  (1 - b) x + b/3 mixer(x), then (1 - b) x + b/s W2 f(W1 x), with b = 1 / (2 L)
  and the greatest slope s of the activation f. With bounded matrices
  (`config.optimizer.cap`) the layer has a Lipschitz constant that is worth
  knowing.

  Source: Newhouse et al. 2025, https://arxiv.org/abs/2507.13338. Differs from
  it: the divisor of GELU is its greatest slope rounded up, not 1.1289.

  Attributes:
    norm_type: "none".

  The other attributes are documented in `TwoBranches`.
  """

  final_norm: ClassVar[bool] = False
  use_bias: ClassVar[bool] = False
  norm_type: str = "none"

  @nn.nowrap
  def shares(self, r: Any) -> Shares:
    """Returns 1 - b, b / 3 and b / s."""
    b = r / (2 * self.num_layers)
    return Shares(1 - b, b / 3, b / SLOPES[self.activation])

  def norm(self, x: jax.Array, name: str, **tokens: Any) -> jax.Array:
    """Returns x."""
    choose("norm_type", self.norm_type, ("none",))
    refuse_unused(self, ("norm_epsilon",), "there is no norm: remove it.")
    return x
