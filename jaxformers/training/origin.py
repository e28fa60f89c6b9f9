"""Trained weights that a run begins with, and the record of their origin.

`config.pretrained` names a folder: the workdir of a run, a folder that
`jaxformers export` has written, or a model folder of Hugging Face.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import numpy as np

from jaxformers import config as configs
from jaxformers import models
from jaxformers.data.engine import vocabularies
from jaxformers.foundations import paths, workdirs
from jaxformers.foundations.errors import UserError
from jaxformers.models import huggingface, pretrained
from jaxformers.models.blocks.contract import BLOCKS
from jaxformers.models.config import NEXT, PLAIN_HEAD, block_of, field_names
from jaxformers.models.mixer import MIXERS
from jaxformers.models.transplant import (
  CAUSAL_ADVICE,
  Transplant,
  transplant,
)
from jaxformers.tasks import STATISTICS, TASKS, Task
from jaxformers.training import exported, resume
from jaxformers.training.weights import (
  Weights,
  is_run,
  read_weights,
  refuse_seeds,
)

RECORD = "pretrained.json"  # Name of the record in a workdir.

# Fields that a Hugging Face folder fixes, because they set the shapes of its
# weights. The nouns are for messages.
_SHAPES = {
  "model.d_model": "channels",
  "model.num_layers": "layers",
  "model.mixer.num_heads": "heads",
  "model.block.mlp_dim": "channels in a feed-forward",
  "model.patch_size": "pixels a side of a patch",
  "model.positions": "",
  "model.mixer.qkv_bias": "",
  "model.block.norm_first": "",
}
_POOLS = ("cls", "distilled")  # Pools with tokens that are trained.
# Values of fields that a config does not list.
_DEFAULTS = {
  "model.mixer.qkv_bias": True,
  "model.mixer.causal": False,
  "model.block.activation": "gelu",
  "model.block.norm_first": True,
}
# Sizes that a run or an exported model fixes.
_SIZES = tuple(_SHAPES)[:4]
# Options of an encoder that change no shape.
_WITHOUT_SHAPE = ("dropout", "drop_path", "init_std", "seed", "memory", "dtype")
# Tasks whose models never have a classification head.
_HEADLESS = ("ade20k", "language", "squad")
_ABSENT = object()  # Differs from every value, None included.


def read_fields(folder: Path) -> dict[str, Any]:
  """Returns the config fields that pretrained weights determine, by path.

  A run or an exported model determines the sizes of its encoder, and the
  statistics of pixels. A run has these statistics only if it took them from
  other weights; an exported model always has them, since it does not record
  their origin. A Hugging Face folder determines everything that changes its
  outputs: the options of the model; and for the task the image size, the number
  of positions, the vocabulary, and the mean and deviation of pixels.

  Args:
    folder: absolute path of the folder.

  Raises:
    UserError: if the folder cannot be read.
  """
  # A run or an exported model: read its config.
  if is_run(folder) or exported.is_exported(folder):
    file = "config.json" if is_run(folder) else exported.RECORD
    content = huggingface.read_json(folder / file)
    resolved = models.resolve_defaults({"model": content.get("model", {})})
    flat = configs.flatten({"model": resolved["model"]})
    fields = {name: flat[name] for name in _SIZES if name in flat}
    # Statistics that a run took from its weights are passed on.
    task = content.get("task", {})
    statistics = {name: task[name] for name in STATISTICS if name in task}
    return fields | configs.flatten({"task": statistics} if statistics else {})
  # A Hugging Face folder: read the options of its model.
  refuse_seeds(folder)
  options = pretrained.read_options(folder)
  image, max_len = options.pop("image", ()), options.pop("max_len")
  vocab_size = options.pop("vocab_size")
  del options["num_classes"]
  # The task has the objective.
  is_language = options.pop("objective", "") == "language_model"
  # Collect the options of the model, on top of their defaults.
  fields = _DEFAULTS | configs.flatten({"model": options})
  # Collect the options of a task of texts.
  if vocab_size:
    fields["task.max_len"] = max_len
    fields["task.vocab_size"] = vocab_size
    kinds = (vocabularies.TOKENIZER,) if is_language else vocabularies.FILES
    if vocabulary := vocabularies.find(folder, kinds):
      if is_language:
        vocabularies.require_unpadded(folder)
      fields["task.vocabulary"] = str(vocabulary)
    return configs.plain(fields)
  # Collect the options of a task of images.
  normalisation = huggingface.read_normalisation(folder, image[-1])
  size = image[0] if image[0] == image[1] else 0
  if normalisation:
    fields["task.mean"] = normalisation.mean
    fields["task.deviation"] = normalisation.deviation
    size = normalisation.size or size
  if size:
    fields["task.size"] = size
  return configs.plain(fields)


def take_fields(
  config: dict[str, Any],
  workdir: Path | None,
  chosen: Collection[str] | None = None,
) -> dict[str, Any]:
  """Returns a config with the fields that `config.pretrained` determines.

  A resumed run takes them from its own record, since the folder may be gone.

  Args:
    config: plain and complete config.
    workdir: workdir of the run; None without one.
    chosen: paths of the fields that the user has set, which keep their values;
      None for all fields that the config lists.

  Raises:
    UserError: if chosen fields do not fit the weights; the message lists all
      fields that have to be set instead.
  """
  if not config["pretrained"] or config["model"].get("name") not in (
    models.MODELS
  ):
    return config
  # Read the fields; a run that has begun has them in its record.
  path = paths.expand(config["pretrained"]).absolute()
  if workdir and (
    (workdir / "results.json").exists() or resume.has_checkpoints(workdir)
  ):
    fields = (read_record(workdir) or {}).get("fields", {})
  else:
    fields = read_fields(path)
  # Take the fields that the user did not choose.
  taken, conflicts = copy.deepcopy(config), {}
  for field, value in fields.items():
    current = _current(config, field)
    is_same = _is_same(field, current, value)
    if is_same or not _has_field(config, field, value):
      continue
    # Texts may be shorter than the weights allow.
    if field == "task.max_len" and current is not _ABSENT and current < value:
      continue
    if not _is_chosen(field, chosen, current):
      _set(taken, field, value)
    # `begin_with` checks the weights of runs, some of which can be resized.
    elif _is_shape(field, value, current) and "model.positions" in fields:
      conflicts[field] = value
    # The reference Transformer gets the same sizes.
    other = field.replace("model.", "reference.", 1)
    if (
      chosen is not None
      and other != field
      and not _is_chosen(other, chosen, _ABSENT)
      and _has_field(config, other, value)
    ):
      _set(taken, other, value)
  if conflicts:
    raise _refusal(path, config, conflicts, chosen)
  # Texts need a vocabulary, from the folder or from the config.
  needs_vocabulary = _has_field(config, "task.vocabulary", "")
  size = fields.get("task.vocab_size", 0) if needs_vocabulary else 0
  if size and _current(taken, "task.vocabulary") is _ABSENT:
    raise UserError(
      f"{path} has no vocabulary, and config.task.vocabulary is empty: set "
      f"--config.task.vocabulary to the vocabulary of its {size:,} tokens, a "
      "vocab.txt of word pieces or a tokenizer.json."
    )
  return taken


def _current(config: Mapping[str, Any], field: str) -> Any:
  """Returns the value of a field, or `_ABSENT` if the config does not set it.

  Values of `mixer_defaults` count as set.
  """
  value: Any = models.resolve_defaults(config)
  for name in field.split("."):
    value = value.get(name, _ABSENT) if isinstance(value, Mapping) else _ABSENT
  is_empty = field == "task.vocabulary" and value == ""
  return _ABSENT if is_empty else value


def _is_chosen(
  field: str, chosen: Collection[str] | None, current: Any
) -> bool:
  if chosen is None:
    return current is not _ABSENT
  return bool({field, field.replace(".mixer.", ".mixer_defaults.")} & {*chosen})


def _is_same(field: str, current: Any, value: Any) -> bool:
  if current is _ABSENT:
    return value == _DEFAULTS.get(field, _ABSENT)
  return current == value


def _is_shape(field: str, *values: Any) -> bool:
  """Returns True if the shapes of weights depend on a field."""
  return field in _SHAPES or (
    field == "model.pool" and any(value in _POOLS for value in values)
  )


def _has_field(config: Mapping[str, Any], field: str, value: Any) -> bool:
  """Returns True if the model or the task of a config can have a field."""
  # Fields of the task.
  section, *names = field.split(".")
  if section == "task":
    options = config["task"]
    if names[0] in STATISTICS:
      return True
    if options.get("name") not in TASKS:
      return False
    return names[0] in inspect.signature(TASKS[options["name"]]).parameters
  # Fields of the mixer, of the block, and of the model itself.
  options = config[section]
  if options.get("name") not in models.MODELS:
    return False
  variant = models.MODELS[options["name"]]
  if names[0] == "mixer":
    has_mixer = bool(variant.mixer) and names[1] not in variant.fixed
    return has_mixer and names[1] in field_names(MIXERS[variant.mixer])
  if names[0] == "block":
    block = block_of(variant, coupled=options.get("coupled", False))
    return names[1] in field_names(BLOCKS[block])
  # Only classifiers have heads, and pools without tokens.
  is_head = names[0].startswith("head_")
  is_head |= names[0] == "pool" and value not in _POOLS
  task = config["task"]
  return not (is_head and (task.get("objective") or task["name"] in _HEADLESS))


def _set(config: dict[str, Any], field: str, value: Any) -> None:
  *sections, name = field.split(".")
  for section in sections:
    config = config.setdefault(section, {})
  config[name] = value


def _as_flags(fields: Mapping[str, Any]) -> str:
  """Returns fields as command-line arguments."""
  texts = (
    f"--config.{field}={value if isinstance(value, str) else json.dumps(value)}"
    for field, value in fields.items()
  )
  return " ".join(map(shlex.quote, texts))


def _refusal(
  folder: Path,
  config: Mapping[str, Any],
  conflicts: Mapping[str, Any],
  chosen: Collection[str] | None,
) -> UserError:
  """Returns the error for fields that do not fit the weights.

  Args:
    folder: folder of the weights.
    config: config of the run.
    conflicts: values that the weights require, by field.
    chosen: see `take_fields`.
  """
  reasons = []
  for field, value in conflicts.items():
    current = _current(config, field)
    if noun := _SHAPES.get(field, ""):
      reasons.append(f"it has {value} {noun} and the model {current}")
    else:
      reasons.append(f"it has {field}={value!r} and the model {current!r}")
  remedy = "" if chosen is None else "Remove these fields, or set "
  return UserError(
    f"config.pretrained={folder} does not fit the model: {'; '.join(reasons)}. "
    f"{remedy or 'Set '}{_as_flags(conflicts)}"
  )


def begin_with(
  folder: str | Path, start: Any, model: Mapping[str, Any], task: Task
) -> tuple[Any, dict[str, Any]]:
  """Takes trained weights over into the parameters of a model.

  Args:
    folder: workdir of a run, exported model, or folder of Hugging Face.
    start: initial parameters of the model.
    model: section `config.model` of the new model.
    task: task of the new model.

  Returns:
    The parameters; and their record as plain JSON. The record has `folder`, the
    `sha256` of the parameters that were taken over, and the names of `new` and
    `resized` parameters. For a run it also has `step`, `task`, `protocol`,
    `objective`, and the encoder options that differ.

  Raises:
    UserError: if the weights have another architecture or vocabulary (the
      message names the differences), or if the folder cannot be read.
  """
  # Read the weights; tokens of Hugging Face need the same vocabulary.
  path = paths.expand(folder).absolute()
  weights = read_weights(path)
  if weights is None and task.tokenizer in ("word_pieces", "byte_pairs"):
    remedy = f"set --config.task.vocabulary={path}."
    vocabularies.require_same(path, task.tokenizer_json, remedy, task.tokenizer)
  fields = read_fields(path)
  # Take over weights of Hugging Face.
  if weights is None:
    differing, advice = _compare(fields, model, task)
    chosen = pretrained.take(path, start, advice, task.image)
    record: dict[str, Any]
    record = {"folder": str(path), "differing_options": differing}
    return chosen.params, record | _of_transplant(chosen) | {"fields": fields}
  # Take over weights of a run or of an exported model.
  differing = _differences(weights, model, task.objective)
  leaves_next = weights.objective in NEXT and task.objective not in NEXT
  advice = CAUSAL_ADVICE if leaves_next else _advise(weights, model, task)
  chosen = transplant(
    start,
    weights.params,
    image=task.image,
    source_image=weights.record["sizes"].get("image", ()),
    vocabulary=task.vocabulary,
    source_vocabulary=weights.vocabulary,
    same_task=weights.has_same_head(task),
    name=str(path),
    advice=advice,
  )
  # Record the origin of the parameters.
  record = {
    "folder": str(path),
    "step": weights.step,
    "task": weights.task.get("task"),
    "protocol": weights.task.get("protocol"),
    "objective": weights.objective,
    "model": weights.model["name"],
    "differing_options": differing,
    "fields": fields,
  }
  return chosen.params, record | _of_transplant(chosen)


def _compare(
  fields: Mapping[str, Any], model: Mapping[str, Any], task: Task
) -> tuple[list[str], str]:
  """Compares a run with a Hugging Face folder; returns differences and advice.

  Args:
    fields: fields that the folder determines.
    model: section `config.model` of the run.
    task: task of the run.
  """
  # Write the run as a config, and list the fields to compare.
  section = {"name": task.name}
  if task.objective != "classification":
    section["objective"] = task.objective
  section |= task.splits["train"].reading() if task.image else {}
  config = {"model": model, "task": section}
  names = [
    field
    for field in fields
    if field.startswith("model.") or field.removeprefix("task.") in STATISTICS
  ]
  differing = {}
  for field in names:
    current = _current(config, field)
    # JSON stores a tuple as a list.
    current = list(current) if isinstance(current, tuple) else current
    value = fields[field]
    is_same = _is_same(field, current, value)
    if not is_same and _has_field(config, field, value):
      differing[field] = current
  # Write the differences as text, and advise on shapes and vocabulary.
  lines = [
    f"{field.removeprefix('model.')}: {fields[field]!r} -> "
    f"{'absent' if current is _ABSENT else repr(current)}"
    for field, current in differing.items()
  ]
  needed = {f: fields[f] for f in differing if _is_shape(f, fields[f])}
  advice = f"Set {_as_flags(needed)}" if needed else ""
  size = fields.get("task.vocab_size", 0)
  if size != task.vocab_size:
    advice += (
      f" The weights have {size:,} tokens and {task.name} has "
      f"{task.vocab_size:,}: give the vocabulary of the weights by "
      "--config.task.vocabulary=FILE."
    )
  return lines, advice.strip()


def _advise(weights: Weights, model: Mapping[str, Any], task: Task) -> str:
  """Advises which options give a model the encoder of a run."""
  theirs, ours = (
    configs.flatten(_encoder_options(*pair))
    for pair in (
      (weights.model, weights.objective),
      (model, task.objective),
    )
  )
  needed = {
    f"model.{name}": value
    for name, value in theirs.items()
    if ours.get(name, _ABSENT) != value
    and value != {}
    and not any(word in name for word in _WITHOUT_SHAPE)
  }
  return f"Set {_as_flags(needed)}" if needed else ""


def _of_transplant(chosen: Transplant) -> dict[str, Any]:
  return _record(
    chosen.params,
    new=chosen.new,
    resized=chosen.resized,
    unused=chosen.unused,
  )


def _record(params: Any, **groups: tuple[str, ...]) -> dict[str, Any]:
  """Returns the digest and the number of parameters taken over, and `groups`.

  Args:
    params: all parameters of the model.
    **groups: names of parameters, such as those that are `new`.
  """
  flat = flax.traverse_util.flatten_dict(jax.device_get(params), sep="/")
  digest = hashlib.sha256()
  for name in sorted(flat.keys() - set(groups["new"])):
    leaf = np.ascontiguousarray(flat[name])
    digest.update(f"{name} {leaf.dtype} {leaf.shape}".encode())
    digest.update(leaf.tobytes())
  lists = {key: list(names) for key, names in groups.items()}
  taken = len(flat) - len(groups["new"])
  return {"sha256": digest.hexdigest(), "taken": taken, **lists}


def _differences(
  weights: Weights, model: Mapping[str, Any], objective: str
) -> list[str]:
  """Returns the encoder options that differ, as "option: a -> b".

  Args:
    weights: trained model.
    model: section `config.model` of the new model.
    objective: objective of the new model's task.

  Raises:
    UserError: if the maps of orthogonal matrices differ, because equal
      parameters then stand for other matrices.
  """
  theirs, ours = (
    section.get("orthogonal_map", "cayley")
    for section in (weights.model, model)
  )
  if theirs != ours:
    raise UserError(
      f"The weights have orthogonal_map={theirs!r} and the model has {ours!r}, "
      "which turns equal parameters into other matrices: set "
      f"--config.model.orthogonal_map={theirs}."
    )
  pairs = ((weights.model, weights.objective), (model, objective))
  return configs.differences(*(_encoder_options(*pair) for pair in pairs))


def _encoder_options(
  section: Mapping[str, Any], objective: str
) -> dict[str, Any]:
  """Returns the options of a model without its head, the mixer's in full."""
  options = models.resolve_defaults({"model": section})["model"]
  if objective in NEXT:
    options["mixer"] = {"causal": True, **options.get("mixer", {})}
  return {k: v for k, v in options.items() if k not in (*PLAIN_HEAD, "pool")}


def read_record(workdir: Path) -> dict[str, Any] | None:
  """Returns the record of a run's pretrained weights; None if it has none."""
  if not (workdir / RECORD).exists():
    return None
  return workdirs.read_verified(workdir, RECORD)


def describe(record: Mapping[str, Any]) -> str:
  """Returns a record as lines of text."""
  where = record["folder"]
  if "step" in record:
    kind = f" ({record['protocol']})" if record.get("protocol") else ""
    where += f", step {record['step']} of {record['model']} on "
    where += f"{record['task']}{kind}"
  lines = [f"Begins with {record['taken']} arrays of {where}."]
  titles = {"new": "New", "resized": "Resized", "differing_options": "Differs"}
  lines += [
    f"{title}: {', '.join(record[key])}."
    for key, title in titles.items()
    if record.get(key)
  ]
  return "\n".join(lines)
