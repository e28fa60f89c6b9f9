"""Models, tasks and analyses of what Transformers do to their tokens, in JAX.

    import jaxformers as jf

    model = jf.train("lra/listops:size=tiny", "runs/listops")
    model = jf.load("runs/listops")  # In a later session.
    model.predict(["[MAX 2 [MIN 7 9 ] ]"])  # Also encode, hidden_states,
    model.invert(["[MAX 2 [MIN 7 9 ] ]"])  # certify, generate, save.

train       trains a config on its task, or on texts and arrays of your own
load        opens a trained model: a run, or a folder that `save` has written
build       returns a model of a name and sizes, a Flax module
encoder     returns its encoder, a part of a Flax module of your own
ModelConfig all that defines a model: model.config; build(config) reads it
RunConfig   all that defines a run; train(config) reads it
generate    continues prompts with a language model
linear_scan linear recurrences of real or complex numbers, in four forms
orthogonal  maps from free matrices to rotations
tasks       data sets under named protocols; tasks.from_arrays
mixers      one module for every kind of attention and recurrence

To add your own by name: attention, MIXERS, MODELS, Variant, BLOCKS, TASKS,
OPTIMIZERS and SCHEDULES; config.imports names the module that registers them.
Commands: `jaxformers` lists them. Pages: docs/ of the repository.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jaxformers.version import __version__ as __version__

if TYPE_CHECKING:
  from jaxformers import orthogonal as orthogonal
  from jaxformers import tasks as tasks
  from jaxformers.api import train as train
  from jaxformers.config import RunConfig as RunConfig
  from jaxformers.foundations.errors import UserError as UserError
  from jaxformers.inference import TrainedModel as TrainedModel
  from jaxformers.inference import load as load
  from jaxformers.models import BLOCKS as BLOCKS
  from jaxformers.models import MIXERS as MIXERS
  from jaxformers.models import MODELS as MODELS
  from jaxformers.models import ModelConfig as ModelConfig
  from jaxformers.models import Variant as Variant
  from jaxformers.models import build as build
  from jaxformers.models import generate as generate
  from jaxformers.models import mixers as mixers
  from jaxformers.models.attention import attention as attention
  from jaxformers.models.model import encoder as encoder
  from jaxformers.scan import linear_scan as linear_scan
  from jaxformers.tasks import TASKS as TASKS
  from jaxformers.training.optim import OPTIMIZERS as OPTIMIZERS
  from jaxformers.training.optim import SCHEDULES as SCHEDULES

# Module of every public name; a name is imported when it is first read.
_PUBLIC = {
  **dict.fromkeys(("TrainedModel", "load"), "inference"),
  **dict.fromkeys(("BLOCKS", "MIXERS", "MODELS", "Variant"), "models"),
  **dict.fromkeys(("ModelConfig", "build", "encoder", "generate"), "models"),
  **dict.fromkeys(("OPTIMIZERS", "SCHEDULES"), "training.optim"),
  "RunConfig": "config",
  "TASKS": "tasks",
  "UserError": "foundations.errors",
  "attention": "models.attention",
  "linear_scan": "scan",
  "train": "api",
}
# Public modules, by the name under which they are read.
_MODULES = {
  "mixers": "models.mixers",
  "orthogonal": "orthogonal",
  "tasks": "tasks",
}


def __getattr__(name: str) -> Any:
  if name in _MODULES:
    value = importlib.import_module(f"{__name__}.{_MODULES[name]}")
  elif name in _PUBLIC:
    module = importlib.import_module(f"{__name__}.{_PUBLIC[name]}")
    value = getattr(module, name)
  else:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  globals()[name] = value  # Read without this function from now on.
  return value


def __dir__() -> list[str]:
  return sorted({*_PUBLIC, *_MODULES, "__version__", "__doc__"})
