"""Encoders and schedules that several recipes share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from jaxformers.foundations.registry import choose
from jaxformers.recipes.traits import find_traits

SIZES = ("paper", "tiny")
# Sizes of Long Range Arena with small models, for minutes and for an hour.
SMALL_SIZES = ("tiny", "laptop")
# Adam of "Attention is all you need", without the schedule of that paper.
VASWANI_ADAM = {
  "name": "adam",
  "b2": 0.98,
  "eps": 1e-9,
  "clip_value": 0.0,
  "weight_decay": 0.0,
  "cycle_momentum": False,
}


def is_tiny(size: str) -> bool:
  """Returns True for size "tiny", which trains in minutes on two cores.

  Raises:
    UserError: for a size that is not in `SIZES`.
  """
  return choose("size", size, SIZES) == "tiny"


# Precision, memory and block of all models.
COMMON = {"dtype": "float32", "memory": "stored", "coupled": False}


def transject(
  shared: dict[str, Any], num_experts: int, **fields: Any
) -> dict[str, Any]:
  """Returns the fields of TransJect for `with_reference`.

  Args:
    shared: fields outside mixer and block.
    num_experts: number of experts in a layer.
    **fields: fields that replace those in `shared`.
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
  """Returns an encoder in the form of a Transformer, with dropout 0.1.

  Args:
    name: name of the model.
    shared: fields outside mixer and block.
    num_heads: number of attention heads in a layer.
    mlp_dim: number of hidden units in the feed-forward.
  """
  # Set defaults, not options, so that a mixer of one head keeps one.
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
  """Sets the options that differ under protocol=paper of tables 1 and 2.

  All weight matrices in the layers of `transformer_orthogonal` become
  orthogonal, as the text of TransJect's paper says. Without these options only
  the projections to queries, keys and values are orthogonal, as in its authors'
  code.

  Args:
    config: config of a run; it is changed.
  """
  if config.model.name == "transformer_orthogonal":
    config.model.mixer.update(orthogonal_output=True)
    config.model.block.update(orthogonal=True)


def block(name: str, **fields: Any) -> dict[str, Any]:
  """Returns the fields of a model's block, derived from a Transformer's."""
  traits = find_traits(name)
  options = traits.block_options
  if "mlp_dim" in options:
    if not traits.has_norms:
      fields.pop("norm_epsilon", None)
    return fields
  # Layers without a feed-forward keep their norms and initialisation.
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
    make_transformer: function that returns the encoder of a name in the form of
      a Transformer.
    transject: fields of the model if its layers are TransJect's.
  """
  # The reference is the Transformer for every model.
  if find_traits(name).is_transject:
    model = {"name": name, **transject}
  else:
    model = make_transformer(name)
  return {"model": model, "reference": make_transformer("transformer")}


def tiny_rate(model: str, learning_rate: float) -> float:
  """Returns the learning rate of a model at size=tiny.

  Linear recurrences have 4e-3, layers with bounds 8e-3, TransJect
  `learning_rate`, and all others 1e-3: softmax attention without a long warm-up
  stays at chance from 5e-3 on.
  """
  traits = find_traits(model)
  if traits.is_bounded:
    return 8e-3
  if traits.recurrence == "linear":
    return 4e-3
  return learning_rate if traits.is_transject else 1e-3


def tiny_schedule(
  learning_rate: float,
  total_steps: int,
  *,
  warmup_steps: int = 0,
  weight_decay: float = 0.0,
) -> dict[str, Any]:
  """Returns a training of minutes on two cores: Adam, one ramp up and down.

  The result is for `update`. It contains neither `seed` nor the task.

  Args:
    learning_rate: peak learning rate.
    total_steps: number of steps of the run.
    warmup_steps: number of steps up to the peak; 0 for a tenth of all steps.
    weight_decay: decoupled weight decay.
  """
  return {
    "optimizer": {**VASWANI_ADAM, "weight_decay": weight_decay},
    "schedule": {
      "name": "onecycle",
      "learning_rate": learning_rate,
      "warmup_steps": warmup_steps or total_steps // 10,
    },
    "total_steps": total_steps,
    "log_steps": 50,
    "eval_steps": 300,
    "checkpoint_steps": 100,
  }


def tiny_fields(
  model: str,
  *,
  learning_rate: float,
  total_steps: int,
  warmup_steps: int = 0,
  weight_decay: float = 0.0,
  **fields: Any,
) -> dict[str, Any]:
  """Returns the fields of a run at size=tiny, for `update`.

  Args:
    model: name of the model.
    learning_rate: learning rate of TransJect.
    total_steps, warmup_steps, weight_decay: see `tiny_schedule`.
    **fields: fields that replace fields of `tiny_schedule`.
  """
  schedule = tiny_schedule(
    tiny_rate(model, learning_rate),
    total_steps,
    warmup_steps=warmup_steps,
    weight_decay=weight_decay,
  )
  return schedule | fields
