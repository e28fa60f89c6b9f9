r"""Loading of Vision Transformers, DeiT, BERT and GPT-2 from Hugging Face.

    model, params = pretrained.load("PATH/deit-tiny-patch16-224")
    model, params = pretrained.load("PATH/...", mixer={"fidelity": 0.6})

PATH is a folder with config.json and model.safetensors, or with the files that
model.safetensors.index.json lists, as written by `save_pretrained` or
downloaded from the hub. PyTorch is not needed. For training, set the field
`config.pretrained`. `huggingface.py` lists the fields of config.json that are
obeyed.

GPT-2 has no id for padding. Its id i is the id i + 1 here, because 0 is
padding.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from jaxformers import models
from jaxformers.foundations import paths
from jaxformers.foundations.errors import UserError
from jaxformers.models import huggingface, transplant

Params = dict[str, Any]
Shape = tuple[int, ...]
# Parameters that a file may lack: heads, and the bias of a language model's
# softmax, which is zero at first.
_HEADS = ("head/", "decoder/", "bias_0")


@dataclasses.dataclass(frozen=True)
class Tensor:
  """Tensors of a file from which one parameter is made.

  Attributes:
    names: names of the tensors, without a prefix such as "vit.".
    convert: function of the tensors and the parameter's shape that returns the
      parameter.
    fits: function of the tensors' shapes and the parameter's shape that returns
      True if `convert` puts all entries in the right places.
  """

  names: tuple[str, ...]
  convert: Callable[..., np.ndarray]
  fits: Callable[..., bool]


def _kernel(name: str) -> Tensor:
  """Returns the conversion of a kernel: transpose, and split into heads."""

  def fits(theirs: Shape, ours: Shape) -> bool:
    # Match [outputs, inputs], where the axes of heads are either the first or
    # the last axes of the parameter.
    cuts = range(1, len(ours))
    pairs = [(math.prod(ours[k:]), math.prod(ours[:k])) for k in cuts]
    return theirs in pairs

  return Tensor((name,), lambda x, shape: x.T.reshape(shape), fits)


def _array(name: str) -> Tensor:
  """Returns the conversion of an array whose entries keep their order.

  A vector may gain or lose axes of size 1.
  """

  def fits(theirs: Shape, ours: Shape) -> bool:
    # Reshape only vectors: a matrix of another shape has another order.
    is_vector = sum(size > 1 for size in theirs) <= 1
    return theirs == ours or (
      is_vector and math.prod(theirs) == math.prod(ours)
    )

  return Tensor((name,), lambda x, shape: x.reshape(shape), fits)


def _filter(name: str) -> Tensor:
  """Returns the conversion of a convolution: [d, c, p, p] -> [p p c, d]."""

  def convert(x: np.ndarray, shape: Shape) -> np.ndarray:
    return x.transpose(2, 3, 1, 0).reshape(shape)

  def fits(theirs: Shape, ours: Shape) -> bool:
    is_filter = len(theirs) == 4 and theirs[0] == ours[-1]
    return is_filter and math.prod(theirs) == math.prod(ours)

  return Tensor((name,), convert, fits)


def _segments(name: str) -> Tensor:
  """Returns the conversion of BERT's segment vectors: subtract the first one.

  The first vector is added to the positions: see `_text_positions`.
  """

  def fits(theirs: Shape, ours: Shape) -> bool:
    return len(theirs) == 2 and theirs[0] >= ours[0] and theirs[1:] == ours[1:]

  return Tensor((name,), lambda x, shape: (x - x[:1])[: shape[0]], fits)


def _image_positions(name: str, count: int, front: int) -> Tensor:
  """Returns the conversion of positions of images: resize their grid.

  Args:
    name: name of the tensor.
    count: number of positions, according to config.json.
    front: number of tokens before the patches.
  """

  def convert(table: np.ndarray, shape: Shape) -> np.ndarray:
    table = table.reshape(-1, shape[-1])
    return transplant.resize_positions(table, shape[0], front)

  def fits(theirs: Shape, ours: Shape) -> bool:
    # Both grids must be squares, unless the number of positions is the same.
    grids = (count - front, ours[0] - front)
    is_square = all(n > 0 and math.isqrt(n) ** 2 == n for n in grids)
    is_table = theirs[-1:] == ours[-1:] and math.prod(theirs[:-1]) == count
    return is_table and (is_square or count == ours[0])

  return Tensor((name,), convert, fits)


def _text_positions(names: Sequence[str], count: int) -> Tensor:
  """Returns the conversion of positions of texts.

  The first segment vector is added to BERT's positions. Positions beyond the
  end of the table repeat the table from its start, as in Longformer (Beltagy et
  al. 2020, https://arxiv.org/abs/2004.05150, section 5). The outputs for
  shorter texts do not change.

  Args:
    names: names of the table of positions, and of BERT's table of segments.
    count: number of positions, according to config.json.
  """

  def convert(*arrays: Any) -> np.ndarray:
    table, *segments, shape = arrays
    for vectors in segments:
      table = table + vectors[:1]
    return table[np.arange(shape[0]) % count]

  def fits(*shapes: Shape) -> bool:
    theirs, *segments, ours = shapes
    is_table = theirs == (count, ours[-1])
    return is_table and all(
      len(shape) == 2 and shape[-1] == ours[-1] for shape in segments
    )

  return Tensor(tuple(names), convert, fits)


def _columns(name: str, part: int, count: int) -> Tensor:
  """Returns the conversion of weights or a bias of GPT-2's `Conv1D`, x W + b.

  Args:
    name: name of the tensor, whose columns belong to several maps, from left to
      right.
    part: number of the map.
    count: number of maps.
  """

  def fits(theirs: Shape, ours: Shape) -> bool:
    # Match [inputs, count * outputs], where either may be split into heads.
    if len(theirs) == 1:
      return theirs[0] == count * math.prod(ours)
    cuts = range(1, len(ours))
    pairs = [(math.prod(ours[:k]), count * math.prod(ours[k:])) for k in cuts]
    return theirs in pairs

  return Tensor(
    (name,),
    lambda x, shape: np.split(x, count, -1)[part].reshape(shape),
    fits,
  )


def _after_padding(name: str) -> Tensor:
  """Returns the conversion of a table of tokens: padding becomes the id 0."""

  def fits(theirs: Shape, ours: Shape) -> bool:
    return len(theirs) == 2 and (theirs[0] + 1, theirs[1]) == ours

  return Tensor((name,), lambda x, shape: np.pad(x, ((1, 0), (0, 0))), fits)


def _stacked(*names: str) -> Tensor:
  """Returns the conversion of k vectors [1, 1, d]: stack them to [k, d]."""

  def fits(*shapes: Shape) -> bool:
    # Each tensor must be a vector of the width of the parameter's rows.
    *theirs, ours = shapes
    is_vector = [math.prod(shape) == shape[-1] for shape in theirs if shape]
    return (len(theirs), *theirs[0][-1:]) == ours and all(is_vector)

  return Tensor(
    names,
    lambda *arrays: np.stack([x.ravel() for x in arrays[:-1]]),
    fits,
  )


def _distilled_head(*names: str) -> dict[str, Tensor]:
  """Returns the conversion of DeiT's heads to one head of both tokens.

  The logits are the mean of the logits of the heads, so each kernel is divided
  by the number of heads.

  Args:
    *names: names of the heads: of the class token, and of the distillation
      token if it has a head.
  """
  # Each of k heads contributes 1 / k of the logits.
  share = 1 / len(names)

  def convert(*arrays: Any) -> np.ndarray:
    *kernels, shape = arrays
    # Stack the kernels; rows of a token without a head are 0.
    both = np.concatenate([share * x.T for x in kernels])
    return np.pad(both, ((0, shape[0] - len(both)), (0, 0)))

  def fits(*shapes: Shape) -> bool:
    *theirs, (rows, classes) = shapes
    return all(shape == (classes, rows // 2) for shape in theirs)

  def average(*arrays: Any) -> np.ndarray:
    return share * np.sum(arrays[:-1], 0)

  def are_equal(*shapes: Shape) -> bool:
    return len({*shapes}) == 1

  weights, biases = (
    tuple(f"{name}.{part}" for name in names) for part in ("weight", "bias")
  )
  return {
    "head/logits/kernel": Tensor(weights, convert, fits),
    "head/logits/bias": Tensor(biases, average, are_equal),
  }


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
  """Returns the tensors of all layers, by parameter.

  Args:
    count: number of layers.
    attention: name of the module that has query, key and value.
    norm_mixer, norm_mlp: names of the LayerNorms of attention and feed-forward.
  """
  tensors: dict[str, Tensor] = {}
  for i in range(count):
    # Map attention, feed-forward and both LayerNorms of layer i.
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
  """Returns the options of a ViT or a DeiT, and the tensors by parameter.

  Args:
    config: fields from `huggingface.read_config`, and `kind`.
  """
  # Set the options of the model.
  (height, width), (patch, _) = config["image_size"], config["patch_size"]
  is_deit = config["kind"] == "deit"
  options = {
    "image": (height, width, config["num_channels"]),
    "patch_size": patch,
    "vocab_size": 0,
    "max_len": 0,
    "pool": "distilled" if is_deit else "cls",
    "mixer": {} if config["qkv_bias"] else {"qkv_bias": False},
    "block": {"norm_first": True},
  }
  # List the tensors of each parameter.
  theirs, ours = "embeddings.patch_embeddings.projection", "encoder/embedding"
  # DeiT has a distillation token in addition to the class token.
  front = ["embeddings.cls_token"]
  front += ["embeddings.distillation_token"] if is_deit else []
  count = (height // patch) * (width // patch) + len(front)
  tensors = {
    f"{ours}/cls": _stacked(*front) if is_deit else _array(*front),
    f"{ours}/positions": _image_positions(
      "embeddings.position_embeddings", count, len(front)
    ),
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
  """Returns the options of a BERT, and the tensors by parameter; see `_vit`."""
  options = {
    "vocab_size": config["vocab_size"],
    "max_len": config["max_position_embeddings"],
    "pool": "first",
    "head_dim": config["hidden_size"],
    "head_activation": "tanh",
    "embedding": {"norm_epsilon": config["layer_norm_eps"]},
    "mixer": {"causal": True} if config["is_decoder"] else {},
    "block": {"norm_first": False},
  }
  # BERT adds a segment vector to the positions. Here the positions include the
  # vector of the first segment, because models of one part have no segments.
  theirs, ours = "embeddings", "encoder/embedding"
  tensors = {
    f"{ours}/tokens/embedding": _array(f"{theirs}.word_embeddings.weight"),
    f"{ours}/positions": _text_positions(
      (
        f"{theirs}.position_embeddings.weight",
        f"{theirs}.token_type_embeddings.weight",
      ),
      config["max_position_embeddings"],
    ),
    f"{ours}/segments": _segments(f"{theirs}.token_type_embeddings.weight"),
    **_norm(f"{theirs}.LayerNorm", f"{ours}/norm"),
    **_dense("pooler.dense", "head/hidden"),
    **_dense("qa_outputs", "decoder"),
    **_layers(
      config["num_hidden_layers"],
      "attention.self",
      "attention.output.LayerNorm",
      "output.LayerNorm",
    ),
  }
  return options, tensors


def _gpt2(
  config: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Tensor]]:
  """Returns options of a GPT-2, and the tensors by parameter; see `_vit`."""
  is_tied = config["tie_word_embeddings"]
  options = {
    "objective": "language_model",
    "vocab_size": config["vocab_size"] + 1,
    "max_len": config["max_position_embeddings"],
    "head": {"tied": is_tied},
    "embedding": {"scale": 1.0},
    "mixer": {},
    "block": {"norm_first": True},
  }
  tensors = {
    "encoder/embedding/tokens/embedding": _after_padding("wte.weight"),
    "encoder/embedding/positions": _text_positions(
      ["wpe.weight"], config["max_position_embeddings"]
    ),
    **_norm("ln_f", "encoder/norm"),
  }
  if not is_tied:
    tensors["table_0"] = _after_padding("lm_head.weight")
  for i in range(config["num_hidden_layers"]):
    theirs, ours = f"h.{i}", f"encoder/layer_{i}"
    # One map has the columns of queries, keys and values.
    maps = {
      "mixer/query": ("attn.c_attn", 0, 3),
      "mixer/key": ("attn.c_attn", 1, 3),
      "mixer/value": ("attn.c_attn", 2, 3),
      "mixer/out": ("attn.c_proj", 0, 1),
      "up": ("mlp.c_fc", 0, 1),
      "down": ("mlp.c_proj", 0, 1),
    }
    for path, (name, part, count) in maps.items():
      for parameter, kind in (("kernel", "weight"), ("bias", "bias")):
        tensors[f"{ours}/{path}/{parameter}"] = _columns(
          f"{theirs}.{name}.{kind}", part, count
        )
    tensors |= _norm(f"{theirs}.ln_1", f"{ours}/norm_mixer")
    tensors |= _norm(f"{theirs}.ln_2", f"{ours}/norm_mlp")
  return options, tensors


_KINDS = {"vit": _vit, "deit": _vit, "bert": _bert, "gpt2": _gpt2}
_PREFIXES = {"gpt2": "transformer."}  # Prefixes of tensors, if not the kind.
# Tensors that may remain unused, by the start of their names: heads, poolers,
# ids, mask tokens, and the masks of attention that old files of GPT-2 have.
_IGNORED = (
  "cls.",
  "classifier.",
  "cls_classifier.",
  "distillation_classifier.",
  "qa_outputs.",
  "decoder.",
  "pooler.",
  "embeddings.position_ids",
  "embeddings.token_type_ids",
  "embeddings.mask_token",
  "lm_head.",
  "multiple_choice_head.",
  "score.",
)
_MASKS = re.compile(r"h\.\d+\.attn\.(masked_)?bias")


def _guess_head(kind: str, values: Mapping[str, Any]) -> str:
  """Returns the kind of head of a file without architecture, by its tensors."""
  if "cls_classifier.weight" in values:
    return "teacher"
  if "classifier.weight" not in values:
    return ""
  # A BERT without a pooler classifies tokens, not texts.
  is_other = kind == "bert" and "pooler.dense.weight" not in values
  return "other" if is_other else "logits"


def _head(kind: str, head: str) -> dict[str, Tensor]:
  """Returns the tensors of the logits; {} if there is no classifier head."""
  if head == "teacher":
    return _distilled_head("cls_classifier", "distillation_classifier")
  if head != "logits":
    return {}
  if kind == "deit":
    return _distilled_head("classifier")
  return _dense("classifier", "head/logits")


def _read_tensors(file: Path) -> dict[str, np.ndarray]:
  """Returns the tensors of a file by name.

  Raises:
    UserError: for a damaged file, or a tensor with NaN or infinity.
  """
  remedy = "Download the file again from the source of the weights."
  # safetensors raises KeyError or TypeError for a dtype that NumPy lacks.
  damaged = (safetensors.SafetensorError, OSError, ValueError)
  try:
    tensors = safetensors.numpy.load_file(file)
  except (*damaged, KeyError, TypeError, AttributeError) as error:
    raise UserError(f"{file} cannot be read ({error}). {remedy}") from None
  # Refuse weights that are not finite. Integers, such as position ids, are not
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


def _find_files(folder: Path) -> tuple[Path, list[Path]]:
  """Returns the path of config.json, and the paths of the files of weights.

  Raises:
    UserError: if one of them is missing, or if the list of several files of
      weights is damaged.
  """
  config, weights = folder / "config.json", folder / "model.safetensors"
  index = folder / "model.safetensors.index.json"
  files = [weights]
  # Weights are in one file, or in the files that the index lists.
  if index.is_file() and not weights.is_file():
    listed = huggingface.read_json(index).get("weight_map")
    names = [*listed.values()] if isinstance(listed, dict) else []
    # Read only files of this folder.
    if not names or any(
      not isinstance(name, str) or Path(name).name != name for name in names
    ):
      raise UserError(
        f"weight_map in {index} does not list files of its folder. "
        f"{huggingface.REMEDY}"
      )
    files = [folder / name for name in sorted({*names})]
  for file in (config, *files):
    if not file.is_file():
      raise UserError(
        f"There is no {file}: give a folder with config.json and "
        "model.safetensors, as written by Hugging Face's save_pretrained. For "
        "other formats, load the model with transformers, and save it with "
        "save_pretrained(..., safe_serialization=True)."
      )
  return config, files


class Checkpoint(NamedTuple):
  """Contents of a folder of weights.

  Attributes:
    options: options of `models.build`.
    tensors: tensors of each parameter.
    values: arrays by name, without a prefix such as "vit.".
    config: fields of config.json, from `huggingface.read_config`, and `kind`.
  """

  options: dict[str, Any]
  tensors: dict[str, Tensor]
  values: dict[str, np.ndarray]
  config: dict[str, Any]


def _translate(
  file: Path,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]:
  """Returns the fields of config.json, options of `build`, and tensors."""
  # Read the options and tensors that depend on the kind of the model.
  kind, config = huggingface.read_config(file)
  config = {**config, "kind": kind}
  options, tensors = _KINDS[kind](config)
  # Add the options that all kinds share.
  options |= {
    "d_model": config["hidden_size"],
    "num_layers": config["num_hidden_layers"],
    "num_classes": 0 if kind == "gpt2" else config["num_labels"],
    "positions": "learned",
    "mixer": options["mixer"] | {"num_heads": config["num_attention_heads"]},
    "block": options["block"]
    | {
      "mlp_dim": config["intermediate_size"],
      "norm_epsilon": config["layer_norm_eps"],
      "activation": huggingface.ACTIVATIONS[config["hidden_act"]],
    },
  }
  return config, options, tensors


def read_options(folder: str | Path) -> dict[str, Any]:
  """Returns the options of `models.build` for a folder, including all sizes.

  Raises:
    UserError: for a folder without weights, or with an unsupported model.
  """
  config_file, _ = _find_files(paths.expand(folder))
  return _translate(config_file)[1]


def _read(folder: str | Path) -> Checkpoint:
  """Returns the contents of a folder of weights."""
  config_file, files = _find_files(paths.expand(folder))
  config, options, tensors = _translate(config_file)
  # Remove the prefix of the model.
  prefix = _PREFIXES.get(config["kind"], f"{config['kind']}.")
  values = {
    name.removeprefix(prefix): value
    for file in files
    for name, value in _read_tensors(file).items()
  }
  # Rename gamma and beta, the LayerNorm parameters in BERT's first release.
  for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
    values = {
      name.removesuffix(old) + new if name.endswith(old) else name: value
      for name, value in values.items()
    }
  # Add the tensors of the head.
  if config["head"] is None:
    config["head"] = _guess_head(config["kind"], values)
  tensors |= _head(config["kind"], config["head"])
  return Checkpoint(options, tensors, values, config)


def load(
  folder: str | Path, name: str = "transformer", **changes: Any
) -> tuple[models.Model, Params]:
  """Returns the model of a folder, and its parameters.

  Args:
    folder: folder with config.json, whose model_type is "vit", "deit", "bert"
      or "gpt2", and with model.safetensors or the files of its index.
      preprocessor_config.json is not read: normalise images with
      `huggingface.read_normalisation`.
    name: name of the model, in `models.MODELS`. "neutreno" uses the same
      weights and adds the fidelity term.
    **changes: options of `models.build` that replace the options of the file.
      Options of mixer, block and embedding are merged. For another `image`, the
      positions are interpolated. For another `max_len`, the positions of texts
      are cut or repeated. With `num_classes`, or if the file has no head, the
      logits are new, and BERT's pooler is the file's; a warning is given unless
      `num_classes` is set.

  Raises:
    UserError: for another architecture, listing the tensors that differ; for a
      head of another kind, such as token classification, unless `num_classes`
      is set; for `num_classes` with a language model; for positions of images
      that are not square and have other sizes than the file's.
  """
  checkpoint = _read(folder)
  theirs, ours = checkpoint.options.get("image", ()), changes.get("image", ())
  transplant.check_image(theirs, ours, str(folder))
  options, has_head = checkpoint.options, "num_classes" not in changes
  if has_head and checkpoint.config["head"] == "other":
    raise _refuse_head(checkpoint.config, str(folder))
  if options.get("objective") == "language_model":
    if changes.get("objective") not in (None, "language_model"):
      del options["head"]  # Options of language models.
      options["mixer"]["causal"] = True  # Language models have it always.
    elif not has_head:
      raise UserError(
        f"num_classes={changes['num_classes']}: {folder} has a language model, "
        "which has no classes. Set objective='classification' as well for a "
        "new classifier, or leave num_classes out."
      )
  # Build the model of the file, with the changes.
  for part in ("mixer", "block", "embedding"):
    changed = changes.pop(part, None) or {}
    if part in options or changed:
      options[part] = options.get(part, {}) | dict(changed)
  model = models.build(name, **(options | changes))
  # Replace the initial parameters by the file's; a new head stays initial.
  init = jax.jit(functools.partial(model.init, train=False))
  start = init(jax.random.key(0), model.example())["params"]
  if not has_head:
    for path in [p for p in checkpoint.tensors if p.startswith("head/logits")]:
      del checkpoint.tensors[path]
  chosen = _fill(start, checkpoint, str(folder))
  # Warn of a random head that was not requested.
  new = [path for path in chosen.new if path.startswith("head/")]
  if has_head and new:
    warnings.warn(
      f"{folder} has no {', '.join(new)}: these parameters are random, and the "
      "outputs have no meaning before training. Set num_classes=N to create a "
      "new head without this warning.",
      stacklevel=2,
    )
  return model, chosen.params


def _refuse_head(config: Mapping[str, Any], folder: str) -> UserError:
  """Returns the error for a head that no model here has."""
  name, *_ = config["architectures"] or ["no architecture"]
  if config["kind"] == "gpt2":
    return UserError(
      f"The head of {folder} ({name}) predicts no tokens: load the model with "
      "GPT2LMHeadModel.from_pretrained, and save it with save_pretrained."
    )
  return UserError(
    f"The head of {folder} ({name}) does not classify whole texts: set "
    "num_classes=N to create a new head on its encoder, and train it."
  )


def take(
  folder: str | Path,
  start: Params,
  advice: str = "",
  image: Sequence[int] = (),
) -> transplant.Transplant:
  """Returns the parameters of a folder, for a model that is already built.

  Args:
    folder: folder of the weights, as for `load`.
    start: initial parameters of the model. Parameters that the file lacks keep
      their initial values if they belong to a head, or to a term that
      pre-trained models do not have.
    advice: sentence appended to the message about another architecture.
    image: (height, width, channels) of the model's images; () for texts, or if
      they have the size of the file's.

  Raises:
    UserError: for another architecture, listing the tensors that differ; for
      positions of images that are not square and have another size.
  """
  checkpoint = _read(folder)
  theirs = checkpoint.options.get("image", ())
  transplant.check_image(theirs, image, str(folder))
  heads = checkpoint.options["mixer"]["num_heads"]
  # Kernels with another number of heads may have the same size: compare heads.
  mixer = start["encoder"].get("layer_0", {}).get("mixer", {})
  query = mixer.get("query", {}).get("kernel")
  if query is not None and query.ndim == 3 and query.shape[1] != heads:
    raise UserError(
      f"{folder} has {heads} heads and the model {query.shape[1]}: set "
      f"--config.model.mixer.num_heads={heads}."
    )
  return _fill(start, checkpoint, str(folder), advice)


def parameters(folder: str | Path, start: Params) -> Params:
  """Returns only the parameters of the result of `take`."""
  return take(folder, start).params


def _fill(
  start: Params, checkpoint: Checkpoint, folder: str, advice: str = ""
) -> transplant.Transplant:
  """Returns `start` with the values of a file.

  Raises:
    UserError: for another architecture, listing the tensors that differ.
  """
  tensors, values = checkpoint.tensors, checkpoint.values
  ours = flax.traverse_util.flatten_dict(start, sep="/")
  shapes = _shapes_in_file(checkpoint)
  # Find the parameters whose tensors exist and have the right shapes.
  fitting = _find_fitting(tensors, shapes, ours)
  params, resized, new, differences = {}, [], [], []
  # Convert these, keep the initial values of new terms, and list differences.
  for path, leaf in ours.items():
    if path in fitting:
      tensor = tensors[path]
      arrays = (np.asarray(values[name], np.float32) for name in tensor.names)
      converted = tensor.convert(*arrays, leaf.shape)
      params[path] = jnp.asarray(converted, jnp.float32)
      is_table = path == "encoder/embedding/positions"
      if is_table and math.prod(shapes[path][0]) != leaf.size:
        resized.append(path)
    elif path.startswith(_HEADS) or path.endswith(transplant.ADDED):
      params[path] = leaf
      new.append(path)
    elif path in shapes:
      differences.append(
        _describe_mismatch(path, leaf.shape, tensors[path], shapes[path])
      )
    else:
      differences.append(f"{path} {leaf.shape} is not in the file")
  # Unused tensors, except known ones, are differences too.
  unused = _find_unused(checkpoint, ours)
  differences += [
    f"{name} {values[name].shape} is only in the file"
    for name in unused
    if not name.startswith(_IGNORED) and not _MASKS.fullmatch(name)
  ]
  if differences:
    raise transplant.refuse(folder, differences, advice)
  # Group the paths by what happened to the parameters.
  groups = (params.keys() - {*resized, *new}, resized, new, unused)
  tree = flax.traverse_util.unflatten_dict(params, sep="/")
  return transplant.Transplant(tree, *(tuple(sorted(g)) for g in groups))


def _shapes_in_file(checkpoint: Checkpoint) -> dict[str, list[Shape]]:
  """Returns the shapes of the tensors of each parameter that the file has."""
  values = checkpoint.values
  return {
    path: [values[name].shape for name in tensor.names]
    for path, tensor in checkpoint.tensors.items()
    if all(name in values for name in tensor.names)
  }


def _describe_mismatch(
  path: str, shape: Shape, tensor: Tensor, shapes: list[Shape]
) -> str:
  listed = ", ".join(map(str, shapes))
  return f"{path} is {shape}, but {tensor.names[0]} in the file is {listed}"


def _find_unused(checkpoint: Checkpoint, ours: Mapping[str, Any]) -> list[str]:
  """Returns the names of the tensors that no parameter of ours reads."""
  tensors = checkpoint.tensors
  used = {
    name for path in ours.keys() & tensors for name in tensors[path].names
  }
  return sorted(checkpoint.values.keys() - used)


def _find_fitting(
  tensors: Mapping[str, Tensor],
  shapes: Mapping[str, list[Shape]],
  ours: Mapping[str, Any],
) -> set[str]:
  """Returns the paths of the parameters whose tensors exist and fit.

  The logits fit only if the rest of the head fits: they read its hidden layer.
  """
  fitting = {
    path
    for path in shapes.keys() & ours.keys()
    if _fits(tensors[path], shapes[path], ours[path].shape)
  }
  if any(p.startswith("head/") and p not in fitting for p in tensors):
    fitting -= {"head/logits/kernel", "head/logits/bias"}
  return fitting


def _fits(tensor: Tensor, shapes: list[Shape], shape: Shape) -> bool:
  return math.prod(shapes[0]) > 0 and tensor.fits(*shapes, shape)
