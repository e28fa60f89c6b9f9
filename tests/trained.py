"""Trained models on a task of a test, without a run."""

import dataclasses
from pathlib import Path
from typing import Any

from jaxformers.inference import TrainedModel


@dataclasses.dataclass(frozen=True, repr=False)
class OnTask(TrainedModel):
  """Trained model whose task is a field."""

  task: Any = None


def on_task(task, model, params, step):
  """Returns a trained model whose task is the given task."""
  fields = (Path(), {}, model, params, None, (), {}, step, {})
  return OnTask(*fields, task=task)
