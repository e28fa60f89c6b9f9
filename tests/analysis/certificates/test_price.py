"""Scores of runs over their certified constants."""

import json
import math

import numpy as np
import pytest

from jaxformers import models
from jaxformers.analysis.certificates import attention, price
from jaxformers.analysis.certificates.price import Certificate, Priced
from jaxformers.commands import price as price_command
from jaxformers.training import loop
from tests import initial


def build(name, **options):
  model = models.build(
    name,
    vocab_size=9,
    max_len=6,
    num_classes=3,
    d_model=8,
    num_layers=2,
    **options,
  )
  return model, initial.params(model, np.ones((1, 4), np.int32))


@pytest.mark.parametrize(
  ("name", "distance", "branches"),
  [("isometric", "sequences", 2), ("l2_transformer", "farthest", 4)],
)
def test_certificates_are_products_of_the_layers(name, distance, branches):
  found = price.find_certificate(*build(name, block={"a_max": 0.5}))
  a = 0.5 * math.tanh(0.5)
  assert found.distance == distance
  np.testing.assert_allclose(
    found[1:], ((1 - a) ** branches, (1 + a) ** branches), 1e-4
  )


def test_certificates_of_bfloat16_are_those_of_float32():
  model, params = build("allpass")
  half, _ = build("allpass", dtype="bfloat16")
  want = price.find_certificate(model, params)
  assert want is not None
  assert price.find_certificate(half, params) == want


def test_constants_of_attention_are_upper_bounds():
  model, params = build("capped_transformer")
  found = price.find_certificate(model, params)
  logs = attention.certify(model, params, 6)["log10"]
  assert found == ("farthest", 0, pytest.approx(10 ** logs["tokens"]))


def test_constants_beyond_the_range_of_floats_are_none(monkeypatch):
  bounds = {"missing": "", "norm": 0.0, "log10": {"tokens": 400.0}}
  monkeypatch.setattr(attention, "certify", lambda *_: bounds)
  assert price.find_certificate(*build("transformer_rezero")) is None


@pytest.mark.parametrize("name", ["transject", "transformer", "lru"])
@pytest.mark.slow
def test_uncertified_models_have_no_certificate(name):
  assert price.find_certificate(*build(name)) is None


RUNS = [
  Priced(
    "wide", "isometric", "accuracy", 0.8, Certificate("sequences", 0.01, 10.0)
  ),
  Priced("free", "s5", "accuracy", 0.9, None),
  Priced(
    "narrow", "isometric", "accuracy", 0.7, Certificate("farthest", 0.5, 2.0)
  ),
]


def test_price_table_begins_with_the_least_constant():
  lines = price.price_table(RUNS).splitlines()[2:]
  assert [line.split("|")[1].strip() for line in lines] == [
    "narrow",
    "wide",
    "free",
  ]
  assert "| 0.01 | 10 | sequences |" in lines[1] and "| - |" in lines[2]


def test_price_figure_marks_runs_without_certificate():
  drawn = price.figure(RUNS)
  assert [row[1:] for row in drawn.rows] == [(math.log10(2), 0.7), (1, 0.8)]
  fig = drawn.draw()
  labels = [text.get_text() for text in fig.legends[0].get_texts()]
  assert labels == [
    "isometric, farthest",
    "isometric, sequences",
    "s5, no certificate",
  ]
  # Every run without a certificate has its line.
  free = RUNS[1]._replace(score=0.6)
  fig = price.figure([*RUNS, free]).draw()
  assert len(fig.axes[0].lines) == 4


def test_price_command_refuses_several_metrics(monkeypatch):
  runs = {"a": RUNS[0], "b": RUNS[1]._replace(metric="perplexity")}
  monkeypatch.setattr(price, "price", lambda folder: runs[folder.name])
  with pytest.raises(SystemExit, match="accuracy and perplexity"):
    price_command.main(["a", "b"])


@pytest.mark.slow
@pytest.mark.long
def test_price_command_reads_runs(smoke, tmp_path, capsys):
  loop.run(smoke("isometric", **{"model.num_layers": 1}), tmp_path / "run")
  price_command.main([str(tmp_path / "run"), f"--out={tmp_path / 'price'}"])
  found = capsys.readouterr().out
  results = json.loads((tmp_path / "run/results.json").read_text())
  assert f"{results['accuracy']:.4f}" in found
  assert (tmp_path / "price/price.png").exists()
  (tmp_path / "run/results.json").unlink()
  with pytest.raises(ValueError, match="results.json"):
    price.price(tmp_path / "run")
