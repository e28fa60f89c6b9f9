"""Scores of runs over the widths of their certificates."""

import json
import math

import numpy as np
import pytest

from jaxformers import models
from jaxformers.analysis.certificates import price
from jaxformers.analysis.certificates.price import Priced
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


def test_find_interval_is_the_product_of_the_layers():
  low, high = price.find_interval(*build("isometric", block={"a_max": 0.5}))
  a = 0.5 * math.tanh(0.5)
  np.testing.assert_allclose((low, high), ((1 - a) ** 2, (1 + a) ** 2), 1e-4)


@pytest.mark.parametrize("name", ["transject", "transformer"])
@pytest.mark.slow
def test_find_interval_is_none_for_uncertified_models(name):
  assert price.find_interval(*build(name)) is None


RUNS = [
  Priced("wide", "isometric", "accuracy", 0.8, (0.01, 10.0)),
  Priced("free", "s5", "accuracy", 0.9, None),
  Priced("narrow", "isometric", "accuracy", 0.7, (0.5, 2.0)),
]


def test_price_table_begins_with_the_narrowest_interval():
  lines = price.price_table(RUNS).splitlines()[2:]
  assert [line.split("|")[1].strip() for line in lines] == [
    "narrow",
    "wide",
    "free",
  ]
  assert "| 3.00 |" in lines[1] and "| - |" in lines[2]


def test_price_figure_marks_runs_without_certificate():
  drawn = price.figure(RUNS)
  assert [row[2] for row in drawn.rows] == [0.7, 0.8]
  fig = drawn.draw()
  labels = [text.get_text() for text in fig.legends[0].get_texts()]
  assert labels == ["isometric", "s5, no certificate"]


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
