"""Names of models: each stands for a mixer in a block.

The file of a mixer registers the names that stand for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxformers.foundations.registry import Registry, choose

# Kinds of recurrences; see `Variant.recurrence`.
RECURRENCES = ("", "linear", "gated")
ALWAYS = "always"  # `Variant.bounded` of layers with a bound by default.
MODELS: Registry = Registry("model", is_open=True)


@dataclasses.dataclass(frozen=True)
class Variant:
  """Mixer, block and options that the name of a model stands for.

  Attributes:
    mixer: name of the mixer, in `mixer.MIXERS`; "" for blocks without one.
    block: name of the block, in `blocks.BLOCKS`.
    fixed: options of the mixer that define the variant; no config changes them.
    defaults: options of the mixer that hold where a config sets none.
    source: paper of the variant; "" for the source of the mixer.
    recurrence: "linear" if the mixer is a recurrence whose factors are the same
      at every step; "gated" for one with gates or attention, which depend on
      the tokens; "" for all other mixers.
    bounded: `ALWAYS` if the layers have a bound for all sequences, as
      certificates need it; or the options that give them one, as a message says
      them; "" for layers without one.
    count_layers: returns the number of parameters of some layers, a norm at
      their end included, from d channels, n tokens and the number of layers;
      with the default options, and 2 d hidden units if the block has a
      feed-forward. Recipes choose the width of recurrences by it; None if it is
      not known.
  """

  mixer: str
  block: str = "pre_norm"
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  source: str = ""
  recurrence: str = ""
  bounded: str = ""
  count_layers: Callable[[int, int, int], int] | None = None

  def __post_init__(self) -> None:
    choose("recurrence", self.recurrence, RECURRENCES)


def bounded_models() -> str:
  """Returns the models whose layers have a bound, as a message lists them."""
  listed = sorted(
    (variant.bounded != ALWAYS, name, variant.bounded)
    for name, variant in MODELS.items()
    if variant.bounded
  )
  names = [
    f"{name} with {options}" if has_options else name
    for has_options, name, options in listed
  ]
  return f"{', '.join(names[:-1])} or {names[-1]}"
