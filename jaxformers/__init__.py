"""Transformer models, training tasks and analyses of token states, in JAX.

    import jaxformers as jf

    model = jf.train("lra/listops:size=tiny", "runs/listops")
    model = jf.load("runs/listops")  # In a later session.
    model.predict(["[MAX 2 [MIN 7 9 ] ]"])  # Also encode, hidden_states,
    model.invert(["[MAX 2 [MIN 7 9 ] ]"])  # certify, generate, save.

train       trains a config on its task, or on your own texts and arrays
load        opens a trained model: a run, or a folder that `save` has written
build       builds a model, a Flax module, from a name and sizes
encoder     builds an encoder to use inside your own Flax module
ModelConfig all fields of a model; build(config) builds it
RunConfig   all fields of a run; train(config) trains it
generate    continues prompts with a language model
linear_scan computes linear recurrences, real or complex, in five forms
matrix_scan computes recurrences of matrices: linear attention, the delta rule
orthogonal  maps from free matrices to rotations
tasks       data sets under named protocols; tasks.from_arrays for your data
mixers      one module for every kind of attention and recurrence

To register your own components: attention, MIXERS, MODELS, Variant, BLOCKS,
TASKS, OPTIMIZERS and SCHEDULES. Name their module in config.imports.
The command `jaxformers` lists all commands. The folder docs/ of the repository
has the documentation.
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
  from jaxformers.matrix_states import matrix_scan as matrix_scan
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
  "matrix_scan": "matrix_states",
  "train": "api",
}
# Public modules, by the name under which they are read.
_MODULES = {
  "mixers": "models.mixers",
  "orthogonal": "orthogonal",
  "tasks": "tasks",
}


def __getattr__(name: str) -> Any:
  # Import the module of the name at its first use.
  if name in _MODULES:
    value = importlib.import_module(f"{__name__}.{_MODULES[name]}")
  elif name in _PUBLIC:
    module = importlib.import_module(f"{__name__}.{_PUBLIC[name]}")
    value = getattr(module, name)
  else:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  # Later reads find the name in the module and do not call this function.
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  return sorted({*_PUBLIC, *_MODULES, "__version__", "__doc__"})
