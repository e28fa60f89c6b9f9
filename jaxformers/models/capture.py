"""Hidden states of a model, layer by layer, as a function of its embedding."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxformers.models import Model
from jaxformers.models.blocks.invertible import layers_of
from jaxformers.models.variables import of_stack

HEADS = ("query", "key", "value")


class Capture(NamedTuple):
  """Hidden states of one forward pass.

  Attributes:
    hidden: embedded tokens and the output of every layer, float32 [b, n, d]
      each, before the LayerNorm that may end the encoder.
    mask: [b, n], True at tokens.
    gates: weights of TransJect's experts, float32 [l, b, e]; None for other
      models.
    sigma: TransJect's Sigma, float32 [b, d], or [1, d] if shared; None for
      other models.
    heads: `query`, `key`, `value` and `attended` (the output of the heads
      before the projection back) of every layer, [b, h, n, e] each, as far as
      its mixer has them.
  """

  hidden: tuple[jax.Array, ...]
  mask: jax.Array
  gates: jax.Array | None
  sigma: jax.Array | None
  heads: tuple[dict[str, jax.Array], ...]


def batches(ids: np.ndarray, size: int, title: str) -> Iterator[np.ndarray]:
  """Yields the samples `size` at a time, and shows a progress bar."""
  for start in tqdm(range(0, len(ids), size), title, disable=None):
    yield ids[start : start + size]


def num_tokens(model: Model, ids: np.ndarray) -> int:
  """Returns how many tokens the longest sample has, without one of `cls`.

  Args:
    model: model from `models.build`.
    ids: samples, as the model takes them.
  """
  tokens = np.asarray(model.mask(ids)).sum(-1)
  return int(tokens.max()) - model.config.cls


@functools.partial(jax.jit, static_argnums=0)
def capture(
  model: Model,
  variables: Any,
  ids: jax.Array,
  embedded: jax.Array | None = None,
) -> Capture:
  """Returns the hidden states between layers, in evaluation.

  Compiled once for a model and the shape of its inputs. Products are at the
  full precision of the compute type, on accelerators too.

  Args:
    model: model from `models.build`.
    variables: result of `models.variables.make_variables`.
    ids: [b, n] or [b, 2, n], as the model takes them. The two sequences of a
      pair count as samples of their own.
    embedded: float32 [b, n, d] that replaces the embedded tokens, or None;
      differentiable.
  """

  # A model of next tokens closes holes: hidden states have that order.
  ids, _ = model.close_holes(ids)

  def run(**more: Any) -> Any:
    with jax.default_matmul_precision("highest"):
      _, state = model.apply(
        {**variables, **more}, ids, train=False, mutable=["intermediates"]
      )
    return state["intermediates"]["encoder"]

  if embedded is None:
    sown = run()
  else:
    # Perturb the embedding by the difference. The sum rounds: it is `embedded`
    # to one unit in the last place, and `hidden[0]` has its exact value.
    start = jax.lax.stop_gradient(run()["hidden"][0])
    change = embedded.astype(start.dtype) - start
    sown = run(perturbations={"encoder": {"embedded": change}})
  # Order layers by number: as text, layer_10 is before layer_2.
  names = [name for name in sown if name.startswith("layer_")]
  names.sort(key=lambda name: int(name.removeprefix("layer_")))
  layers = [sown[name] for name in names]
  # A loop over layers sows in the encoder, other layers in themselves.
  gates = [layer["gate"][0] for layer in layers if "gate" in layer]
  gates = gates or list(sown.get("gate", ()))
  sigma = sown.get("sigma", (None,))[0]
  # Without a loop, the first layer's mixer sows Sigma.
  if sigma is None and gates:
    sigma = sown["layer_0"]["mixer"]["sigma"][0]
  stacked = jnp.stack(gates) if gates else None
  # A layer whose mixer has no heads sows nothing for it.
  heads = tuple(_heads(layer.get("mixer", {})) for layer in layers)
  return Capture(tuple(sown["hidden"]), model.mask(ids), stacked, sigma, heads)


def _heads(sown: Mapping[str, Any]) -> dict[str, jax.Array]:
  heads = dict(sown.get("projected", ({},))[0])
  if "attended" in sown:
    heads["attended"] = sown["attended"][0]
  return heads


def parts(
  model: Model, variables: Any, captured: Capture
) -> tuple[jax.Array, ...] | None:
  """Returns the outputs of every head or expert of every layer.

  Args:
    model, variables: arguments of `capture`.
    captured: result of `capture`.

  Returns:
    For every layer the outputs of its heads before the projection back,
    [b, h, n, e]; or those of its experts, [b, e, n, d], see
    `InvertibleLayers.parts`; None for other models.
  """
  # Models without experts have heads, if every layer sows them.
  if captured.gates is None:
    attended: list[Any]
    attended = [heads.get("attended") for heads in captured.heads]
    is_complete = attended and all(heads is not None for heads in attended)
    return tuple(attended) if is_complete else None
  layers = layers_of(model.stacks()["encoder"])
  if layers is None:
    return None
  weights = layers.weights(of_stack(variables, "encoder"))
  inputs = zip(weights, captured.hidden[:-1], strict=True)
  with jax.default_matmul_precision("highest"):
    of_layers: list[Any]  # Layers with gates have experts.
    of_layers = [layers.parts(w, x, captured.sigma) for w, x in inputs]
  return tuple(of_layers)
