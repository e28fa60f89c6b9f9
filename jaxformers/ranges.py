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

from ml_collections import ConfigDict

from jaxformers.errors import UserError

# Types that a value of a kind may have, such as numbers of NumPy and paths, and
# the kind in words.
_KINDS: dict[type, tuple[Any, str]] = {
  int: (numbers.Integral, "an integer"),
  float: (numbers.Real, "a number"),
  bool: (bool, "True or False"),
  str: ((str, os.PathLike), "text"),
  dict: ((Mapping, ConfigDict), "a section of fields"),
}


@dataclasses.dataclass(frozen=True)
class Range:
  """The values that a field can take.

  Attributes:
    kind: int, float (which accepts integers), bool, str or dict.
    interval: lowest and highest number, such as "[0, 1)"; a parenthesis
      excludes the end, and 2^31 is a power; "" if the values are not
      numbers.
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
    return _KINDS[self.kind][1]

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
    is_flag = isinstance(value, bool)  # For Python, True is also an integer.
    is_type = isinstance(value, _KINDS[self.kind][0])
    return is_type and is_flag == (self.kind is bool)

  def _is_inside(self, value: Any) -> bool:
    low, high = (_number(end) for end in self.interval[1:-1].split(","))
    # NaN fails every comparison, and infinity is outside of every interval.
    above = low < value or (self.interval[0] == "[" and low == value)
    below = value < high or (self.interval[-1] == "]" and value == high)
    return above and below


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
      if allowed.kind is dict:
        check(value, path)


def find(path: str) -> Range | None:
  """Returns the range of a field, or None; the section's range goes first.

  Args:
    path: name of the field with its sections.
  """
  # The added "" is the section of a path without sections.
  *_, section, name = ("", *path.split("."))
  return RANGES.get(f"{section}.{name}", RANGES.get(name))


# Names of the fields of each range; "section.name" where a section has another
# range. Seeds and counts are int32 in JAX. A range of integers from 0 gives 0 a
# meaning of its own: a length or a vocabulary of 0 is that of the task.
_NAMES = {
  # Sections, names and paths, flags.
  Range(dict): """
    task model reference optimizer schedule mixer mixer_defaults block embedding
    head augment groups
  """,
  Range(str): """
    name select parallel mesh pretrained data_dir archive protocol vocabulary
    operators difficulty tokens crop objective pool pool_norm head_activation
    interaction
    positions dtype orthogonal_map memory activation gating sigma kind
    inverse_init norm_type glu c_init start discretization weights bias form a
    targets frozen imports
  """,
  Range(bool): """
    tensorboard wandb cycle_momentum flip special_tokens tied use_bias
    orthogonal orthogonal_output symmetric rotary learn_fidelity feat_scale
    redraw decay qkv_bias
    causal normalize share_heads share_key_value train_projection same_bucket
    correct_duplicates residual norm_first use_norm final_norm share_step
    clip_eigenvalues coupled certified
  """,
  # Counts.
  Range(int, "[0, 2^31)"): """
    seed patience accumulate eval_examples warmup_steps vocab_size num_classes
    separator question_len
    min_length test_min_length test_max_length stride eval_windows margin_tokens
  """,
  Range(int, "[1, 2^31)"): """
    batch_size eval_batch_size buckets total_steps log_steps
    eval_steps checkpoint_steps num_train num_validation num_test num_images
    max_length length num_pairs distance
  """,
  Range(int, "[1, 2^31)", is_list=True): "cutoffs",
  Range(int, "[1, 2^15)", is_list=True): "dilations",
  # Sizes.
  Range(int, "[0, 2^24]"): "max_len padded_len train_len",
  Range(int, "[0, 2^20]"): """
    head_dim head_size num_random num_global num_summary num_queries num_samples
    num_buckets num_ssm truncation attention_chunk step_rank
    width value_dim
  """,
  Range(int, "[1, 2^20]"): """
    mlp_dim block_size chunk_size rank num_landmarks num_features state_size
    blocks query_dim
  """,
  Range(int, "[2, 2^20]"): "window",
  Range(int, "[0, 2^16]"): "patch_size",
  Range(int, "[1, 2^16]"): "d_model num_heads",
  Range(int, "[1, 2^16]", is_list=True): "image",
  Range(int, "[1, 2^12]"): "resolution size",
  Range(int, "[0, 1000]"): "conv_size",
  Range(
    int, "[1, 1000]"
  ): "num_layers div_value expansion num_experts num_hashes repeats",
  Range(int, "[2, 1000]"): "max_args",
  Range(int, "[1, 100]"): "inverse_steps sort_steps num_sections",
  Range(int, "[2, 100]"): "max_depth",
  Range(int, "[1, 20]"): "head_layers",
  Range(int, "[1, 2]"): "num_inputs",
  # Shares, rates and weights.
  Range(float, "[0, 1)"): """
    a_max
    label_smoothing ema_decay b1 b2 momentum dropout_rate head_dropout_rate
    drop_path_rate value_dropout_rate weight_dropout_rate hidden_dropout_rate
  """,
  Range(float, "[0, 1]"): """
    norm_epsilon epsilon color_jitter erase r_min r_max margin_weight
  """,
  Range(float, "(0, 1]"): "eps block.norm_epsilon layer_decay",
  Range(float, "(0, 1)"): "mask_rate",
  Range(float, "[0, 10]"): "randaugment",
  Range(float, "[0, 100]"): "init_std head_init_std",
  Range(float, "(0, 100]"): "power max_phase step_min step_max",
  Range(float, "(0, 1000]"): "learning_rate scale factor temperature",
  Range(float, "[0, 1000]"): """
    end weight_decay clip_value clip_norm fidelity reconstruction_weight gamma
    mixup cutmix
  """,
  Range(float, "[0, 1000]", is_list=True): "fidelity_schedule",
  # Statistics of pixels, those of 0 to 255 too.
  Range(float, "[-1000, 1000]", is_list=True): "mean",
  Range(float, "(0, 1000]", is_list=True): "deviation",
}

# The range of each field, by "name" or "section.name".
RANGES = {
  name: span for span, names in _NAMES.items() for name in names.split()
}
