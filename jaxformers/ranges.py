"""The ranges of all fields of a config, and the function that checks them.

A field has one spelling in the whole package, so one table by name holds all
ranges: those of a run, and those of the options of models, mixers, blocks,
tasks, optimisers and schedules.
"""

from __future__ import annotations

import dataclasses
import numbers
import os
from collections.abc import Mapping
from typing import Any

from jaxformers.errors import UserError

# Types that a value of a kind may have, such as numbers of NumPy and paths.
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
    kind: int, float (which accepts integers), bool, str or dict.
    interval: lowest and highest number, such as "[0, 1)"; a parenthesis
      excludes the end, and 2^31 is a power; "" if the values are no numbers.
    is_list: True for a list of such values.
  """

  kind: type
  interval: str = ""
  is_list: bool = False

  def __str__(self) -> str:
    """Describes the values in words."""
    place = f" in {self.interval}" if self.interval else ""
    return ("a list, each " if self.is_list else "") + self.noun + place

  @property
  def noun(self) -> str:
    """Kind of the values in words."""
    return _NOUNS[self.kind]

  def check(self, path: str, value: Any) -> None:
    """Raises UserError for a value out of range or of another type.

    Args:
      path: name of the field with its sections, such as "config.optimizer.b2".
      value: value of the field.
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
    if isinstance(value, bool):  # For Python, True is also an integer.
      return self.kind is bool
    return isinstance(value, _TYPES.get(self.kind, self.kind))

  def _is_inside(self, value: Any) -> bool:
    low, high = (_number(end) for end in self.interval[1:-1].split(","))
    # NaN fails every comparison, and infinity is outside of every interval.
    above = low < value or (self.interval[0] == "[" and low == value)
    below = value < high or (self.interval[-1] == "]" and value == high)
    return above and below


def _is_section(value: Any) -> bool:
  return hasattr(value, "items")  # A ConfigDict is no Mapping.


def _number(text: str) -> float:
  """Returns the number that "0.5" or the power "2^31" stands for."""
  base, _, exponent = text.strip().partition("^")
  return int(base) ** int(exponent) if exponent else float(base)


def check(options: Mapping[str, Any], section: str = "") -> None:
  """Raises UserError for the first field that is out of its range.

  Fields that are not in `RANGES` are not checked.

  Args:
    options: values of fields, and sections of fields.
    section: path of the options, such as "config.model"; "" for arguments of a
      function.
  """
  for name, value in options.items():
    path = f"{section}.{name}" if section else name
    allowed = find(path)
    if allowed is not None:
      allowed.check(path, value)
      if _is_section(value):
        check(value, path)


def find(path: str) -> Range | None:
  """Returns the range of a field, or None; the section's range goes first.

  Args:
    path: name of the field with its sections.
  """
  # The added "" is the section of a path without sections.
  *_, section, name = ("", *path.split("."))
  return RANGES.get(f"{section}.{name}", RANGES.get(name))


# Seeds and counts are int32 in JAX.
# Kinds that end in OR_NONE allow 0, which has a meaning of its own.
_SEED, _FLAG, _TEXT = Range(int, "[0, 2^31)"), Range(bool), Range(str)
_SECTION, _COUNT = Range(dict), Range(int, "[1, 2^31)")
_COUNT_OR_NONE = Range(int, "[0, 2^31)")
_WIDTH, _WIDTH_OR_NONE = Range(int, "[1, 2^20]"), Range(int, "[0, 2^20]")
_FEW, _FEW_OR_NONE = Range(int, "[1, 1000]"), Range(int, "[0, 1000]")
_SHARE, _NOT_NEGATIVE = Range(float, "[0, 1)"), Range(float, "[0, 1000]")
_POSITIVE = Range(float, "(0, 1000]")

# By name of the field, or by "section.name" where a section has another range.
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
      *("memory", "activation", "gating", "sigma", "kind"),
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
  # Tasks. A length of 0 stands for the protocol's, a vocabulary of 0 for all
  # words of the text.
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
