"""Fields of Hugging Face's config.json and preprocessor_config.json.

These are the fields of BertConfig, GPT2Config, ViTConfig and DeiTConfig of
current and older releases of transformers. Each field is obeyed, refused, or
listed as without effect on a forward pass. All other fields are listed in a
warning.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import choose

Fields = dict[str, Any]
KINDS = ("bert", "deit", "gpt2", "vit")
REMEDY = "Download it again from the source of the weights."

# Fields that are obeyed. Fields of `_SIZES` are required. The others have the
# defaults of transformers, because old files lack some.
_COMMON_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads")
_IMAGE_SIZES = (*_COMMON_SIZES, "intermediate_size", "image_size", "patch_size")
_TEXT_SIZES = (*_COMMON_SIZES, "vocab_size", "max_position_embeddings")
_SIZES = {
  "vit": _IMAGE_SIZES,
  "deit": _IMAGE_SIZES,
  "bert": (*_TEXT_SIZES, "intermediate_size"),
  "gpt2": _TEXT_SIZES,
}
# Names of these fields in the files of a kind, where they differ.
_NAMES = {
  "gpt2": {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
    "layer_norm_eps": "layer_norm_epsilon",
  }
}
_COMMON_DEFAULTS: Fields = {
  "hidden_act": "gelu",
  "layer_norm_eps": 1e-12,
  "architectures": None,
  "id2label": None,
  "num_labels": None,
}
_IMAGE_DEFAULTS: Fields = {"num_channels": 3, "qkv_bias": True}
_DEFAULTS = {
  "vit": _COMMON_DEFAULTS | _IMAGE_DEFAULTS,
  "deit": _COMMON_DEFAULTS | _IMAGE_DEFAULTS,
  "bert": _COMMON_DEFAULTS | {"is_decoder": False, "type_vocab_size": 2},
  "gpt2": _COMMON_DEFAULTS
  | {
    "hidden_act": "gelu_new",
    "layer_norm_eps": 1e-5,
    "intermediate_size": None,
    "tie_word_embeddings": True,
  },
}

# Names in `activations.ACTIVATIONS`, by the value of `hidden_act`.
ACTIVATIONS = {
  "gelu": "gelu",
  "gelu_python": "gelu",
  "gelu_new": "gelu_tanh",
  "gelu_fast": "gelu_tanh",
  "gelu_pytorch_tanh": "gelu_tanh",
  "relu": "relu",
  "silu": "silu",
  "swish": "silu",
  "tanh": "tanh",
}

# Fields that change the outputs, with the supported values and a remedy for
# other values.
_EXPORT = "load the model with transformers, and save it without"
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
  "add_cross_attention": ((False,), "use a model without cross-attention"),
  "cross_attention_hidden_size": (
    (None,),
    "use a model without cross-attention",
  ),
  "is_encoder_decoder": ((False,), "use an encoder without a decoder"),
  "pruned_heads": (({}, None), "use a model without pruned heads"),
  "quantization_config": ((None,), f"{_EXPORT} quantization"),
  "compression_config": ((None,), f"{_EXPORT} compression"),
  "auto_map": (
    (None, {}),
    "custom code is not run: use a model class of transformers",
  ),
  "per_layer_config": ((None, {}), "use a model with equal layers"),
  "problem_type": (
    (None, "single_label_classification"),
    "only classification with one label is supported. To read the outputs as "
    "logits of classes, or to replace the head, set the field to null in a "
    "copy of the folder",
  ),
}
_REFUSED_IMAGE: dict[str, tuple[tuple[Any, ...], str]] = {
  "is_decoder": ((False,), "use an encoder"),
}
_REFUSED_BERT: dict[str, tuple[tuple[Any, ...], str]] = {
  "position_embedding_type": (
    ("absolute",),
    "use a BERT with absolute positions",
  ),
  "pad_token_id": (
    (0,),
    "the padding id must be 0: exchange the rows of both ids in "
    "word_embeddings and in vocab.txt, and set the field to 0",
  ),
  "directionality": (("bidi",), "use a bidirectional BERT"),
  "pooler_type": (
    ("first_token_transform",),
    "use a BERT that pools the first token",
  ),
}
_REFUSED_GPT2: dict[str, tuple[tuple[Any, ...], str]] = {
  "scale_attn_weights": ((True,), "use a model whose attention is scaled"),
  "scale_attn_by_inverse_layer_idx": (
    (False,),
    "use a model whose attention has the same scale in every layer",
  ),
}
_REFUSED_KINDS = {
  "vit": _REFUSED_IMAGE,
  "deit": _REFUSED_IMAGE,
  "bert": _REFUSED_BERT,
  "gpt2": _REFUSED_GPT2,
}

# Fields without effect on a forward pass in evaluation. They concern training,
# names, storage types, heads that are not read, and the format of the outputs.
_WITHOUT_EFFECT = """
  model_type transformers_version name_or_path label2id finetuning_task
  task_specific_params tokenizer_class prefix language license
  hidden_dropout_prob attention_probs_dropout_prob classifier_dropout
  initializer_range gradient_checkpointing output_past
  torch_dtype dtype torchscript use_bfloat16 tf_legacy_loss
  attn_implementation experts_implementation chunk_size_feed_forward
  output_attentions output_hidden_states return_dict use_return_dict use_cache
  tie_word_embeddings tie_encoder_decoder tie_last_hidden_states
  encoder_stride pooler_output_size pooler_act
  pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers
  pooler_size_per_head
  bos_token_id eos_token_id sep_token_id cls_token_id mask_token_id unk_token_id
  decoder_start_token_id
"""
_IMAGE_FIELDS = "pad_token_id type_vocab_size vocab_size"
_WITHOUT_EFFECT_ON_KIND = {
  "vit": _IMAGE_FIELDS,
  "deit": _IMAGE_FIELDS,
  "bert": "",
  "gpt2": """
    pad_token_id is_decoder n_ctx n_special predict_special_tokens
    attn_pdrop embd_pdrop resid_pdrop
    reorder_and_upcast_attn summary_type summary_use_proj summary_activation
    summary_proj_to_labels summary_first_dropout
  """,
}
# Fields of text generation, which older releases wrote into config.json.
_GENERATION = """
  assistant_confidence_threshold assistant_lookbehind bad_words_ids
  begin_suppress_tokens diversity_penalty do_sample early_stopping
  encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff
  eta_cutoff exponential_decay_length_penalty forced_bos_token_id
  forced_eos_token_id length_penalty max_length min_length no_repeat_ngram_size
  num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams
  num_return_sequences output_scores remove_invalid_values repetition_penalty
  return_dict_in_generate suppress_tokens target_lookbehind temperature top_k
  top_p typical_p
"""

# Kinds of heads, by architecture. "logits": a classifier head, which is read.
# "teacher": the two heads of a distilled DeiT. "": no classifier head; a new
# head is created. "other": a head that looks like a classifier head but is not.
_HEADS = {
  "bert": {
    "BertForSequenceClassification": "logits",
    "BertModel": "",
    "BertForMaskedLM": "",
    "BertForPreTraining": "",
    "BertForNextSentencePrediction": "",
    "BertLMHeadModel": "",
    "BertForTokenClassification": "other",
    "BertForQuestionAnswering": "other",
    "BertForMultipleChoice": "other",
  },
  "gpt2": {
    "GPT2LMHeadModel": "",
    "GPT2Model": "",
    "GPT2DoubleHeadsModel": "",
    "GPT2ForSequenceClassification": "other",
    "GPT2ForTokenClassification": "other",
    "GPT2ForQuestionAnswering": "other",
  },
  "vit": {
    "ViTForImageClassification": "logits",
    "ViTModel": "",
    "ViTForMaskedImageModeling": "",
  },
  "deit": {
    "DeiTForImageClassification": "logits",
    "DeiTForImageClassificationWithTeacher": "teacher",
    "DeiTModel": "",
    "DeiTForMaskedImageModeling": "",
  },
}


class Normalisation(NamedTuple):
  """Mean and standard deviation of each channel, of pixels in [0, 1].

  Attributes:
    mean, deviation: mean and standard deviation, one number for each channel.
    size: side of the model's input images; 0 if the file does not give it.
  """

  mean: tuple[float, ...]
  deviation: tuple[float, ...]
  size: int


def read_json(file: Path) -> Fields:
  """Returns the fields of a JSON file.

  Raises:
    UserError: for a damaged file.
  """
  try:
    content = json.loads(file.read_text(encoding="utf-8"))
  except (ValueError, OSError, RecursionError) as error:
    raise UserError(f"{file} cannot be read ({error}). {REMEDY}") from None
  if not isinstance(content, dict):
    raise UserError(f"{file} is not a JSON object with fields. {REMEDY}")
  return content


def read_config(file: Path) -> tuple[str, Fields]:
  """Returns the kind of a model, and the fields of its config.json.

  Unknown fields are listed in a warning.

  Args:
    file: path of config.json.

  Returns:
    The kind, in `KINDS`; and the fields, with defaults for missing ones. Fields
    that all kinds have are named as in BertConfig. `image_size` and
    `patch_size` are (height, width), `num_labels` is the number of labels, and
    `head` is the kind of head, see `_HEADS`.

  Raises:
    UserError: for a damaged file, another kind of model, a missing size, or a
      field whose value is not supported.
  """
  config = read_json(file)
  kind = choose(f"model_type in {file}:", _find_kind(config), KINDS)
  names = _NAMES.get(kind, {})
  renamed = {
    ours: config[name] for ours, name in names.items() if name in config
  }
  fields = _DEFAULTS[kind] | config | renamed
  # Check the fields that determine sizes and options of the model.
  for name in _SIZES[kind]:
    _check_size(file, _name(kind, name), fields.get(name))
  if fields["intermediate_size"] is None:
    fields["intermediate_size"] = 4 * fields["hidden_size"]
  _check_values(file, kind, fields)
  # Convert a single number to (height, width).
  for name in ("image_size", "patch_size"):
    if name in _SIZES[kind]:
      value = fields[name]
      fields[name] = tuple(value) if isinstance(value, list) else (value, value)
  # Check that the heads have equal sizes.
  heads, width = fields["num_attention_heads"], fields["hidden_size"]
  if width % heads:
    raise UserError(
      f"{_name(kind, 'num_attention_heads')}={heads} in {file} does not divide "
      f"{_name(kind, 'hidden_size')}={width}. {REMEDY}"
    )
  # Refuse fields that change the outputs, and warn of unknown ones.
  refused = _REFUSED | _REFUSED_KINDS[kind]
  refused |= {
    "head_dim": (
      (None, width // heads),
      "use a model with head_dim = hidden_size / num_attention_heads",
    ),
    "embedding_size": (
      (None, width),
      "use a model with embedding_size = hidden_size",
    ),
  }
  for name, (allowed, remedy) in refused.items():
    if name in config and not any(_is_same(config[name], v) for v in allowed):
      raise UserError(
        f"{name}={config[name]!r} in {file} is not supported: {remedy}."
      )
  read = {_name(kind, name) for name in (*_SIZES[kind], *_DEFAULTS[kind])}
  without_effect = {*_WITHOUT_EFFECT_ON_KIND[kind].split()}
  _warn_of_unknown(file, config, {*read, *refused, *without_effect})
  # Count the labels; transformers has two by default.
  labels = fields["id2label"]
  if labels is not None:
    fields["num_labels"] = len(labels)
  fields["num_labels"] = fields["num_labels"] or 2
  fields["head"] = _find_head(file, kind, fields["architectures"])
  return kind, fields


def _name(kind: str, name: str) -> str:
  """Returns the name of a field in the files of a kind."""
  return _NAMES.get(kind, {}).get(name, name)


def _find_kind(config: Mapping[str, Any]) -> Any:
  """Returns model_type, or infers it from other fields in older files."""
  if "model_type" in config:
    return config["model_type"]
  # Segments indicate a BERT, n_embd a GPT-2, and patches a ViT or a DeiT.
  if "type_vocab_size" in config and "vocab_size" in config:
    return "bert"
  if "n_embd" in config and "n_positions" in config:
    return "gpt2"
  names = config.get("architectures") or [""]
  is_deit = isinstance(names, list) and str(names[0]).startswith("DeiT")
  if "patch_size" in config and "image_size" in config:
    return "deit" if is_deit else "vit"
  return None


def _is_same(value: Any, allowed: Any) -> bool:
  """Returns True for an equal value of the same type: 0 is not False."""
  return type(value) is type(allowed) and value == allowed


def _check_size(file: Path, name: str, value: Any) -> None:
  """Raises UserError for a size that is not a positive integer.

  Sizes of images and patches may be pairs (height, width) of positive integers.
  Patches must be square.
  """
  # Accept a number, or a pair of numbers for images and patches.
  is_pair = isinstance(value, list) and len(value) == 2
  can_be_pair = name in ("image_size", "patch_size")
  entries = value if is_pair and can_be_pair else [value]
  if any(type(entry) is not int or entry < 1 for entry in entries):
    raise UserError(
      f"{name}={value!r} in {file} is not a positive integer. {REMEDY}"
    )
  if name == "patch_size" and entries[0] != entries[-1]:
    raise UserError(
      f"patch_size={value!r} in {file} is not supported: use a model with "
      "square patches."
    )


def _check_values(file: Path, kind: str, fields: Mapping[str, Any]) -> None:
  """Raises UserError for an obeyed field whose type or value is not valid."""
  # Check numbers.
  epsilon = fields["layer_norm_eps"]
  if type(epsilon) not in (int, float) or not 0 < epsilon < 1:
    raise UserError(
      f"{_name(kind, 'layer_norm_eps')}={epsilon!r} in {file} is not a number "
      f"in (0, 1). {REMEDY}"
    )
  if not isinstance(fields["id2label"], dict | None):
    raise UserError(f"id2label in {file} is not an object. {REMEDY}")
  labels = fields["num_labels"]
  if labels is not None and (type(labels) is not int or labels < 0):
    raise UserError(
      f"num_labels={labels!r} in {file} is not a number of labels. {REMEDY}"
    )
  for name in ("num_channels", "type_vocab_size", "intermediate_size"):
    if name in fields:
      _check_size(file, _name(kind, name), fields[name])
  # Check flags and names.
  for name, default in _DEFAULTS[kind].items():
    if isinstance(default, bool) and not isinstance(fields[name], bool):
      raise UserError(
        f"{name}={fields[name]!r} in {file} is not true or false. {REMEDY}"
      )
  if fields["hidden_act"] not in list(ACTIVATIONS):
    raise UserError(
      f"{_name(kind, 'hidden_act')}={fields['hidden_act']!r} in {file} is not "
      f"supported: use a model with one of {', '.join(ACTIVATIONS)}."
    )


def _warn_of_unknown(
  file: Path, config: Mapping[str, Any], read: set[str]
) -> None:
  """Warns of fields that are neither in `read` nor without any effect."""
  # Collect all fields that need no warning.
  ignored = {*_WITHOUT_EFFECT.split(), *_GENERATION.split()}
  ignored |= read
  unknown = sorted(
    name for name in config if name not in ignored and not name.startswith("_")
  )
  if unknown:
    listed = ", ".join(f"{name}={config[name]!r}" for name in unknown)
    warnings.warn(
      f"{file} has fields that are not read: {listed}. If they change what the "
      "model computes, its outputs differ from transformers. Otherwise remove "
      "them from the file.",
      stacklevel=2,
    )


def _find_head(file: Path, kind: str, names: Any) -> str | None:
  """Returns the kind of head of an architecture, in `_HEADS`.

  Returns None if the file names no architecture.
  """
  if not names:
    return None
  if not isinstance(names, list):
    raise UserError(
      f"architectures={names!r} in {file} is not a list. {REMEDY}"
    )
  heads = _HEADS[kind]
  return heads[choose(f"architecture in {file}:", names[0], [*heads])]


def read_normalisation(folder: Path, channels: int = 3) -> Normalisation | None:
  """Returns the normalisation of images in preprocessor_config.json.

  Returns None if the folder does not have this file. Missing fields have the
  defaults of transformers: mean and deviation 0.5. The way in which images are
  resized and cropped is not read; images are prepared as in DeiT's evaluation.

  Args:
    folder: folder of the model.
    channels: number of channels of an image, for statistics that are single
      numbers.

  Raises:
    UserError: for a damaged file, or a value that is not supported.
  """
  file = folder / "preprocessor_config.json"
  if not file.is_file():
    return None
  fields = read_json(file)
  # Refuse another order of the channels.
  if fields.get("do_flip_channel_order"):
    raise UserError(
      f"do_flip_channel_order=True in {file} is not supported: jaxformers "
      "reads pixels as red, green, blue. Reverse the channels of the patch "
      "filters in the weights, and set the field to false."
    )
  # y = (scale * pixel - mean) / deviation, with pixels from 0 to 255.
  scale = 1.0
  if fields.get("do_rescale", True):
    scale = fields.get("rescale_factor", 1 / 255)
  # Read mean and deviation, and repeat a single number for each channel.
  mean: Any = fields.get("image_mean", 0.5)
  deviation: Any = fields.get("image_std", 0.5)
  if not fields.get("do_normalize", True):
    mean, deviation = 0.0, 1.0
  mean, deviation = (
    x if isinstance(x, list) else [x] * channels for x in (mean, deviation)
  )
  # Refuse values that are not finite, or not positive where they must be.
  for name, values in (
    ("rescale_factor", [scale]),
    ("image_mean", mean),
    ("image_std", deviation),
  ):
    is_signed = name == "image_mean"
    if not values or not all(
      type(x) in (int, float) and math.isfinite(x) and (is_signed or x > 0)
      for x in values
    ):
      raise UserError(f"{name}={values!r} in {file} is not supported: {REMEDY}")
  # Images are read as pixel / 255: divide by the ratio of the two scales.
  factor = 255 * scale
  mean, deviation = (tuple(x / factor for x in v) for v in (mean, deviation))
  return Normalisation(mean, deviation, _find_side(file, fields))


def _find_side(file: Path, fields: Mapping[str, Any]) -> int:
  """Returns the side of the model's input images; 0 if the file lacks it."""
  # The size after the crop counts; without a crop, the size after resizing.
  is_cropped = fields.get("do_center_crop", "crop_size" in fields)
  if not is_cropped and not fields.get("do_resize", True):
    return 0
  name = "crop_size" if is_cropped and "crop_size" in fields else "size"
  size = fields.get(name, 0)
  if isinstance(size, dict):
    if "height" not in size:
      return (
        0  # Only the shortest edge is given, so that images differ in size.
      )
    size = [size["height"], size.get("width")]
  # Only square images are supported.
  sides = size if isinstance(size, list) else [size, size]
  if any(type(side) is not int or side < 0 for side in sides):
    raise UserError(
      f"{name}={fields[name]!r} in {file} is not a size. {REMEDY}"
    )
  if sides[0] != sides[-1]:
    raise UserError(
      f"{name}={fields[name]!r} in {file} is not supported: use a model with "
      "square images."
    )
  return sides[0]
