"""Parameters and operations of models at the sizes of a config."""

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

# Largest ratio of parameters to the Transformer's (Long Range Arena, section
# 3).
MOST_PARAMETERS = 1.10
Fields = dict[str, Any]
NUMBERS = ("vocab_size", "max_len", "num_classes", "num_inputs")
SIZES = (*NUMBERS, "objective", "image")


def parse_sizes(text: str) -> Fields:
  """Returns the sizes of a task from "name=value,...".

  Raises:
    UserError: for an unknown name, a wrong value, or a size that is missing.
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
  # A language model predicts ids, and has no classes.
  if sizes.get("objective") == "language_model":
    sizes.setdefault("num_classes", 0)
  if missing := [name for name in NUMBERS[:3] if name not in sizes]:
    raise UserError(f"--sizes {text} lacks {', '.join(missing)}: add them.")
  return sizes


def open_task_sizes(spec: str, overrides: Sequence[str] = ()) -> Fields:
  """Returns the sizes of a config's task, whose data it opens."""
  config = RunConfig.from_dict(configs.load_with(spec, overrides))
  return tasks.get(config.task.name, **config.task_options).sizes()


def rows(
  spec: str, names: list[str], sizes: Fields, overrides: Sequence[str] = ()
) -> list[Fields]:
  """Returns the cost of each model, and its parameters over the Transformer's.

  A model that cannot have these sizes has a row with the reason.

  Args:
    spec: path and arguments of a config without `model`, "path.py:key=value".
    names: names of models.
    sizes: sizes of the task, as `models.build` takes them.
    overrides: fields of the config, such as "--config.model.d_model=64".
  """
  path, _, arg = spec.partition(":")
  costs = []
  for name in names:
    # Load the config anew for each model.
    arguments = ",".join(filter(None, (arg, f"model={name}")))
    loaded = configs.load_with(f"{path}:{arguments}", overrides)
    config = RunConfig.from_dict(loaded)
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
  """Returns the rows of `rows` as a Markdown table."""
  lines = [
    # A model that cannot be built has the reason instead of numbers.
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
  """Returns the names of models with mixer, block and a line on each."""
  lines = []
  for name in names:
    variant = MODELS[name]
    # List the options that define the variant, and its defaults.
    options = {**variant.fixed, **variant.defaults}
    listed = ", ".join(f"{key}={value}" for key, value in options.items())
    mixer = f"{variant.mixer} ({listed})" if listed else variant.mixer
    make = MIXERS[variant.mixer] if variant.mixer else BLOCKS[variant.block]
    lines.append((name, mixer, variant.block, summarize(make)))
  return markdown_table(("model", "mixer", "block", "what it is"), lines)
