"""Trained models in use, without their data and optimiser."""

import dataclasses
import gc
import os
import shutil
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest

import jaxformers as jf
from jaxformers import inference, models
from jaxformers.analysis.certificates import certified
from jaxformers.commands import export as export_command
from jaxformers.commands import states
from jaxformers.models import in_float32
from jaxformers.training import loop, run
from tests import initial
from tests.marks import long_except

GPT2 = Path(__file__).parent / "models" / "pretrained" / "gpt2"
TEXTS = ["[MAX 2 [SM 3 9 ] ]", "[MIN 4 1 ]", "7"]


@pytest.fixture(scope="module")
def workdir(smoke, tmp_path_factory):
  """A trained run of TransJect on ListOps; do not write there."""
  folder = tmp_path_factory.mktemp("inference") / "run"
  loop.run(smoke(), folder)
  return folder


@pytest.fixture(scope="module")
def model(workdir):
  return jf.load(workdir)


@pytest.fixture(scope="module")
def isometric(smoke, tmp_path_factory):
  folder = tmp_path_factory.mktemp("isometric") / "run"
  loop.run(smoke("isometric", total_steps=5), folder)
  return jf.load(folder)


def test_predict_gives_the_labels_of_the_run(workdir, model):
  whole = states.load(workdir)
  ids = whole.sample(5, 20)
  want = whole.apply(5)(ids)
  np.testing.assert_allclose(model.outputs(ids), want, atol=1e-5)
  predictions = model.predict(ids, batch_size=2)
  assert [int(p.label) for p in predictions] == want.argmax(-1).tolist()
  for each in predictions:
    assert each.probabilities.sum() == pytest.approx(1)
    assert each.probability == each.probabilities.max()


def test_load_needs_neither_data_nor_optimiser(workdir, monkeypatch):
  monkeypatch.setattr(run.tasks, "get", None)
  monkeypatch.setattr(run.optim, "build_optimizer", None)
  model = jf.load(workdir)
  (prediction,) = model.predict(TEXTS[:1])
  assert prediction.label in tuple("0123456789")
  assert "transject on listops (jaxformers), step" in repr(model)
  assert "test accuracy" in repr(model)


@pytest.mark.parametrize("kind", ["saved", "exported"])
@pytest.mark.slow
def test_saved_model_gives_the_same_outputs(workdir, model, tmp_path, kind):
  folder = tmp_path / kind
  if kind == "saved":
    assert model.save(folder) == folder
  else:
    export_command.main([str(workdir), f"--out={folder}", "--length=20"])
  other = jf.load(folder)
  np.testing.assert_array_equal(other.outputs(TEXTS), model.outputs(TEXTS))
  assert other.classes == model.classes
  # And again, from the folder alone.
  np.testing.assert_array_equal(
    jf.load(other.save(tmp_path / "again")).outputs(TEXTS), model.outputs(TEXTS)
  )


def test_encode_reads_texts_as_the_task(model):
  ids = model.encode(TEXTS)
  assert ids.shape == (3, 7)
  assert model.decode(ids) == TEXTS
  assert model.encode(ids).tolist() == ids.tolist()


def test_encode_cuts_a_long_text_with_a_warning(model):
  longer = f"[MAX {'1 ' * 60}]"
  limit = model.inputs.max_len
  with pytest.warns(UserWarning, match=f"MAX 1 1.*{limit}"):
    assert model.encode([longer]).shape == (1, limit)


def test_hidden_states_have_every_layer(model):
  states, mask = model.hidden_states(TEXTS)
  assert states.shape == (3, 3, 7, 16)
  assert mask.sum(1).tolist() == [7, 4, 1]
  assert np.isfinite(states).all()
  one_by_one = model.hidden_states(TEXTS, batch_size=1)
  np.testing.assert_allclose(one_by_one.states, states, atol=1e-5)
  np.testing.assert_array_equal(one_by_one.mask, mask)


def test_causal_models_are_inverted_from_states_of_any_layer():
  model = jf.load("zoo:language-allpass")
  ids = np.array([[5, 7, 3, 12], [4, 4, 9, 0]])
  hidden = model.hidden_states(ids).states
  back = model.invert(states=hidden[1, :, :3], layer=1)
  np.testing.assert_array_equal(back.inputs, ids[:, :3])
  assert back.recovered is None and back.margins.min() > 10
  # Inputs of unequal lengths, from their own states.
  back = model.invert(ids, layer=2, policy="gradient")
  np.testing.assert_array_equal(back.inputs, ids)
  assert back.recovered == 1.0
  with pytest.raises(ValueError, match="either inputs or states"):
    model.invert()


@pytest.mark.parametrize(
  "name", long_except(("model",), ("model", "isometric"))
)
def test_invert_recovers_the_inputs(name, request):
  back = request.getfixturevalue(name).invert(TEXTS, batch_size=2)
  assert back.texts == tuple(TEXTS)
  assert back.recovered == 1
  assert back.error < 1e-4


@pytest.mark.long
def test_certify_returns_the_greatest_radius_that_holds(isometric):
  ids = isometric.encode(TEXTS)
  labels = isometric.outputs(ids).argmax(-1)
  certificates = isometric.certify(TEXTS)
  assert [c.label for c in certificates] == [str(k) for k in labels]
  sure = certified.certified_accuracy
  exact = in_float32(isometric.model)
  for i, each in enumerate(certificates[:1]):  # Each compiles four programs.
    batch = [{"inputs": ids[i : i + 1], "targets": labels[i : i + 1]}]
    counts = sorted({each.tokens, each.tokens + 1})
    shares = sure(exact, isometric.params, batch, counts, [each.radius])
    assert shares["tokens", each.tokens] == 1
    is_whole = each.tokens == (ids[i] > 0).sum()
    assert shares["tokens", each.tokens + 1] == is_whole
    assert shares["radius", each.radius] == 1
    wider = sure(exact, isometric.params, batch, [], [each.radius * 1.01])
    assert wider["radius", each.radius * 1.01] == 0
  # An example that is classified wrong has none.
  (wrong, *_) = isometric.certify(TEXTS, (labels + 1) % 10)
  assert (wrong.tokens, wrong.radius) == (0, 0)
  # Names are classes, too; what is neither is refused.
  named = isometric.certify(TEXTS, [str(k) for k in labels], batch_size=2)
  assert [c.tokens for c in named] == [c.tokens for c in certificates]
  for label in ("ten", 10, -1, 0.5):
    with pytest.raises(ValueError, match=f"{label!r} .*0, 1, 2"):
      isometric.certify(TEXTS[:1], [label])


def test_certify_takes_the_class_of_the_model_in_float32(monkeypatch):
  """One that computes in bfloat16 may predict another class."""
  model = jf.load("zoo:text-certified")
  half = dataclasses.replace(model.model.config, dtype="bfloat16")
  want = model.certify(["a good film", "bad"])
  model = dataclasses.replace(model, model=models.from_config(half))
  monkeypatch.setattr(jf.TrainedModel, "_outputs", None)
  assert model.certify(["a good film", "bad"]) == want


def test_certify_and_generate_refuse_models_without_them(
  model, workdir, tmp_path
):
  with pytest.raises(ValueError, match="'transject'.*isometric"):
    model.certify(TEXTS)
  with pytest.raises(
    ValueError, match="'language_model'.*'classification'.*`predict`"
  ):
    model.generate(TEXTS, 3)
  with pytest.raises(ValueError, match="nothing.*workdir"):
    jf.load(tmp_path / "nothing")
  with pytest.raises(
    ValueError, match="workdir of a run.*exported model.*Hugging Face"
  ):
    jf.load(tmp_path)


@pytest.mark.slow
def test_generate_continues_a_prompt(smoke, tmp_path):
  texts = tmp_path / "texts"
  texts.mkdir()
  for split in ("train", "valid", "test"):
    (texts / f"{split}.txt").write_text("to be or not to be " * 40)
  options = {
    "task.archive": str(texts),
    "task.tokens": "bytes",
    "d": 0,
    "task.max_len": 16,
    "model.num_layers": 1,
    "model.d_model": 8,
    "model.mixer_defaults.num_heads": 2,
    "total_steps": 2,
    "eval_steps": 2,
    "checkpoint_steps": 2,
    "batch_size": 8,
    "schedule.warmup_steps": 1,
    "data_dir": str(tmp_path / "data"),
  }
  del options["d"]
  model = jf.train("lm/text:size=tiny", tmp_path / "run", options=options)
  first, second = (
    model.generate(["to b", "n"], 5, temperature=0) for _ in range(2)
  )
  assert first == second
  assert len(first) == 2
  assert model.outputs(["to b"]).shape == (1, 4, 257)
  assert model.sample(2, 5).shape == (2, 5)
  # The next token is that of a step of greedy decoding.
  greedy = model.generate(["to b", "n"], 1, temperature=0)
  log_p = model.outputs([model.inputs.encode("to b", closed=False)])
  predictions = model.predict(["to b", "n"])
  for prediction, token in zip(predictions, greedy, strict=True):
    best = prediction.probabilities.argmax()
    assert model.decode([[best]]) == [token]
    assert prediction.label in (token, model.inputs.vocabulary[best])
    assert prediction.probabilities.sum() == pytest.approx(1, abs=1e-5)
    assert prediction.probability == prediction.probabilities.max()
  got = predictions[0].probabilities
  np.testing.assert_allclose(got, np.exp(log_p[0, -1]), rtol=1e-5)
  # A text that is too long is not cut before it is continued.
  for method in (model.predict, lambda texts: model.generate(texts, 1)):
    with pytest.raises(ValueError, match="17 tokens.*at most 16.*shorter"):
      method(["a" * 17])


def test_load_reads_a_gpt2_of_hugging_face(tmp_path):
  model = jf.load(GPT2)
  assert model.encode(["the film"]).tolist() == [[258, 268]]
  texts = ["the film and", "of"]
  hidden = model.hidden_states(texts).states
  assert hidden.shape == (3, 2, 3, 12)
  assert model.invert(texts).texts == tuple(texts)
  assert model.invert(states=hidden[1, :1], layer=1).texts == (texts[0],)
  # States of texts of unequal lengths need the mask.
  both = model.hidden_states(texts)
  back = model.invert(states=both.states[-1], mask=both.mask, progress=True)
  assert back.texts == tuple(texts)
  with pytest.raises(ValueError, match="mask= belongs to states="):
    model.invert(texts, mask=both.mask)
  with pytest.raises(ValueError, match="batch_size=0"):
    model.invert(states=both.states[-1], batch_size=0)
  drawn = model.generate(texts, 3, temperature=0)
  assert drawn == model.generate(texts, 3, temperature=0) and len(drawn) == 2
  (next_token, _) = model.predict(texts)
  assert len(next_token.probabilities) == 281
  # Special tokens stay in a text; half of a character has the token's name.
  assert model.decode(model.encode(["a<|endoftext|>b"])) == ["a<|endoftext|>b"]
  names = model.inputs.vocabulary
  half = names.index("\u0142")  # A byte that is no character in UTF-8.
  assert model.decode([[half]]) == ["\ufffd"]
  with mock.patch.object(inference, "outputs") as outputs:
    outputs.return_value = np.log(
      np.eye(281, dtype=np.float32)[[[half]]] + 1e-9
    )
    assert model.predict(["of"])[0].label == "\u0142"
  assert repr(model).startswith("<TrainedModel transformer on gpt2")
  # It is saved as any other model.
  again = jf.load(model.save(tmp_path / "saved"))
  np.testing.assert_array_equal(again.outputs(texts), model.outputs(texts))
  # A closing token is no part of a decoded text.
  assert model.decode(model.encode(["a<|endoftext|>"])) == ["a"]
  # Ids of published weights are moved up by one, and not those of <pad> as 0.
  folder = shutil.copytree(GPT2, tmp_path / "gpt2")
  written = (folder / "tokenizer.json").read_text()
  (folder / "tokenizer.json").write_text(written.replace('"!":0', '"<pad>":0'))
  with pytest.raises(ValueError, match="id 0 for <pad>.*rename"):
    jf.load(folder)
  # A tokenizer in another format is not left out silently.
  (folder / "tokenizer.json").rename(folder / "vocab.json")
  with pytest.raises(ValueError, match=r"merges\.txt.*tokenizer\.json"):
    jf.load(folder)
  # Without a tokenizer it reads ids.
  (folder / "vocab.json").unlink()
  ids = jf.load(folder)
  np.testing.assert_allclose(
    ids.outputs(model.encode(texts)), model.outputs(texts), atol=1e-5
  )
  with pytest.raises(ValueError, match="not text.*ids int32"):
    ids.encode(texts)
  with pytest.raises(ValueError, match=r"no language model.*pretrained\.load"):
    jf.load(GPT2.parent / "bert")


@pytest.mark.slow
def test_loaded_model_exposes_flax_module_and_parameters(model):
  """The module and its parameters are those of Flax."""
  ids = model.encode(TEXTS)
  logits = model.model.apply({"params": model.params}, ids, train=False)
  np.testing.assert_allclose(logits, model.outputs(ids), atol=1e-5)
  assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(model.params))


@pytest.mark.parametrize(
  ("method", "inputs", "options", "message"),
  [
    ("predict", TEXTS, {"batch_size": 0}, "batch_size=0"),
    ("outputs", TEXTS, {"batch_size": 1.5}, "batch_size=1.5"),
    ("hidden_states", TEXTS, {"batch_size": -1}, "batch_size=-1"),
    ("invert", TEXTS, {"batch_size": 0}, "batch_size=0"),
    ("certify", TEXTS, {"batch_size": 0}, "batch_size=0"),
    ("predict", {"text": "7"}, {}, "dict.*'text'"),
    ("predict", ["7", ""], {}, r"inputs\[1\].*tokens"),
    ("hidden_states", [[1], [0, 0]], {}, r"inputs\[1\].*tokens"),
    ("invert", [[]], {}, r"inputs\[0\].*tokens"),
    ("certify", [""], {}, r"inputs\[0\].*tokens"),
    ("encode", ["7", None], {}, r"inputs\[1\]=None"),
    ("certify", TEXTS, {"labels": ["7"]}, "1 labels.*3 inputs"),
    ("certify", TEXTS, {"labels": "777"}, "labels='777'"),
    ("certify", TEXTS, {"labels": [7, 7, [7]]}, r"\[7\].*0, 1, 2"),
    ("certify", TEXTS, {"labels": [7, 7, float("nan")]}, "nan.*0, 1, 2"),
  ],
)
@pytest.mark.slow
def test_trained_model_refuses_wrong_inputs(
  isometric, method, inputs, options, message
):
  with pytest.raises(ValueError, match=message):
    getattr(isometric, method)(inputs, **options)


def test_generate_refuses_wrong_arguments():
  model = jf.load("zoo:language-allpass")
  for prompts, options, message in (
    (["the", ""], {}, r"prompts\[1\].*tokens"),
    ("the", {}, "inputs='the'"),
    (["the"], {"seed": 0.5}, "seed=0.5"),
    (["the"], {"temperature": float("nan")}, "temperature=nan"),
  ):
    with pytest.raises(ValueError, match=message):
      model.generate(prompts, 3, **options)


CALLS = int(os.environ.get("JAXFORMERS_CALLS", "10"))


def resident():
  """Returns the bytes of memory of this process."""
  gc.collect()
  pages = int(Path("/proc/self/statm").read_text().split()[1])
  return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.long
def test_model_methods_compile_once_for_all_lengths_and_counts(
  model, isometric
):
  """Whatever the lengths, the numbers of inputs, and the options are."""
  sizes = dict(vocab_size=10, max_len=64, num_classes=0, d_model=8)
  language = models.build(
    "transformer", objective="language_model", num_layers=1, **sizes
  )
  params = initial.params(language, language.example())
  rng = np.random.default_rng(0)

  def some(vocabulary=10):
    count, length = rng.integers(3, 5), rng.integers(17, 33)
    return rng.integers(1, vocabulary, (count, length))

  methods = {
    "predict": lambda: model.predict(some()),
    "hidden_states": lambda: model.hidden_states(some()),
    "invert": lambda: model.invert(some()),
    "certify": lambda: isometric.certify(some()),
    "generate": lambda: models.generate(
      language,
      params,
      some()[:, :8],
      int(rng.integers(5, 9)),
      key=jax.random.key(rng.integers(99)),
      temperature=float(rng.uniform(0, 2)),
      top_k=int(rng.integers(3, 5)),
    ),
  }
  compiled = []
  jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: (
      compiled.append(event)
      if event.endswith("backend_compile_duration")
      else None
    )
  )
  for name, call in methods.items():
    call()
    before, start = resident(), len(compiled)
    for _ in range(CALLS):
      call()
    assert len(compiled) == start, name
    assert resident() - before < 20e6, name
