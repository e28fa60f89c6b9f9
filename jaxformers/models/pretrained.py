r"""Vision Transformers, DeiT and BERT from Hugging Face's safetensors.

    model, params = pretrained.load("PATH/deit-tiny-patch16-224")
    held, params = pretrained.load("PATH/...", mixer={"fidelity": 0.6})

A folder as `save_pretrained` leaves it and the hub ships it: config.json and
model.safetensors. Nothing of PyTorch is needed. In training the field
`config.pretrained` does the same.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping
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
from jaxformers.registry import choose

Params = dict[str, Any]
# What may be new: heads, and what a term that is added learns.
_HEADS = ("head/", "decoder/")
_NEW = ("/fidelity", "/feat_scale_mean", "/feat_scale_rest")


@dataclasses.dataclass(frozen=True)
class Tensor:
  """Where a parameter stands in a file.

  Attributes:
    names: of the tensors, without a prefix such as "vit."; several are added.
    convert: from theirs, of the shape of ours, to ours.
  """

  names: tuple[str, ...]
  convert: Callable[..., np.ndarray]


def _dense(theirs: str, ours: str) -> Iterator[tuple[str, Tensor]]:
  """A linear map: kernels are transposed, and split into heads."""
  yield f"{ours}/kernel", Tensor((f"{theirs}.weight",), _transposed)
  yield f"{ours}/bias", Tensor((f"{theirs}.bias",), _reshaped)


def _norm(theirs: str, ours: str) -> Iterator[tuple[str, Tensor]]:
  yield f"{ours}/scale", Tensor((f"{theirs}.weight",), _reshaped)
  yield f"{ours}/bias", Tensor((f"{theirs}.bias",), _reshaped)


def _transposed(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  return x.T.reshape(shape)


def _reshaped(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  return x.reshape(shape)


def _filter(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  """A convolution [d, c, p, p] as a map of patches [p p c, d]."""
  return x.transpose(2, 3, 1, 0).reshape(shape)


def _places(*tables: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  """Positions, and the type of a first segment, which BERT adds to them."""
  first, *types = tables
  total = first.reshape(-1, shape[-1])
  for one in types:
    total = total + one[:1]
  return resized(total, shape[0])


def resized(table: np.ndarray, count: int) -> np.ndarray:
  """Positions of the patches of a square image, for another size of image.

  Interpolated bicubically, as DeiT does; the one of the class token stays.

  Args:
    table: [1 + k^2, d].
    count: 1 + m^2.

  Raises:
    UserError: for a count that is no square image's and not the table's.
  """
  if len(table) == count:
    return table
  old, new = (round((n - 1) ** 0.5) for n in (len(table), count))
  if (old**2 + 1, new**2 + 1) != (len(table), count):
    raise UserError(
      f"{len(table)} positions cannot become {count}: they are not those of "
      "square images with a class token."
    )
  grid = table[1:].reshape(old, old, -1)
  grid = jax.image.resize(grid, (new, new, grid.shape[-1]), "bicubic")
  return np.concatenate([table[:1], np.asarray(grid).reshape(new**2, -1)])


def _vit(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
  size, patch = config["image_size"], config["patch_size"]
  options = {
    "image": (size, size, config.get("num_channels", 3)),
    "patch_size": patch,
    "vocab_size": 0,
    "max_len": 0,
    "num_classes": _labels(config),
    "pool": "cls",
    "mixer": {"use_bias": config.get("qkv_bias", True)},
    "block": {"norm_first": True},
  }
  names = {
    "encoder/embedding/cls": Tensor(("embeddings.cls_token",), _reshaped),
    "encoder/embedding/positions": Tensor(
      ("embeddings.position_embeddings",), _places
    ),
    "encoder/embedding/patches/kernel": Tensor(
      ("embeddings.patch_embeddings.projection.weight",), _filter
    ),
    "encoder/embedding/patches/bias": Tensor(
      ("embeddings.patch_embeddings.projection.bias",), _reshaped
    ),
    **dict(_norm("layernorm", "encoder/norm")),
  }
  for i in range(config["num_hidden_layers"]):
    theirs, ours = f"encoder.layer.{i}", f"encoder/layer_{i}"
    for name in ("query", "key", "value"):
      names |= _dense(
        f"{theirs}.attention.attention.{name}", f"{ours}/mixer/{name}"
      )
    names |= _dense(f"{theirs}.attention.output.dense", f"{ours}/mixer/out")
    names |= _dense(f"{theirs}.intermediate.dense", f"{ours}/up")
    names |= _dense(f"{theirs}.output.dense", f"{ours}/down")
    names |= _norm(f"{theirs}.layernorm_before", f"{ours}/norm_mixer")
    names |= _norm(f"{theirs}.layernorm_after", f"{ours}/norm_mlp")
  return options, names


def _bert(
  config: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Tensor]]:
  if config.get("position_embedding_type", "absolute") != "absolute":
    raise UserError(
      f"position_embedding_type={config['position_embedding_type']!r}: only "
      "BERTs with absolute positions are read."
    )
  options = {
    "vocab_size": config["vocab_size"],
    "max_len": config["max_position_embeddings"],
    "num_classes": _labels(config),
    "pool": "first",
    "head_dim": config["hidden_size"],
    "head_activation": "tanh",
    "embedding": {"norm_epsilon": config["layer_norm_eps"]},
    "mixer": {},
    "block": {"norm_first": False},
  }
  names = {
    "encoder/embedding/tokens/embedding": Tensor(
      ("embeddings.word_embeddings.weight",), _reshaped
    ),
    "encoder/embedding/positions": Tensor(
      (
        "embeddings.position_embeddings.weight",
        "embeddings.token_type_embeddings.weight",
      ),
      _places,
    ),
    **dict(_norm("embeddings.LayerNorm", "encoder/embedding/norm")),
    **dict(_dense("pooler.dense", "head/hidden")),
  }
  for i in range(config["num_hidden_layers"]):
    theirs, ours = f"encoder.layer.{i}", f"encoder/layer_{i}"
    for name in ("query", "key", "value"):
      names |= _dense(f"{theirs}.attention.self.{name}", f"{ours}/mixer/{name}")
    names |= _dense(f"{theirs}.attention.output.dense", f"{ours}/mixer/out")
    names |= _norm(f"{theirs}.attention.output.LayerNorm", f"{ours}/norm_mixer")
    names |= _dense(f"{theirs}.intermediate.dense", f"{ours}/up")
    names |= _dense(f"{theirs}.output.dense", f"{ours}/down")
    names |= _norm(f"{theirs}.output.LayerNorm", f"{ours}/norm_mlp")
  return options, names


_KINDS = {"vit": _vit, "bert": _bert}
# What the files hold beside the encoder: other heads, and what trained them.
_IGNORED = ("cls.", "classifier.", "pooler.", "embeddings.position_ids")


# Positive integers that config.json must have.
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


def _labels(config: Mapping[str, Any]) -> int:
  return len(config.get("id2label") or {}) or config.get("num_labels", 2)


def _read_config(file: Path) -> tuple[str, dict[str, Any]]:
  """Returns the kind of model and the fields of config.json.

  Raises:
    UserError: for a file that is damaged, of another kind of model, or lacks a
      size.
  """
  remedy = "Fetch it again from where the weights come from."
  try:
    config = json.loads(file.read_text(encoding="utf-8"))
  except (ValueError, OSError, RecursionError) as error:
    raise UserError(f"{file} cannot be read ({error}). {remedy}") from None
  if not isinstance(config, dict):
    raise UserError(f"{file} holds no fields. {remedy}")
  kind = choose(f"model_type in {file}:", config.get("model_type"), _KINDS)
  for name in (*_COMMON_SIZES, *_SIZES[kind]):
    value = config.get(name)
    if type(value) is not int or value < 1:
      raise UserError(
        f"{name}={value!r} in {file} is no positive integer. {remedy}"
      )
  epsilon = config.get("layer_norm_eps")
  if type(epsilon) not in (int, float) or not 0 <= epsilon < 1:
    raise UserError(
      f"layer_norm_eps={epsilon!r} in {file} is no number from 0 to 1. {remedy}"
    )
  if not isinstance(config.get("id2label") or {}, dict):
    raise UserError(f"id2label in {file} names no classes. {remedy}")
  return kind, config


def _read_tensors(file: Path) -> dict[str, np.ndarray]:
  """Returns the tensors of a file by name.

  Raises:
    UserError: for a file that is damaged, or a tensor with NaN or infinity.
  """
  remedy = "Fetch the file again from where the weights come from."
  # A type that NumPy has not raises KeyError or TypeError.
  damaged = (safetensors.SafetensorError, OSError, ValueError)
  try:
    tensors = safetensors.numpy.load_file(file)
  except (*damaged, KeyError, TypeError, AttributeError) as error:
    raise UserError(f"{file} cannot be read ({error}). {remedy}") from None
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


def _read(
  folder: str | Path,
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, np.ndarray]]:
  """Options for `models.build`, names, and tensors without their prefix."""
  folder = paths.expand(folder)
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
        "leaves it, with config.json and model.safetensors. (Other formats: "
        "load them there, and save_pretrained(..., safe_serialization=True).)"
      )
  kind, config = _read_config(files[0])
  if config.get("hidden_act", "gelu") != "gelu":
    raise UserError(
      f"hidden_act={config['hidden_act']!r} in {files[0]}: only exact GELU is "
      "read."
    )
  options, names = _KINDS[kind](config)
  names |= _dense("classifier", "head/logits")
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
  tensors = {
    name.removeprefix(f"{kind}."): value
    for name, value in _read_tensors(files[1]).items()
  }
  # BERT as it was first released, in TensorFlow's words.
  for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
    tensors = {
      name.removesuffix(old) + new if name.endswith(old) else name: value
      for name, value in tensors.items()
    }
  return options, names, tensors


def load(
  folder: str | Path, name: str = "transformer", **changes: Any
) -> tuple[models.Model, Params]:
  """The model of a folder, and its parameters.

  Args:
    folder: with config.json, whose model_type is "vit" (DeiT, too) or "bert",
      and model.safetensors.
    name: in `models.MODELS`; "neutreno" for the same weights with the term.
    **changes: of the options of `models.build`: those of mixer and block are
      added to the file's. With another `image` positions are interpolated; with
      another `num_classes`, or where the file has none, the head is new.

  Raises:
    UserError: for another architecture, naming the tensors that differ.
  """
  options, names, tensors = _read(folder)
  for part in ("mixer", "block", "embedding"):
    given = changes.pop(part, None) or {}
    if part in options or given:
      options[part] = options.get(part, {}) | dict(given)
  model = models.build(name, **(options | changes))
  start = jax.jit(functools.partial(model.init, train=False))(
    jax.random.key(0), model.example()
  )["params"]
  return model, _filled(start, names, tensors, str(folder))


def parameters(folder: str | Path, start: Params) -> Params:
  """The parameters of a folder, for a model that has been built.

  Args:
    folder: as for `load`.
    start: of the model, initialised: what the file does not have stays, if it
      is a head or belongs to a term that pre-trained models have not.

  Raises:
    UserError: for another architecture, naming the tensors that differ.
  """
  options, names, tensors = _read(folder)
  heads = options["mixer"]["num_heads"]
  query = start["encoder"]["layer_0"]["mixer"].get("query", {}).get("kernel")
  if query is not None and query.ndim == 3 and query.shape[1] != heads:
    raise UserError(
      f"{folder} has {heads} heads and the model {query.shape[1]}: set "
      f"model.mixer.num_heads={heads}."
    )
  return _filled(start, names, tensors, str(folder))


def _filled(
  start: Params,
  names: dict[str, Tensor],
  tensors: dict[str, np.ndarray],
  folder: str,
) -> Params:
  flat = flax.traverse_util.flatten_dict(start, sep="/")
  found: dict[str, Any] = {}
  wrong: list[str] = []
  for path, leaf in flat.items():
    own = names.get(path)
    there = own is not None and all(name in tensors for name in own.names)
    fits = there and _fits(own, tensors, leaf)
    if not fits and (path.startswith(_HEADS) or path.endswith(_NEW)):
      found[path] = leaf
    elif not there:
      wrong.append(f"{path} {leaf.shape} is not in the file")
    elif not fits:
      shapes = ", ".join(str(tensors[name].shape) for name in own.names)
      wrong.append(f"{path} is {leaf.shape}, and {own.names[0]} {shapes}")
    else:
      value = _converted(own, tensors, leaf)
      found[path] = jnp.asarray(value, jnp.float32)
  used = {name for path in flat if path in names for name in names[path].names}
  wrong += [
    f"{name} {value.shape} is in the file alone"
    for name, value in sorted(tensors.items())
    if name not in used and not name.startswith(_IGNORED)
  ]
  if wrong:
    listed = "\n  ".join([*wrong[:8], *(["..."] if len(wrong) > 8 else [])])
    raise UserError(
      f"{folder} is of another architecture; {len(wrong)} tensors differ:\n  "
      f"{listed}\nBuild the model with the file's sizes: see `pretrained.load`."
    )
  return flax.traverse_util.unflatten_dict(found, sep="/")


def _fits(
  own: Tensor, tensors: Mapping[str, np.ndarray], leaf: jax.Array
) -> bool:
  theirs, ours = tensors[own.names[0]].shape, leaf.shape
  if not math.prod(theirs):
    return False
  if own.convert is _places:
    # BERT adds a table of segments to that of positions.
    others = [tensors[name].shape for name in own.names[1:]]
    if not theirs or any(len(s) != 2 or s[-1] != ours[-1] for s in others):
      return False
    old, new = math.prod(theirs[:-1]), ours[0]
    square = all(math.isqrt(n - 1) ** 2 == n - 1 for n in (old, new))
    return theirs[-1] == ours[-1] and (old == new or square)
  if own.convert is _transposed:
    # Axes of heads stand together, before or behind.
    cuts = range(1, len(ours))
    both = [(math.prod(ours[k:]), math.prod(ours[:k])) for k in cuts]
    return theirs in both
  if own.convert is _filter and (len(theirs) != 4 or theirs[0] != ours[-1]):
    return False
  # Vectors alone change their shape: a matrix would change its order.
  is_vector = sum(size > 1 for size in theirs) <= 1
  if own.convert is _reshaped and theirs != ours and not is_vector:
    return False
  return math.prod(theirs) == math.prod(ours)


def _converted(
  own: Tensor, tensors: Mapping[str, np.ndarray], leaf: jax.Array
) -> np.ndarray:
  values = [np.asarray(tensors[name], np.float32) for name in own.names]
  if own.convert is _places:
    return _places(*values, shape=leaf.shape)
  return own.convert(*values, leaf.shape)
