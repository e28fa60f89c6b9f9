"""The range of every field of a config, and the one check of them.

A field has one spelling in the whole package, so that one table by name holds
all of them: those of a run, and the options of models, mixers, blocks, tasks,
optimisers and schedules.
"""

from __future__ import annotations

import dataclasses
import numbers
import os
from collections.abc import Mapping
from typing import Any

from jaxformers.errors import UserError

# What a value of each kind may be instead: NumPy's numbers, and paths.
_TYPES: dict[type, Any] = {
  int: numbers.Integral,
  float: numbers.Real,
  str: (str, os.PathLike),
}
_NOUNS = {
  int: "an integer",
  float: "a number",
  bool: "True or False",
  str: "text",
  dict: "a section of fields",
}


@dataclasses.dataclass(frozen=True)
class Range:
  """The values that a field can take.

  Attributes:
    kind: int, float (which takes integers, too), bool, str or dict.
    interval: lowest and highest number, such as "[0, 1)"; a parenthesis
      leaves the end out, and 2^31 is a power; "" for no numbers.
    is_list: True for a list of such values.
  """

  kind: type
  interval: str = ""
  is_list: bool = False

  def __str__(self) -> str:
    place = f" in {self.interval}" if self.interval else ""
    return ("a list, each " if self.is_list else "") + self.noun + place

  @property
  def noun(self) -> str:
    """The kind in words."""
    return _NOUNS[self.kind]

  def check(self, path: str, value: Any) -> None:
    """Raises UserError for a value out of range or of another type.

    Args:
      path: name of the field with its sections, "config.optimizer.b2".
      value: what the config has there.
    """
    if self.is_list and not isinstance(value, list | tuple):
      raise UserError(f"{path}={value!r} is not of type list: give {self}.")
    for entry in value if self.is_list else [value]:
      if not self._is_kind(entry):
        name = self.kind.__name__
        raise UserError(f"{path}={value!r} is not of type {name}: give {self}.")
      if self.interval and not self._is_inside(entry):
        raise UserError(
          f"{path}={value!r} is not in {self.interval}: give {self.noun} in "
          "that range."
        )

  def _is_kind(self, value: Any) -> bool:
    if self.kind is dict:
      return _is_section(value)
    # Python counts True as an integer.
    is_other = isinstance(value, bool) and self.kind is not bool
    return isinstance(value, _TYPES.get(self.kind, self.kind)) and not is_other

  def _is_inside(self, value: Any) -> bool:
    low, high = (_number(end) for end in self.interval[1:-1].split(","))
    # Comparisons with NaN are False, and infinity is no number of an interval.
    above = low < value or (self.interval[0] == "[" and low == value)
    below = value < high or (self.interval[-1] == "]" and value == high)
    return above and below


def _is_section(value: Any) -> bool:
  return hasattr(value, "items")  # A ConfigDict is no Mapping.


def _number(text: str) -> float:
  """The number of "0.5" or of the power "2^31"."""
  base, _, exponent = text.strip().partition("^")
  return int(base) ** int(exponent) if exponent else float(base)


def check(options: Mapping[str, Any], section: str = "") -> None:
  """Raises UserError for the first field that is out of its range.

  Fields that `RANGES` has not are left to whoever reads them.

  Args:
    options: fields and their values, sections among them.
    section: path of the options, such as "config.model"; "" for arguments.
  """
  for name, value in options.items():
    path = f"{section}.{name}" if section else name
    allowed = find(path)
    if allowed is not None:
      allowed.check(path, value)
      if _is_section(value):
        check(value, path)


def find(path: str) -> Range | None:
  """Returns the range of a field: of its section if that has its own."""
  *_, section, name = ("", *path.split("."))
  return RANGES.get(f"{section}.{name}", RANGES.get(name))


# Seeds and counts are int32 in JAX.
_SEED, _FLAG, _TEXT = Range(int, "[0, 2^31)"), Range(bool), Range(str)
_SECTION, _COUNT = Range(dict), Range(int, "[1, 2^31)")
_COUNT_OR_NONE = Range(int, "[0, 2^31)")
_WIDTH, _WIDTH_OR_NONE = Range(int, "[1, 2^20]"), Range(int, "[0, 2^20]")
_FEW, _FEW_OR_NONE = Range(int, "[1, 1000]"), Range(int, "[0, 1000]")
_SHARE, _NOT_NEGATIVE = Range(float, "[0, 1)"), Range(float, "[0, 1000]")
_POSITIVE = Range(float, "(0, 1000]")

# By name, or by "section.name" where a section differs from the others.
RANGES: dict[str, Range] = {
  # Sections.
  **dict.fromkeys(
    (
      *("task", "model", "reference", "optimizer", "schedule", "mixer"),
      *("mixer_defaults", "block", "embedding", "head", "augment"),
    ),
    _SECTION,
  ),
  # Names, choices and paths.
  **dict.fromkeys(
    (
      *("name", "select", "parallel", "mesh", "pretrained", "data_dir"),
      *("archive", "protocol", "vocabulary", "operators", "difficulty"),
      *("tokens", "crop", "objective", "pool", "head_activation"),
      *("interaction", "positions", "dtype", "orthogonal_map"),
      *("activations", "activation", "gating", "sigma", "kind"),
      *("inverse_init",),
    ),
    _TEXT,
  ),
  # Flags.
  **dict.fromkeys(
    (
      *("tensorboard", "wandb", "cycle_momentum", "flip", "special_tokens"),
      *("tied", "use_bias", "orthogonal", "symmetric", "learn_fidelity"),
      *("feat_scale", "redraw", "causal", "normalize", "share_heads"),
      *("share_key_value", "train_projection", "same_bucket"),
      *("correct_duplicates", "residual", "norm_first", "use_norm"),
    ),
    _FLAG,
  ),
  # Runs.
  "seed": _SEED,
  "batch_size": _COUNT,
  "eval_batch_size": _COUNT,
  "accumulate": _COUNT,
  "buckets": _COUNT,
  "total_steps": _COUNT,
  "log_steps": _COUNT,
  "eval_steps": _COUNT,
  "checkpoint_steps": _COUNT,
  "patience": _COUNT_OR_NONE,
  "label_smoothing": _SHARE,
  "ema_decay": _SHARE,
  # Optimisers and schedules.
  "learning_rate": _POSITIVE,
  "warmup_steps": _COUNT_OR_NONE,
  "power": Range(float, "(0, 100]"),
  "end": _NOT_NEGATIVE,
  "b1": _SHARE,
  "b2": _SHARE,
  "eps": Range(float, "(0, 1]"),
  "momentum": _SHARE,
  "weight_decay": _NOT_NEGATIVE,
  "clip_value": _NOT_NEGATIVE,
  "clip_norm": _NOT_NEGATIVE,
  # Models.
  "d_model": Range(int, "[1, 2^16]"),
  "num_layers": _FEW,
  "vocab_size": _COUNT_OR_NONE,
  "max_len": Range(int, "[0, 2^24]"),
  "num_classes": _COUNT_OR_NONE,
  "image": Range(int, "[1, 2^16]", is_list=True),
  "num_inputs": Range(int, "[1, 2]"),
  "padded_len": Range(int, "[0, 2^24]"),
  "patch_size": Range(int, "[0, 2^16]"),
  "head_dim": _WIDTH_OR_NONE,
  "head_layers": Range(int, "[1, 20]"),
  "init_std": Range(float, "[0, 100]"),
  "head_init_std": Range(float, "[0, 100]"),
  "dropout_rate": _SHARE,
  "head_dropout_rate": _SHARE,
  "drop_path_rate": _SHARE,
  "mlp_dim": _WIDTH,
  "block.norm_epsilon": Range(float, "(0, 1]"),
  "norm_epsilon": Range(float, "[0, 1]"),
  "cutoffs": Range(int, "[1, 2^31)", is_list=True),
  "div_value": _FEW,
  "scale": _POSITIVE,
  # Mixers.
  "num_heads": Range(int, "[1, 2^16]"),
  "fidelity": _NOT_NEGATIVE,
  "fidelity_schedule": Range(float, "[0, 1000]", is_list=True),
  "num_experts": _FEW,
  "reconstruction_weight": _NOT_NEGATIVE,
  "block_size": _WIDTH,
  "chunk_size": _WIDTH,
  "window": Range(int, "[2, 2^20]"),
  "num_random": _WIDTH_OR_NONE,
  "num_global": _WIDTH_OR_NONE,
  "num_summary": _WIDTH_OR_NONE,
  "num_queries": _WIDTH_OR_NONE,
  "num_samples": _WIDTH_OR_NONE,
  "factor": _POSITIVE,
  "rank": _WIDTH,
  "num_landmarks": _WIDTH,
  "inverse_steps": Range(int, "[1, 100]"),
  "conv_size": _FEW_OR_NONE,
  "gamma": _NOT_NEGATIVE,
  "num_features": _WIDTH,
  "epsilon": Range(float, "[0, 1]"),
  "num_hashes": _FEW,
  "num_buckets": _WIDTH_OR_NONE,
  # Tasks. A length of 0 is the protocol's, a vocabulary of 0 the text's.
  "num_train": _COUNT,
  "num_validation": _COUNT,
  "num_test": _COUNT,
  "num_images": _COUNT,
  "max_depth": Range(int, "[2, 100]"),
  "max_args": Range(int, "[2, 1000]"),
  "min_length": _COUNT_OR_NONE,
  "max_length": _COUNT,
  "test_min_length": _COUNT_OR_NONE,
  "test_max_length": _COUNT_OR_NONE,
  "resolution": Range(int, "[1, 2^12]"),
  "stride": _COUNT_OR_NONE,
  "eval_windows": _COUNT_OR_NONE,
  "size": Range(int, "[1, 2^12]"),
  "randaugment": Range(float, "[0, 10]"),
  "color_jitter": Range(float, "[0, 1]"),
  "erase": Range(float, "[0, 1]"),
  "mixup": _NOT_NEGATIVE,
  "cutmix": _NOT_NEGATIVE,
  "repeats": _FEW,
}
