"""Runs that begin with the weights of other runs."""

import functools
import io
import json
import shutil
import types
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
from ml_collections import ConfigDict
from PIL import Image

from jaxformers import config as configs
from jaxformers import inference, models, tasks
from jaxformers.commands import export as export_command
from jaxformers.commands import smoothness, states
from jaxformers.data.engine import vocabularies
from jaxformers.foundations import workdirs
from jaxformers.models import pretrained
from jaxformers.recipes.pretraining import pretraining
from jaxformers.training import loop, origin
from jaxformers.training.run import open_run
from jaxformers.training.trainer import Trainer, begin
from tests.data.archives import write_folder

HUGGING_FACE = Path(__file__).parents[1] / "models" / "pretrained"


@pytest.fixture(scope="module")
def make(smoke):
  """A function that makes a config of seconds of a Transformer."""
  return functools.partial(smoke, "transformer")


@pytest.fixture(scope="module")
def first(make, tmp_path_factory):
  """A trained run of a Transformer on ListOps; do not write there."""
  workdir = tmp_path_factory.mktemp("first") / "run"
  loop.run(make(), workdir)
  return workdir


def trainer_of(config, workdir):
  return Trainer(open_run(config, workdir))


def test_trainer_begins_with_the_best_weights_of_another_run(
  first, make, tmp_path
):
  begun = trainer_of(make(pretrained=str(first), seed=1), tmp_path / "b")
  best = states.load(first)
  chex.assert_trees_all_equal(
    *map(jax.device_get, (begun.state.params, best.params))
  )
  record = begun.origin
  assert record["new"] == record["resized"] == []
  assert (record["step"], record["task"]) == (best.step, "listops")
  assert record["differing_options"] == []
  assert len(record["sha256"]) == 64


@pytest.mark.slow
def test_trainer_begins_alike_with_an_exported_model(first, make, tmp_path):
  out = tmp_path / "model"
  export_command.main([str(first), f"--out={out}", "--length=20"])
  one, two = (
    trainer_of(make(pretrained=str(path), seed=1), tmp_path / path.name)
    for path in (first, out)
  )
  chex.assert_trees_all_equal(one.state.params, two.state.params)
  assert one.origin["sha256"] == two.origin["sha256"]
  (out / "model.json").write_text("{}")
  with pytest.raises(ValueError, match=r"model\.json.*digest"):
    trainer_of(make(pretrained=str(out)), tmp_path / "c")


def test_results_record_the_origin_of_a_run(first, make, tmp_path, capsys):
  fields = {"pretrained": str(first), "seed": 1, "total_steps": 5}
  results = loop.run(make(**fields), tmp_path / "next")
  assert results["pretrained"] == origin.read_record(tmp_path / "next")
  assert results["pretrained"]["folder"] == str(first)
  assert f"of {first}, step" in capsys.readouterr().err
  # Taken up again, it needs no other run, and says the same.
  (tmp_path / "next" / "results.json").unlink()
  gone = tmp_path / "gone"
  first.rename(gone)
  again = loop.run(make(**fields), tmp_path / "next")
  gone.rename(first)
  assert again["accuracy"] == results["accuracy"]
  assert again["pretrained"] == results["pretrained"]
  assert "pretrained" not in workdirs.read_results(first)


def test_origin_record_makes_a_relative_path_absolute(
  first, make, tmp_path, monkeypatch
):
  monkeypatch.chdir(first.parent)
  begun = trainer_of(make(pretrained=first.name, seed=1), tmp_path / "b")
  assert begun.origin["folder"] == str(first)


@pytest.mark.slow
def test_results_ignore_the_origin_record_of_another_start(
  first, make, tmp_path
):
  """A run stopped before its first checkpoint, and began without weights."""
  workdir = tmp_path / "b"
  begun = trainer_of(make(pretrained=str(first), total_steps=5), workdir)
  begin(begun.run, begun.origin)
  assert "pretrained" not in loop.run(make(total_steps=5), workdir)


@pytest.mark.long
def test_load_start_of_a_pretrained_run_checks_its_origin(
  first, make, tmp_path
):
  weights = tmp_path / "weights"
  shutil.copytree(first, weights)
  workdir = tmp_path / "next"
  loop.run(make(pretrained=str(weights), seed=1, total_steps=5), workdir)
  start = states.load(workdir, untrained=True)
  best = states.load(first)
  chex.assert_trees_all_equal(*map(jax.device_get, (start.params, best.params)))
  # Weights that have changed since are not those of the start.
  shutil.rmtree(weights)
  loop.run(make(seed=3, total_steps=5), weights)
  with pytest.raises(ValueError, match="other weights than those"):
    states.load(workdir, untrained=True)
  assert states.load(workdir).start is None


@pytest.mark.long
def test_trainer_refuses_causal_weights_for_a_bidirectional_model(
  smoke, tmp_path
):
  config = smoke("s5", total_steps=5, select="loss", eval_steps=5)
  with config.unlocked():
    config.task.objective = "causal"
  config.model.update(head_dim=0, pool="mean")
  config.reference.update(head_dim=0, pool="mean")
  loop.run(config, tmp_path / "a")
  fields = {"pretrained": str(tmp_path / "a")}
  with pytest.raises(ValueError, match="--config.model.mixer.causal=true"):
    trainer_of(smoke("s5", **fields), tmp_path / "b")


def test_origin_describe_names_options_that_differ(first, make, tmp_path):
  fields = {"pretrained": str(first), "model.block.dropout_rate": 0.5}
  begun = trainer_of(make(**fields), tmp_path / "b")
  assert begun.origin["differing_options"] == ["block.dropout_rate: 0.1 -> 0.5"]
  text = origin.describe(begun.origin)
  assert "Differs: block.dropout_rate: 0.1 -> 0.5." in text


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"model.num_layers": 3}, "(?s)16 tensors.*layer_2"),
    ({"model.block.mlp_dim": 4}, "up/kernel"),
  ],
)
def test_trainer_refuses_weights_of_another_model(
  first, make, tmp_path, fields, message
):
  with pytest.raises(ValueError, match=message):
    trainer_of(make(pretrained=str(first), **fields), tmp_path / "b")
  assert not (tmp_path / "b" / "config.json").exists()


@pytest.mark.slow
def test_trainer_refuses_weights_of_another_orthogonal_map(smoke, tmp_path):
  loop.run(smoke(total_steps=5), tmp_path / "a")
  fields = {"pretrained": str(tmp_path / "a"), "model.orthogonal_map": "expm"}
  with pytest.raises(ValueError, match="--config.model.orthogonal_map=cay"):
    Trainer(open_run(smoke(**fields), tmp_path / "b"))


def test_trainer_refuses_a_folder_that_is_no_run(first, make, tmp_path):
  begin = {"pretrained": str(tmp_path)}
  with pytest.raises(ValueError, match=f"{tmp_path}/config.json"):
    trainer_of(make(**begin), tmp_path / "b")
  (tmp_path / "seed_1").mkdir()
  with pytest.raises(ValueError, match="several seeds.*seed_1"):
    trainer_of(make(**begin), tmp_path / "b")
  shutil.copy(first / "config.json", tmp_path)
  with pytest.raises(ValueError, match="checkpoints.*config.eval_steps"):
    trainer_of(make(**begin), tmp_path / "b")


def test_origin_digest_covers_the_weights_taken(first, make, tmp_path):
  begun = trainer_of(make(pretrained=str(first)), tmp_path / "b")
  params = jax.device_get(begun.state.params)
  kernel = params["head"]["logits"]["kernel"]
  changed = {**params, "head": {**params["head"]}}
  changed["head"]["logits"] = {
    **params["head"]["logits"],
    "kernel": np.asarray(kernel) + 1,
  }
  digests = [
    origin._record(tree, new=new)["sha256"]
    for tree, new in (
      (params, ()),
      (changed, ()),
      (params, ("head/logits/kernel",)),
      (changed, ("head/logits/kernel",)),
    )
  ]
  assert digests[0] == begun.origin["sha256"]
  assert digests[0] != digests[1]
  assert digests[2] == digests[3]


OBJECTIVE = {"objective": "masked", "size": "tiny", "model": "transformer"}


class KilledError(BaseException):
  pass


@pytest.mark.long
def test_pretraining_and_fine_tuning_resume_bitwise(
  make, tmp_path, monkeypatch
):
  """Masked tokens, then classes; each is killed, and taken up again."""

  def phases(folder, *, kills):
    masked = pretraining(make(), ConfigDict(OBJECTIVE))
    masked.model.head_dim = 0
    first, second = folder / "pretraining", folder / "tuning"
    tuned = make(pretrained=str(first), seed=1)
    for config, workdir in ((masked, first), (tuned, second)):
      if kills:
        with monkeypatch.context() as patch, pytest.raises(KilledError):
          patch.setattr(loop._Loop, "boundary", killed_at(8))
          loop.run(config, workdir)
      results = loop.run(config, workdir)
    return results, states.load(second).params

  def killed_at(step):
    real = loop._Loop.boundary

    def boundary(self, now, is_preempted):
      if now == step:
        raise KilledError
      real(self, now, is_preempted)

    return boundary

  (want, params), (got, again) = (
    phases(tmp_path / name, kills=name == "killed")
    for name in ("straight", "killed")
  )
  chex.assert_trees_all_equal(*map(jax.device_get, (params, again)))
  assert (got["accuracy"], got["loss"]) == (want["accuracy"], want["loss"])
  record = got["pretrained"]
  assert record["sha256"] == want["pretrained"]["sha256"]
  assert {path.split("/")[0] for path in record["new"]} == {"head"}
  assert record["resized"] == ["encoder/embedding/tokens/embedding"]
  assert record["unused"] == ["decoder/bias", "decoder/kernel"]
  assert all(path.startswith("head/") for path in record["new"])


def taken(spec, folder, *overrides, is_command=True, workdir=Path("none")):
  """The config of a command, with what a folder determines."""
  overrides = [f"--config.{item}" for item in overrides]
  overrides += [f"--config.pretrained={folder}"]
  config = configs.complete(configs.load_with(spec, overrides))
  chosen = configs.values_of(overrides) if is_command else None
  return origin.take_fields(config, workdir, chosen)


def with_preprocessor(tmp_path, **fields):
  """A copy of a ViT with a preprocessor_config.json."""
  folder = tmp_path / "vit"
  shutil.copytree(HUGGING_FACE / "vit", folder)
  path = folder / "preprocessor_config.json"
  path.write_text(json.dumps({"image_mean": [0.2, 0.3, 0.4]} | fields))
  return folder


def test_load_with_takes_the_sizes_of_a_vit(tmp_path):
  folder = with_preprocessor(tmp_path)
  got = taken("vision/imagenet:deit=small", folder)
  for section in ("model", "reference"):
    fields = got[section]
    assert (fields["d_model"], fields["num_layers"]) == (12, 2)
    assert (fields["patch_size"], fields["mixer"]) == (4, {"num_heads": 3})
    assert (fields["block"]["mlp_dim"], fields["pool"]) == (24, "cls")
    assert fields["block"]["norm_epsilon"] == 1e-12
  assert (got["task"]["size"], got["task"]["mean"]) == (16, [0.2, 0.3, 0.4])
  assert got["task"]["deviation"] == [0.5] * 3
  # What is chosen stays where weights can have it.
  chosen = ("task.size=32", "model.block.norm_epsilon=0.1", "task.mean=0,0,0")
  got = taken("vision/imagenet", folder, *chosen)
  assert (got["task"]["size"], got["task"]["mean"]) == (32, [0, 0, 0])
  assert got["model"]["block"]["norm_epsilon"] == 0.1
  assert got["reference"]["block"]["norm_epsilon"] == 1e-12
  # Windows of scenes keep their size.
  assert taken("vision/ade20k", folder)["task"]["window"] == 512


def test_load_with_names_all_conflicting_overrides(tmp_path):
  folder = HUGGING_FACE / "vit"
  chosen = ("model.d_model=16", "model.mixer_defaults.num_heads=4")
  with pytest.raises(ValueError, match="3 heads.*model 4") as error:
    taken("vision/imagenet", folder, *chosen)
  flags = {"--config.model.d_model=12", "--config.model.mixer.num_heads=3"}
  assert flags == {w for w in str(error.value).split() if w[:2] == "--"}
  # From Python the config says what is wanted, and the message all of it.
  with pytest.raises(ValueError, match="4 pixels.*16.*3 heads") as error:
    taken("vision/imagenet:deit=small", folder, is_command=False)
  flags = [word for word in str(error.value).split() if word[:2] == "--"]
  got = taken("vision/imagenet", folder, *(f[9:] for f in flags))
  assert got["model"]["d_model"] == 12
  assert len(flags) == 5


def test_load_with_takes_the_sizes_of_a_bert(tmp_path):
  folder = tmp_path / "bert"
  shutil.copytree(HUGGING_FACE / "bert", folder)
  with pytest.raises(ValueError, match="30 tokens.*vocab.txt.*tokenizer.json"):
    taken("short/bert", folder)
  (folder / "vocab.txt").write_text("[PAD]\n")
  got = taken("short/bert", folder)
  assert (got["model"]["d_model"], got["model"]["head_dim"]) == (12, 12)
  assert got["task"]["max_len"] == 9
  assert got["task"]["vocabulary"] == str(folder / "vocab.txt")
  got = taken("short/bert", folder, "task.max_len=5", "task.vocabulary=a")
  assert (got["task"]["max_len"], got["task"]["vocabulary"]) == (5, "a")
  # A decoder, and another activation.
  config = json.loads((folder / "config.json").read_text())
  config |= {"is_decoder": True, "hidden_act": "relu"}
  (folder / "config.json").write_text(json.dumps(config))
  got = taken("short/bert", folder)["model"]
  assert (got["mixer"]["causal"], got["block"]["activation"]) == (True, "relu")


def test_load_with_takes_the_sizes_of_a_gpt2(tmp_path):
  folder = shutil.copytree(HUGGING_FACE / "gpt2", tmp_path / "gpt2")
  got = taken("lm/text:model=neutreno", folder)
  model = got["model"]
  assert (model["d_model"], model["mixer"]["num_heads"]) == (12, 3)
  assert (model["positions"], model["embedding"]["scale"]) == ("learned", 1.0)
  assert model["block"]["activation"] == "gelu_tanh"
  assert got["task"]["vocabulary"] == str(folder / "tokenizer.json")
  assert got["task"]["max_len"] == 16
  # A list of word pieces is not the vocabulary of a language model.
  (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n")
  got = taken("lm/text", folder)
  assert got["task"]["vocabulary"] == str(folder / "tokenizer.json")
  (folder / "tokenizer.json").unlink()
  with pytest.raises(ValueError, match="281 tokens.*tokenizer.json"):
    taken("lm/text", folder)


@pytest.mark.slow
def test_trainer_begins_with_a_gpt2(tmp_path, capsys):
  folder = HUGGING_FACE / "gpt2"
  texts = tmp_path / "texts"
  texts.mkdir()
  for split in ("train", "valid", "test"):
    (texts / f"{split}.txt").write_text("the actor of the film " * 40)
  steps = ("total_steps", "eval_steps", "log_steps", "checkpoint_steps")
  overrides = [
    *(f"--config.{name}=1" for name in steps),
    "--config.batch_size=8",
    "--config.schedule.warmup_steps=0",
    "--config.schedule.learning_rate=1e-30",
    f"--config.data_dir={tmp_path / 'data'}",
    f"--config.task.archive={texts}",
    f"--config.pretrained={folder}",
  ]
  config = configs.load_with("lm/text", overrides)
  loop.run(config, tmp_path / "run", chosen=configs.values_of(overrides))
  record = origin.read_record(tmp_path / "run")
  assert record["new"] == ["bias_0"] and record["differing_options"] == []
  prompts = ["the film", "of"]
  got, want = (
    inference.load(path).outputs(prompts) for path in (tmp_path / "run", folder)
  )
  np.testing.assert_allclose(got, want, atol=1e-4)
  # The analyses measure GPT-2 as a run that begins with it.
  smoothness.main([str(tmp_path / "run"), "--samples=4", "--length=8"])
  assert "cosine" in capsys.readouterr().out
  # Another vocabulary is refused, with the remedy.
  path = tmp_path / "tokenizer.json"
  content = json.loads((folder / "tokenizer.json").read_text())
  vocab = content["model"]["vocab"]
  vocab["!"], vocab["#"] = vocab["#"], vocab["!"]
  path.write_text(json.dumps(content))
  overrides.append(f"--config.task.vocabulary={path}")
  config = configs.load_with("lm/text", overrides)
  with pytest.raises(ValueError, match=f"task.vocabulary={folder}"):
    loop.run(config, tmp_path / "b", chosen=configs.values_of(overrides))


def test_load_with_takes_no_bert_head_for_models_without_a_head(tmp_path):
  folder = tmp_path / "bert"
  shutil.copytree(HUGGING_FACE / "bert", folder)
  (folder / "vocab.txt").write_text("[PAD]\n")
  sizes = {"vocab_size": 30, "max_len": 9}
  for spec, objective in (
    ("short/squad", "spans"),
    ("lm/text", "language_model"),
    ("short/simcse", "sentences"),
  ):
    got = taken(spec, folder)["model"]
    assert got["d_model"] == 12
    assert models.build(**got, **sizes, objective=objective)


@pytest.mark.slow
def test_load_with_takes_the_pool_of_a_distilled_deit(tmp_path):
  import tests.models.test_pretrained as tests_of_pretrained

  make = tests_of_pretrained.make
  folder = make.derive("teacher", tmp_path / "teacher")
  assert taken("vision/imagenet", folder)["model"]["pool"] == "distilled"
  with pytest.raises(ValueError, match="--config.model.pool=distilled"):
    taken("vision/imagenet", folder, "model.pool=cls")


def test_load_with_takes_the_sizes_of_a_run(first):
  spec = "lra/listops:size=tiny,model=transformer"
  got = taken(spec, first)["model"]
  assert (got["d_model"], got["num_layers"]) == (16, 2)
  got = taken(spec, first, is_command=False)["model"]
  assert got["d_model"] == 64


def test_trainer_names_all_options_that_differ_from_the_weights(
  first, make, tmp_path
):
  fields = {"model.num_layers": 3, "model.block.mlp_dim": 4}
  with pytest.raises(
    ValueError, match=r"layer_0/down/kernel .*\(4, 16\)"
  ) as error:
    trainer_of(make(pretrained=str(first), **fields), tmp_path / "b")
  flags = [word for word in str(error.value).split() if word[:2] == "--"]
  assert "--config.model.num_layers=2" in flags
  assert any(flag.startswith("--config.model.block.mlp_dim=") for flag in flags)
  assert len(flags) == 2


@pytest.mark.long
def test_run_normalises_pixels_as_its_pretrained_weights(tmp_path):
  rng = np.random.default_rng(0)
  files = {}
  for name in ("train", "val"):
    for k in range(15):
      file = io.BytesIO()
      pixels = rng.integers(0, 256, (16, 16, 3), np.uint8)
      Image.fromarray(pixels).save(file, "PNG")
      files[f"{name}/{k % 5}/{k}.png"] = file.getvalue()
  archive = write_folder(tmp_path / "images", files)
  folder = with_preprocessor(tmp_path, rescale_factor=1 / 127.5)
  steps = ("total_steps", "eval_steps", "log_steps", "checkpoint_steps")
  overrides = [
    *(f"--config.{name}=1" for name in steps),
    "--config.batch_size=4",
    "--config.schedule.warmup_steps=0",
    "--config.schedule.learning_rate=1e-30",
    f"--config.data_dir={tmp_path}",
    f"--config.task.archive={archive}",
    "--config.task.augment.repeats=1",
    f"--config.pretrained={folder}",
    "--config.eval_batch_size=4",
  ]
  config = configs.load_with("vision/imagenet", overrides)
  chosen = configs.values_of(overrides)
  loop.run(config, tmp_path / "run", chosen=chosen)
  record = origin.read_record(tmp_path / "run")
  assert record["new"] == record["differing_options"] == []
  # Pixels of users are read so, too.
  model, params = pretrained.load(folder)
  x = rng.integers(0, 256, (3, 16, 16, 3), np.uint8)
  normalised = (x / 127.5 - [0.2, 0.3, 0.4]) / 0.5
  want = model.apply({"params": params}, np.float32(normalised), train=False)
  got = inference.load(tmp_path / "run").outputs(x)
  np.testing.assert_allclose(got, want, atol=1e-4)
  # Another run that begins with this one reads pixels in the same way.
  task = taken("vision/imagenet", tmp_path / "run")["task"]
  assert (task["mean"], task["deviation"]) == ([0.1, 0.15, 0.2], [0.25] * 3)
  # The same command resumes without the folder.
  shutil.rmtree(folder)
  opened = open_run(config, tmp_path / "run", chosen=chosen)
  assert opened.config.as_dict() == workdirs.read_config(tmp_path / "run")


def test_normalise_refuses_statistics_of_other_channels():
  pixels = np.zeros((4, 4, 4, 3), np.uint8)
  task = tasks.from_arrays((pixels, np.arange(4) % 2))
  got = tasks.normalise(task, (0.5,) * 3, (0.25,) * 3)
  assert (got.splits["train"].batch(np.arange(1))["inputs"] == -2).all()
  assert got.inputs.reading["mean"] == [0.5] * 3
  assert tasks.normalise(task) is task
  with pytest.raises(ValueError, match=r"task.mean=\[0.5\].*1 channels.*3"):
    tasks.normalise(task, (0.5,))
  texts = tasks.from_arrays((["a", "b"], [0, 1]))
  with pytest.raises(ValueError, match="task.mean.*arrays"):
    tasks.normalise(texts, (0.5,))


@pytest.mark.slow
def test_begin_with_refuses_weights_of_another_tokenizer(tmp_path):
  pieces = {piece: k for k, piece in enumerate(vocabularies.SPECIAL)}
  task = types.SimpleNamespace(
    tokenizer="word_pieces",
    tokenizer_json=vocabularies.from_vocabulary(pieces).to_str(),
  )
  (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
  with pytest.raises(
    ValueError, match=f"normalizer.*config.task.vocabulary={tmp_path}"
  ):
    origin.begin_with(tmp_path, {}, {}, task)
