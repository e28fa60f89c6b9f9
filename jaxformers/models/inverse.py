"""Inverse of injective layers, from the output of any of them to the tokens.

A layer is injective once its gate's weights and Sigma are known (theorem 2 of
TransJect; docs/theory.md). A forward pass returns both as side information:
num_layers * num_experts + d numbers per sample.
"""

from __future__ import annotations

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
from jaxformers.models.model import bind_encoder
from jaxformers.models.variables import make_variables, of_stack

MAX_STEPS = 2_000  # a = 0.99 needs 1,600 in float32.


class Side(NamedTuple):
  """Side information that undoes the layers of a forward pass.

  Attributes:
    mask: [b, n], True at tokens.
    sides: side outputs of every layer, see `InvertibleLayers.forward`; for
      TransJect the experts' weights, float32 [b, e].
    shared: values that the layers share; for TransJect Sigma, float32 [b, d] or
      [1, d].
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
  """Returns embedded tokens, all layers' outputs, and what undoes them.

  Args:
    model: model from `models.build`, with injective layers.
    params: parameters of the model.
    ids: [b, n], or [b, 2, n] for pairs.
    embedded: tokens that replace the embedded ones, see `capture`.

  Raises:
    UserError: for another model, or one that computes in half precision.
  """
  layers = layers_in_float32(model)
  variables = make_variables(model, params)
  hidden, mask, *_ = capture(model, variables, ids, embedded)
  encoder = of_stack(variables, "encoder")
  shared = _shared(layers, encoder, hidden[0], mask)
  # Compute each layer's side output again, from the layer's input.
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
    layer: number of the layer from 1; the last if None.
    max_steps: limit of the iteration that undoes one branch of a layer.

  Returns:
    float32 [b, n, d], at tokens as accurate as y: relative errors grow by at
    most (1 - a)^-2 per layer.

  Raises:
    UserError: if a layer does not contract enough to be undone in max_steps, or
      if the layer does not map the result back to y, for example because values
      are not finite.
  """
  layers = layers_in_float32(model)
  variables = make_variables(model, params)
  weights = _weights(layers, of_stack(variables, "encoder"))
  # Layers count from 1: undo the layers `top` to 1.
  top = layers.num_layers if layer is None else layer
  if not 1 <= top <= layers.num_layers:
    raise UserError(f"layer={layer}: choose one of 1 to {layers.num_layers}.")
  eps = float(jnp.finfo(y.dtype).eps)
  # Undo the layers from the last to the first.
  for i in reversed(range(top)):
    constants = layers.constants(weights[i], side.shared)
    _check_contraction(i, constants, max_steps, eps)
    # Rounding to float32 may bring a constant to 1: keep it below.
    below_one = {
      name: jnp.asarray(min(constant, 1 - 1e-7), y.dtype)
      for name, constant in constants.items()
    }
    context = (side.shared, side.mask, side.sides[i])
    x = _undo(
      layers, weights[i], y, *context, constants=below_one, max_steps=max_steps
    )
    # Apply the layer again, to see that the result is its input.
    back, _ = _apply(layers, weights[i], x, *context)
    size = largest_at_tokens(y, side.mask)
    off = largest_at_tokens(back - y, side.mask) / (size + 1e-30)
    if not off < 100 * eps:
      raise UserError(
        f"Layer {i + 1} could not be undone: it maps the result to a value "
        f"that differs from its output by {off:.1g} of the largest entry. Give "
        "finite values and parameters."
      )
    y = x
  return y


def largest_at_tokens(x: jax.Array, mask: jax.Array) -> float:
  """Returns the largest |entry| of x [b, n, d] at tokens; NaN if any is NaN."""
  # NumPy, because XLA's maximum on CPUs loses NaN.
  return float(np.abs(np.asarray(x)[np.asarray(mask)]).max(initial=0))


# Layers are hashable, so that calls for one model share the compilation.
_undo = jax.jit(invertible.inverse, static_argnames=("layers", "max_steps"))
_apply = jax.jit(invertible.forward, static_argnames="layers")
_weights = jax.jit(
  lambda layers, variables: layers.weights(variables), static_argnums=0
)
_shared = jax.jit(
  lambda layers, variables, x, mask: layers.shared(variables, x, mask).value,
  static_argnums=0,
)
_embed = jax.jit(
  lambda embedding, params, ids: embedding.apply({"params": params}, ids),
  static_argnums=0,
)


def _check_contraction(
  i: int, constants: Mapping[str, float], max_steps: int, eps: float
) -> None:
  for name, bound in constants.items():
    # The error falls by the constant in every step.
    rate = math.log(max(bound, eps))
    needed = math.log(eps) / rate if rate < 0 else math.inf
    if needed > max_steps:
      raise UserError(
        f"The {name.replace('_', '-')} of layer {i + 1} contracts too weakly "
        f"to be undone: its Lipschitz constant is {bound:.6g}, which needs "
        f"{needed:.4g} steps, more than max_steps={max_steps}. Give a larger "
        "max_steps if the constant is below 1. At 1 and above no inverse is "
        "guaranteed: train with more layers, which makes alpha / L smaller."
      )


def tokens(
  model: Model, params: Any, x: jax.Array
) -> tuple[np.ndarray, np.ndarray | None]:
  """Returns the token and the position nearest to every embedded token.

  Where the block concatenates positions, half of the channels are the token's
  and half the position's. Where it adds them, the position is known by the
  place, and its vector is subtracted.

  Source: TransJect, section 4.4.

  Args:
    model, params: arguments of `forward`.
    x: embedded tokens, [b, n, d], such as `inverse` returns.

  Returns:
    int32 [b, n] ids, or for real-valued inputs float32 [b, n] values; and
    int32 [b, n] positions, None where they are added. The class token in front
    is left out.
  """
  layers_in_float32(model)
  encoder = bind_encoder(model.config)(parent=None)
  embedding_params = params["encoder"]["embedding"]
  has_channels = encoder.block().concatenate_positions
  embedding = encoder.embedding(concatenate=has_channels)
  if model.config.image or embedding.cutoffs or embedding.norm_epsilon:
    raise UserError(
      "Tokens cannot be read from patches, adaptive tables or an embedding "
      "with a LayerNorm: use `inverse`, which returns the embedding."
    )
  first = model.config.cls  # The class token in front has no id.
  dtype = jnp.float32 if model.config.real else jnp.int32
  blank = jnp.zeros((1, x.shape[1] - first), dtype)
  # Positions are those of an empty sequence, whose tokens are all alike.
  empty = np.asarray(_embed(embedding, embedding_params, blank))
  empty, content = empty[0, first:], np.asarray(x)[:, first:]
  positions = None
  if has_channels:
    half = x.shape[-1] // 2
    positions = _nearest(content[..., half:], empty[:, half:])
    content = content[..., :half]
  else:
    content = content - (empty - _vector_of_zero(embedding, embedding_params))
  if model.config.real:
    # Invert x = value * kernel + bias in the direction of the kernel.
    values = jax.device_get(embedding_params["values"])
    kernel = values["kernel"][0] * embedding.scale
    content = content - values["bias"] * embedding.scale
    return content @ (kernel / np.square(kernel).sum()), positions
  # Ids are the nearest rows of the embedding.
  table = np.asarray(embedding_params["tokens"]["embedding"])
  return _nearest(content, table * embedding.scale), positions


def _vector_of_zero(embedding: Any, params: Mapping[str, Any]) -> np.ndarray:
  """Returns the vector of the token or the value 0, without a position."""
  if "values" in params:
    return np.asarray(params["values"]["bias"]) * embedding.scale
  return np.asarray(params["tokens"]["embedding"])[0] * embedding.scale


def _nearest(x: np.ndarray, table: np.ndarray) -> np.ndarray:
  """Returns the index of the nearest row of a table, int32 [b, n].

  Args:
    x: [b, n, c].
    table: [r, c].
  """
  table = np.asarray(table, np.float64)
  # |x - t|^2 = |x|^2 + |t|^2 - 2 x . t; one sample at a time, to save memory.
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
      "The model computes in bfloat16, which rounds before each branch. Only "
      "the same model in float32 can be undone and certified: give "
      "`models.in_float32(model)`."
    )
  return layers
