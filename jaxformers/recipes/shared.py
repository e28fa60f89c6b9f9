"""Encoders and schedules that several recipes have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from jaxformers.foundations.registry import choose
from jaxformers.recipes.traits import find_traits

SIZES = ("paper", "tiny")
# Adam of "Attention is all you need", without its schedule.
VASWANI_ADAM = {
  "name": "adam",
  "b2": 0.98,
  "eps": 1e-9,
  "clip_value": 0.0,
  "weight_decay": 0.0,
  "cycle_momentum": False,
}


def is_tiny(size: str, sizes: tuple[str, ...] = SIZES) -> bool:
  """Returns True for size "tiny", which trains in minutes on two cores.

  Raises:
    UserError: for a size that is not in `sizes`.
  """
  return choose("size", size, sizes) == "tiny"


# Precision, memory and form of all models.
COMMON = {"dtype": "float32", "memory": "stored", "coupled": False}


def transject(
  shared: dict[str, Any], num_experts: int, **fields: Any
) -> dict[str, Any]:
  """Returns TransJect's fields for `with_reference`.

  Args:
    shared: fields outside mixer and block.
    num_experts: experts of a layer.
    **fields: fields in place of those in `shared`.
  """
  return {**shared, **fields, "mixer": {"num_experts": num_experts}}


def certified(name: str, shared: dict[str, Any]) -> dict[str, Any]:
  """Returns the fields of a model whose layers have bounds.

  Args:
    name: name of the model.
    shared: fields outside mixer and block.
  """
  return {
    "name": name,
    **shared,
    "num_layers": 6,
    "d_model": 64,
    "positions": "sinusoid",
    "dropout_rate": 0.0,
    "orthogonal_map": "cayley",
    "embedding": {"init_std": 1.0},
    **({"mixer": {}} if find_traits(name).has_mixer else {}),
    "block": {},
  }


def transformer(
  name: str, shared: dict[str, Any], num_heads: int, mlp_dim: int
) -> dict[str, Any]:
  """Returns an encoder in the Transformer's form, with dropout 0.1.

  Args:
    name: name of the model.
    shared: fields outside mixer and block.
    num_heads: attention heads of a layer.
    mlp_dim: hidden units of the feed-forward.
  """
  # Defaults, not options: a mixer that has one head keeps it.
  defaults: dict[str, Any] = {"num_heads": num_heads}
  if not find_traits(name).is_bounded:
    defaults["dropout_rate"] = 0.1
  return {
    "name": name,
    **shared,
    "mixer": {},
    "mixer_defaults": defaults,
    "block": block(name, mlp_dim=mlp_dim, dropout_rate=0.1),
  }


def use_papers_options(config: ConfigDict) -> None:
  """Sets what protocol=paper of TransJect's tables 1 and 2 has otherwise.

  All weight matrices of the layers of `transformer_orthogonal` are orthogonal,
  as the text of the paper says. Without these options only the projections to
  queries, keys and values are, as in the code of its authors.

  Args:
    config: config of a run; it is changed.
  """
  if config.model.name == "transformer_orthogonal":
    config.model.mixer.update(orthogonal_output=True)
    config.model.block.update(orthogonal=True)


def block(name: str, **fields: Any) -> dict[str, Any]:
  """Returns the fields of a model's block, given those of a Transformer's."""
  options = find_traits(name).block_options
  if "mlp_dim" in options:
    return fields
  # Layers without a feed-forward keep their own norms and initialization.
  kept = {"residual": True, "dropout_rate": fields["dropout_rate"]}
  return {option: kept[option] for option in options}


def with_reference(
  name: str,
  make_transformer: Callable[[str], dict[str, Any]],
  transject: dict[str, Any],
) -> dict[str, Any]:
  """Returns the fields `model` and `reference` for `base`.

  Args:
    name: name of the model.
    make_transformer: returns the encoder in the Transformer's form of a name.
    transject: fields of the model if it has TransJect's layers.
  """
  # The reference is always the Transformer, whatever the model.
  if find_traits(name).is_transject:
    model = {"name": name, **transject}
  else:
    model = make_transformer(name)
  return {"model": model, "reference": make_transformer("transformer")}


def tiny_rate(model: str, learning_rate: float) -> float:
  """Returns the learning rate at size=tiny: TransJect's own, or by kind.

  Linear recurrences have 4e-3, layers with bounds 8e-3, and others 1e-3:
  softmax attention without a long warm-up stays at chance from 5e-3 on.
  """
  traits = find_traits(model)
  if traits.is_bounded:
    return 8e-3
  if traits.recurrence == "linear":
    return 4e-3
  return learning_rate if traits.is_transject else 1e-3


def tiny_schedule(learning_rate: float, total_steps: int) -> dict[str, Any]:
  """Returns a schedule of minutes on two cores: Adam, one ramp up and down.

  The result is for `update`; `seed` and the task are not part of it.
  """
  return {
    "optimizer": dict(VASWANI_ADAM),
    "schedule": {
      "name": "onecycle",
      "learning_rate": learning_rate,
      "warmup_steps": total_steps // 10,
    },
    "total_steps": total_steps,
    "log_steps": 50,
    "eval_steps": 300,
    "checkpoint_steps": 100,
  }


def tiny_fields(
  model: str, *, learning_rate: float, total_steps: int, **fields: Any
) -> dict[str, Any]:
  """Returns the fields of a run at size=tiny, for `update`.

  Args:
    model: name of the model.
    learning_rate: learning rate of TransJect.
    total_steps: length of the run.
    **fields: fields that differ from those of `tiny_schedule`.
  """
  rate = tiny_rate(model, learning_rate)
  return tiny_schedule(rate, total_steps) | fields
