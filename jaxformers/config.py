"""Configs are plain data: the fields every run has, and how they are given."""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from jaxformers import ranges
from jaxformers.errors import UserError
from jaxformers.registry import choose, unknown

SIZES = ("paper", "tiny")
LRA_SIZES = ("paper", "matched", "tiny")

# Sections in which a command may set what the config does not name.
OPEN = (["model", "mixer"], ["model", "block"])

# The models whose layer is TransJect's, not the Transformer's.
TRANSJECTS = ("transject", "random_transject")
# Models whose layer is attention alone.
WITHOUT_FEED_FORWARD = ("linearized",)

# As in "Attention is all you need", without its schedule.
VASWANIS_ADAM = {
  "name": "adam",
  "b2": 0.98,
  "eps": 1e-9,
  "clip_value": 0.0,
  "weight_decay": 0.0,
  "cycle_momentum": False,
}

# What may differ when a run is taken up again: it changes no number. Other data
# behind a path would; a checkpoint knows its data by more than the path.
FREE = (
  "data_dir",
  "mesh",
  "store_seconds",
  "task.archive",
  "task.vocabulary",
  "tensorboard",
  "wandb",
)


def parse_arg(arg: str | None, **defaults: Any) -> ConfigDict:
  """Parses a config's string argument "key=value,key=value".

  Args:
    arg: what stands after the colon of `--config=file.py:...`; may be None.
    **defaults: every key that there is, with its default; the default's type
      is the type of the value.

  Returns:
    The defaults, overridden.

  Raises:
    UserError: for an unknown key, a key that is given twice or without a
      value, or a value of another type.
  """
  values: dict[str, Any] = {}
  for item in filter(None, (arg or "").split(",")):
    key, equals, text = (part.strip() for part in item.partition("="))
    if key not in defaults:
      raise unknown("config argument", key, defaults)
    if not equals or not text:
      raise UserError(
        f"The config argument {item!r} has no value: write {key}=VALUE."
      )
    if key in values:
      raise UserError(f"The config argument {key} is given twice: choose one.")
    values[key] = _typed(key, text, type(defaults[key]))
  return ConfigDict(defaults | values)


def _typed(key: str, text: str, kind: type) -> Any:
  booleans = {"true": True, "1": True, "false": False, "0": False}
  try:
    return booleans[text.lower()] if kind is bool else kind(text)
  except (KeyError, ValueError):
    raise UserError(
      f"The config argument {key}={text!r} is not of type {kind.__name__}."
    ) from None


class Field(NamedTuple):
  """A field that every run has: its default, and what it is."""

  default: Any
  help: str


FIELDS = {
  "seed": Field(0, "seed of parameters, order of examples and dropout"),
  "pretrained": Field("", "folder of safetensors to begin with"),
  "task": Field({}, "name, protocol and options of the task"),
  "model": Field({}, "name and options of jaxformers.models.build"),
  "reference": Field({}, "Transformer that parameters are compared with"),
  "optimizer": Field({"name": "adam"}, "name and options of the optimiser"),
  "schedule": Field(
    {"name": "constant", "learning_rate": 1e-3},
    "name and options of the learning rate",
  ),
  "batch_size": Field(32, "examples of a step, on all devices together"),
  "accumulate": Field(1, "parts that a batch is taken in, to save memory"),
  "label_smoothing": Field(0.0, "share of the target that all classes get"),
  "ema_decay": Field(0.0, "decay of the scored average of parameters; 0: none"),
  "eval_batch_size": Field(32, "examples scored at once"),
  "buckets": Field(1, "number of lengths that batches are padded to"),
  "total_steps": Field(1000, "step at which the run ends"),
  "log_steps": Field(50, "steps between two log lines"),
  "eval_steps": Field(500, "steps between two evaluations"),
  "checkpoint_steps": Field(500, "steps between two checkpoints"),
  "store_seconds": Field(
    600, "time to wait for a workdir that is full or away"
  ),
  "select": Field("accuracy", "score that chooses the checkpoint, or loss"),
  "patience": Field(0, "evaluations without a better one to stop; 0: never"),
  "parallel": Field("jit", "jit over a mesh, or pmap"),
  "mesh": Field("", "devices by axis, data:2,sequence:4; empty: all for data"),
  "data_dir": Field(
    "", "folder of data; empty: $JAXFORMERS_DATA_DIR or ~/.cache/jaxformers"
  ),
  "tensorboard": Field(False, "write TensorBoard files, too"),
  "wandb": Field(False, "log to Weights & Biases, too"),
}


def base(**fields: Any) -> ConfigDict:
  """Returns the `FIELDS` of every run at their defaults, overridden by some.

  Raises:
    UserError: for an unknown field.
  """
  config = {name: field.default for name, field in FIELDS.items()}
  for key, value in fields.items():
    if key not in config:
      raise unknown("config field", key, config)
    config[key] = value
  return ConfigDict(config)


def describe(config: ConfigDict) -> str:
  """Returns every field of a config with its value, a line each.

  Sections follow their line, indented, as `--config.SECTION.FIELD=VALUE` takes
  their fields.
  """
  lines = []
  for name, value in plain(config).items():
    told = f"  # {FIELDS[name].help}" if name in FIELDS else ""
    if not isinstance(value, dict):
      lines.append(f"  {name}={json.dumps(value)}{told}{_interval(name)}")
      continue
    lines.append(f"  {name}:{told}")
    lines += [
      f"    {name}.{key}={json.dumps(inner)}{_interval(f'{name}.{key}', '  #')}"
      for key, inner in flatten(value).items()
    ]
  return "\n".join(lines)


def _interval(path: str, before: str = ";") -> str:
  """Returns the range of a field of numbers for `describe`; "" for others."""
  allowed = ranges.find(path)
  return (
    f"{before} in {allowed.interval}" if allowed and allowed.interval else ""
  )


def is_tiny(size: str, sizes: tuple[str, ...] = SIZES) -> bool:
  """Whether size is "tiny", for two cores; ValueError if not one of `sizes`."""
  return choose("size", size, sizes) == "tiny"


def _transformer(
  name: str, shared: dict[str, Any], num_heads: int, mlp_dim: int
) -> dict[str, Any]:
  """An encoder of the Transformer's form, of any mixer."""
  return {
    "name": name,
    **shared,
    "mixer": {},
    "mixer_defaults": {"num_heads": num_heads, "dropout_rate": 0.1},
    "block": _block(name, mlp_dim=mlp_dim, dropout_rate=0.1),
  }


def _block(name: str, **fields: Any) -> dict[str, Any]:
  """The fields of a Transformer's block, or those of attention alone."""
  if name not in WITHOUT_FEED_FORWARD:
    return fields
  return {"residual": True, "dropout_rate": fields["dropout_rate"]}


def lra_models(
  name: str,
  *,
  pools: Mapping[str, str],
  protocol: str,
  size: str,
  matched: Mapping[str, int],
  **head: Any,
) -> dict[str, Any]:
  """The model of a name at the sizes of TransJect's LRA table.

  TransJect has L = 2, E = 4, d = 512. All others have the sizes of Skyformer's
  comparison, from which the paper takes their numbers: also two layers, but
  d = 64, two heads, 128 hidden units and mean pooling, a fifteenth of the
  parameters. Results are set against the parameters of the Transformer.

  Args:
    name: of the model.
    pools: how a protocol pools; "jaxformers" has TransJect's pooling on the
      task, and the others the mean.
    protocol: one of them.
    size: "paper"; "matched", TransJect with at most the Transformer's
      parameters; or "tiny", d = 32 and E = 2. The others stay as they are.
    matched: width of a matched TransJect under each protocol.
    **head: further fields of the head, for both.

  Returns:
    The fields `model` and `reference` for `base`.
  """
  tiny = is_tiny(size, LRA_SIZES)
  pool = pools[choose("protocol", protocol, pools)]
  # S4 has no hidden layer between the pooled tokens and the logits.
  head = {"head_dim": 0 if protocol == "s4" else 128} | head
  shared = {
    "d_model": 64,
    "num_layers": 2,
    "positions": "learned",
    "dropout_rate": 0.1,
    "pool": "mean" if protocol == "jaxformers" else pool,
    "dtype": "float32",
    "activations": "stored",
    **head,
  }
  transject = {
    "name": name,
    "d_model": {"paper": 512, "matched": matched[protocol], "tiny": 32}[size],
    "num_layers": 2,
    "positions": "sinusoid",
    "dropout_rate": 0.0,
    "pool": pool,
    "dtype": "float32",
    "activations": "stored",
    "orthogonal_map": "cayley",
    "mixer": {"num_experts": 2 if tiny else 4},
    **head,
  }
  other = _transformer(name, shared, num_heads=2, mlp_dim=128)
  return {
    "model": transject if name in TRANSJECTS else other,
    "reference": _transformer("transformer", shared, num_heads=2, mlp_dim=128),
  }


def short_models(name: str, *, tiny: bool) -> dict[str, Any]:
  """The model of a name at the sizes of TransJect's short-text table.

  L = 6, d = 512, mean pooling; E = 4 experts, or 8 heads and a feed-forward of
  2048 for all others (the Transformer: 18.9 M parameters without embedding).

  Args:
    name: of the model.
    tiny: L = 2, d = 64, E = 2 experts or heads, with dropout of the embedding.

  Returns:
    The fields `model` and `reference` for `base`.
  """
  shared = {
    "d_model": 64 if tiny else 512,
    "num_layers": 2 if tiny else 6,
    "positions": "sinusoid",
    "dropout_rate": 0.2 if tiny else 0.1,
    "pool": "mean",
    "head_dim": 0,
    "dtype": "float32",
    "activations": "stored",
  }
  sizes = (2, 128) if tiny else (8, 2_048)
  transject = {
    "name": name,
    **shared,
    "dropout_rate": 0.2 if tiny else 0.0,
    "orthogonal_map": "cayley",
    "mixer": {"num_experts": 2 if tiny else 4},
  }
  other = _transformer(name, shared, *sizes)
  return {
    "model": transject if name in TRANSJECTS else other,
    "reference": _transformer("transformer", shared, *sizes),
  }


def short_schedule(examples: int, batch_size: int = 32) -> dict[str, Any]:
  """TransJect's training on short text: 30 epochs, patience of 4.

  Adam, 5e-4, beta (0.9, 0.98), eps 1e-9; an evaluation an epoch.

  Args:
    examples: of the training split.
    batch_size: 32 in the paper.

  Returns:
    Fields for `base`.
  """
  epoch = -(-examples // batch_size)
  return {
    "optimizer": dict(VASWANIS_ADAM),
    "schedule": {
      "name": "constant",
      "learning_rate": 5e-4,
      "warmup_steps": 0,
    },
    "batch_size": batch_size,
    "total_steps": 30 * epoch,
    "log_steps": 100,
    "eval_steps": epoch,
    "checkpoint_steps": epoch,
    "patience": 4,
  }


def augmentation(crop: str, strength: str = "deit") -> dict[str, Any]:
  """What is done to training images, as `data.augment.Augment` takes it.

  Args:
    crop: "pad" for images of 32 x 32, "resized" for larger ones.
    strength: "deit", all of DeiT's table 9; or "light", crops and flips.
  """
  deit = choose("strength", strength, ("deit", "light")) == "deit"
  return {
    "crop": crop,
    "flip": True,
    "randaugment": 9.0 if deit else 0.0,
    "color_jitter": 0.0,
    "erase": 0.25 if deit else 0.0,
    "mixup": 0.8 if deit else 0.0,
    "cutmix": 1.0 if deit else 0.0,
    "repeats": 3 if deit else 1,
  }


# What DeiT has of a model's width: (d, heads).
DEITS = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12)}


def vision_models(
  name: str, *, patch_size: int, deit: str = "tiny", tiny: bool = False
) -> dict[str, Any]:
  """The model of a name at the sizes of DeiT (Touvron et al. 2021, table 1).

  Twelve layers, a class token, learned positions, feed-forwards of 4 d, drop
  path 0.1; kernels, those of a classifier's head too, class token and positions
  from a normal of 0.02. TransJect has its own layers, positions and head.

  Args:
    name: of the model.
    patch_size: side of the patches: 16 for 224 x 224, 4 for 32 x 32.
    deit: "tiny", "small" or "base".
    tiny: twelve layers of d = 64 with two heads, for two cores; no drop path,
      and the default initialisation of the head.

  Returns:
    The fields `model` and `reference` for `base`.
  """
  d_model, num_heads = DEITS[choose("deit", deit, DEITS)]
  if tiny:
    d_model, num_heads = 64, 2
  shared = {
    "d_model": d_model,
    "num_layers": 12,
    "patch_size": patch_size,
    "positions": "learned",
    "dropout_rate": 0.0,
    "pool": "cls",
    "head_dim": 0,
    "dtype": "float32",
    "activations": "stored",
  }
  block = {
    "mlp_dim": (2 if tiny else 4) * d_model,
    "dropout_rate": 0.0,
    "drop_path_rate": 0.0 if tiny else 0.1,
    "norm_epsilon": 1e-6,
    "init_std": 0.02,
  }
  transject = {
    "name": name,
    **shared,
    "orthogonal_map": "cayley",
    "mixer": {"num_experts": 2 if tiny else 4},
  }
  other = {
    "name": name,
    **shared,
    "head_init_std": 0.0 if tiny else 0.02,
    "mixer": {},
    "mixer_defaults": {"num_heads": num_heads, "init_std": 0.02},
    "block": _block(name, **block),
  }
  return {
    "model": transject if name in TRANSJECTS else other,
    "reference": {**other, "name": "transformer", "block": block},
  }


def language_models(
  name: str,
  *,
  d_model: int,
  num_layers: int,
  num_heads: int,
  mlp_dim: int,
  positions: str = "learned",
) -> dict[str, Any]:
  """A decoder-only model of a name, dropout 0.1.

  The softmax shares the embedding, of deviation d^-1/2 and multiplied by
  sqrt(d) where it is read ("Attention is all you need", section 3.4). Vectors
  of deviation 0.02 beside sinusoids of amplitude 1 cannot be told apart: such a
  model stays at the frequencies of single tokens.

  Returns:
    The fields `model` and `reference` for `base`.
  """
  shared = {
    "d_model": d_model,
    "num_layers": num_layers,
    "positions": positions,
    "dropout_rate": 0.1,
    "dtype": "float32",
    "activations": "stored",
    "embedding": {"scale": d_model**0.5, "init_std": d_model**-0.5},
    "head": {"tied": True},
  }
  sizes = (num_heads, mlp_dim)
  return {
    "model": _transformer(name, shared, *sizes),
    "reference": _transformer("transformer", shared, *sizes),
  }


def deit_schedule(
  examples: int, *, batch_size: int, epochs: int, rate: float = 5e-4
) -> dict[str, Any]:
  """DeiT's training: AdamW, weight decay 0.05, five epochs up, a cosine down.

  The learning rate is `rate` times batch_size / 512; label smoothing 0.1. An
  epoch is as long as without repeated augmentation. Differs from theirs: the
  cosine ends at 0, not at 1e-5, and the rise begins there.

  Args:
    examples: of the training split.
    batch_size: in all; 1024 in the paper.
    epochs: 300 in the paper.
    rate: at a batch of 512.

  Returns:
    Fields for `base`.
  """
  epoch = -(-examples // batch_size)
  return {
    "optimizer": {"name": "adam", "b2": 0.999, "weight_decay": 0.05},
    "schedule": {
      "name": "cosine",
      "learning_rate": rate * batch_size / 512,
      "warmup_steps": min(5, epochs - 1) * epoch,
    },
    "batch_size": batch_size,
    "eval_batch_size": 100,
    "label_smoothing": 0.1,
    "total_steps": epochs * epoch,
    "log_steps": 100,
    "eval_steps": epoch,
    "checkpoint_steps": epoch,
  }


def cifar(task: str, arg: str | None) -> ConfigDict:
  """The config of a small DeiT on CIFAR: model=NAME, size=paper|tiny, seed=0.

  Args:
    task: "cifar10" or "cifar100".
    arg: the config's string argument.
  """
  args = parse_arg(arg, model="transformer", size="paper", seed=0)
  tiny = is_tiny(args.size)
  # 45,000 training images.
  schedule = deit_schedule(45_000, batch_size=1_024, epochs=300)
  if tiny:
    # Ten to fourteen minutes on two cores: 703 steps an epoch.
    schedule = deit_schedule(45_000, batch_size=64, epochs=4)
    schedule["schedule"] |= {"learning_rate": 2e-3, "warmup_steps": 200}
    steps = {"total_steps": 2_816, "eval_steps": 703, "checkpoint_steps": 703}
    schedule |= {"label_smoothing": 0.0} | steps
  return base(
    seed=args.seed,
    task={
      "name": task,
      "protocol": "jaxformers",
      "archive": "",
      "augment": augmentation("pad", "light" if tiny else "deit"),
    },
    **vision_models(args.model, patch_size=4, tiny=tiny),
    **schedule,
  )


def skyformer_schedule(
  learning_rate: float, warmup_steps: int
) -> dict[str, Any]:
  """The training of Skyformer's code, which TransJect's LRA runs follow.

  Adam under PyTorch's OneCycleLR, whose default also cycles the first beta;
  gradients clipped entry by entry at 1; 50,000 steps. Differs from it: float32
  throughout, where they have half precision on linear layers.

  Returns:
    Fields for `base`.
  """
  return {
    "optimizer": {
      "name": "adam",
      "b2": 0.999,
      "eps": 1e-6,
      "clip_value": 1.0,
      "weight_decay": 0.0,
      "cycle_momentum": True,
    },
    "schedule": {
      "name": "onecycle",
      "learning_rate": learning_rate,
      "warmup_steps": warmup_steps,
    },
    "total_steps": 50_000,
    "log_steps": 100,
    "eval_steps": 500,
    "checkpoint_steps": 500,
  }


def tiny_rate(model: str, learning_rate: float) -> float:
  """The learning rate of a model at size=tiny: TransJect's own, or 1e-3.

  Softmax attention without long warm-up stays at chance from 5e-3 on.
  """
  return learning_rate if model in TRANSJECTS else 1e-3


def tiny_schedule(learning_rate: float, total_steps: int) -> dict[str, Any]:
  """A schedule of minutes on two cores: Adam, a ramp up and a ramp down.

  Returns:
    Fields for `update`; `seed` and sections of the task stay as they are.
  """
  return {
    "optimizer": dict(VASWANIS_ADAM),
    "schedule": {
      "name": "onecycle",
      "learning_rate": learning_rate,
      "warmup_steps": total_steps // 10,
    },
    "total_steps": total_steps,
    "log_steps": 50,
    "eval_steps": 300,
    "checkpoint_steps": 100,
  }


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """{"model": {"d_model": 64}} as {"model.d_model": 64}; {} stays a value."""
  flat = {}
  for key, value in config.items():
    if isinstance(value, Mapping) and value:
      flat |= flatten(value, f"{prefix}{key}.")
    else:
      flat[f"{prefix}{key}"] = value
  return flat


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
  """A config as JSON reads it back: dictionaries, lists and scalars."""
  if isinstance(config, ConfigDict):
    config = config.copy_and_resolve_references().to_dict()
  return json.loads(json.dumps(config))


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
  """A plain config; fields that came after it was written at their defaults."""
  return plain(base()) | plain(config)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
  """The keys in which two plain configs differ, those in `FREE` left out."""
  before, after = flatten(old), flatten(new)
  absent = object()
  return [
    f"{key}: {before.get(key, 'absent')!r} -> {after.get(key, 'absent')!r}"
    for key in sorted(before.keys() | after.keys())
    if key not in FREE and before.get(key, absent) != after.get(key, absent)
  ]


def load(spec: str) -> ConfigDict:
  """The config of "path/to/file.py:key=value", as `--config` gives it.

  Raises:
    UserError: for a file that is not there or an argument it has not.
  """
  path, _, arg = spec.partition(":")
  if not Path(path).is_file():
    raise UserError(
      f"There is no config file {path!r} seen from {Path.cwd()}: give a path "
      "such as configs/lra/listops.py."
    )
  module = importlib.util.module_from_spec(
    importlib.util.spec_from_file_location(Path(path).stem, path)
  )
  module.__spec__.loader.exec_module(module)
  return module.get_config(arg or None)


def check_overrides(config: ConfigDict, argv: list[str]) -> None:
  """Raises UserError for a `--config.x.y=` that the config has not.

  ml_collections finds it too, but names neither section nor choices.
  """
  for path in _overridden(argv):
    section: Any = config
    for depth, key in enumerate(path):
      if not isinstance(section, ConfigDict) or key not in section:
        where = ".".join(("config", *path[:depth]))
        choices = section if isinstance(section, ConfigDict) else ()
        raise unknown(f"key of {where}:", key, choices)
      section = section[key]


def take_options(
  config: ConfigDict, argv: list[str]
) -> tuple[list[str], dict[str, Any]]:
  """Takes options of mixer and block that the config leaves out from argv.

  A config names those that its numbers depend on; `models.build` knows all, and
  says which there are.

  Returns:
    The other arguments; and the options, "model.mixer.causal": True, read as
    Python values, or as text where they are none.
  """
  rest, options = [], {}
  for arg in argv:
    (path,) = list(_overridden([arg])) or [[]]
    name, _, value = arg.partition("=")
    known = path[:2] not in OPEN or len(path) != 3
    if known or path[2] in config.model.get(path[1], {}):
      rest.append(arg)
    elif name.lstrip("-").startswith("no"):
      options[".".join(path)] = False
    else:
      options[".".join(path)] = _value(value or "True")
  return rest, options


def set_options(config: ConfigDict, options: Mapping[str, Any]) -> None:
  """Sets what `take_options` took, in sections that the config may not have."""
  with config.unlocked():
    for path in options:
      section = path.split(".")[1]
      if section not in config.model:
        config.model[section] = ConfigDict()
    config.update_from_flattened_dict(dict(options))


def _value(text: str) -> Any:
  if text in ("true", "false"):
    return text == "true"
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return text


def _overridden(argv: list[str]) -> Iterator[list[str]]:
  for arg in argv:
    name = arg.lstrip("-").partition("=")[0]
    name = name.removeprefix("no") if name.startswith("noconfig.") else name
    if arg.startswith("-") and name.startswith("config."):
      yield name.split(".")[1:]
