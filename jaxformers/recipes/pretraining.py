"""Pre-training on the inputs of a task, and published sizes for it.

Source: Amos et al. 2024 ("Never Train from Scratch"),
https://arxiv.org/abs/2310.02980; `configs/experiment/lra` of its code.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ml_collections import ConfigDict

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import choose
from jaxformers.recipes import shared

# Share of the tokens that are masked, by task: from the appendix of the paper,
# and for word pieces from Devlin et al. 2019.
MASK_RATES = {
  "listops": 0.1,
  "text": 0.15,
  "retrieval": 0.15,
  "imdb": 0.15,
  "ag_news": 0.15,
  "image": 0.5,
  "pathfinder": 0.5,
  "pathx": 0.5,
}
# Tasks whose pixels are predicted as 256 classes, not as real values.
AS_CLASSES = ("pathfinder", "pathx")
# Fields that only classifiers use, at the defaults of `ModelConfig`.
NO_HEAD = {
  "pool_norm": "",
  "head_dim": 0,
  "head_layers": 1,
  "head_init_std": 0.0,
  "head_dropout_rate": 0.0,
  "interaction": "",
}


class Published(NamedTuple):
  """Sizes of a Transformer with rotary positions, and its training.

  Attributes:
    num_layers, d_model, num_heads, mlp_dim: sizes of the encoder.
    learning_rate: learning rate of fine-tuning, and of training from scratch.
    masked_rate, causal_rate: learning rates of pre-training, by objective.
    batch_size: number of examples in a step; 0 for the batch size of the
      config.
  """

  num_layers: int
  d_model: int
  num_heads: int
  mlp_dim: int
  learning_rate: float
  masked_rate: float
  causal_rate: float
  batch_size: int = 32


# Source: `transformer-lra-*-mlm.yaml` and the paper's appendix. Path-X is
# missing, because the paper's model for it has attention in blocks.
PUBLISHED = {
  "listops": Published(6, 512, 8, 2_048, 1e-4, 1e-3, 5e-4),
  "text": Published(6, 512, 8, 2_048, 5e-4, 5e-4, 1e-3),
  "retrieval": Published(4, 128, 4, 512, 5e-4, 5e-3, 5e-3),
  "image": Published(3, 64, 4, 128, 1e-3, 1e-3, 5e-3, batch_size=50),
  "pathfinder": Published(4, 128, 8, 128, 5e-4, 1e-3, 1e-3, batch_size=0),
}


def published_model(task: str, shared_fields: dict[str, Any]) -> dict[str, Any]:
  """Returns the fields of the Transformer with the paper's best scores.

  It has rotary positions and pre-norm blocks.

  Args:
    task: key of `PUBLISHED`.
    shared_fields: fields of the model outside mixer and block.

  Raises:
    UserError: for a task without such a model in the paper.
  """
  sizes = PUBLISHED[choose("task with size=published", task, PUBLISHED)]
  # Take the sizes of the paper, without absolute positions.
  model = shared.transformer(
    "transformer",
    {**shared_fields, "positions": "none", "dropout_rate": 0.0},
    sizes.num_heads,
    sizes.mlp_dim,
  )
  model.update(d_model=sizes.d_model, num_layers=sizes.num_layers)
  # Pool the mean, use rotary positions, and leave out dropout.
  model.update(pool="mean", head_dim=0)
  model["mixer"] = {"rotary": True}
  model["mixer_defaults"]["dropout_rate"] = 0.0
  model["block"]["dropout_rate"] = 0.0
  return model


def published_training(task: str) -> dict[str, Any]:
  """Returns the training of the paper, as fields for `base`.

  The learning rate is constant after a warm-up, which has 2,000 to 5,000 steps
  in the paper. Differs from the paper: the config sets the number of steps,
  where the paper has up to 200 epochs in each phase. The paper states no weight
  decay, so none is used.
  """
  sizes = PUBLISHED[task]
  # Adam with the usual second beta and epsilon, and a constant rate.
  fields: dict[str, Any] = {
    "optimizer": {**shared.VASWANI_ADAM, "b2": 0.999, "eps": 1e-8},
    "schedule": {
      "name": "constant",
      "learning_rate": sizes.learning_rate,
      "warmup_steps": 2_000,
    },
  }
  if sizes.batch_size:
    fields["batch_size"] = sizes.batch_size
  return fields


def pretraining(config: ConfigDict, args: ConfigDict) -> ConfigDict:
  """Turns a config of classification into one of pre-training.

  The encoder, the batches and the schedule stay. Only the Transformer at
  size=published gets its own learning rate.

  Args:
    config: config of a task of Long Range Arena or of short text; it is
      changed.
    args: arguments of the config. `objective` is "masked", "causal", or "" to
      leave the config as it is.

  Raises:
    UserError: for an unknown objective, or for one that the protocol does not
      allow.
  """
  objective = args.objective
  if not objective:
    return config
  if objective not in ("masked", "causal"):
    raise UserError(
      f"The config argument objective={objective!r} is unknown: choose masked "
      "or causal, or remove it."
    )
  # Set the objective, and the share of masked tokens.
  config.task.objective = objective
  if objective == "masked":
    config.task.mask_rate = MASK_RATES[config.task.name]
  # Pixels of protocol=s4 are real numbers: choose what to predict.
  is_real = config.task.protocol == "s4" and config.task.name in (
    "image",
    *AS_CLASSES,
  )
  if is_real:
    as_classes = config.task.name in AS_CLASSES
    config.task.targets = "classes" if as_classes else "values"
  # Remove the head of classification from both models.
  for section in (config.model, config.reference):
    section.update({k: v for k, v in NO_HEAD.items() if k in section})
    # Keep a class token in masked pre-training: the encoder has a parameter
    # for it. Next-token prediction has none.
    if section.pool != "cls" or objective == "causal":
      section.pool = "mean"
  # Use the published learning rate of the objective.
  if args.size == "published" and args.model == "transformer":
    sizes = PUBLISHED[config.task.name]
    rate = getattr(sizes, f"{objective}_rate")
    config.schedule.learning_rate = rate
  config.select = "loss"
  return config
