"""Models by name: from a config to a Linen module."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from jaxformers.models.classifier import Classifier
from jaxformers.models.config import ModelConfig
from jaxformers.models.language import LanguageModel
from jaxformers.models.model import Model
from jaxformers.models.segmenter import Segmenter
from jaxformers.registry import call

CLASSES = {
  "classification": Classifier,
  "language_model": LanguageModel,
  "segmentation": Segmenter,
}


def build(name: str, **options: Any) -> Model:
  """Returns the model of a name.

  Args:
    name: in `MODELS`.
    **options: the other fields of `ModelConfig`.

  Raises:
    UserError: see `ModelConfig`; and for options of a mixer that a trace of
      its longest input refuses.
  """
  return from_config(
    call("config.model", ModelConfig, options | {"name": name})
  )


def from_config(config: ModelConfig) -> Model:
  """Returns the model of a config; its layers are traced once, on shapes."""
  model = CLASSES[config.objective](config)
  model.check()
  return model


def in_float32(model: Model) -> Model:
  """Returns the same model, of the same parameters, computing in float32."""
  return type(model)(dataclasses.replace(model.config, dtype="float32"))


def shapes(model: Model) -> Any:
  """Returns the tree of a model's parameters as shapes, computing none."""
  init = functools.partial(model.init, train=False)
  return jax.eval_shape(init, jax.random.key(0), model.example())["params"]


def size(model: Model) -> int:
  """Returns the number of a model's parameters, as stored."""
  return sum(leaf.size for leaf in jax.tree.leaves(shapes(model)))
