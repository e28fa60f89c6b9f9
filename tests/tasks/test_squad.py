"""SQuAD: windows, answers and scores, and a model that learns a little."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformers
from jaxformers import config as c
from jaxformers import models, tasks
from jaxformers.tasks import squad
from jaxformers.training import compilers, evaluate, loop, losses
from tests import initial
from tests.data.archives import squad as files
from tests.data.archives import write_folder

pytestmark = pytest.mark.slow

ROOM = {"max_len": 24, "stride": 6, "question_len": 5}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
  folder = tmp_path_factory.mktemp("squad")
  archive = write_folder(folder / "squad", files({"train": 6, "dev": 2}))
  options = dict(
    data_dir=str(folder / "data"),
    archive=str(archive),
    vocab_size=90,
    num_train=24,
    num_test=8,
    **ROOM,
  )
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(squad, "HELD_OUT", {"jaxformers": 4, "paper": 0})
    yield tasks.get("squad", **options), options


def test_squad_task_holds_out_a_paragraph(task):
  task, options = task
  sizes = {name: len(s.pieces) for name, s in task.splits.items()}
  assert sizes == {"train": 20, "validation": 4, "test": 8}
  held = {task.splits["validation"].text(i)[0] for i in range(4)}
  assert len(held) == 1
  assert held.isdisjoint(task.splits["train"].text(i)[0] for i in range(20))
  paper = tasks.get("squad", protocol="paper", **options)
  assert (paper.selection, len(paper.splits["train"].pieces)) == ("test", 24)
  assert 0 < task.baselines()["sentence nearest to the question"] < 1


def test_squad_windows_are_those_of_run_squad(task):
  """Loops of BERT's code, written again: windows, and who scores a piece."""
  split = task[0].splits["test"]
  number = 0
  for example in range(8):
    question = split.pieces.raw(4 * example)[: ROOM["question_len"]]
    context = split.pieces.raw(4 * example + 1)
    most, start, spans = ROOM["max_len"] - len(question) - 3, 0, []
    while start < len(context):
      length = min(len(context) - start, most)
      spans.append((start, length))
      if start + length == len(context):
        break
      start += min(length, ROOM["stride"])
    assert len(spans) > 1
    batch = split.batch(number + np.arange(len(spans)), ROOM["max_len"])
    at = len(question) + 2
    for row, (start, length) in enumerate(spans):
      ids = batch["inputs"][row]
      part = context[start : start + length]
      want = [split.start, *question, split.end, *part, split.end]
      assert ids[: len(want)].tolist() == want
      assert not ids[len(want) :].any()
      for i in range(length):
        best, score = None, None
        for k, (begin, size) in enumerate(spans):
          left, right = start + i - begin, begin + size - 1 - start - i
          if left < 0 or right < 0:
            continue
          if score is None or min(left, right) + 0.01 * size > score:
            best, score = k, min(left, right) + 0.01 * size
        assert batch["places"][row, at + i] == 1 + (best == row)
      outside = np.delete(batch["places"][row], np.arange(at, at + length))
      assert not outside.any()
    number += len(spans)
  assert number == len(split)
  assert split.lengths().max() == ROOM["max_len"]


def test_squad_targets_are_the_pieces_of_the_answer(task):
  task = task[0]
  split = task.splits["train"]
  batch = split.batch(np.arange(len(split)), ROOM["max_len"])
  examples, answered = split.windows.examples, set()
  for row, (first, last) in enumerate(batch["targets"]):
    if first:
      answered.add(examples[row])
      ids = batch["inputs"][row, first : last + 1]
      text = "".join(task.vocabulary[i].removeprefix("##") for i in ids)
      assert text == split.text(examples[row])[1][0][1].lower()
  assert answered == {*range(20)}
  assert (batch["targets"] == 0).all(1).any()


def test_squad_predicted_answer_is_the_best_over_all_windows(task):
  split = task[0].splits["test"]
  n = ROOM["max_len"]
  batch = split.batch(np.arange(len(split)), n)
  logits = np.random.default_rng(0).normal(size=(len(split), n, 2))
  logits = logits.astype(np.float32)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(losses, "MAX_ANSWER", 3)
    rows = jax.device_get(losses.best_spans(jnp.asarray(logits), batch))
  found = split.predicted(rows)
  for example, text in enumerate(found):
    best = -np.inf
    for window in np.flatnonzero(split.windows.examples == example):
      at, places = logits[window], batch["places"][window]
      for s, e in itertools.product(range(n), range(n)):
        inside = places[s] == 2 and places[e] > 0 and s <= e < s + 3
        if inside and at[s, 0] + at[e, 1] > best:
          best, want = at[s, 0] + at[e, 1], (window, s, e)
    window, s, e = want
    ids = batch["inputs"][window, s : e + 1]
    tokens = [task[0].vocabulary[i].removeprefix("##") for i in ids]
    assert text.lower().replace(" ", "").replace("\u00e9", "e") == "".join(
      tokens
    )


def test_squad_score_of_right_answers_is_one(task):
  split = task[0].splits["test"]
  batch = split.batch(np.arange(len(split)), ROOM["max_len"])
  logits = np.zeros((len(split), ROOM["max_len"], 2), np.float32)
  for row, (first, last) in enumerate(batch["targets"]):
    if first:
      # More where an answer may begin.
      logits[row, first, 0] = logits[row, last, 1] = 9.0
  rows = jax.device_get(losses.best_spans(jnp.asarray(logits), batch))
  assert split.score(rows) == {"f1": 1.0, "exact_match": 1.0, "count": 8}


@pytest.mark.parametrize("mode", sorted(compilers.COMPILERS))
@pytest.mark.parametrize("batch_size", [7, 16])
def test_squad_score_does_not_depend_on_devices(task, mode, batch_size):
  task = task[0]
  model = models.build("transformer", d_model=8, num_layers=1, **task.sizes())
  split = task.splits["test"]
  ids = split.batch(np.arange(len(split)), 24)
  params = initial.params(model, ids["inputs"])
  logits = model.apply({"params": params}, ids["inputs"], train=False)
  want = split.score(jax.device_get(losses.best_spans(logits, ids)))
  log_p = jax.nn.log_softmax(logits, 1)
  chosen = jnp.take_along_axis(log_p, ids["targets"][:, None], 1)
  run = evaluate.Evaluator(model, mode, batch_size, (12, 24))
  scores = run(compilers.layout().place_state(params), split)
  assert {name: scores[name] for name in want} == want
  assert scores["loss"] == pytest.approx(float(-chosen.mean()), rel=1e-5)


@pytest.mark.long
def test_squad_trains_bert(task, tmp_path, monkeypatch, request):
  monkeypatch.chdir(request.config.rootpath)
  config = c.load("configs/short/squad.py:model=neutreno")
  options = dict(task[1])
  config.data_dir = options.pop("data_dir")
  config.task.update(options)
  config.update(batch_size=8, total_steps=60, buckets=1, log_steps=20)
  config.update(eval_steps=30, checkpoint_steps=30, eval_batch_size=8)
  config.schedule.update(warmup_steps=5, learning_rate=5e-3)
  small = {"d_model": 16, "num_layers": 1}
  for model in (config.model, config.reference):
    model.update(small)
    model.mixer_defaults.num_heads = 2
    model.block.mlp_dim = 16
  results = loop.run(config, tmp_path)
  assert results["metric"] == "f1"
  assert results["examples"] == 8
  assert 0 <= results["exact_match"] <= results["f1"] <= 1
  lines = (tmp_path / "metrics.jsonl").read_text()
  assert "validation/exact_match" in lines
  assert "train/accuracy" in lines
  # Parameters of a loaded model are arrays of NumPy.
  trained = jaxformers.load(str(tmp_path))
  assert trained.outputs(["where is ada ?"]).shape[2] == 2


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"max_len": 8}, "max_len=8, question_len=5"),
    ({"stride": 0}, "stride=0"),
    ({"protocol": "bert"}, "protocol.*'bert'"),
  ],
)
def test_squad_task_refuses_wrong_options(task, options, message):
  with pytest.raises(ValueError, match=message):
    tasks.get("squad", **task[1] | options)
