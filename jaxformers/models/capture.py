"""Hidden states of a model after each layer, as a function of its embedding."""

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
      each, before a final LayerNorm of the encoder.
    mask: [b, n], True at tokens.
    gates: weights of TransJect's experts, float32 [l, b, e]; None for other
      models.
    sigma: TransJect's Sigma, float32 [b, d], or [1, d] if shared; None for
      other models.
    heads: for every layer, a dictionary with `query`, `key`, `value` and
      `attended` (the output of the heads before the output projection),
      [b, h, n, e] each. Entries that the mixer does not have are missing. With
      `weights`, also `weights`, [b, h, n, n]: see `Attention`.
    mixing: matrices that mix the streams of every branch, in their order; see
      `blocks.streams`. () without streams.
  """

  hidden: tuple[jax.Array, ...]
  mask: jax.Array
  gates: jax.Array | None
  sigma: jax.Array | None
  heads: tuple[dict[str, jax.Array], ...]
  mixing: tuple[jax.Array, ...] = ()


def batches(ids: np.ndarray, size: int, title: str) -> Iterator[np.ndarray]:
  """Yields batches of `size` samples, and shows a progress bar."""
  for start in tqdm(range(0, len(ids), size), title, disable=None):
    yield ids[start : start + size]


def mask_of_states(model: Model, ids: Any) -> np.ndarray:
  """Returns the mask of the hidden states of `capture`, bool [b, n].

  It differs from `model.mask(ids)` where a causal model moves its tokens to the
  front (`Model.close_holes`).
  """
  return np.asarray(model.mask(model.close_holes(jnp.asarray(ids))[0]))


def num_tokens(model: Model, ids: np.ndarray) -> int:
  """Returns the number of tokens of the longest sample, without class tokens.

  Args:
    model: model from `models.build`.
    ids: samples, in the shape that the model takes.
  """
  tokens = np.asarray(model.mask(ids)).sum(-1)
  return int(tokens.max()) - model.config.cls


@functools.partial(jax.jit, static_argnums=0, static_argnames="weights")
def capture(
  model: Model,
  variables: Any,
  ids: jax.Array,
  embedded: jax.Array | None = None,
  *,
  weights: bool = False,
) -> Capture:
  """Returns the hidden states of a forward pass in evaluation.

  The function is compiled once for a model and a shape of inputs. Products use
  the full precision of the compute type, on accelerators too.

  Args:
    model: model from `models.build`.
    variables: result of `models.variables.make_variables`.
    ids: inputs, [b, n] or [b, 2, n]. The two sequences of a pair count as
      separate samples.
    embedded: float32 [b, n, d] that replaces the embedded tokens, or None. The
      result is differentiable with respect to it.
    weights: True to return the weights of attention, too.
  """

  # Models of next tokens move tokens to the front: hidden states follow.
  ids, *_ = model.close_holes(ids)

  collections = ["intermediates", *(["weights"] if weights else [])]

  def run(**more: Any) -> Any:
    with jax.default_matmul_precision("highest"):
      _, state = model.apply(
        {**variables, **more}, ids, train=False, mutable=collections
      )
    return _join(state)

  if embedded is None:
    sown = run()
  else:
    # Perturb the embedding by the difference. The rounded sum equals `embedded`
    # up to one unit in the last place; `hidden[0]` is the sum that was used.
    start = jax.lax.stop_gradient(run()["hidden"][0])
    change = embedded.astype(start.dtype) - start
    sown = run(perturbations={"encoder": {"embedded": change}})
  # Order layers by number: as text, layer_10 is before layer_2.
  names = [name for name in sown if name.startswith("layer_")]
  names.sort(key=lambda name: int(name.removeprefix("layer_")))
  layers = [sown[name] for name in names]
  # A loop over layers sows gates in the encoder; otherwise each layer does.
  gates = [layer["gate"][0] for layer in layers if "gate" in layer]
  gates = gates or list(sown.get("gate", ()))
  sigma = sown.get("sigma", (None,))[0]
  # Without a loop, the mixer of the first layer sows Sigma.
  if sigma is None and gates:
    sigma = sown["layer_0"]["mixer"]["sigma"][0]
  stacked = jnp.stack(gates) if gates else None
  # A layer whose mixer has no heads sows none: its dictionary is empty.
  heads = tuple(_heads(layer.get("mixer", {})) for layer in layers)
  return Capture(
    tuple(sown["hidden"]),
    model.mask(ids),
    stacked,
    sigma,
    heads,
    _mixing(layers),
  )


def _join(state: Mapping[str, Any]) -> dict[str, Any]:
  """Returns what the encoder has sown, with the weights of its mixers."""
  sown = dict(state["intermediates"]["encoder"])
  for name, layer in state.get("weights", {}).get("encoder", {}).items():
    sown[name] = sown[name] | {"mixer": sown[name]["mixer"] | layer["mixer"]}
  return sown


def _mixing(layers: list[Any]) -> tuple[jax.Array, ...]:
  """Returns the mixing matrices of all branches, () without streams."""
  names = ("connect_mixer", "connect_mlp")
  return tuple(
    layer[name]["mixing"][0]
    for layer in layers
    for name in names
    if name in layer
  )


def _heads(sown: Mapping[str, Any]) -> dict[str, jax.Array]:
  heads = dict(sown.get("projected", ({},))[0])
  if "attended" in sown:
    heads["attended"] = sown["attended"][0]
  if "matrix" in sown:
    heads["weights"] = sown["matrix"][0]
  return heads


def parts(
  model: Model, variables: Any, captured: Capture
) -> tuple[jax.Array, ...] | None:
  """Returns the outputs of every head or expert of every layer.

  Args:
    model, variables: arguments of `capture`.
    captured: result of `capture`.

  Returns:
    For every layer, the outputs of its heads before the output projection,
    [b, h, n, e], or the outputs of its experts, [b, e, n, d] (see
    `InvertibleLayers.parts`). None for models without heads and experts.
  """
  # Without experts, return the heads if every layer has sown them.
  if captured.gates is None:
    attended: list[Any]
    attended = [heads.get("attended") for heads in captured.heads]
    is_complete = attended and all(heads is not None for heads in attended)
    return tuple(attended) if is_complete else None
  # Compute the outputs of the experts from the input of each layer.
  layers = layers_of(model.stacks()["encoder"])
  if layers is None:
    return None
  weights = layers.weights(of_stack(variables, "encoder"))
  inputs = zip(weights, captured.hidden[:-1], strict=True)
  with jax.default_matmul_precision("highest"):
    of_layers: list[Any]  # Layers with gates have experts.
    of_layers = [layers.parts(w, x, captured.sigma) for w, x in inputs]
  return tuple(of_layers)
