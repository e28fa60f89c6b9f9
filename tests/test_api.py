"""`import jaxformers as jf`: its names, and training from Python."""

import importlib
import os
import pydoc
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import numpy as np
import pytest

import jaxformers as jf
from jaxformers.commands import export as export_command
from jaxformers.commands import states
from jaxformers.foundations import workdirs

ROOT = Path(__file__).parents[1]
TINY = {
  "model.d_model": 8,
  "model.num_layers": 1,
  "batch_size": 8,
  "total_steps": 6,
  "eval_steps": 3,
  "checkpoint_steps": 3,
  "schedule.warmup_steps": 2,
  "eval_batch_size": 8,
  "buckets": 1,
}
TEXTS = [f"{'good' if k % 2 else 'bad'} number {k}" for k in range(40)]
LABELS = ["good" if k % 2 else "bad" for k in range(40)]


def test_every_public_name_has_a_docstring():
  for name in dir(jf):
    value = getattr(jf, name)
    assert value is not None
    if callable(value) and not name.isupper():
      assert value.__doc__.strip(), name
  with pytest.raises(AttributeError, match="attribute.*'trian'"):
    _ = jf.trian


def test_type_stub_lists_the_public_names():
  source = (ROOT / "jaxformers" / "__init__.py").read_text()
  listed = source.partition("if TYPE_CHECKING:")[2].partition("\n\n")[0]
  names = {line.split()[-1] for line in listed.strip().splitlines()}
  assert names == {name for name in dir(jf) if not name.startswith("__")}
  assert (ROOT / "jaxformers" / "py.typed").exists()
  assert typing.get_type_hints(jf.train)["return"] is jf.TrainedModel


def test_help_begins_with_one_screen():
  text = pydoc.plain(pydoc.render_doc(jf))
  description = text.partition("PACKAGE CONTENTS")[0]
  assert len(description.splitlines()) < 35
  for name in ("train", "load", "build", "tasks", "mixers", "linear_scan"):
    assert name in description


def test_import_jaxformers_imports_no_other_library():
  code = (
    "import sys, jaxformers; "
    "assert not {'jax', 'numpy', 'flax'} & set(sys.modules), sys.modules"
  )
  subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture(scope="module")
def texts_model(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("api") / "texts"
  spec = "lra/text:size=tiny,model=transformer"
  return jf.train(
    spec, workdir, train=(TEXTS, LABELS), options=TINY, max_len=20
  )


def test_train_on_texts_in_memory(texts_model):
  (prediction,) = texts_model.predict(["a good one"])
  assert prediction.label in ("good", "bad")
  assert texts_model.results["selection"] == "test"
  assert texts_model.results["examples"] == 4
  # The examples that select the checkpoint are no test split.
  assert "held-out accuracy" in repr(texts_model)


def test_load_gives_no_results_of_another_checkpoint(texts_model, tmp_path):
  """As of a run that was made longer, and has not ended."""
  folder = shutil.copytree(texts_model.folder, tmp_path / "run")
  results = workdirs.read_results(folder)
  workdirs.write(folder, "results.json", results | {"best_step": 99_999})
  model = jf.load(folder)
  assert model.step == texts_model.step and not model.results


def test_train_refuses_what_has_no_effect_on_own_examples(tmp_path):
  spec = "lra/text:size=tiny,model=transformer"
  options = TINY | {"task.max_len": 20}
  with pytest.raises(ValueError, match="'task.max_len'.*no effect"):
    jf.train(spec, tmp_path, train=(TEXTS, LABELS), options=options)
  with pytest.raises(ValueError, match="^max_len, test describe"):
    jf.train(spec, tmp_path, test=(TEXTS, LABELS), max_len=5)
  with pytest.raises(ValueError, match="^max_len describe"):
    jf.train(spec, tmp_path, max_len=5)


def test_train_resumes_with_the_same_examples_only(texts_model):
  spec = "lra/text:size=tiny,model=transformer"
  sizes = {"options": TINY, "max_len": 20}
  pairs = zip(TEXTS, LABELS, strict=True)
  again = jf.train(spec, texts_model.folder, train=pairs, **sizes)
  np.testing.assert_array_equal(
    again.outputs(TEXTS), texts_model.outputs(TEXTS)
  )
  with pytest.raises(ValueError, match=r"(?s)results\.json.*data: "):
    jf.train(spec, texts_model.folder, train=(TEXTS[::-1], LABELS), **sizes)

  with pytest.raises(ValueError, match="were given in Python"):
    _ = states.load(texts_model.folder).task


@pytest.mark.parametrize(
  ("config", "make", "options"),
  [
    pytest.param(
      "lra/image:size=tiny,model=s5,protocol=s4",
      lambda rng: rng.normal(size=(40, 16)),
      {},
      marks=pytest.mark.long,
    ),
    pytest.param(
      "vision/cifar10:size=tiny,model=neutreno",
      lambda rng: rng.integers(0, 256, (40, 8, 8, 3), np.uint8),
      {},
      marks=pytest.mark.slow,
    ),
    pytest.param(
      "lra/listops:size=tiny,model=transject",
      lambda rng: rng.integers(1, 9, (40, 12)),
      {},
      marks=pytest.mark.long,  # Ids are masked below.
    ),
    (
      "lra/listops:size=tiny,model=transformer,objective=masked",
      lambda rng: rng.integers(1, 9, (40, 12)),
      {},
    ),
  ],
)
@pytest.mark.slow
def test_train_on_arrays_in_memory(config, make, options, tmp_path):
  x = make(np.random.default_rng(0))
  y = np.arange(40) % 3
  model = jf.train(
    config,
    tmp_path,
    train=(x[:30], y[:30]),
    validation=(x[30:35], y[30:35]),
    test=(x[35:], y[35:]),
    options=TINY | options,
  )
  assert model.outputs(x[:3]).shape[0] == 3
  assert model.results["selection"] == "validation"


@pytest.mark.slow
def test_train_refuses_other_class_names_in_the_same_folder(texts_model):
  """Nothing in the folder of the run is changed."""
  before = texts_model.outputs(TEXTS[:2])
  with pytest.raises(
    ValueError, match="(?s)results.json.*2 classes.*3 classes"
  ):
    jf.train(
      "lra/text:size=tiny,model=transformer",
      texts_model.folder,
      train=(TEXTS, LABELS),
      classes=("bad", "good", "so"),
      options=TINY,
      max_len=20,
    )
  after = jf.load(texts_model.folder).outputs(TEXTS[:2])
  np.testing.assert_array_equal(before, after)


def test_train_raises_keyboard_interrupt_at_ctrl_c(tmp_path, monkeypatch):
  def stop(*_, **__):
    raise SystemExit(130)

  monkeypatch.setattr("jaxformers.training.loop.run", stop)
  with pytest.raises(KeyboardInterrupt, match="saved"):
    jf.train(
      "lra/listops:size=tiny",
      tmp_path,
      options={"total_steps": np.int64(9), "task.archive": tmp_path},
    )


def test_train_refuses_wrong_arguments(tmp_path):
  with pytest.raises(ValueError, match="validation.*train="):
    jf.train("lra/listops:size=tiny", tmp_path, validation=([[1]], [0]))
  with pytest.raises(ValueError, match="'nowhere'.*jaxformers configs"):
    jf.train("nowhere", tmp_path)
  with pytest.raises(ValueError, match="'total_stepz'.*'total_steps'"):
    jf.train("lra/listops:size=tiny", tmp_path, options={"total_stepz": 1})


PLUGIN = '''
"""Code of a user."""
import flax.linen as nn
import optax
import jaxformers as jf
from jaxformers.training.optim import scale_by_path

@jf.attention("halves")
def halves(q, k, v, *, mask, share: float = 0.5):
  """Adds a share of the values to themselves."""
  return v * share

jf.MODELS.register("halves")(jf.Variant("halves"))

@jf.OPTIMIZERS.register("lion")
def lion(schedule, decays, *, b1: float = 0.9):
  return optax.lion(schedule, b1=b1)

@jf.TASKS.register("letters")
def letters(*, data_dir: str = "", protocol: str = "mine"):
  """Tells a from b."""
  texts = ["aaaa", "bbbb"] * 20
  return jf.tasks.from_arrays((texts, [t[0] for t in texts]))
'''


@pytest.mark.slow
def test_train_save_and_load_with_user_registered_code(tmp_path, monkeypatch):
  """A mixer, an optimiser and a task, named in the config and kept in it."""
  (tmp_path / "of_a_user.py").write_text(PLUGIN)
  config = """
from jaxformers.recipes import lra

def get_config(arg=None):
  from jaxformers import config as c
  config = c.load("lra/text:size=tiny,model=transformer")
  config.imports = "of_a_user"
  config.task = {"name": "letters"}
  config.model.name = "halves"
  config.optimizer = {"name": "lion", "b1": 0.8}
  return config
"""
  (tmp_path / "config.py").write_text(config)
  monkeypatch.chdir(tmp_path)
  for registry in (jf.MIXERS, jf.MODELS, jf.TASKS, jf.OPTIMIZERS):
    monkeypatch.setattr(registry, "data", dict(registry.data))
  try:
    model = jf.train("config.py", "run", options=TINY)
    assert model.predict(["aaaa"])[0].label in ("a", "b")
    # It is analysed, exported and opened again.
    from jaxformers.commands import states

    assert states.load("run").model.config.name == "halves"
    export_command.main(["run", "--out=out", "--length=4"])
    assert jf.load("out").config["name"] == "halves"
    # In another process, too, from each folder.
    jf.load("out").save("saved")
    code = (
      "import jaxformers as jf;print(jf.load({!r}, trust=True).config['name'])"
    )
    for folder in ("out", "saved"):
      ran = subprocess.run(
        [sys.executable, "-c", code.format(folder)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
      )
      assert ran.stdout.split() == ["halves"]
  finally:
    sys.modules.pop("of_a_user", None)
  (tmp_path / "of_a_user.py").unlink()
  importlib.invalidate_caches()
  with pytest.raises(ValueError, match=r"imports='of_a_user'.*PYTHONPATH"):
    jf.load("run", trust=True)
  with pytest.raises(ValueError, match="'of_a_user'.*--trust"):
    jf.load("run")


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (
      lambda: jf.train("lm/text", "run", max_length=10),
      "train.*'max_length'.*'max_len'",
    ),
    (lambda: jf.train("lm/text", "run", tset=[]), "train.*'tset'.*'test'"),
    (lambda: jf.load(folde="run"), "load.*'folde'.*'folder'"),
    (
      lambda: jf.build("transfomer", max_len=10),
      "model.*'transfomer'.*'transformer'",
    ),
    (lambda: jf.build("transformer", max_length=1), "'max_length'.*'max_len'"),
    (lambda: jf.encoder("transfomer"), "model.*'transfomer'.*'transformer'"),
    (lambda: jf.encoder("lru", num_layer=10), "'num_layer'.*'num_layers'"),
    (
      lambda: jf.encoder("lru", num_classes=10),
      "encoder.*'num_classes'.*max_len",
    ),
    (lambda: jf.generate(temprature=1), "'temprature'.*'temperature'"),
    (lambda: jf.linear_scan(axes=1), "linear_scan.*'axes'.*reverse"),
    (
      lambda: jf.tasks.from_arrays(([], []), max_length=1),
      "from_arrays.*'max_length'.*'max_len'",
    ),
    (
      lambda: jf.tasks.get("listops", max_lenght=1),
      "'listops'.*'max_lenght'.*'max_length'",
    ),
    (
      lambda: jf.TrainedModel.predict(None, batch=1),
      "predict.*'batch'.*'batch_size'",
    ),
  ],
)
def test_unknown_keyword_suggests_the_nearest_one(call, message):
  with pytest.raises(jf.UserError, match=message):
    call()


@pytest.mark.slow
@pytest.mark.long
def test_train_language_model_on_texts_in_memory(tmp_path):
  texts = [f"the film number {k} is good\n" for k in range(40)]
  options = TINY | {"model.mixer_defaults.num_heads": 1, "task.stride": 4}
  spec = "lm/text:size=tiny,model=transformer"
  sizes = {"vocab_size": 270, "max_len": 8}
  model = jf.train(spec, tmp_path, train=texts, options=options, **sizes)
  assert model.results["metric"] == "perplexity"
  assert model.results["selection"] == "test"
  assert model.inputs.max_len == 8
  assert len(model.generate(["the film"], 5)) == 1
  # It goes on with the same texts, and refuses others.
  again = jf.train(spec, tmp_path, train=texts, options=options, **sizes)
  assert again.results == model.results
  with pytest.raises(jf.UserError, match="(?s)results.json.*data: "):
    jf.train(spec, tmp_path, train=texts[::2], options=options, **sizes)
  with pytest.raises(jf.UserError, match="language model.*'classes'"):
    jf.train(spec, tmp_path, train=texts, classes=("a",), options=options)


def test_build_from_model_config_replaces_dtype_and_keeps_parameters():
  sizes = {"vocab_size": 9, "max_len": 8, "d_model": 8, "num_layers": 1}
  model = jf.build("lru", objective="language_model", **sizes)
  assert model.config == jf.ModelConfig(
    "lru", objective="language_model", **sizes
  )
  half = jf.build(model.config, dtype="bfloat16")
  assert half.config.dtype == "bfloat16"
  with pytest.raises(jf.UserError, match="'dtype'"):
    jf.build(model.config, dtyp="bfloat16")
  with pytest.raises(jf.UserError, match="num_classes=0"):
    jf.build("lru", **sizes)


OUTSIDE = '''
import jaxformers as jf

@jf.attention("doubles")
def doubles(v, *, mask):
  """Adds its value to every token."""
  return 2 * v

@jf.attention("leaks")
def leaks(v, *, mask):
  """Adds the mean over padding, too, which is wrong."""
  return v + v.mean(2, keepdims=True)
'''


@pytest.mark.slow
@pytest.mark.long
def test_pytest_imports_option_checks_a_user_mixer(tmp_path):
  (tmp_path / "of_a_user.py").write_text(OUTSIDE)

  def check(name):
    return subprocess.run(
      [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-q",
        "-k",
        "never_read",
        f"--imports={name}",
      ],
      env=os.environ | {"PYTHONPATH": str(tmp_path)},
      cwd=ROOT,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      check=False,
    )

  done = check("of_a_user")
  assert "1 failed, 1 passed" in done.stdout
  assert "test_masked_tokens_are_never_read[leaks]" in done.stdout
  done = check("of_nobody")
  assert "--imports='of_nobody' cannot be imported" in done.stdout
