"""LSTM, GRU and minGRU: recurrences whose state is a vector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformers.models.cache import check_causal, recall, remember
from jaxformers.models.mixer import MIXERS
from jaxformers.models.mixers.convolution import (
  front_mask,
  move_back,
  to_front,
)
from jaxformers.models.mixers.recurrence import dense
from jaxformers.models.reductions import wide
from jaxformers.models.segments import scan_options
from jaxformers.models.variants import MODELS, Variant
from jaxformers.scan import linear_scan

MODELS.register("lstm")(
  Variant(
    "lstm",
    recurrence="gated",
    count_layers=lambda d, n, layers: layers * (22 * d * d + 16 * d) + 2 * d,
  )
)
MODELS.register("gru")(
  Variant(
    "gru",
    recurrence="gated",
    count_layers=lambda d, n, layers: layers * (18 * d * d + 16 * d) + 2 * d,
  )
)
MODELS.register("mingru")(
  Variant(
    "mingru",
    recurrence="gated",
    count_layers=lambda d, n, layers: layers * (10 * d * d + 12 * d) + 2 * d,
  )
)


class RNN(nn.Module):
  """Base class of mixers with a vector as state: x [b, n, d] -> [b, n, d].

  The states of both directions have their own parameters. They are joined and
  mapped linearly. All subclasses have the fields below.

  Attributes:
    causal: True to read only the present and earlier tokens; False to read in
      both directions.
    dtype: compute type; parameters and states are float32.
  """

  has_step: ClassVar[bool] = True  # Decoding continues from a cache.
  has_segments: ClassVar[bool] = True  # The mask may be numbers.

  causal: bool = False
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self, x: jax.Array, *, mask: jax.Array, carry: Any, train: bool
  ) -> tuple[jax.Array, Any]:
    del train
    check_causal(self, causal=self.causal)
    # Move the tokens before the padding.
    front = to_front(x.astype(self.dtype), mask)
    places, mask = mask, front_mask(mask)
    states, last = self.recur(front, mask, recall(self, "state"))
    remember(self, "state", last)
    if not self.causal:
      behind, _ = self.recur(front, mask, None, reverse=True)
      states = jnp.concatenate([states, behind], -1)
    y = dense(states, x.shape[-1], "output", dtype=self.dtype)
    return move_back(y, places), carry

  def recur(
    self, x: jax.Array, mask: jax.Array, initial: Any, *, reverse: bool = False
  ) -> tuple[jax.Array, Any]:
    """Returns the states of all tokens, [b, n, d], and the last state.

    Args:
      x: tokens [b, n, d], before the padding, which is 0.
      mask: bool [b, n], True at tokens; or numbers of packed rows.
      initial: state before the first token; None for 0.
      reverse: True to begin with the last token.
    """
    raise NotImplementedError


class _Cell(RNN):
  """Base class of mixers that run a cell of Flax."""

  cell: ClassVar[Callable[..., nn.RNNCellBase]]

  def recur(
    self, x: jax.Array, mask: jax.Array, initial: Any, *, reverse: bool = False
  ) -> tuple[jax.Array, Any]:
    """Runs the recurrence; see `RNN.recur`."""
    dtype, x = x.dtype, wide(x)
    cell = self.cell(x.shape[-1], dtype=x.dtype)
    empty = cell.initialize_carry(jax.random.key(0), x[:, 0].shape)
    empty = jax.tree.map(lambda a: a.astype(x.dtype), empty)
    initial = empty if initial is None else initial

    def choose(where: jax.Array, state: Any, other: Any) -> Any:
      rows = where[:, None]
      return jax.tree.map(lambda a, b: jnp.where(rows, a, b), state, other)

    # Padding copies the state, and an example begins with an empty state.
    def step(cell: Any, state: Any, token: Any) -> tuple[Any, jax.Array]:
      x, is_token, is_first = token
      if is_first is not None:
        state = choose(is_first, empty, state)
      new, y = cell(state, x)
      return choose(is_token, new, state), y

    run = nn.scan(
      step,
      variable_broadcast="params",
      split_rngs={"params": False},
      in_axes=1,
      out_axes=1,
      reverse=reverse,
    )
    flags = scan_options(mask, reverse=reverse)
    last, states = run(cell, initial, (x, flags["mask"], flags["resets"]))
    return states.astype(dtype), last


@MIXERS.register("lstm")
class LSTM(_Cell):
  """Long short-term memory, with a linear map of its outputs.

  Source: Hochreiter and Schmidhuber 1997,
  https://doi.org/10.1162/neco.1997.9.8.1735, with the forget gate of Gers et
  al. 2000; the cell is Flax's `OptimizedLSTMCell`.
  """

  cell = nn.OptimizedLSTMCell


@MIXERS.register("gru")
class GRU(_Cell):
  """Gated recurrent unit, with a linear map of its states.

  Source: Cho et al. 2014, https://arxiv.org/abs/1406.1078, section 2.3; the
  cell is Flax's `GRUCell`, which multiplies by the reset gate after the map.
  """

  cell = nn.GRUCell


@MIXERS.register("mingru")
class MinGRU(RNN):
  """minGRU: gates that do not read the state, so that the scan is linear.

  h_t = (1 - z_t) h_(t-1) + z_t g(V x_t) with z_t = sigmoid(W x_t), and g(x) =
  x + 1/2 for x > 0 and sigmoid(x) elsewhere.

  Source: Feng et al. 2024, https://arxiv.org/abs/2410.01201, section 3.1, with
  the positive g of their appendix B.
  """

  def recur(
    self, x: jax.Array, mask: jax.Array, initial: Any, *, reverse: bool = False
  ) -> tuple[jax.Array, Any]:
    """Runs the recurrence; see `RNN.recur`."""
    end, d = "_reverse" if reverse else "", x.shape[-1]
    gate = wide(dense(x, d, f"gate{end}", dtype=self.dtype))
    new = wide(dense(x, d, f"candidate{end}", dtype=self.dtype))
    new = jnp.where(new > 0, new + 0.5, jax.nn.sigmoid(new))
    states, last = linear_scan(
      jax.nn.sigmoid(-gate),
      jax.nn.sigmoid(gate) * new,
      initial=initial,
      reverse=reverse,
      **scan_options(mask, reverse=reverse),
    )
    return states.astype(x.dtype), last
