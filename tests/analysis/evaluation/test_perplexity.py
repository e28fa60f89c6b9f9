"""Perplexity under windows that move by a few tokens."""

import json
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import models
from jaxformers.analysis.evaluation import perplexity
from jaxformers.commands import perplexity as perplexity_command
from jaxformers.commands import states
from jaxformers.data.engine.segments import Segments
from jaxformers.foundations import workdirs
from tests import draws, initial
from tests.trained import on_task

TOKENS = np.random.default_rng(0).integers(1, 9, 23)


@pytest.fixture(scope="module")
def run():
  model = models.build(
    "transformer",
    vocab_size=9,
    max_len=6,
    num_classes=0,
    d_model=8,
    num_layers=1,
    objective="language_model",
  )
  ids = jnp.asarray(TOKENS[None, :6])
  params = initial.params(model, ids)
  params = jax.tree.map(lambda p: p + draws.normal(1, p.shape), params)
  task = types.SimpleNamespace(
    name="language", max_len=6, splits={"test": Segments(TOKENS, 6, 6)}
  )
  return on_task(task, model, params, 5)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"tokens": -5}, "tokens=-5"),
    ({"batch_size": 0}, "batch_size=0"),
    ({"split": "dev"}, "split 'dev'"),
  ],
)
def test_measure_perplexity_refuses_wrong_options(run, options, message):
  with pytest.raises(ValueError, match=message):
    perplexity.measure_perplexity(run, [1], **options)


@pytest.mark.slow
def test_measure_perplexity_predicts_each_token_once(run):
  rows = perplexity.measure_perplexity(run, [1, 4], batch_size=4)
  assert [row["stride"] for row in rows] == [1, 4]
  # Of one length, for what stands behind a token is not seen.
  before = [TOKENS[max(at - 6, 0) : at] for at in range(1, 23)]
  ids = jnp.stack([jnp.pad(window, (0, 6 - len(window))) for window in before])
  log_p = run.model.apply({"params": run.params}, ids, train=False)
  ends = np.array([len(window) - 1 for window in before])
  total = -float(log_p[np.arange(22), ends, TOKENS[1:]].sum())
  assert rows[0]["count"] == rows[1]["count"] == 22
  assert rows[0]["perplexity"] == pytest.approx(math.exp(total / 22), rel=1e-4)
  assert rows[1]["perplexity"] != pytest.approx(rows[0]["perplexity"])
  few = perplexity.measure_perplexity(run, [1], tokens=5)
  assert few[0]["count"] == 5


@pytest.mark.slow
def test_perplexity_command_prints_a_line_for_each_stride(
  run, monkeypatch, capsys, tmp_path
):
  loaded = states.load
  monkeypatch.setattr(states, "load", lambda workdir, **_: run)
  perplexity_command.main(["here"])
  printed = capsys.readouterr().out
  assert "stride     1" in printed
  assert "stride     6" in printed
  perplexity_command.main(["here", "--strides=2", "--json"])
  assert json.loads(capsys.readouterr().out)[0]["stride"] == 2
  # A finished run keeps its scores, and how they were made.
  finished = tmp_path / "finished"
  finished.mkdir()
  (finished / "results.json").touch()
  perplexity_command.main([str(finished), "--strides=1", "--tokens=5"])
  (kept,) = workdirs.read_scores(finished)
  assert kept["how"] == {"split": "test", "stride": 1, "tokens": 5}
  assert kept["examples"] == kept["step"] == 5
  with pytest.raises(SystemExit, match="stride=7 is not in 1 to 6"):
    perplexity_command.main(["here", "--strides=7"])
  monkeypatch.setattr(states, "load", loaded)
  with pytest.raises(SystemExit, match="There is no run in"):
    perplexity_command.main([str(tmp_path)])


@pytest.mark.slow
def test_perplexity_command_refuses_strides_that_are_no_integers(tmp_path):
  with pytest.raises(SystemExit, match="--strides=1,a: give integers"):
    perplexity_command.main([str(tmp_path), "--strides=1,a"])
