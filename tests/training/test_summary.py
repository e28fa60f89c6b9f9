from jaxformers.tasks import arrays
from jaxformers.training import summary


def test_summary_table_shows_task_protocol_and_seed():
  results = {
    "task": "listops",
    "protocol": "lra",
    "seed": 3,
    "model": "transject",
    "accuracy": 0.3615,
    "baselines": {"majority class": 0.1755, "first-token rule": 0.356},
    "examples": 2_000,
    "best_step": 900,
    "selection": "validation",
    "parameters": 19_276,
    "parameter_ratio": 0.094,
    "train_seconds": 268.0,
    "wall_seconds": 286.0,
    "data": {"source": "generated"},
  }
  text = summary.format_results(results)
  for shown in (
    "36.15%",
    "17.55%",
    "35.60%",
    "19,276",
    "0.09 times",
    "0:04:28",
  ):
    assert shown in text
  assert text.startswith("listops, protocol lra, seed 3")
  assert "SHA-256" not in text
  results["data"] = {"authors_checksum": False, "sha256": "0123456789abcdef"}
  shown = "not the authors' archive: SHA-256 0123456789ab"
  assert shown in summary.format_results(results)
  results["data"]["authors_checksum"] = None
  shown = "an archive without a published checksum: SHA-256 0123456789ab"
  assert shown in summary.format_results(results)
  counts = {"train": 1200, "classes": 10}
  results["data"] |= {"authors_counts": False, "counts": counts}
  shown = "not the authors' counts: 1,200 train, 10 classes"
  assert shown in summary.format_results(results)


def test_split_title_of_examples_in_memory_is_held_out():
  assert summary.split_title("text", "test") == "test"
  assert summary.split_title(arrays.NAME, "validation") == "validation"
  title = summary.split_title(arrays.NAME, "test, 20 of 40")
  assert title == "held-out, 20 of 40"
