"""Fields of config.json are obeyed, refused, or known to change nothing."""

import json
from pathlib import Path

import pytest

from jaxformers.models import huggingface

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent / "pretrained"
CONFIGS = {
  kind: json.loads((HERE / kind / "config.json").read_text())
  for kind in ("bert", "gpt2", "vit")
}
CONFIGS["deit"] = {**CONFIGS["vit"], "model_type": "deit"}
CONFIGS["deit"]["architectures"] = ["DeiTForImageClassification"]


def written(tmp_path, kind, without=(), **fields):
  """A config.json with other fields."""
  config = CONFIGS[kind] | fields
  config = {k: v for k, v in config.items() if k not in without}
  file = tmp_path / "config.json"
  file.write_text(json.dumps(config))
  return file


@pytest.mark.parametrize("kind", huggingface.KINDS)
def test_read_config_knows_every_field_of_the_installed_transformers(
  kind, tmp_path
):
  transformers = pytest.importorskip("transformers")
  names = {"bert": "Bert", "vit": "ViT", "deit": "DeiT", "gpt2": "GPT2"}
  config = getattr(transformers, f"{names[kind]}Config")()
  file = tmp_path / "config.json"
  file.write_text(config.to_json_string(use_diff=False))
  huggingface.read_config(file)  # A warning would be an error.


@pytest.mark.parametrize(
  ("kind", "field", "value"),
  [
    *(("bert", "add_cross_attention", value) for value in (True, 1)),
    ("bert", "is_encoder_decoder", True),
    ("bert", "pad_token_id", 1),
    ("bert", "pad_token_id", None),
    ("bert", "position_embedding_type", "relative_key"),
    ("bert", "problem_type", "regression"),
    ("vit", "problem_type", "multi_label_classification"),
    ("bert", "pruned_heads", {"0": [1]}),
    ("vit", "quantization_config", {"quant_method": "bitsandbytes"}),
    ("bert", "auto_map", {"AutoModel": "code.Model"}),
    ("bert", "directionality", "left"),
    ("bert", "embedding_size", 6),
    ("vit", "head_dim", 8),
    ("vit", "is_decoder", True),
    ("deit", "per_layer_config", {"0": {"intermediate_size": 3}}),
    ("bert", "is_decoder", "no"),
    ("vit", "qkv_bias", 0),
    ("vit", "num_channels", 0),
    ("bert", "layer_norm_eps", 0),
    ("vit", "hidden_act", ["gelu"]),
    ("vit", "patch_size", [4, 2]),
    ("vit", "num_attention_heads", 5),
    ("bert", "num_labels", -1),
    ("gpt2", "scale_attn_by_inverse_layer_idx", True),
    ("gpt2", "scale_attn_weights", False),
    ("gpt2", "add_cross_attention", True),
    ("gpt2", "n_embd", None),
    ("gpt2", "n_head", 5),
    ("gpt2", "n_inner", 0),
    ("gpt2", "activation_function", "mish"),
    ("gpt2", "layer_norm_epsilon", 2),
    ("gpt2", "tie_word_embeddings", "yes"),
    ("gpt2", "architectures", ["GPT2ForChess"]),
    ("bert", "architectures", ["BertForChess"]),
    ("vit", "architectures", "ViTModel"),
  ],
)
def test_read_config_refuses_fields_that_change_the_outputs(
  kind, field, value, tmp_path
):
  file = written(tmp_path, kind, **{field: value})
  name = "architecture" if field == "architectures" else field
  with pytest.raises(ValueError, match=name):
    huggingface.read_config(file)


def test_read_config_names_unknown_fields(tmp_path):
  file = written(tmp_path, "bert", sparsity=0.5, use_rope=True, _private=1)
  with pytest.warns(UserWarning, match=r"sparsity=0.5, use_rope=True\. If"):
    huggingface.read_config(file)


def test_read_config_fills_defaults_of_old_files(tmp_path):
  lacking = ("layer_norm_eps", "hidden_act", "is_decoder", "architectures")
  for kind in ("bert", "vit"):
    file = written(tmp_path, kind, (*lacking, "model_type", "qkv_bias"))
    read, fields = huggingface.read_config(file)
    assert read == kind
    assert fields["layer_norm_eps"] == 1e-12
    assert fields["hidden_act"] == "gelu"
    assert fields["head"] is None
  assert fields["qkv_bias"] is True
  lacking = ("model_type", "n_inner", "layer_norm_epsilon", "architectures")
  read, fields = huggingface.read_config(written(tmp_path, "gpt2", lacking))
  assert (read, fields["intermediate_size"]) == ("gpt2", 48)
  assert (fields["layer_norm_eps"], fields["hidden_size"]) == (1e-5, 12)
  file = written(tmp_path, "deit", ("model_type",))
  assert huggingface.read_config(file)[0] == "deit"


def test_read_config_ignores_fields_of_older_releases(tmp_path):
  file = written(
    tmp_path,
    "bert",
    gradient_checkpointing=False,
    torchscript=False,
    top_k=50,
    chunk_size_feed_forward=4,
    pooler_fc_size=768,
    torch_dtype="x",
    position_embedding_type="absolute",
    finetuning_task=None,
  )
  huggingface.read_config(file)  # A warning would be an error.
  file = written(tmp_path, "vit", pad_token_id=None, sep_token_id=None)
  huggingface.read_config(file)
  file = written(tmp_path, "gpt2", n_ctx=1024, task_specific_params={"a": 1})
  huggingface.read_config(file)


@pytest.mark.parametrize(
  ("fields", "mean", "deviation"),
  [
    ({}, 0.5, 0.5),
    ({"image_mean": [0.1, 0.2, 0.3]}, (0.1, 0.2, 0.3), 0.5),
    ({"image_std": 0.25}, 0.5, 0.25),
    ({"do_normalize": False, "image_mean": [0.9] * 3}, 0.0, 1.0),
    ({"do_rescale": False, "image_mean": [51] * 3}, 0.2, 0.5 / 255),
    ({"rescale_factor": 1 / 127.5}, 0.25, 0.25),
  ],
)
def test_read_normalisation_reads_mean_and_deviation(
  fields, mean, deviation, tmp_path
):
  (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
  got = huggingface.read_normalisation(tmp_path)
  mean, deviation = (
    x if isinstance(x, tuple) else (x,) * 3 for x in (mean, deviation)
  )
  assert got.mean == pytest.approx(mean)
  assert got.deviation == pytest.approx(deviation)


def test_read_normalisation_repeats_a_number_for_every_channel(tmp_path):
  fields = {"image_mean": 0.3, "image_std": [0.2]}
  (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
  got = huggingface.read_normalisation(tmp_path, 1)
  assert (got.mean, got.deviation) == ((0.3,), (0.2,))


@pytest.mark.parametrize(
  ("fields", "size"),
  [
    ({"size": 8}, 8),
    ({"size": {"height": 8, "width": 8}}, 8),
    ({"size": 256, "crop_size": {"height": 224, "width": 224}}, 224),
    ({"size": 8, "crop_size": 6, "do_center_crop": False}, 8),
    ({"size": {"shortest_edge": 8}}, 0),
    ({"size": 8, "do_resize": False}, 0),
  ],
)
def test_read_normalisation_size_is_that_after_the_crop(fields, size, tmp_path):
  (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
  assert huggingface.read_normalisation(tmp_path).size == size


@pytest.mark.parametrize(
  "fields",
  [
    {"image_std": [0, 1, 1]},
    {"image_mean": ["a"] * 3},
    {"rescale_factor": 0},
    {"do_flip_channel_order": True},
    {"size": {"height": 8, "width": 4}},
    {"size": "large"},
  ],
)
def test_read_normalisation_refuses_wrong_fields(fields, tmp_path):
  assert huggingface.read_normalisation(tmp_path) is None
  (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
  name = next(iter(fields))
  with pytest.raises(ValueError, match=rf"{name}=.*preprocessor_config.json"):
    huggingface.read_normalisation(tmp_path)
