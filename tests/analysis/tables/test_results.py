import pytest

from jaxformers.analysis.tables import results
from jaxformers.commands import results as results_command
from jaxformers.foundations import workdirs
from tests import results as made

MODEL = {"name": "transject", "num_layers": 2, "d_model": 32}


def write(folder, seed, accuracy, **config):
  folder.mkdir(parents=True)
  content = made.make(
    {"seed": seed, "task": {}, "model": MODEL} | config,
    seed=seed,
    accuracy=accuracy,
    max_len=1999,
    parameters=19_276,
    parameter_ratio=0.094,
    baselines={"majority class": 0.1755},
    data={"source": "generated"},
    train_seconds=60.0,
  )
  workdirs.write(folder, "results.json", content)


def test_summarise_averages_seeds_and_separates_recipes(tmp_path):
  for seed, accuracy in enumerate((0.30, 0.34, 0.35)):
    write(tmp_path / "a" / f"seed_{seed}", seed, accuracy)
  write(tmp_path / "b", 0, 0.5, batch_size=64)
  rows = results.summarise(results.read_runs([tmp_path / "a", tmp_path / "b"]))
  assert len(rows) == 2
  mean, deviation = rows[0]["score"]
  assert mean == pytest.approx(33.0)
  assert deviation == pytest.approx(2.6457513)
  assert rows[0]["seeds"] == "0 1 2"
  text = results.markdown(rows)
  assert "33.00 +- 2.65" in text
  assert "| 50.00 |" in text
  assert "lra, 1999 long, generated" in text


def test_results_markdown_has_a_table_for_every_metric(tmp_path):
  write(tmp_path / "a", 0, 0.3)
  write(tmp_path / "b", 0, 0.0, batch_size=2)
  content = workdirs.read_results(tmp_path / "b")
  content |= {"metric": "perplexity", "perplexity": 33.154, "max_len": 0}
  content["baselines"] = {"unigram": 654.19}
  workdirs.write(tmp_path / "b", "results.json", content)
  rows = results.summarise(results.read_runs([tmp_path / "a", tmp_path / "b"]))
  first, second = results.markdown(rows).split("\n\n")
  assert "| accuracy % |" in first
  assert "majority class 17.5" in first
  assert "| perplexity |" in second
  assert "| 33.15 |" in second
  assert "unigram 654.2" in second


def test_summarise_counts_a_seed_once(tmp_path, capsys):
  for name, accuracy in (("a", 0.3), ("b", 0.9)):
    write(tmp_path / name, 0, accuracy)
  folders = [tmp_path / name for name in ("a", "a", "b")]
  (row,) = results.summarise(results.read_runs(folders))
  assert row["seeds"] == "0"
  assert row["score"][0] == pytest.approx(30)
  (note,) = capsys.readouterr().err.splitlines()
  assert note.startswith(f"Left out: {tmp_path / 'b'}")
  assert f"{tmp_path / 'a'}" in note and "same recipe and seed" in note


def test_summarise_averages_only_what_is_alike(tmp_path):
  """Imported code may be another model; hardware has another speed."""
  for seed, name in enumerate(("v1", "v2")):
    write(tmp_path / name, seed, 0.3, imports=name)
  rows = results.summarise(results.read_runs([tmp_path]))
  assert [row["seeds"] for row in rows] == ["0", "1"]
  alike = [made.make({"seed": s, "model": MODEL}, hardware="a") for s in (0, 1)]
  (row,) = results.summarise(alike)
  assert row["train s"] == 1
  (row,) = results.summarise([alike[0], alike[1] | {"hardware": "b"}])
  assert row["train s"] is None
  assert results.markdown([row]).splitlines()[-1].endswith("| validation |  |")


def test_settings_name_an_mlp_that_does_not_follow_the_width():
  finished = [
    made.make(
      {
        "seed": 0,
        "task": {},
        "model": MODEL | {"d_model": d, "block": {"mlp_dim": width}},
      }
    )
    for d, width in ((64, 64), (64, 512), (128, 512))
  ]
  rows = results.summarise(finished)
  assert [row["config"] for row in rows] == [
    "L=2 d=64 mlp_dim=64",
    "L=2 d=64 mlp_dim=512",
    "L=2 d=128 mlp_dim=512",
  ]
  rows = results.summarise(finished[1:])
  assert [row["config"] for row in rows] == ["L=2 d=64", "L=2 d=128"]


def test_results_command_prints_a_table(tmp_path, capsys):
  write(tmp_path / "a", 0, 0.3)
  results_command.main([str(tmp_path / "a")])
  assert capsys.readouterr().out.startswith("| task | protocol |")
  with pytest.raises(SystemExit, match="no results.json in"):
    results_command.main([str(tmp_path / "a" / "b")])


def test_over_settings_names_settings_and_their_spread(tmp_path):
  """As in TransJect's figure 3: each setting counts by its mean over seeds."""
  model = {"name": "transject", "num_layers": 2, "d_model": 32, "mixer": {}}
  for experts, scores in {1: (0.30, 0.32), 4: (0.35,), 8: (0.40,)}.items():
    for seed, accuracy in enumerate(scores):
      mixer = {"mixer": {"num_experts": experts}}
      folder = tmp_path / f"{experts}_{seed}"
      write(folder, seed, accuracy, model=model | mixer)
  rows = results.summarise(results.read_runs([tmp_path]))
  assert sorted(row["config"] for row in rows) == [
    f"L=2 d=32 num_experts={experts}" for experts in (1, 4, 8)
  ]
  (line,) = results.over_settings(rows)
  mean, deviation = line["score"]
  assert mean == pytest.approx((31 + 35 + 40) / 3)
  assert deviation == pytest.approx(4.5092498)
  text = results.markdown(rows)
  assert "| 35.33 +- 4.51 | 31.00 to 40.00 |" in text
  # One setting has no spread.
  write(tmp_path / "other" / "0", 0, 0.5, batch_size=1)
  assert "settings" not in results.markdown(
    results.summarise(results.read_runs([tmp_path / "other"]))
  )


@pytest.mark.parametrize(
  ("data", "shown"),
  [
    ({}, "lra, 9 long"),
    ({"source": "generated"}, "lra, 9 long, generated"),
    ({"authors_checksum": True}, "lra, 9 long"),
    ({"authors_checksum": False}, "lra, 9 long, another archive"),
    ({"authors_checksum": None}, "lra, 9 long, archive of unknown checksum"),
  ],
)
def test_describe_protocol_names_the_data(data, shown):
  result = {"protocol": "lra", "max_len": 9, "data": data}
  assert results.describe_protocol(result) == shown


def test_summarise_separates_tasks_in_memory_of_one_name(tmp_path):
  """Examples in Python have one name, and settings belong to one task."""
  for k, accuracy in enumerate((0.95, 0.485)):
    write(tmp_path / str(k), 0, accuracy)
    content = workdirs.read_results(tmp_path / str(k))
    content["task_description"] = {"data": {"test": str(k)}}
    workdirs.write(tmp_path / str(k), "results.json", content)
  rows = results.summarise(results.read_runs([tmp_path]))
  assert results.over_settings(rows) == []
  text = results.markdown(rows)
  assert "over settings" not in text and "71.75" not in text
  # The rows name their data.
  assert len({row["protocol"] for row in rows}) == 2
  assert all("generated, data " in row["protocol"] for row in rows)


def test_results_markdown_shows_steps_and_notes_rows_that_differ(tmp_path):
  write(tmp_path / "a", 0, 0.3, total_steps=2_400, batch_size=32)
  write(tmp_path / "b", 0, 0.4, total_steps=1_000, batch_size=8)
  rows = results.summarise(results.read_runs([tmp_path]))
  text = results.markdown(rows)
  assert "| config | steps | accuracy % |" in text
  assert "| 2,400 | 30.00 |" in text and "| 1,000 | 40.00 |" in text
  note = (
    "Rows of listops differ in steps (1,000, 2,400) and in batch size (8, 32): "
    "compare those that agree."
  )
  assert note in text.split("\n\n")
  assert "Rows of" not in results.markdown(rows[:1])
