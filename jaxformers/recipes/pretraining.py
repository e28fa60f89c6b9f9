"""Pre-training on a task's own inputs, and sizes of models that begin so.

Source: Amos et al. 2024 ("Never Train from Scratch"),
https://arxiv.org/abs/2310.02980; `configs/experiment/lra` of its code.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ml_collections import ConfigDict

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import choose
from jaxformers.recipes import shared

# Share of the tokens that are masked, by task (appendix of the paper; of word
# pieces Devlin et al. 2019).
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
# Tasks whose pixels are predicted in 256 classes, not as values.
AS_CLASSES = ("pathfinder", "pathx")
# What classifiers alone have, at the defaults of `ModelConfig`.
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
    learning_rate: rate of fine-tuning, and from scratch.
    masked_rate, causal_rate: rates of pre-training by objective.
    batch_size: examples of a step; 0 for the config's.
  """

  num_layers: int
  d_model: int
  num_heads: int
  mlp_dim: int
  learning_rate: float
  masked_rate: float
  causal_rate: float
  batch_size: int = 32


# `transformer-lra-*-mlm.yaml` and the paper's appendix. The paper's Path-X has
# attention in blocks.
PUBLISHED = {
  "listops": Published(6, 512, 8, 2_048, 1e-4, 1e-3, 5e-4),
  "text": Published(6, 512, 8, 2_048, 5e-4, 5e-4, 1e-3),
  "retrieval": Published(4, 128, 4, 512, 5e-4, 5e-3, 5e-3),
  "image": Published(3, 64, 4, 128, 1e-3, 1e-3, 5e-3, batch_size=50),
  "pathfinder": Published(4, 128, 8, 128, 5e-4, 1e-3, 1e-3, batch_size=0),
}


def published_model(task: str, shared_fields: dict[str, Any]) -> dict[str, Any]:
  """Returns the Transformer of the paper's best row: rotary, pre-norm.

  Args:
    task: key of `PUBLISHED`.
    shared_fields: fields outside mixer and block.

  Raises:
    UserError: for a task that the paper has no such model for.
  """
  sizes = PUBLISHED[choose("task with size=published", task, PUBLISHED)]
  model = shared.transformer(
    "transformer",
    {**shared_fields, "positions": "none", "dropout_rate": 0.0},
    sizes.num_heads,
    sizes.mlp_dim,
  )
  model.update(d_model=sizes.d_model, num_layers=sizes.num_layers)
  model.update(pool="mean", head_dim=0)
  model["mixer"] = {"rotary": True}
  model["mixer_defaults"]["dropout_rate"] = 0.0
  model["block"]["dropout_rate"] = 0.0
  return model


def published_training(task: str) -> dict[str, Any]:
  """Returns the training of the paper, as fields for `base`.

  A constant rate after a warm-up, of 2,000 to 5,000 steps there. Differs from
  it: the number of steps is the config's, where the paper has up to 200 epochs
  in each phase; and there is no weight decay, which it does not tell.
  """
  sizes = PUBLISHED[task]
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
  """Returns a config of classification as one of pre-training.

  The encoder, the batches and the schedule stay; at size=published the
  Transformer has its own rate.

  Args:
    config: config of a task of Long Range Arena, or of short text; it is
      changed.
    args: arguments of the config: `objective` is "masked", "causal", or "" to
      leave the config as it is.

  Raises:
    UserError: for another objective, or one that the protocol cannot have.
  """
  objective = args.objective
  if not objective:
    return config
  if objective not in ("masked", "causal"):
    raise UserError(
      f"The config argument objective={objective!r} is unknown: choose masked "
      "or causal, or leave it out."
    )
  config.task.objective = objective
  if objective == "masked":
    config.task.mask_rate = MASK_RATES[config.task.name]
  is_real = config.task.protocol == "s4" and config.task.name in (
    "image",
    *AS_CLASSES,
  )
  if is_real:
    as_classes = config.task.name in AS_CLASSES
    config.task.targets = "classes" if as_classes else "values"
  for section in (config.model, config.reference):
    section.update({k: v for k, v in NO_HEAD.items() if k in section})
    # A class token stays, of which the encoder has a parameter.
    if section.pool != "cls" or objective == "causal":
      section.pool = "mean"
  if args.size == "published" and args.model == "transformer":
    sizes = PUBLISHED[config.task.name]
    rate = getattr(sizes, f"{objective}_rate")
    config.schedule.learning_rate = rate
  config.select = "loss"
  return config
