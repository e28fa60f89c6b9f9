"""What a model does layer by layer, as a pure function of its embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.models import Model, reversible
from jaxformers.models.mixers.transject import expert_outputs

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
  return int(tokens.max()) - bool(getattr(model, "cls", False))


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
  gates = [one["mixer"]["gate"][0] for one in layers if "gate" in one["mixer"]]
  gates = gates or list(found.get("gate", ()))
  sigma = found.get("sigma", (None,))[0]
  if sigma is None and gates:
    sigma = found["layer_0"]["mixer"]["sigma"][0]
  hidden = tuple(found["hidden"])
  heads = tuple(_heads(one["mixer"]) for one in layers)
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
  """What every head or expert of every layer makes of the tokens.

  Args:
    model, variables: as for `capture`.
    found: of `capture`.

  Returns:
    Of every layer what its heads put out, before the projection back,
    [b, h, n, e]; or x + a F_e(x) of TransJect's experts, [b, e, n, d]; None for
    other models.
  """
  if found.gates is None:
    attended = [heads.get("attended") for heads in found.heads]
    whole = bool(attended) and all(one is not None for one in attended)
    return tuple(attended) if whole else None
  block = model.encoder(parent=None).block(parent=None)
  if not reversible.has_form(block):
    return None
  form = reversible.form(block)
  own = {name: tree["encoder"] for name, tree in variables.items()}
  inputs = found.hidden[:-1]
  made = []
  for x, layer in zip(inputs, reversible.layers(own, form), strict=True):
    experts = layer.experts
    with jax.default_matmul_precision("highest"):
      f = expert_outputs(x, experts, found.sigma)
    made.append(jnp.stack([x + experts.a * one for one in f], 1))
  return tuple(made)


def _number(name: str) -> int:
  return int(name.removeprefix("layer_")) if name.startswith("layer_") else -1
