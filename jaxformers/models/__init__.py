"""Models by name. A model consists of an encoder, its blocks and their mixers.

All models share one encoder. The name of a model selects a block and a mixer.
"""

from jaxformers.models import blocks, isometric, mixers, transject
from jaxformers.models.blocks.contract import BLOCKS
from jaxformers.models.classifier import Classifier
from jaxformers.models.config import (
  ModelConfig,
  causal_mixers,
  check_names,
  resolve_defaults,
)
from jaxformers.models.decode import generate
from jaxformers.models.language import LanguageModel
from jaxformers.models.mixer import MIXERS
from jaxformers.models.model import (
  EncoderModel,
  Model,
  build,
  encoder,
  from_config,
  in_float32,
  shapes,
  size,
  state_bytes,
)
from jaxformers.models.reconstruction import Reconstruction
from jaxformers.models.segmenter import Segmenter
from jaxformers.models.sentences import SentenceModel
from jaxformers.models.spans import SpanModel
from jaxformers.models.tokens import TokenClassifier
from jaxformers.models.variables import make_variables
from jaxformers.models.variants import MODELS, Variant

__all__ = [
  "BLOCKS",
  "MIXERS",
  "MODELS",
  "Classifier",
  "EncoderModel",
  "LanguageModel",
  "Model",
  "ModelConfig",
  "Reconstruction",
  "Segmenter",
  "SentenceModel",
  "SpanModel",
  "TokenClassifier",
  "Variant",
  "blocks",
  "build",
  "causal_mixers",
  "check_names",
  "encoder",
  "from_config",
  "generate",
  "in_float32",
  "isometric",
  "make_variables",
  "mixers",
  "resolve_defaults",
  "shapes",
  "size",
  "state_bytes",
  "transject",
]
