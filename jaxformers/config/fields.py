"""Fields that every run has, with their defaults."""

from __future__ import annotations

from typing import Any, NamedTuple

from ml_collections import ConfigDict

from jaxformers.registry import choose

# Fields that may differ when a run resumes, because they change rounding at
# most, or (`accumulate`) what is drawn for a part of a batch. Other data behind
# a path would change more: a checkpoint also keeps a digest of its data.
RESUMABLE_FIELDS = (
  "accumulate",
  "data_dir",
  "imports",
  "mesh",
  "task.archive",
  "task.vocabulary",
  "tensorboard",
  "wandb",
)


class Field(NamedTuple):
  """Default value of a field, and its description."""

  default: Any
  help: str


FIELDS = {
  # Start of the run, and the sections of its data, model and training.
  "seed": Field(0, "seed of parameters, order of examples and dropout"),
  "imports": Field(
    "", "modules of your own code to import first, separated by commas"
  ),
  "pretrained": Field(
    "", "run, exported model or folder of Hugging Face to start from"
  ),
  "task": Field({}, "name, protocol and options of the task"),
  "model": Field({}, "name and options of jaxformers.models.build"),
  "reference": Field({}, "Transformer for the comparison of parameters"),
  "optimizer": Field({"name": "adam"}, "name and options of the optimiser"),
  "schedule": Field(
    {"name": "constant", "learning_rate": 1e-3},
    "name and options of the learning rate",
  ),
  # Batches, loss and average of a train step; batches of an evaluation.
  "batch_size": Field(32, "examples per step, over all devices"),
  "accumulate": Field(
    0, "microbatches per batch, to save memory; 0: as many as are fastest"
  ),
  "label_smoothing": Field(0.0, "share of the target spread over all classes"),
  "margin_tokens": Field(
    0, "replaced tokens that the loss is robust to, by the certificate; 0: none"
  ),
  "margin_weight": Field(1.0, "share of that loss; the rest is without them"),
  "ema_decay": Field(
    0.0, "decay of the average of parameters that is scored; 0: none"
  ),
  "eval_batch_size": Field(32, "examples per evaluation batch"),
  "eval_examples": Field(
    0, "examples of the selection split that are scored; 0: all"
  ),
  "buckets": Field(1, "number of lengths that batches are padded to"),
  # Length of the run, and when it logs, evaluates and saves.
  "total_steps": Field(1000, "step at which the run ends"),
  "log_steps": Field(50, "steps between two log lines"),
  "eval_steps": Field(500, "steps between two evaluations"),
  "checkpoint_steps": Field(500, "steps between two checkpoints"),
  "select": Field("accuracy", "score that selects the best checkpoint"),
  "patience": Field(
    0, "evaluations without improvement before the run stops; 0: never"
  ),
  # Devices, the folder of data, and further logs.
  "parallel": Field("jit", "jit over a mesh, or pmap"),
  "mesh": Field("", "devices by axis, data:2,sequence:4; empty: all for data"),
  "data_dir": Field(
    "", "folder of data; empty: $JAXFORMERS_DATA_DIR or ~/.cache/jaxformers"
  ),
  "tensorboard": Field(False, "also write TensorBoard files"),
  "wandb": Field(False, "also log to Weights & Biases"),
}


def base(**fields: Any) -> ConfigDict:
  """Returns the `FIELDS` of every run, with the given values.

  Raises:
    UserError: for an unknown field.
  """
  for name in fields:
    choose("config field", name, FIELDS)
  defaults = {name: field.default for name, field in FIELDS.items()}
  return ConfigDict(defaults | fields)
