"""Widths at size=matched: the greatest within the Transformer's parameters.

Parameters are counted in closed form, because tracing a model takes 0.3 s for
each width. A model's registration holds the formula of its layers.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxformers.foundations.errors import UserError

# Widths to try: even, because some mixers have two heads.
WIDTHS = range(2, 2**16, 2)
# Channels of each interaction, in multiples of a pooled vector.
INTERACTIONS = {"": 1, "concat": 2, "symmetric": 2, "nli": 4}


class Inputs(NamedTuple):
  """Sizes of a task on which the number of parameters depends.

  Attributes:
    vocab_size: number of ids; 0 for inputs of real numbers.
    max_len: greatest number of tokens.
    num_classes: number of classes.
  """

  vocab_size: int
  max_len: int
  num_classes: int


def count_outside(model: Mapping[str, Any], inputs: Inputs, width: int) -> int:
  """Returns the number of parameters of the embedding and of the head.

  Positions are not counted here.

  Args:
    model: fields of the model, including its pool and head.
    inputs: sizes of the task.
    width: number of channels of a token.
  """
  # Real numbers are embedded by one row of a kernel and a bias. A class token
  # adds one vector.
  count = width * ((inputs.vocab_size or 2) + int(model["pool"] == "cls"))
  # Count the hidden layers of the head, then its output.
  width *= INTERACTIONS[model.get("interaction", "")]
  num_hidden = model.get("head_layers", 1) if model["head_dim"] else 0
  # Each hidden layer of the head is half as wide as the one before.
  for layer in range(num_hidden):
    hidden = max(model["head_dim"] >> layer, 1)
    count += (width + 1) * hidden
    width = hidden
  return count + (width + 1) * inputs.num_classes


def count_transformer(model: Mapping[str, Any], inputs: Inputs) -> int:
  """Returns the number of parameters of a Transformer.

  Args:
    model: fields of the model, as `shared.transformer` returns them.
    inputs: sizes of the task.
  """
  # Read the sizes.
  d, mlp_dim = model["d_model"], model["block"]["mlp_dim"]
  options = model["mixer_defaults"]
  num_heads = options["num_heads"]
  channels = num_heads * options.get("head_size", d // num_heads)
  # Count queries, keys, values, the projection back, and the feed-forward.
  layer = 4 * d * channels + 2 * d * mlp_dim + mlp_dim + d
  if options.get("use_bias", True):
    layer += 3 * channels + d
  layer += 4 * d  # Two norms.
  # Add embedding, head, positions and the last norm.
  count = count_outside(model, inputs, d) + model["num_layers"] * layer
  if model["positions"] == "learned":
    count += (inputs.max_len + int(model["pool"] == "cls")) * d
  return count + 2 * d  # The norm at the end.


def find_width(count: Callable[[int], int], limit: int) -> int:
  """Returns the greatest even width with at most `limit` parameters.

  Args:
    count: function of a width that returns its number of parameters, which
      grows with the width.
    limit: greatest number of parameters.

  Raises:
    UserError: if a width of two channels has more parameters than the limit.
  """
  # Search the widths, whose counts ascend.
  index = bisect.bisect_right(WIDTHS, limit, key=count)
  if not index:
    raise UserError(
      f"size=matched: a width of {WIDTHS[0]} has {count(WIDTHS[0]):,} "
      f"parameters, more than the Transformer's {limit:,}: choose another size."
    )
  return WIDTHS[index - 1]
