"""The command `collisions` on a run of seconds."""

import csv
import json

import pytest

from jaxformers.commands import collisions
from jaxformers.training import loop


@pytest.mark.slow
def test_collisions_command_prints_and_draws(smoke, tmp_path, capsys):
  causal = {"model.mixer.causal": True}
  loop.run(smoke("lru", **causal), tmp_path / "run")
  capsys.readouterr()
  options = ["--samples=13", "--length=8", "--longest=16"]
  workdir = str(tmp_path / "run")
  out = tmp_path / "figure"
  collisions.main([workdir, *options, f"--out={out}"])
  printed = capsys.readouterr().out
  columns = "| layer | least | collisions | typical | least continued | of one"
  assert columns in printed
  assert "Collapse in bfloat16" in printed and "Certified" not in printed
  assert (tmp_path / "figure.png").exists()
  assert (tmp_path / "figure_collapse.png").exists()
  collisions.main([workdir, *options, "--json"])
  (found,) = json.loads(capsys.readouterr().out).values()
  assert found["lengths"] == [1, 2, 4, 8, 16]
  assert len(found["least"]) == len(found["continued"]) == 3
  assert all(
    least <= typical
    for least, typical in zip(found["least"], found["typical"], strict=True)
  )


@pytest.mark.slow
def test_collisions_draws_the_certified_distance(smoke, tmp_path, capsys):
  fields = {"model.mixer.causal": True, "model.num_layers": 1}
  loop.run(smoke("allpass", **fields), tmp_path / "run")
  capsys.readouterr()
  out = str(tmp_path / "figure")
  options = ["--samples=13", "--length=8", "--longest=4", f"--out={out}"]
  collisions.main([str(tmp_path / "run"), *options, "--json"])
  (found,) = json.loads(capsys.readouterr().out).values()
  assert len(found["certified"]) == len(found["least"])
  for certified, least in zip(
    found["certified"], found["siblings"], strict=True
  ):
    assert 0 < certified <= least * (1 + 1e-5)
  with (tmp_path / "figure.csv").open() as file:
    lines = {row["run"].partition(": ")[2] for row in csv.DictReader(file)}
  kind = "continuations of one prompt"
  assert lines == {"prompts", "continuations", kind, f"{kind}, certified"}


@pytest.mark.slow
def test_collisions_refuses_models_of_both_sides(smoke, tmp_path):
  loop.run(smoke("lru"), tmp_path / "run")
  with pytest.raises(SystemExit, match="reads later tokens"):
    collisions.main([str(tmp_path / "run")])
