"""The mixers, one file each; importing this package registers them."""

from jaxformers.models.mixers import (
  bigbird,
  informer,
  kernelized,
  linear,
  linearized,
  linformer,
  local,
  longformer,
  nystromformer,
  performer,
  reformer,
  skyformer,
  softmax,
  sparse,
  synthesizer,
)

__all__ = [
  "bigbird",
  "informer",
  "kernelized",
  "linear",
  "linearized",
  "linformer",
  "local",
  "longformer",
  "nystromformer",
  "performer",
  "reformer",
  "skyformer",
  "softmax",
  "sparse",
  "synthesizer",
]
