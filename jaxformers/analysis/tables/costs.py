"""Number of parameters and operations of models with the sizes of a config."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from jaxformers import config as configs
from jaxformers import tasks
from jaxformers.config import RunConfig
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import choose, summarize
from jaxformers.foundations.tables import markdown_table
from jaxformers.models import BLOCKS, MIXERS, MODELS, build, cost, size

# Largest allowed ratio of a model's parameters to the Transformer's (Long Range
# Arena, section 3).
MOST_PARAMETERS = 1.10
Fields = dict[str, Any]
NUMBERS = (
  "vocab_size",
  "max_len",
  "num_classes",
  "num_inputs",
  "channels",
  "padded_len",
  "separator",
  "causal",
)
SIZES = (*NUMBERS, "objective", "image")


def parse_sizes(text: str) -> Fields:
  """Returns the sizes of a task, parsed from "name=value,...".

  Raises:
    UserError: for an unknown name, a wrong value, or a missing size.
  """
  sizes: Fields = {}
  for item in text.split(","):
    name, _, value = item.partition("=")
    choose("size of a task", name, SIZES)
    if name == "image":
      if not re.fullmatch(r"\d+x\d+x\d+", value):
        raise UserError(f"--sizes {item}: write image=224x224x3.")
      # Images have neither a vocabulary nor a length.
      image = tuple(map(int, value.split("x")))
      sizes |= {"image": image, "vocab_size": 0, "max_len": 0}
    elif name == "objective":
      sizes[name] = value
    elif not value.isdigit():
      raise UserError(f"--sizes {item}: write {name}=NUMBER.")
    else:
      sizes[name] = int(value)
  # A language model has no classes, because it predicts ids.
  if sizes.get("objective") == "language_model":
    sizes.setdefault("num_classes", 0)
  needed: tuple[str, ...] = NUMBERS[:3]
  # Labels of tokens may depend on later tokens, or not.
  if sizes.get("objective") == "token_classification":
    needed += ("causal",)
  if missing := [name for name in needed if name not in sizes]:
    raise UserError(f"--sizes {text} lacks {', '.join(missing)}: add them.")
  return sizes


def open_task_sizes(spec: str, overrides: Sequence[str] = ()) -> Fields:
  """Returns the sizes of a config's task, after opening the data."""
  config = RunConfig.from_dict(configs.load_with(spec, overrides))
  return tasks.get(config.task.name, **config.task_options).sizes()


def rows(
  spec: str, names: list[str], sizes: Fields, overrides: Sequence[str] = ()
) -> list[Fields]:
  """Returns the cost of each model, relative to the Transformer as well.

  Args:
    spec: path and arguments of a config, "path.py:key=value", without the
      argument `model`.
    names: names of models.
    sizes: sizes of the task, as `models.build` takes them.
    overrides: fields of the config, such as "--config.model.d_model=64".

  Returns:
    Rows with the fields of `cost.Cost`, and `relative`, the ratio of parameters
    to the Transformer's. If a model cannot be built with these sizes, its row
    has the reason as `error`.
  """
  path, _, arg = spec.partition(":")
  costs = []
  for name in names:
    # Load the config with the model as an argument.
    arguments = ",".join(filter(None, (arg, f"model={name}")))
    loaded = configs.load_with(f"{path}:{arguments}", overrides)
    config = RunConfig.from_dict(loaded)
    # Build the model, or keep the reason why it cannot be built.
    try:
      model = build(**vars(config.model), **sizes)
    except UserError as error:
      costs.append({"model": name, "error": str(error)})
      continue
    # Compare with the Transformer of the same config.
    row = dataclasses.asdict(cost.count_cost(model, sizes["max_len"]))
    share = row["parameters"] / size(build(**vars(config.reference), **sizes))
    costs.append({"model": name, **row, "relative": share})
  return costs


COLUMNS = (
  "model",
  "parameters",
  "of Transformer's",
  "at most 10 % more",
  "GFLOP, products",
  "GFLOP, other",
  "MB kept",
)


def cost_table(costs: list[Fields]) -> str:
  """Returns the result of `rows` as a Markdown table."""
  lines = [
    # Print the reason instead of numbers for a model that cannot be built.
    (row["model"], row["error"], *[""] * 5)
    if "error" in row
    else (
      row["model"],
      f"{row['parameters']:,}",
      f"{row['relative']:.2f}",
      "yes" if row["relative"] <= MOST_PARAMETERS else "NO",
      f"{row['flops'] / 1e9:.3f}",
      f"{row['elementwise'] / 1e9:.3f}",
      f"{row['activations'] / 1e6:.1f}",
    )
    for row in costs
  ]
  return markdown_table(COLUMNS, lines, right=(1, 2, 4, 5, 6))


def catalogue(names: Sequence[str]) -> str:
  """Returns a Markdown table of models with mixer, block and description."""
  lines = []
  for name in names:
    variant = MODELS[name]
    # List the fixed options of the variant and its defaults.
    options = {**variant.fixed, **variant.defaults}
    listed = ", ".join(f"{key}={value}" for key, value in options.items())
    mixer = f"{variant.mixer} ({listed})" if listed else variant.mixer
    make = MIXERS[variant.mixer] if variant.mixer else BLOCKS[variant.block]
    lines.append((name, mixer, variant.block, summarize(make)))
  return markdown_table(("model", "mixer", "block", "what it is"), lines)
