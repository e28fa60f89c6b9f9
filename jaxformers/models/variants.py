"""Names of models: each name selects a mixer and a block.

The file of a mixer registers the names of its models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxformers.foundations.registry import Registry, choose

# Kinds of recurrences; see `Variant.recurrence`.
RECURRENCES = ("", "linear", "gated")
# Value of `Variant.bounded` if the layers have a bound by default.
ALWAYS = "always"
MODELS: Registry = Registry("model", is_open=True)


@dataclasses.dataclass(frozen=True)
class Variant:
  """Mixer, block and options that the name of a model selects.

  Attributes:
    mixer: name of the mixer, in `mixer.MIXERS`; "" for blocks without a mixer.
    block: name of the block, in `models.BLOCKS`.
    fixed: options of the mixer that define the variant. A config cannot change
      them.
    defaults: defaults of options of the mixer. A config can change them.
    source: paper of the variant; "" for the source of the mixer.
    recurrence: "linear" if the mixer is a recurrence whose factors are the same
      at every step; "gated" for a recurrence with gates or attention, whose
      factors depend on the tokens; "" for all other mixers.
    bounded: `ALWAYS` if the layers have a bound for all sequences, which
      certificates need; or the options that give the layers such a bound, as
      text for messages; "" for layers without a bound.
    count_layers: function of d channels, n tokens and the number of layers that
      returns the number of parameters of these layers and a final norm. It
      assumes the default options, and 2 d hidden units if the block has a
      feed-forward. Recipes use it to choose the width of recurrences. None if
      the number is not known.

  Example:
    >>> MODELS.register("local_rezero")(Variant("local", "rezero"))
    Variant(mixer='local', block='rezero', ...)
    >>> del MODELS.data["local_rezero"]
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
  """Returns the names of models with bounded layers, as text for messages."""
  # List the models that need no option first.
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
