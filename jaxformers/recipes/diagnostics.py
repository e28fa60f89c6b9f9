"""Models, settings and trainings of diagnostic tasks."""

from __future__ import annotations

from typing import Any

from jaxformers.recipes import language, shared
from jaxformers.recipes.traits import find_traits

MAD_BATCH = 128
# Sizes of approximations, by model: a fourth of 64 tokens. The defaults are for
# thousands of tokens.
SIZES: dict[str, dict[str, Any]] = {
  "linformer": {"rank": 16},
  "nystromformer": {"num_landmarks": 16},
  "skyformer": {"num_landmarks": 16},
  "performer": {"num_features": 16},
}


def mad_training(
  epochs: int, num_train: int, learning_rate: float, weight_decay: float
) -> dict[str, Any]:
  """Returns MAD's training: AdamW and a cosine to 0, as fields for `base`."""
  steps = max(epochs * num_train // MAD_BATCH, 1)
  every = max(steps // 20, 1)
  return {
    "optimizer": {"name": "adam", "weight_decay": weight_decay},
    "schedule": {
      "name": "cosine",
      "learning_rate": learning_rate,
      "warmup_steps": 0,
    },
    "total_steps": steps,
    "batch_size": min(MAD_BATCH, num_train),
    "eval_batch_size": MAD_BATCH,
    "log_steps": 50,
    "eval_steps": every,
    "checkpoint_steps": every,
    "select": "accuracy",
  }


def model_fields(
  name: str, *, width: int, num_layers: int, rotary: bool = False
) -> dict[str, Any]:
  """Returns a model of four heads, without positions and dropout.

  Without positions a model can read sequences of any length. Layers that
  reserve channels for positions have sinusoids, which exist for any length.

  Args:
    name: name of the model.
    width: number of channels d; the MLP has 2 d.
    num_layers: number of layers.
    rotary: True for rotary positions in mixers with queries and keys; they
      exist for any length.

  Returns:
    The fields `model` and `reference` for `base`.
  """
  fields = language.model_fields(
    name,
    d_model=width,
    num_layers=num_layers,
    num_heads=4,
    mlp_dim=2 * width,
    positions="none",
  )
  for model in fields.values():
    traits = find_traits(model["name"])
    model["mixer"].update(SIZES.get(model["name"], {}))
    if traits.needs_positions:
      model["positions"] = "sinusoid"
    if rotary and traits.has_rotary:
      model["mixer"]["rotary"] = True
    del model["head"]  # Of language models.
    model["dropout_rate"] = 0.0
    for section in ("mixer_defaults", "block"):
      if "dropout_rate" in model[section]:
        model[section]["dropout_rate"] = 0.0
  return fields


def readable(name: str, lengths: tuple[int, ...]) -> tuple[int, ...]:
  """Returns the lengths of tests that a model can read after training.

  Args:
    name: name of the model.
    lengths: lengths of the tests; the first one is the length of training.
  """
  return lengths[:1] if find_traits(name).has_position_weights else lengths


def training(total_steps: int, learning_rate: float = 3e-3) -> dict[str, Any]:
  """Returns a training of minutes on one core, as fields for `base`.

  Args:
    total_steps: number of steps.
    learning_rate: peak learning rate, after a tenth of the steps.
  """
  return {
    **shared.tiny_schedule(learning_rate, total_steps),
    "optimizer": {"name": "adam", "weight_decay": 1e-2, "clip_norm": 1.0},
    "batch_size": 32,
    # Many checkpoints score 100 %: take the surest.
    "select": "loss",
    "eval_batch_size": 100,
    "eval_steps": max(total_steps // 5, 1),
    "checkpoint_steps": max(total_steps // 5, 1),
  }
