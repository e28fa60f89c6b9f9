"""What a model does layer by layer, as a pure function of its embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.models import Model
from jaxformers.models.blocks.invertible import layers_of
from jaxformers.models.variables import of_stack

HEADS = ("query", "key", "value")


class Capture(NamedTuple):
  """One forward pass.

  Attributes:
    hidden: the embedded tokens and the output of every layer, float32
      [b, n, d] each, before the LayerNorm that may end the encoder.
    mask: [b, n], True at tokens.
    gates: of TransJect, the weights of the experts, float32 [l, b, e]; None
      for other models.
    sigma: of TransJect, float32 [b, d], or [1, d] if shared; None for others.
    heads: of every layer `query`, `key` and `value`, and `attended`, what the
      heads put out before the projection back, [b, h, n, e] each, as far as its
      mixer has them.
  """

  hidden: tuple[jax.Array, ...]
  mask: jax.Array
  gates: jax.Array | None
  sigma: jax.Array | None
  heads: tuple[dict[str, jax.Array], ...]


def num_tokens(model: Model, ids: np.ndarray) -> int:
  """Returns how many tokens the longest sample has, without one of `cls`.

  Args:
    model: from `models.build`.
    ids: samples, as the model takes them.
  """
  tokens = np.asarray(model.mask(ids)).sum(-1)
  return int(tokens.max()) - model.config.cls


def capture(
  model: Model,
  variables: Any,
  ids: jax.Array,
  embedded: jax.Array | None = None,
) -> Capture:
  """Everything between the layers, in evaluation.

  Products are at the full precision of the compute type, on accelerators too.

  Args:
    model: from `models.build`.
    variables: of `models.variables.make_variables`.
    ids: [b, n] or [b, 2, n], as the model takes them. The two sequences of a
      pair count as samples of their own.
    embedded: float32 [b, n, d] to put in the place of the embedded tokens, or
      None; differentiable.
  """

  def run(**more: Any) -> Any:
    with jax.default_matmul_precision("highest"):
      _, state = model.apply(
        {**variables, **more}, ids, train=False, mutable=["intermediates"]
      )
    return state["intermediates"]["encoder"]

  if embedded is None:
    found = run()
  else:
    own = jax.lax.stop_gradient(run()["hidden"][0])
    # What is added back rounds: the sum is `embedded` to one unit in the last
    # place, and `hidden[0]` says exactly what it was.
    found = run(
      perturbations={"encoder": {"embedded": embedded.astype(own.dtype) - own}}
    )
  mask = model.mask(ids)
  layers = [found[k] for k in sorted(found, key=_number) if "layer_" in k]
  gates = [layer["gate"][0] for layer in layers if "gate" in layer]
  gates = gates or list(found.get("gate", ()))
  sigma = found.get("sigma", (None,))[0]
  if sigma is None and gates:
    sigma = found["layer_0"]["mixer"]["sigma"][0]
  hidden = tuple(found["hidden"])
  # A layer whose mixer has no heads sows nothing for it.
  heads = tuple(_heads(layer.get("mixer", {})) for layer in layers)
  return Capture(
    hidden, mask, jnp.stack(gates) if gates else None, sigma, heads
  )


def _heads(sown: Mapping[str, Any]) -> dict[str, jax.Array]:
  found = dict(sown.get("projected", ({},))[0])
  if "attended" in sown:
    found["attended"] = sown["attended"][0]
  return found


def parts(
  model: Model, variables: Any, found: Capture
) -> tuple[jax.Array, ...] | None:
  """Returns what every head or expert of every layer makes of the tokens.

  Args:
    model, variables: as for `capture`.
    found: result of `capture`.

  Returns:
    For every layer what its heads put out, before the projection back,
    [b, h, n, e]; or what its experts do, [b, e, n, d], as `parts` of its
    `InvertibleLayers` has it; None for other models.
  """
  if found.gates is None:
    attended = [heads.get("attended") for heads in found.heads]
    complete = bool(attended) and all(heads is not None for heads in attended)
    return tuple(attended) if complete else None
  layers = layers_of(model.stacks()["encoder"])
  if layers is None:
    return None
  encoder = of_stack(variables, "encoder")
  with jax.default_matmul_precision("highest"):
    return tuple(
      layers.parts(weights, x, found.sigma)
      for x, weights in zip(
        found.hidden[:-1], layers.weights(encoder), strict=True
      )
    )


def _number(name: str) -> int:
  return int(name.removeprefix("layer_")) if name.startswith("layer_") else -1
