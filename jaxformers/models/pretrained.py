r"""Vision Transformers, DeiT and BERT from safetensors of Hugging Face.

    model, params = pretrained.load("PATH/deit-tiny-patch16-224")
    model, params = pretrained.load("PATH/...", mixer={"fidelity": 0.6})

PATH is a folder as `save_pretrained` writes it and the hub ships it, with
config.json and model.safetensors. PyTorch is not needed. In training the field
`config.pretrained` does the same.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from jaxformers import models, paths
from jaxformers.errors import UserError
from jaxformers.models import transplant
from jaxformers.registry import choose

Params = dict[str, Any]
Shape = tuple[int, ...]
_HEADS = ("head/", "decoder/")  # Parameters that a file may lack.


@dataclasses.dataclass(frozen=True)
class Tensor:
  """Tensors of a file that make one parameter.

  Attributes:
    names: names of the tensors, without a prefix such as "vit.".
    convert: function of the tensors and the parameter's shape; returns the
      parameter.
    fits: function of the tensors' shapes and the parameter's shape; True if
      `convert` keeps the order of the entries.
  """

  names: tuple[str, ...]
  convert: Callable[..., np.ndarray]
  fits: Callable[..., bool]


def _kernel(name: str) -> Tensor:
  """Returns the tensor of a linear map: transposed, and split into heads."""

  def fits(theirs: Shape, ours: Shape) -> bool:
    # The axes of heads are adjacent, either first or last.
    cuts = range(1, len(ours))
    pairs = [(math.prod(ours[k:]), math.prod(ours[:k])) for k in cuts]
    return theirs in pairs

  return Tensor((name,), lambda x, shape: x.T.reshape(shape), fits)


def _array(name: str) -> Tensor:
  """Returns an unchanged tensor; a vector may gain or lose axes of size 1."""

  def fits(theirs: Shape, ours: Shape) -> bool:
    # A matrix of another shape has its entries in another order.
    is_vector = sum(size > 1 for size in theirs) <= 1
    return theirs == ours or (
      is_vector and math.prod(theirs) == math.prod(ours)
    )

  return Tensor((name,), lambda x, shape: x.reshape(shape), fits)


def _filter(name: str) -> Tensor:
  """Returns a convolution [d, c, p, p], as a map of patches [p p c, d]."""

  def convert(x: np.ndarray, shape: Shape) -> np.ndarray:
    return x.transpose(2, 3, 1, 0).reshape(shape)

  def fits(theirs: Shape, ours: Shape) -> bool:
    is_filter = len(theirs) == 4 and theirs[0] == ours[-1]
    return is_filter and math.prod(theirs) == math.prod(ours)

  return Tensor((name,), convert, fits)


def _positions(*names: str) -> Tensor:
  """Returns a table of positions, plus BERT's vector of the first segment."""

  def convert(*arguments: Any) -> np.ndarray:
    table, *segments, shape = arguments
    total = table.reshape(-1, shape[-1])
    for segment in segments:
      total = total + segment[:1]
    return transplant.resize_positions(total, shape[0])

  def fits(theirs: Shape, *others: Shape) -> bool:
    *segments, ours = others
    if not theirs or any(len(s) != 2 or s[-1] != ours[-1] for s in segments):
      return False
    old, new = math.prod(theirs[:-1]), ours[0]
    is_square = all(math.isqrt(n - 1) ** 2 == n - 1 for n in (old, new))
    return theirs[-1] == ours[-1] and (old == new or is_square)

  return Tensor(names, convert, fits)


def _dense(theirs: str, ours: str) -> dict[str, Tensor]:
  return {
    f"{ours}/kernel": _kernel(f"{theirs}.weight"),
    f"{ours}/bias": _array(f"{theirs}.bias"),
  }


def _norm(theirs: str, ours: str) -> dict[str, Tensor]:
  return {
    f"{ours}/scale": _array(f"{theirs}.weight"),
    f"{ours}/bias": _array(f"{theirs}.bias"),
  }


def _layers(
  count: int, attention: str, norm_mixer: str, norm_mlp: str
) -> dict[str, Tensor]:
  """Returns the tensors of all layers.

  Args:
    count: number of layers.
    attention: name of the module with query, key and value.
    norm_mixer, norm_mlp: names of the LayerNorms.
  """
  tensors: dict[str, Tensor] = {}
  for i in range(count):
    theirs, ours = f"encoder.layer.{i}", f"encoder/layer_{i}"
    for name in ("query", "key", "value"):
      tensors |= _dense(f"{theirs}.{attention}.{name}", f"{ours}/mixer/{name}")
    tensors |= _dense(f"{theirs}.attention.output.dense", f"{ours}/mixer/out")
    tensors |= _dense(f"{theirs}.intermediate.dense", f"{ours}/up")
    tensors |= _dense(f"{theirs}.output.dense", f"{ours}/down")
    tensors |= _norm(f"{theirs}.{norm_mixer}", f"{ours}/norm_mixer")
    tensors |= _norm(f"{theirs}.{norm_mlp}", f"{ours}/norm_mlp")
  return tensors


def _vit(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
  size, patch = config["image_size"], config["patch_size"]
  options = {
    "image": (size, size, config.get("num_channels", 3)),
    "patch_size": patch,
    "vocab_size": 0,
    "max_len": 0,
    "num_classes": _num_labels(config),
    "pool": "cls",
    "mixer": {"use_bias": config.get("qkv_bias", True)},
    "block": {"norm_first": True},
  }
  # Name the tensors of each parameter.
  theirs, ours = "embeddings.patch_embeddings.projection", "encoder/embedding"
  tensors = {
    f"{ours}/cls": _array("embeddings.cls_token"),
    f"{ours}/positions": _positions("embeddings.position_embeddings"),
    f"{ours}/patches/kernel": _filter(f"{theirs}.weight"),
    f"{ours}/patches/bias": _array(f"{theirs}.bias"),
    **_norm("layernorm", "encoder/norm"),
    **_layers(
      config["num_hidden_layers"],
      "attention.attention",
      "layernorm_before",
      "layernorm_after",
    ),
  }
  return options, tensors


def _bert(
  config: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Tensor]]:
  if config.get("position_embedding_type", "absolute") != "absolute":
    raise UserError(
      f"position_embedding_type={config['position_embedding_type']!r} is not "
      "supported: give a BERT with absolute positions."
    )
  options = {
    "vocab_size": config["vocab_size"],
    "max_len": config["max_position_embeddings"],
    "num_classes": _num_labels(config),
    "pool": "first",
    "head_dim": config["hidden_size"],
    "head_activation": "tanh",
    "embedding": {"norm_epsilon": config["layer_norm_eps"]},
    "mixer": {},
    "block": {"norm_first": False},
  }
  # BERT adds a vector of the segment to the positions; segments are not used.
  theirs, ours = "embeddings", "encoder/embedding"
  tensors = {
    f"{ours}/tokens/embedding": _array(f"{theirs}.word_embeddings.weight"),
    f"{ours}/positions": _positions(
      f"{theirs}.position_embeddings.weight",
      f"{theirs}.token_type_embeddings.weight",
    ),
    **_norm(f"{theirs}.LayerNorm", f"{ours}/norm"),
    **_dense("pooler.dense", "head/hidden"),
    **_layers(
      config["num_hidden_layers"],
      "attention.self",
      "attention.output.LayerNorm",
      "output.LayerNorm",
    ),
  }
  return options, tensors


_KINDS = {"vit": _vit, "bert": _bert}
# Tensors that may stay unused: heads, poolers and position ids.
_IGNORED = ("cls.", "classifier.", "pooler.", "embeddings.position_ids")

# Fields of config.json that must be positive integers.
_SIZES = {
  "vit": ("image_size", "patch_size"),
  "bert": ("vocab_size", "max_position_embeddings"),
}
_COMMON_SIZES = (
  "hidden_size",
  "num_hidden_layers",
  "num_attention_heads",
  "intermediate_size",
)


def _num_labels(config: Mapping[str, Any]) -> int:
  return len(config.get("id2label") or {}) or config.get("num_labels", 2)


def _read_config(file: Path) -> tuple[str, dict[str, Any]]:
  """Returns the kind of the model and the fields of config.json.

  Raises:
    UserError: for a damaged file, another kind of model, or a missing size.
  """
  remedy = "Fetch it again from the source of the weights."
  try:
    config = json.loads(file.read_text(encoding="utf-8"))
  except (ValueError, OSError, RecursionError) as error:
    raise UserError(f"{file} cannot be read ({error}). {remedy}") from None
  if not isinstance(config, dict):
    raise UserError(f"{file} is not a JSON object with fields. {remedy}")
  # Check the fields that become sizes of the model.
  kind = choose(f"model_type in {file}:", config.get("model_type"), _KINDS)
  for name in (*_COMMON_SIZES, *_SIZES[kind]):
    value = config.get(name)
    if type(value) is not int or value < 1:
      raise UserError(
        f"{name}={value!r} in {file} is not a positive integer. {remedy}"
      )
  epsilon = config.get("layer_norm_eps")
  if type(epsilon) not in (int, float) or not 0 <= epsilon < 1:
    raise UserError(
      f"layer_norm_eps={epsilon!r} in {file} is not a number in [0, 1). "
      f"{remedy}"
    )
  if not isinstance(config.get("id2label") or {}, dict):
    raise UserError(f"id2label in {file} is not an object. {remedy}")
  return kind, config


def _read_tensors(file: Path) -> dict[str, np.ndarray]:
  """Returns the tensors of a file by name.

  Raises:
    UserError: for a damaged file, or a tensor with NaN or infinity.
  """
  remedy = "Fetch the file again from the source of the weights."
  # safetensors raises KeyError or TypeError for a type that NumPy lacks.
  damaged = (safetensors.SafetensorError, OSError, ValueError)
  try:
    tensors = safetensors.numpy.load_file(file)
  except (*damaged, KeyError, TypeError, AttributeError) as error:
    raise UserError(f"{file} cannot be read ({error}). {remedy}") from None
  # Refuse weights that are not finite; integers, such as position ids, are not
  # weights.
  for name, value in tensors.items():
    if value.dtype.kind in "biu":
      continue
    with np.errstate(over="ignore"):  # Weights are read as float32.
      finite = np.isfinite(np.asarray(value, np.float32))
    if not finite.all():
      raise UserError(
        f"{file}: {value.size - finite.sum():,} of {value.size:,} values of "
        f"{name!r} are NaN or infinite in float32. {remedy}"
      )
  return tensors


def _find_files(folder: Path) -> list[Path]:
  """Returns config.json and model.safetensors of a folder, or raises."""
  files = [folder / "config.json", folder / "model.safetensors"]
  index = folder / "model.safetensors.index.json"
  if index.is_file() and not files[1].is_file():
    raise UserError(
      f"{index} names several files, and only one is read: load them with "
      "transformers, and save_pretrained(..., max_shard_size='1TB')."
    )
  for file in files:
    if not file.is_file():
      raise UserError(
        f"There is no {file}: give a folder as Hugging Face's save_pretrained "
        "writes it, with config.json and model.safetensors. Load other formats "
        "with transformers, and save_pretrained(..., safe_serialization=True)."
      )
  return files


def _read(
  folder: str | Path,
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, np.ndarray]]:
  """Reads a folder of weights.

  Returns:
    Options of `models.build`; the tensors of each parameter; the values of the
    tensors by name, without the prefix of the model.
  """
  config_file, weights_file = _find_files(paths.expand(folder))
  kind, config = _read_config(config_file)
  if config.get("hidden_act", "gelu") != "gelu":
    raise UserError(
      f"hidden_act={config['hidden_act']!r} in {config_file} is not supported: "
      'give a model with "gelu".'
    )
  # Translate the fields of the config to options.
  options, tensors = _KINDS[kind](config)
  tensors |= _dense("classifier", "head/logits")
  # Add the options that all kinds share.
  options |= {
    "d_model": config["hidden_size"],
    "num_layers": config["num_hidden_layers"],
    "positions": "learned",
    "mixer": options["mixer"] | {"num_heads": config["num_attention_heads"]},
    "block": options["block"]
    | {
      "mlp_dim": config["intermediate_size"],
      "norm_epsilon": config["layer_norm_eps"],
    },
  }
  # Rename gamma and beta, LayerNorm's parameters in BERT's first release.
  values = {
    name.removeprefix(f"{kind}."): value
    for name, value in _read_tensors(weights_file).items()
  }
  for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
    values = {
      name.removesuffix(old) + new if name.endswith(old) else name: value
      for name, value in values.items()
    }
  return options, tensors, values


def load(
  folder: str | Path, name: str = "transformer", **changes: Any
) -> tuple[models.Model, Params]:
  """Returns the model of a folder, and its parameters.

  Args:
    folder: folder with config.json, whose model_type is "vit" (DeiT, too) or
      "bert", and model.safetensors.
    name: name of the model, in `models.MODELS`; "neutreno" adds the fidelity
      term to the same weights.
    **changes: options of `models.build` that replace those of the file; options
      of mixer, block and embedding are merged. Another `image` interpolates the
      positions. Another `num_classes`, or a file without a head, gives a new
      head.

  Raises:
    UserError: for another architecture, naming the tensors that differ.
  """
  options, tensors, values = _read(folder)
  # Build the model of the file, with the changes.
  for part in ("mixer", "block", "embedding"):
    changed = changes.pop(part, None) or {}
    if part in options or changed:
      options[part] = options.get(part, {}) | dict(changed)
  model = models.build(name, **(options | changes))
  # Replace initial parameters by those of the file; a new head keeps its own.
  init = jax.jit(functools.partial(model.init, train=False))
  start = init(jax.random.key(0), model.example())["params"]
  return model, _fill(start, tensors, values, str(folder))


def parameters(folder: str | Path, start: Params) -> Params:
  """Returns the parameters of a folder, for a model that has been built.

  Args:
    folder: folder of the weights, as for `load`.
    start: initial parameters of the model. Those that the file lacks stay, if
      they belong to a head or to a term that pre-trained models do not have.

  Raises:
    UserError: for another architecture, naming the tensors that differ.
  """
  options, tensors, values = _read(folder)
  heads = options["mixer"]["num_heads"]
  # Kernels of another number of heads may have the same size: compare it.
  query = start["encoder"]["layer_0"]["mixer"].get("query", {}).get("kernel")
  if query is not None and query.ndim == 3 and query.shape[1] != heads:
    raise UserError(
      f"{folder} has {heads} heads and the model {query.shape[1]}: set "
      f"model.mixer.num_heads={heads}."
    )
  return _fill(start, tensors, values, str(folder))


def _fill(
  start: Params,
  tensors: dict[str, Tensor],
  values: dict[str, np.ndarray],
  folder: str,
) -> Params:
  """Returns `start` with the values of a file, or raises what differs."""
  params: dict[str, Any] = {}
  differences: list[str] = []
  used: set[str] = set()
  for path, leaf in flax.traverse_util.flatten_dict(start, sep="/").items():
    # Find the tensors of the parameter, and compare their shapes.
    tensor = tensors.get(path)
    names = tensor.names if tensor else ()
    used.update(names)
    is_there = bool(names) and all(name in values for name in names)
    shapes = [values[name].shape for name in names] if is_there else []
    fits = is_there and _fits(tensor, shapes, leaf.shape)
    if fits:
      arrays = (np.asarray(values[name], np.float32) for name in names)
      params[path] = jnp.asarray(
        tensor.convert(*arrays, leaf.shape), jnp.float32
      )
    elif path.startswith(_HEADS) or path.endswith(transplant.ADDED):
      params[path] = leaf
    elif is_there:
      listed = ", ".join(str(shape) for shape in shapes)
      differences.append(
        f"{path} is {leaf.shape}, but {names[0]} in the file is {listed}"
      )
    else:
      differences.append(f"{path} {leaf.shape} is not in the file")
  # Tensors that no parameter uses differ, too.
  differences += [
    f"{name} {value.shape} is in the file alone"
    for name, value in sorted(values.items())
    if name not in used and not name.startswith(_IGNORED)
  ]
  if differences:
    raise transplant.refuse(folder, differences)
  return flax.traverse_util.unflatten_dict(params, sep="/")


def _fits(tensor: Tensor, shapes: list[Shape], shape: Shape) -> bool:
  return math.prod(shapes[0]) > 0 and tensor.fits(*shapes, shape)
