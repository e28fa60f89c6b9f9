"""Facts about models that recipes need; they follow from the registration."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxformers.foundations import interrupts


class Traits(NamedTuple):
  """Facts about a model on which its recipe depends.

  Attributes:
    is_transject: True for layers of TransJect, for which the papers' tables
      give separate sizes.
    is_bounded: True for layers with a bound for all sequences, which
      certificates need.
    recurrence: "linear", "gated" or ""; see `models.Variant`.
    is_causal: True if the mixer reads only earlier tokens by default.
    has_causal: True if the mixer has a causal form.
    has_rotary: True if the mixer has queries and keys, which can be rotated by
      their positions.
    needs_positions: True for layers that reserve channels for positions.
    has_position_weights: True if the mixer is in `mixer.POSITION_WEIGHTS`.
    has_mixer: True for layers with a mixer.
    has_mixer_dropout: True if the mixer has the option `dropout_rate`.
    block_options: options of the block that are in `BLOCK_OPTIONS`.
    has_norms: False for a block that has no norms by default.
    count_layers: function that counts the parameters of the layers; see
      `models.Variant`.
  """

  is_transject: bool = False
  is_bounded: bool = False
  recurrence: str = ""
  is_causal: bool = False
  has_causal: bool = True
  has_rotary: bool = False
  needs_positions: bool = False
  has_position_weights: bool = False
  has_mixer: bool = True
  has_mixer_dropout: bool = True
  block_options: tuple[str, ...] = ("mlp_dim", "dropout_rate")
  has_norms: bool = True
  count_layers: Callable[[int, int, int], int] | None = None


# Options of blocks that recipes set where a block has them.
BLOCK_OPTIONS = ("mlp_dim", "residual", "dropout_rate")
# Traits of the default models of most configs. The registry of models has the
# traits of all others, but it imports JAX.
DEFAULT_MODELS = {
  "transformer": Traits(has_rotary=True),
  "transject": Traits(
    is_transject=True,
    has_causal=False,
    needs_positions=True,
    has_mixer_dropout=False,
    block_options=(),
  ),
}


def find_traits(name: str) -> Traits:
  """Returns the traits of a model; imports JAX for most models.

  Raises:
    UserError: for a model that is not registered.
  """
  if name in DEFAULT_MODELS:
    return DEFAULT_MODELS[name]
  return read_traits(name)


def read_traits(name: str) -> Traits:
  """Returns the traits of a model from the registry, which imports JAX."""
  with interrupts.importing():
    from jaxformers.models import BLOCKS, MIXERS, MODELS
    from jaxformers.models.config import field_names, is_causal
    from jaxformers.models.mixer import POSITION_WEIGHTS
    from jaxformers.models.variants import ALWAYS

  variant = MODELS[name]
  block = BLOCKS[variant.block]
  options = field_names(block)
  has_mixer = bool(variant.mixer)
  mixer = field_names(MIXERS[variant.mixer]) if has_mixer else []
  # Attention names the inputs of its function, such as queries and keys.
  built = MIXERS[variant.mixer](**variant.fixed) if has_mixer else None
  inputs = getattr(getattr(built, "signature", None), "inputs", ())
  return Traits(
    is_transject=variant.block == "injective",
    is_bounded=variant.bounded == ALWAYS,
    recurrence=variant.recurrence,
    is_causal=is_causal(variant, variant.defaults),
    has_causal="causal" in mixer,
    has_rotary="rotary" in mixer and {"q", "k"} <= {*inputs},
    needs_positions=block.concatenate_positions,
    has_position_weights=variant.mixer in POSITION_WEIGHTS,
    has_mixer=has_mixer,
    has_mixer_dropout="dropout_rate" in mixer,
    block_options=tuple(name for name in BLOCK_OPTIONS if name in options),
    has_norms=getattr(block, "use_norm", True)
    and getattr(block, "norm_type", "") != "none",
    count_layers=variant.count_layers,
  )
