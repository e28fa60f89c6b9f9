"""Names of models: each stands for a mixer in a block.

The file of a mixer registers the names that stand for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxformers.foundations.registry import Registry

MODELS: Registry = Registry("model", is_open=True)


@dataclasses.dataclass(frozen=True)
class Variant:
  """Mixer, block and options that the name of a model stands for.

  Attributes:
    mixer: name of the mixer, in `attention.MIXERS`; "" for blocks without one.
    block: name of the block, in `blocks.BLOCKS`.
    fixed: options of the mixer that define the variant; no config changes them.
    defaults: options of the mixer that hold where a config sets none.
    source: paper of the variant; "" for the source of the mixer.
  """

  mixer: str
  block: str = "pre_norm"
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  source: str = ""
