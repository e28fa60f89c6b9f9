"""What is drawn of trained models."""

from pathlib import Path

from jaxformers.analysis import measured
from jaxformers.analysis.runs import One, groups


def test_what_is_measured_of_the_last_layer_against_sizes():
  def one(seed, num_layers):
    model = {"name": "local", "num_layers": num_layers, "d_model": 8}
    config = {"seed": seed, "task": {"name": "text"}, "model": model}
    return One(Path("run"), config, {})

  found = groups([one(0, 1), one(1, 1), one(0, 2)])
  rows = measured.Rows(measured.Options())
  few, many = (group.label for group in found)
  rows.of["factors"] = [
    *((few, seed, 1, k, 2.0 + seed + k) for seed in (0, 1) for k in (0, 2)),
    *((many, 0, layer, k, 10.0 * layer) for layer in (0, 1, 2) for k in (0, 1)),
  ]
  line = "text local (d_model=8)"
  assert measured._at_the_end(found, rows, "factors") == [
    (line, 0, "num_layers", 1, 3.0),
    (line, 1, "num_layers", 1, 4.0),
    (line, 0, "num_layers", 2, 20.0),
  ]
  assert measured._at_the_end(found[:1], rows, "factors") == []
  # Over layers, without the embedding; where nothing varies there is none.
  rows.of["entropy"] = [(*row[:4], -row[4]) for row in rows.of["factors"]]
  assert measured._correlations(rows) == f"{few} -1.00, {many} -1.00"
  rows.of["factors"] = rows.of["factors"][:1]
  assert measured._correlations(rows) == "none"
