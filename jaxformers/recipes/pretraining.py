"""Pre-training on a task's own inputs, and sizes of models that begin so.

Source: Amos et al. 2024 ("Never Train from Scratch"),
https://arxiv.org/abs/2310.02980; `configs/experiment/lra` of its code.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from jaxformers.errors import UserError

# Share of the tokens that are masked, by task (appendix of the paper).
MASK_RATES = {
  "listops": 0.1,
  "text": 0.15,
  "retrieval": 0.15,
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


def pretraining(config: ConfigDict, objective: str) -> ConfigDict:
  """Returns a config of classification as one of pre-training.

  The encoder, the batches and the schedule stay.

  Args:
    config: config of a task of Long Range Arena; it is changed.
    objective: "masked", "causal", or "" to leave the config as it is.

  Raises:
    UserError: for another objective, or one that the protocol cannot have.
  """
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
  config.select = "loss"
  return config
