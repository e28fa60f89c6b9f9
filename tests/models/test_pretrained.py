"""Weights of Hugging Face's models say here what they say there."""

import functools
import importlib.util
import json
import shutil
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxformers import models
from jaxformers.foundations.errors import UserError
from jaxformers.models import pretrained
from jaxformers.models.capture import capture
from tests import initial

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent / "pretrained"
spec = importlib.util.spec_from_file_location("make", HERE / "make.py")
make = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make)
IMAGES, IDS = (jnp.asarray(x) for x in make.inputs())
# Ids of GPT-2 are moved up by one, because 0 is padding.
INPUTS = {"vit": IMAGES, "bert": IDS, "gpt2": IDS + 1}


def logits(model, params, x):
  apply = jax.jit(functools.partial(model.apply, train=False))
  got = apply({"params": params}, x)
  if model.objective == "language_model":
    return got[..., 1:6]  # Leave out padding.
  return got


@pytest.mark.parametrize("kind", ["vit", "bert", "gpt2"])
def test_load_gives_the_logits_of_transformers(kind):
  model, params = pretrained.load(HERE / kind)
  want = json.loads((HERE / "logits.json").read_text())[kind]
  got = logits(model, params, INPUTS[kind])
  np.testing.assert_allclose(got, want, atol=1e-5)
  assert np.ptp(want, axis=0).min() > 0.1  # They depend on the input.
  # Adaptation: the same weights, held to the first layer's values.
  held, same = pretrained.load(HERE / kind, "neutreno", mixer={"fidelity": 0.6})
  assert jax.tree.all(jax.tree.map(jnp.array_equal, params, same))
  assert np.abs(logits(held, same, INPUTS[kind]) - got).max() > 1e-3


def test_load_gives_the_hidden_states_of_gpt2():
  """A table at 0 is padding, and columns are queries, keys and values."""
  model, params = pretrained.load(HERE / "gpt2")
  want = json.loads((HERE / "logits.json").read_text())["gpt2_states"]
  hidden = capture(model, {"params": params}, INPUTS["gpt2"][:1]).hidden
  *states, last = (np.asarray(x[0]) for x in hidden)
  norm = params["encoder"]["norm"]
  last = (last - last.mean(-1, keepdims=True)) / np.sqrt(
    last.var(-1, keepdims=True) + 1e-5
  )
  states.append(last * norm["scale"] + norm["bias"])
  np.testing.assert_allclose(states, want, atol=1e-5)
  # A shorter model has the first positions.
  _, short = pretrained.load(HERE / "gpt2", max_len=4)
  positions = [p["encoder"]["embedding"]["positions"] for p in (params, short)]
  np.testing.assert_array_equal(positions[0][:4], positions[1])


def test_load_reads_weights_in_several_files(tmp_path):
  folder = shutil.copytree(HERE / "gpt2", tmp_path / "gpt2")
  _, want = pretrained.load(folder)
  tensors = safetensors.numpy.load_file(folder / "model.safetensors")
  (folder / "model.safetensors").unlink()
  names = sorted(tensors)
  files = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
  for file, part in files.items():
    chosen = {name: tensors[name] for name in part}
    safetensors.numpy.save_file(chosen, folder / file)
  index = {name: file for file, part in files.items() for name in part}
  path = folder / "model.safetensors.index.json"
  path.write_text(json.dumps({"weight_map": index}))
  _, params = pretrained.load(folder)
  assert jax.tree.all(jax.tree.map(jnp.array_equal, params, want))
  (folder / "b.safetensors").unlink()
  with pytest.raises(ValueError, match=r"There is no .*b\.safetensors"):
    pretrained.load(folder)


def test_load_of_gpt2_reads_a_softmax_of_its_own_and_old_names(tmp_path):
  folder = shutil.copytree(HERE / "gpt2", tmp_path / "gpt2")
  model, tied = pretrained.load(folder)
  tensors = safetensors.numpy.load_file(folder / "model.safetensors")
  # Old files have masks of attention, and no prefix.
  tensors = {k.removeprefix("transformer."): v for k, v in tensors.items()}
  tensors["h.1.attn.bias"] = np.tri(16, dtype=np.float32)[None, None]
  tensors["lm_head.weight"] = -tensors["wte.weight"]
  safetensors.numpy.save_file(tensors, folder / "model.safetensors")
  _, params = pretrained.load(folder)
  assert jax.tree.all(jax.tree.map(jnp.array_equal, params, tied))
  config = json.loads((folder / "config.json").read_text())
  config |= {"tie_word_embeddings": False, "n_inner": 48}
  (folder / "config.json").write_text(json.dumps(config))
  own, params = pretrained.load(folder)
  np.testing.assert_array_equal(
    params["table_0"], -tied["encoder"]["embedding"]["tokens"]["embedding"]
  )
  x = INPUTS["gpt2"]
  assert np.abs(logits(own, params, x) - logits(model, tied, x)).max() > 0.1
  tensors["h.1.attn.other"] = np.zeros(1, np.float32)
  safetensors.numpy.save_file(tensors, folder / "model.safetensors")
  with pytest.raises(ValueError, match=r"h\.1\.attn\.other.*only in the file"):
    pretrained.load(folder)


def test_load_refuses_a_gpt2_of_another_head(tmp_path):
  architectures = ["GPT2ForSequenceClassification"]
  folder = with_fields(tmp_path / "a", "gpt2", architectures=architectures)
  with pytest.raises(ValueError, match="predicts no tokens.*GPT2LMHeadModel"):
    pretrained.load(folder)


def test_load_makes_a_classifier_of_gpt2_only_on_request():
  with pytest.raises(ValueError, match="num_classes=3.*language model"):
    pretrained.load(HERE / "gpt2", num_classes=3)
  changes = {"objective": "classification", "num_classes": 3}
  model, params = pretrained.load(HERE / "gpt2", **changes)
  x = INPUTS["gpt2"][:1]
  assert logits(model, params, x).shape == (1, 3)
  # Its weights are of a causal model, and its states are those of GPT-2.
  language = pretrained.load(HERE / "gpt2")
  got, want = (
    capture(model, {"params": params}, x).hidden[-1]
    for model, params in ((model, params), language)
  )
  np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("seed", [1, 2])
def test_load_gives_the_logits_of_the_installed_transformers(seed, tmp_path):
  pytest.importorskip("transformers")
  found, want = make.make(seed)
  for kind, theirs in found.items():
    theirs.save_pretrained(tmp_path / kind)
    model, params = pretrained.load(tmp_path / kind)
    got = logits(model, params, INPUTS[kind])
    np.testing.assert_allclose(got, want[kind], atol=1e-5)


@pytest.mark.parametrize("name", ["transformer", "neutreno"])
@pytest.mark.slow
def test_load_gives_the_spans_of_transformers(name, tmp_path):
  """Both segments have their vectors, and a head for questions is read."""
  folder = shutil.copytree(HERE / "bert", tmp_path / "bert")
  tensors = safetensors.numpy.load_file(folder / "model.safetensors")
  tensors["qa_outputs.weight"] = np.eye(2, 12, dtype=np.float32)
  tensors["qa_outputs.bias"] = np.zeros(2, np.float32)
  safetensors.numpy.save_file(tensors, folder / "model.safetensors")
  sizes = {"objective": "spans", "separator": 29, "num_classes": 0}
  options = {"pool": "mean", "head_dim": 0}
  if name == "neutreno":
    options["mixer"] = {"fidelity": 0.0}  # The same model then.
  model, params = pretrained.load(folder, name, **sizes, **options)
  ids, segments = make.pairs()
  want = np.array(json.loads((HERE / "logits.json").read_text())["pairs"])
  got = logits(model, params, jnp.asarray(ids))
  at = ids > 0
  np.testing.assert_allclose(np.asarray(got)[at], want[at], atol=1e-5)
  assert (segments[at] == 1).any()
  # Other models of these weights take no head for questions.
  _, plain = pretrained.load(folder)
  assert "decoder" not in plain


@pytest.mark.slow
def test_load_cuts_text_positions_for_shorter_sequences():
  model, params = pretrained.load(HERE / "bert", max_len=6)
  _, whole = pretrained.load(HERE / "bert")
  short, long = (
    p["encoder"]["embedding"]["positions"] for p in (params, whole)
  )
  np.testing.assert_array_equal(short, long[:6])
  assert logits(model, params, IDS[:, :6]).shape == (3, 3)


@pytest.mark.slow
def test_load_accepts_another_image_size_and_classes():
  model, params = pretrained.load(HERE / "vit", image=(24, 24, 3))
  x = jnp.zeros((1, 24, 24, 3))
  assert logits(model, params, x).shape == (1, 5)
  model, params = pretrained.load(
    HERE / "vit", num_classes=7, mixer={"learn_fidelity": True}
  )
  assert params["head"]["logits"]["kernel"].shape == (12, 7)
  assert logits(model, params, IMAGES).shape == (3, 7)
  assert float(params["encoder"]["layer_1"]["mixer"]["fidelity"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vit", "bert"])
def test_load_makes_a_new_head_of_as_many_classes_as_the_file(kind):
  model, theirs = pretrained.load(HERE / kind)
  classes = theirs["head"]["logits"]["kernel"].shape[1]
  _, params = pretrained.load(HERE / kind, num_classes=classes)
  start = initial.params(model, jax.tree.leaves(model.example())[0])
  chex.assert_trees_all_equal(params["head"]["logits"], start["head"]["logits"])
  chex.assert_trees_all_equal(params["encoder"], theirs["encoder"])


def test_positions_of_images_that_are_not_square_are_not_resized():
  # 2 x 8 patches are as many as the 4 x 4 of the file.
  with pytest.raises(UserError, match="16 x 16.*8 x 32.*square"):
    pretrained.load(HERE / "vit", image=(8, 32, 3))


def test_models_of_other_layers_are_refused():
  sizes = dict(max_len=8, vocab_size=16, num_classes=2)
  model = models.build("isometric", d_model=8, num_layers=1, **sizes)
  start = initial.params(model, IDS)
  with pytest.raises(UserError, match="another architecture"):
    pretrained.take(HERE / "bert", start)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"d_model": 24}, r"layer_0/mixer/key/kernel .*\(24, 3, 8\)"),
    ({"num_layers": 3}, "16 tensors.*layer_2"),
    ({"num_layers": 1}, r"16 tensors.*encoder\.layer\.1"),
    ({"block": {"mlp_dim": 12}}, r"up/kernel .*\(12, 12\).*\(24, 12\)"),
    ({"patch_size": 8}, "patches/kernel"),
    ({"mixer": {"use_bias": False}}, r"8 tensors.*query\.bias"),
  ],
)
@pytest.mark.slow
def test_load_refuses_another_architecture_by_its_tensors(changes, message):
  with pytest.raises(ValueError, match=f"(?s){message}"):
    pretrained.load(HERE / "vit", **changes)


@pytest.mark.slow
def test_load_compares_heads_even_if_shapes_fit():
  model, start = pretrained.load(HERE / "vit", mixer={"num_heads": 2})
  assert models.size(model)
  with pytest.raises(ValueError, match="3 heads.*num_heads=3"):
    pretrained.parameters(HERE / "vit", start)
  other, _ = pretrained.load(HERE / "bert")
  ids = initial.params(other, IDS)
  with pytest.raises(ValueError, match="(?s)embedding/norm/bias"):
    pretrained.parameters(HERE / "vit", ids)


def test_load_accepts_tensor_names_of_other_releases(tmp_path):
  shutil.copytree(HERE / "bert", tmp_path / "bert")
  tensors = safetensors.numpy.load_file(HERE / "bert" / "model.safetensors")
  renamed = {
    name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
      "LayerNorm.bias", "LayerNorm.beta"
    ): value
    for name, value in tensors.items()
    if not name.startswith("classifier")
  }
  renamed["cls.predictions.bias"] = np.zeros(30, np.float32)
  safetensors.numpy.save_file(renamed, tmp_path / "bert" / "model.safetensors")
  _, one = pretrained.load(HERE / "bert")
  # A head that the file lacks is new: a warning, unless it is asked for.
  with pytest.warns(UserWarning, match="has no head/logits/bias, head/logits/"):
    _, two = pretrained.load(tmp_path / "bert")
  pretrained.load(tmp_path / "bert", num_classes=3)
  assert jax.tree.all(
    jax.tree.map(jnp.array_equal, one["encoder"], two["encoder"])
  )


@pytest.mark.parametrize("name", make.DERIVED)
@pytest.mark.slow
def test_load_of_variants_gives_the_logits_of_transformers(name, tmp_path):
  model, params = pretrained.load(make.derive(name, tmp_path / name))
  want = json.loads((HERE / "logits.json").read_text())[name]
  got = logits(model, params, INPUTS["bert" if name == "decoder" else "vit"])
  np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("length", [5, 10, 12])
@pytest.mark.slow
def test_load_cuts_or_repeats_text_positions(length):
  """Also 10, which could be an image with a class token."""
  model, params = pretrained.load(HERE / "bert")
  ids = IDS[:, :5]
  want = logits(model, params, ids)
  model, params = pretrained.load(HERE / "bert", max_len=length)
  np.testing.assert_allclose(logits(model, params, ids), want, atol=1e-6)
  table = params["encoder"]["embedding"]["positions"]
  np.testing.assert_array_equal(table[9:], table[: max(length - 9, 0)])
  assert len(table) == length


def with_fields(folder, kind, **fields):
  """A copy of a model whose config.json has other fields."""
  shutil.copytree(HERE / kind, folder)
  path = folder / "config.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | fields))
  return folder


def test_load_refuses_positions_unlike_the_config(tmp_path):
  folder = with_fields(tmp_path / "a", "bert", max_position_embeddings=8)
  with pytest.raises(
    ValueError, match=r"(?s)embedding/positions .*\(8, 12\).*\(9, 12\)"
  ):
    pretrained.load(folder)


@pytest.mark.parametrize(
  "name", ["TokenClassification", "QuestionAnswering", "MultipleChoice"]
)
def test_load_does_not_take_the_head_of_another_task(name, tmp_path):
  architectures = [f"BertFor{name}"]
  folder = with_fields(tmp_path / "a", "bert", architectures=architectures)
  with pytest.raises(ValueError, match=rf"{name}\).*num_classes=N"):
    pretrained.load(folder)
  _, start = pretrained.load(folder, num_classes=3)
  chosen = pretrained.take(folder, start)
  assert chosen.new == ("head/logits/bias", "head/logits/kernel")
  # Labels of tokens are known by the pooler that they lack.
  tensors = safetensors.numpy.load_file(folder / "model.safetensors")
  tensors = {k: v for k, v in tensors.items() if "pooler" not in k}
  safetensors.numpy.save_file(tensors, folder / "model.safetensors")
  config = json.loads((folder / "config.json").read_text())
  del config["architectures"]
  (folder / "config.json").write_text(json.dumps(config))
  with pytest.raises(ValueError, match="no architecture.*num_classes=N"):
    pretrained.load(folder)


def test_load_refuses_incomplete_folders(tmp_path):
  with pytest.raises(ValueError, match=f"{tmp_path}/config.json"):
    pretrained.load(tmp_path)
  shutil.copytree(HERE / "vit", tmp_path / "vit")
  config = json.loads((HERE / "vit" / "config.json").read_text())
  for field, value, message in (
    ("model_type", "swin", "model_type.*'swin'.*bert, deit, gpt2, vit"),
    ("model_type", ["vit"], r"model_type.*\['vit'\].*bert, deit, gpt2, vit"),
    ("hidden_act", "mish", "hidden_act='mish'.*gelu"),
    ("hidden_size", "12", "hidden_size='12'.*config.json"),
    ("patch_size", None, "patch_size=None.*config.json"),
    ("num_hidden_layers", 0, "num_hidden_layers=0.*config.json"),
    ("layer_norm_eps", float("nan"), "layer_norm_eps=nan.*config.json"),
    ("id2label", 3, "id2label.*config.json"),
  ):
    text = json.dumps(config | {field: value})
    (tmp_path / "vit" / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
      pretrained.load(tmp_path / "vit")
  (tmp_path / "vit" / "config.json").write_text(json.dumps(config))
  for text in ("", "{", "[]", '{"model_type": "vit"}', "[" * 100_000):
    (tmp_path / "vit" / "config.json").write_text(text)
    with pytest.raises(ValueError, match="vit/config.json"):
      pretrained.load(tmp_path / "vit")


WHOLE = (HERE / "vit" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
  "content",
  [b"", b"cut short", b"PK\x03\x04" + bytes(100), WHOLE[:-1], WHOLE[:200]],
)
def test_load_names_a_damaged_file_of_weights(tmp_path, content):
  shutil.copytree(HERE / "vit", tmp_path / "vit")
  (tmp_path / "vit" / "model.safetensors").write_bytes(content)
  message = "vit/model.safetensors"
  with pytest.raises(ValueError, match=message):
    pretrained.load(tmp_path / "vit")


@pytest.mark.parametrize(
  "content",
  ["{", "{}", '{"weight_map": []}', '{"weight_map": {"a": "../../b"}}'],
)
def test_load_refuses_a_damaged_list_of_files(tmp_path, content):
  shutil.copytree(HERE / "vit", tmp_path / "vit")
  (tmp_path / "vit" / "model.safetensors").unlink()
  (tmp_path / "vit" / "model.safetensors.index.json").write_text(content)
  with pytest.raises(ValueError, match=r"index\.json.*Download it again"):
    pretrained.load(tmp_path / "vit")


def changed(folder, name, change):
  """A copy of a model in which one tensor is another."""
  shutil.copytree(HERE / folder.name, folder)
  path = folder / "model.safetensors"
  tensors = safetensors.numpy.load_file(path)
  tensors[name] = change(tensors[name].copy())
  safetensors.numpy.save_file(tensors, path)
  return folder


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_load_refuses_values_that_are_not_finite(tmp_path, value):
  name = "vit.encoder.layer.1.output.dense.weight"

  def change(x):
    x = x.astype(np.float64)
    x[0, 1] = value
    return x

  folder = changed(tmp_path / "vit", name, change)
  message = f"vit/model.safetensors.*1 of 288.*'{name}'"
  with pytest.raises(ValueError, match=message):
    pretrained.load(folder)


@pytest.mark.parametrize(
  ("kind", "part", "name", "change"),
  [
    (
      "vit",
      "positions",
      "vit.embeddings.position_embeddings",
      lambda x: x.sum()[None][0:0],
    ),
    (
      "vit",
      "positions",
      "vit.embeddings.position_embeddings",
      lambda x: x.sum(),
    ),
    (
      "vit",
      "patches/kernel",
      "vit.embeddings.patch_embeddings.projection.weight",
      lambda x: np.ascontiguousarray(x.transpose(2, 3, 1, 0)),
    ),
    (
      "bert",
      "tokens/embedding",
      "bert.embeddings.word_embeddings.weight",
      lambda x: np.ascontiguousarray(x.T),
    ),
    (
      "bert",
      "positions",
      "bert.embeddings.token_type_embeddings.weight",
      lambda x: x[:, :1].copy(),
    ),
    (
      "gpt2",
      "tokens/embedding",
      "transformer.wte.weight",
      lambda x: x[:-1].copy(),
    ),
  ],
)
def test_load_refuses_transposed_tensors(tmp_path, kind, part, name, change):
  folder = changed(tmp_path / kind, name, lambda x: np.asarray(change(x)))
  with pytest.raises(ValueError, match=f"(?s)1 tensors.*embedding/{part} "):
    pretrained.load(folder)
