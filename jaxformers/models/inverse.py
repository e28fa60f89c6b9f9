"""Inverse of injective layers: from the output of any layer to the tokens.

A layer of TransJect is injective for given gate weights and given Sigma
(theorem 2 of TransJect; docs/theory.md). A forward pass returns both as side
information: num_layers * num_experts + d numbers per sample.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.foundations.errors import UserError
from jaxformers.models import Model
from jaxformers.models.blocks import invertible
from jaxformers.models.blocks.invertible import InvertibleLayers, require_layers
from jaxformers.models.capture import capture
from jaxformers.models.embedding import second_part
from jaxformers.models.model import bind_encoder
from jaxformers.models.variables import make_variables, of_stack

MAX_STEPS = 2_000  # A Lipschitz constant of 0.99 needs 1,600 in float32.


class Side(NamedTuple):
  """Side information that the inverse of the layers needs.

  Attributes:
    mask: [b, n], True at tokens.
    sides: side output of every layer, see `InvertibleLayers.forward`. For
      TransJect, the weights of the experts, float32 [b, e].
    shared: values that the layers share. For TransJect, Sigma, float32 [b, d]
      or [1, d].
  """

  mask: jax.Array
  sides: tuple[Any, ...]
  shared: Any


def forward(
  model: Model,
  params: Any,
  ids: jax.Array,
  embedded: jax.Array | None = None,
) -> tuple[tuple[jax.Array, ...], Side]:
  """Returns the hidden states of a forward pass, and their side information.

  The hidden states are the embedded tokens and the output of every layer.

  Args:
    model: model from `models.build`, with injective layers.
    params: parameters of the model.
    ids: inputs, [b, n], or [b, 2, n] for pairs.
    embedded: vectors that replace the embedded tokens, see `capture`.

  Raises:
    UserError: for a model whose layers are not injective, or a model that
      computes in half precision.
  """
  layers = layers_in_float32(model)
  variables = make_variables(model, params)
  hidden, mask, *_ = capture(model, variables, ids, embedded)
  encoder = of_stack(variables, "encoder")
  shared = _shared(layers, encoder, hidden[0], mask)
  # Recompute the side output of each layer from the layer's input.
  sides = tuple(
    _apply(layers, weights, x, shared, mask)[1]
    for weights, x in zip(_weights(layers, encoder), hidden[:-1], strict=True)
  )
  return hidden, Side(mask, sides, shared)


def inverse(
  model: Model,
  params: Any,
  y: jax.Array,
  side: Side,
  *,
  layer: int | None = None,
  max_steps: int = MAX_STEPS,
) -> jax.Array:
  """Returns the embedded tokens from the output of a layer.

  Args:
    model, params: arguments of `forward`.
    y: output of layer `layer`, float32 [b, n, d].
    side: side information from `forward`.
    layer: number of the layer, from 1; None for the last.
    max_steps: greatest number of steps of the iteration that inverts a branch.

  Returns:
    Embedded tokens, float32 [b, n, d]. At positions that are not padding, the
    inverse of a layer increases the relative error by a factor of at most (1 -
    a)^-2, where a is the greatest Lipschitz constant of its branches.

  Raises:
    UserError: if a layer contracts too weakly to be inverted in max_steps, or
      if a layer does not map the result back to its output, for example because
      values are not finite.
  """
  layers = layers_in_float32(model)
  variables = make_variables(model, params)
  weights = _weights(layers, of_stack(variables, "encoder"))
  # Layers are numbered from 1: invert the layers `top` to 1.
  top = layers.num_layers if layer is None else layer
  if not 1 <= top <= layers.num_layers:
    raise UserError(f"layer={layer}: choose one of 1 to {layers.num_layers}.")
  eps = float(jnp.finfo(y.dtype).eps)
  # Invert the layers from the last to the first.
  for i in reversed(range(top)):
    constants = layers.constants(weights[i], side.shared)
    _check_contraction(i, constants, max_steps, eps)
    # Rounding to float32 may raise a constant to 1: keep it below 1.
    below_one = {
      name: jnp.asarray(min(constant, 1 - 1e-7), y.dtype)
      for name, constant in constants.items()
    }
    context = (side.shared, side.mask, side.sides[i])
    x = _undo(
      layers, weights[i], y, *context, constants=below_one, max_steps=max_steps
    )
    # Apply the layer to the result, to check that it returns y.
    back, _ = _apply(layers, weights[i], x, *context)
    size = largest_at_tokens(y, side.mask)
    off = largest_at_tokens(back - y, side.mask) / (size + 1e-30)
    if not off < 100 * eps:
      raise UserError(
        f"Layer {i + 1} could not be inverted: the layer maps the result to "
        f"an output that is off by {off:.1g} of the largest entry. "
        "Check that all values and parameters are finite."
      )
    y = x
  return y


def largest_at_tokens(x: jax.Array, mask: jax.Array) -> float:
  """Returns the largest |entry| of x [b, n, d] at tokens; NaN if any is NaN."""
  # Use NumPy, because XLA's maximum on CPUs ignores NaN.
  return float(np.abs(np.asarray(x)[np.asarray(mask)]).max(initial=0))


# Layers are hashable, so that all calls for one model share a compiled program.
_undo = jax.jit(invertible.inverse, static_argnames=("layers", "max_steps"))
_apply = jax.jit(invertible.forward, static_argnames="layers")
_weights = jax.jit(
  lambda layers, variables: layers.weights(variables), static_argnums=0
)
_embed = jax.jit(
  lambda embedding, params, ids: embedding.apply({"params": params}, ids),
  static_argnums=0,
)


@functools.partial(jax.jit, static_argnums=0)
def _shared(layers: Any, variables: Any, x: jax.Array, mask: jax.Array) -> Any:
  # At full precision, as in `capture`.
  with jax.default_matmul_precision("highest"):
    return layers.shared(variables, x, mask).value


def _check_contraction(
  i: int, constants: Mapping[str, float], max_steps: int, eps: float
) -> None:
  """Raises UserError if a branch of layer i needs more than max_steps steps."""
  for name, bound in constants.items():
    # The error falls by a factor of `bound` in every step.
    # Solve bound^steps = eps for the number of steps.
    rate = math.log(max(bound, eps))
    needed = math.log(eps) / rate if rate < 0 else math.inf
    if needed > max_steps:
      raise UserError(
        f"The {name.replace('_', '-')} of layer {i + 1} contracts too weakly "
        f"to be inverted: its Lipschitz constant is {bound:.6g}, which needs "
        f"{needed:.4g} steps, more than max_steps={max_steps}. If the constant "
        "is below 1, raise max_steps. At 1 and above no inverse is guaranteed: "
        "train with more layers, which makes alpha / L smaller."
      )


def tokens(
  model: Model, params: Any, x: jax.Array
) -> tuple[np.ndarray, np.ndarray | None]:
  """Returns the nearest token and the nearest position of each embedded token.

  If the block concatenates positions, half of the channels belong to the token
  and half to the position. If it adds positions, the vector of the position is
  subtracted first, as is the vector of the part of a sequence with two parts.

  Source: TransJect, section 4.4.

  Args:
    model, params: arguments of `forward`.
    x: embedded tokens, [b, n, d], such as `inverse` returns.

  Returns:
    The ids, int32 [b, n], or for real-valued inputs the values, float32 [b, n]
    or [b, n, channels];
    and the positions, int32 [b, n], or None if the block adds positions.
    Prepended tokens are left out.

  Raises:
    UserError: for images, adaptive tables, or an embedding with a LayerNorm;
      and as for `forward`.
  """
  layers_in_float32(model)
  encoder = bind_encoder(model.config)(parent=None)
  embedding_params = params["encoder"]["embedding"]
  block = encoder.block()
  embedding = encoder.embedding(concatenate=block.concatenate_positions)
  has_channels = embedding.has_channels
  width = encoder.embedding.keywords["d_model"] // (1 + has_channels)
  if model.config.channels > width:
    raise UserError(
      f"{model.config.channels} channels do not follow from {width} numbers: "
      "use `inverse`, which returns the embedding."
    )
  if model.config.image or embedding.cutoffs or embedding.norm_epsilon:
    raise UserError(
      "Tokens cannot be read from patches, adaptive tables or an embedding "
      "with a LayerNorm: use `inverse`, which returns the embedding."
    )
  first = model.config.cls  # Prepended tokens have no id.
  dtype = jnp.float32 if model.config.real else jnp.int32
  channels = model.config.channels
  shape = (1, x.shape[1] - first, *(channels,) * (channels > 0))
  blank = jnp.zeros(shape, dtype)
  # Embed padding only: all tokens are then equal, and only positions differ.
  empty = np.asarray(_embed(embedding, embedding_params, blank))
  empty, content = empty[0, first:], np.asarray(x)[:, first:]
  positions = None
  # Separate the content of each token from its position.
  if has_channels:
    half = x.shape[-1] // 2
    positions = _nearest(content[..., half:], empty[:, half:])
    content, empty = content[..., :half], empty[:, :half]
  # Subtract added positions, and the vector of the first part of a sequence.
  content = content - (empty - _vector_of_zero(embedding, embedding_params))
  if model.config.real:
    # Solve x = values kernel + bias by least squares.
    values = jax.device_get(embedding_params["values"])
    kernel = values["kernel"][: max(channels, 1)] * embedding.scale
    content = content - values["bias"] * embedding.scale
    recovered = content @ np.linalg.pinv(kernel)
    return (recovered if channels else recovered[..., 0]), positions
  # Find the nearest rows of the embedding: their numbers are the ids.
  table = np.asarray(embedding_params["tokens"]["embedding"]) * embedding.scale
  ids = _nearest(content, table)
  if embedding.separator:
    # The ids are right up to the first separator, where the second part begins.
    parts = np.asarray(second_part(jnp.asarray(ids), embedding.separator))
    segments = np.asarray(embedding_params["segments"])
    content = content + (segments[0] - segments[parts])
    ids = _nearest(content, table)
  return ids, positions


def _vector_of_zero(embedding: Any, params: Mapping[str, Any]) -> np.ndarray:
  """Returns the vector of id 0 or of the value 0, without a position."""
  if "values" in params:
    return np.asarray(params["values"]["bias"]) * embedding.scale
  return np.asarray(params["tokens"]["embedding"])[0] * embedding.scale


def _nearest(x: np.ndarray, table: np.ndarray) -> np.ndarray:
  """Returns the index of the table's row nearest to each vector, int32 [b, n].

  Args:
    x: vectors, [b, n, c].
    table: rows, [r, c].
  """
  table = np.asarray(table, np.float64)
  # Minimise |x - t|^2 - |x|^2 = |t|^2 - 2 x . t, one sample at a time to save
  # memory.
  lengths = np.square(table).sum(1)
  x = np.asarray(x, np.float64)
  rows = [(lengths - 2 * sample @ table.T).argmin(1) for sample in x]
  return np.stack(rows).astype(np.int32)


def layers_in_float32(model: Model) -> InvertibleLayers:
  """Returns the layers of a model that computes in float32.

  Raises:
    UserError: for a model whose layers are not injective, or that computes in
      half precision, which rounds before each branch.
  """
  layers = require_layers(model.stacks()["encoder"])
  if layers.dtype == jnp.bfloat16:
    raise UserError(
      "The model computes in bfloat16, which rounds before each branch, so it "
      "can be neither inverted nor certified: use "
      "`models.in_float32(model)`."
    )
  return layers
