r"""Lists the models, or what each costs under a config beside the Transformer.

python -m jaxformers models
python -m jaxformers models --config configs/lra/listops.py

The models have the sizes that the config gives them; `:size=matched` gives
TransJect at most the Transformer's parameters. Long Range Arena allows a model
10 % more than the Transformer; who has more is marked. The data are opened for
the sizes of the task; --sizes does without:

--sizes vocab_size=257,max_len=4000,num_classes=2
--sizes image=224x224x3,num_classes=1000
--sizes vocab_size=8000,max_len=256,objective=language_model
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import sys
from typing import Any

from jaxformers import config as configs
from jaxformers import tasks
from jaxformers.errors import UserError
from jaxformers.models import MIXERS, MODELS, build, cost
from jaxformers.registry import choose

ALLOWED = 1.10  # Long Range Arena, section 3: parameters of the Transformer.
NUMBERS = ("vocab_size", "max_len", "num_classes", "num_inputs")
SIZES = (*NUMBERS, "objective", "image")


def _given(text: str) -> dict[str, Any]:
  sizes: dict[str, Any] = {}
  for item in text.split(","):
    name, _, value = item.partition("=")
    choose("size of a task", name, SIZES)
    if name == "image":
      parts = value.split("x")
      if len(parts) != 3 or not all(part.isdigit() for part in parts):
        raise UserError(f"--sizes {item}: write image=224x224x3.")
      sizes |= {"image": tuple(map(int, parts))}
      sizes |= {"vocab_size": 0, "max_len": 0}
    elif name == "objective":
      sizes[name] = value
    elif not value.isdigit():
      raise UserError(f"--sizes {item}: write {name}=NUMBER.")
    else:
      sizes[name] = int(value)
  if sizes.get("objective") == "language_model":
    sizes.setdefault("num_classes", 0)
  if missing := [n for n in NUMBERS[:3] if n not in sizes]:
    raise UserError(f"--sizes {text} lacks {', '.join(missing)}.")
  return sizes


def _of_task(spec: str) -> dict[str, Any]:
  config = configs.plain(configs.load(spec))
  return tasks.get(**config["task"], data_dir=config["data_dir"]).sizes()


def rows(
  spec: str, names: list[str], sizes: dict[str, Any]
) -> list[dict[str, Any]]:
  """One row a model: its cost, and its parameters over the Transformer's.

  A model that cannot have these sizes has a row with the reason.

  Args:
    spec: of a config, "path.py:key=value", without `model`.
    names: of models.
    sizes: of the task, as `models.build` takes them.
  """
  path, _, arg = spec.partition(":")
  made = []
  for name in names:
    own = ",".join(filter(None, (arg, f"model={name}")))
    config = configs.plain(configs.load(f"{path}:{own}"))
    try:
      model = build(**config["model"], **sizes)
    except UserError as error:
      made.append({"model": name, "error": str(error)})
      continue
    reference = build(**config["reference"], **sizes)
    costs = dataclasses.asdict(cost.count_cost(model, sizes["max_len"]))
    share = costs["parameters"] / cost.size(reference)
    made.append({"model": name, **costs, "relative": share})
  return made


def table(made: list[dict[str, Any]]) -> str:
  """The rows as Markdown."""
  lines = [
    "| model | parameters | of Transformer's | at most 10 % more | "
    "GFLOP, products | GFLOP, other | MB kept |",
    "| --- | ---: | ---: | --- | ---: | ---: | ---: |",
  ]
  for row in made:
    if "error" in row:
      lines.append(f"| {row['model']} | {row['error']} | | | | | |")
      continue
    within = "yes" if row["relative"] <= ALLOWED else "NO"
    lines.append(
      f"| {row['model']} | {row['parameters']:,} | {row['relative']:.2f} | "
      f"{within} | {row['flops'] / 1e9:.3f} | {row['elementwise'] / 1e9:.3f} | "
      f"{row['activations'] / 1e6:.1f} |"
    )
  return "\n".join(lines)


def catalogue() -> str:
  """Returns the names of all models with mixer, block and a line on each."""
  lines = [
    "| model | mixer | block | what it is |",
    "| --- | --- | --- | --- |",
  ]
  for name in sorted(MODELS):
    variant = MODELS[name]
    options = {**variant.fixed, **variant.defaults}
    given = ", ".join(f"{key}={value}" for key, value in options.items())
    mixer = f"{variant.mixer} ({given})" if given else variant.mixer
    summary = inspect.getdoc(MIXERS[variant.mixer]).splitlines()[0]
    lines.append(f"| {name} | {mixer} | {variant.block} | {summary} |")
  return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
  """Prints the names of the models, or the table of a config."""
  parser = argparse.ArgumentParser(
    prog="python -m jaxformers models", description=__doc__.split("\n")[0]
  )
  parser.add_argument("--config", default="", help="path.py:key=value,...")
  parser.add_argument("--models", default="", help="names, a,b; default: all")
  parser.add_argument("--sizes", default="", help="of the task, see above")
  parser.add_argument("--json", action="store_true", help="rows as JSON")
  args = parser.parse_args(argv)
  if not args.config:
    if args.models or args.sizes or args.json:
      parser.error("--models, --sizes and --json need a --config.")
    print(catalogue())
    return
  try:
    names = args.models.split(",") if args.models else sorted(MODELS)
    for name in names:
      choose("model", name, MODELS)
    sizes = _given(args.sizes) if args.sizes else _of_task(args.config)
    made = rows(args.config, names, sizes)
  except UserError as error:
    sys.exit(f"Error: {error}")
  if args.json:
    print(json.dumps(made, indent=2))
    return
  what = f"example of {sizes['max_len']:,} tokens"
  if sizes.get("image"):
    what = "image of {} x {} pixels".format(*sizes["image"])
  print(
    f"One {what}: operations of a forward pass, in matrix products and in all "
    "other\narithmetic, and what it keeps for the backward pass.\n"
  )
  print(table(made))


if __name__ == "__main__":
  main()
