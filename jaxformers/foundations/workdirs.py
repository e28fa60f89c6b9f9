"""Files of a run's workdir, which are written with a digest and verified.

The digest detects files of other programs: a folder of Hugging Face also has a
`config.json`. It also detects damage: a changed digit in `results.json` would
otherwise be quoted as a result.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxformers.foundations import durable
from jaxformers.foundations.errors import UserError

TOKENIZER = "tokenizer.json"
# Fields that every `config.json` and `results.json` has, with their types. A
# dot separates the names of sections.
CONFIG_FIELDS: dict[str, Any] = {
  "seed": int,
  "task.name": str,
  "model.name": str,
  "reference": Mapping,
  "optimizer": Mapping,
  "schedule": Mapping,
}
RESULTS_FIELDS: dict[str, Any] = {
  **dict.fromkeys(("task", "protocol", "model", "selection", "metric"), str),
  **dict.fromkeys(("config", "baselines", "data"), Mapping),
  **dict.fromkeys(("seed", "max_len", "parameters", "metrics_records"), int),
  **dict.fromkeys(("parameter_ratio", "train_seconds"), (int, float)),
  **dict.fromkeys(("config.model.num_layers", "config.model.d_model"), int),
}
# Fields of each record of scores.json.
SCORE_FIELDS = ("command", "how", "step", "examples", "scores")


def digest(content: Any) -> str:
  """Returns the BLAKE2b digest of JSON content, as 16 hexadecimal digits."""
  text = json.dumps(content, sort_keys=True)
  return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def with_digest(content: Mapping[str, Any]) -> dict[str, Any]:
  """Converts content to plain JSON types and adds its digest."""
  # Compute the digest after a round trip through JSON: tuples become lists.
  plain = json.loads(json.dumps(content))
  return {**plain, "digest": digest(plain)}


def write(folder: Path, name: str, content: Mapping[str, Any]) -> None:
  """Writes a JSON file of a run, with the digest of its content.

  Args:
    folder: workdir of the run.
    name: name of the file.
    content: plain JSON, without NaN and infinity.
  """
  durable.write_json(folder / name, with_digest(content))


def write_vocabulary(folder: Path, task: Any) -> None:
  """Writes `vocabulary.json`: the token of every id, and how to read inputs.

  With this file, a trained model reads texts and arrays without its data set;
  see `tasks.inputs.from_record`. For word pieces and byte pairs, the function
  also writes `tokenizer.json`, which Hugging Face's `tokenizers` reads.

  Args:
    folder: workdir of the run, or any other folder.
    task: `tasks.Task` whose inputs the file describes.
  """
  # Tokens and sizes complete the description of the task.
  content = task.description() | {
    "tokens": list(task.vocabulary),
    "tokenizer": task.tokenizer,
    "sizes": task.sizes(),
  }
  if task.classes:
    content["classes"] = list(task.classes)
  write_record(folder, content, task.tokenizer_json)


def write_record(
  folder: Path, content: Mapping[str, Any], tokenizer_json: str
) -> None:
  """Writes `vocabulary.json`, and `tokenizer.json` if there is a tokenizer.

  Args:
    folder: folder to write to.
    content: content of `vocabulary.json`.
    tokenizer_json: content of `tokenizer.json`; "" for no tokenizer.
  """
  # Write the tokenizer first, because its digest is part of the vocabulary.
  if tokenizer_json:
    tokenizer = json.loads(tokenizer_json)
    durable.write_json(folder / TOKENIZER, tokenizer)
    content = {**content, "tokenizer_digest": digest(tokenizer)}
  write(folder, "vocabulary.json", content)


def has_tokenizer(vocabulary: Mapping[str, Any]) -> bool:
  """Returns True if a `tokenizer.json` belongs to a `vocabulary.json`."""
  return "tokenizer_digest" in vocabulary


def read_tokenizer(folder: Path, vocabulary: Mapping[str, Any]) -> Any:
  """Returns the content of `tokenizer.json`.

  The digest of this file is in `vocabulary.json`.

  Args:
    folder: workdir of the run, or folder of an exported model.
    vocabulary: content of `vocabulary.json`.

  Raises:
    UserError: if the file is damaged, or if this package did not write it.
  """
  content = _read_json(folder, TOKENIZER)
  if vocabulary.get("tokenizer_digest") != digest(content):
    problem = f"the digest of {TOKENIZER} is not that in vocabulary.json"
    raise _not_a_run(folder, TOKENIZER, problem)
  return content


def read_config(folder: Path) -> dict[str, Any]:
  """Returns the content of a run's `config.json`.

  Raises:
    UserError: if the file is damaged, or if this package did not write it. The
      message names the file, the problem and the remedy.
  """
  if any(folder.glob("model.safetensors*")):
    raise UserError(
      f"{folder} has the weights of another package, and is no run: train one "
      f"that begins with them, by --config.pretrained={folder}, and give its "
      "workdir."
    )
  config = read_verified(folder, "config.json")
  check_config(folder, "config.json", config)
  return config


def read_results(folder: Path) -> dict[str, Any]:
  """Returns the content of a run's `results.json`.

  Raises:
    UserError: if the file is damaged, or if this package did not write it.
  """
  results = read_verified(folder, "results.json")
  # Check the required fields, and the score of the run's metric.
  _check_types(folder, "results.json", results, RESULTS_FIELDS)
  kinds = {results["metric"]: (int, float)}
  _check_types(folder, "results.json", results, kinds)
  return results


def read_all_scores(folder: Path) -> dict[str, Any]:
  """Returns the results of a run, with the `scores` that commands added.

  Raises:
    UserError: if `results.json` or `scores.json` is damaged, or if this package
      did not write it.
  """
  results = read_results(folder)
  scores = read_scores(folder)
  return results | ({"scores": scores} if scores else {})


def read_scores(folder: Path) -> list[dict[str, Any]]:
  """Returns the records of a run's `scores.json`; [] if there is no file.

  See `add_score` for the fields of a record.

  Raises:
    UserError: if the file is damaged, or if this package did not write it.
  """
  if not (folder / "scores.json").exists():
    return []
  # Check that the file is a list of records with all fields.
  try:
    scores: Any = read_verified(folder, "scores.json").get("scores")
    is_list = isinstance(scores, list) and all(
      isinstance(record, Mapping) and {*SCORE_FIELDS} <= {*record}
      for record in scores
    )
  except UserError:
    is_list = False
  if not is_list:
    raise UserError(
      f"{folder / 'scores.json'} is damaged, or this package did not write it: "
      "remove it. Then run the commands that wrote its scores again "
      "(segmentation, perplexity, smoothness or robustness)."
    )
  return scores


def add_score(folder: Path, record: Mapping[str, Any]) -> None:
  """Adds a record to a run's `scores.json`.

  The record replaces a record with the same `command` and `how`.

  Args:
    folder: workdir of the run.
    record: `command` that computed the scores, `how` (the settings of the
      command), `step` of the checkpoint, number of `examples`, and `scores` by
      name.

  Raises:
    UserError: if `scores.json` is damaged, or if this package did not write it.
  """
  # Keep the records of other commands and other settings.
  key = [record[name] for name in ("command", "how")]
  kept = [
    other
    for other in read_scores(folder)
    if [other["command"], other["how"]] != key
  ]
  write(folder, "scores.json", {"scores": [*kept, record]})


def check_config(folder: Path, name: str, config: Any) -> None:
  """Raises UserError if this package did not write a config.

  Args:
    folder: workdir of the run.
    name: name of the file that the config was read from.
    config: content of the file.
  """
  _check_types(folder, name, config, CONFIG_FIELDS)


def metrics_line(step: int, scalars: Mapping[str, float]) -> str:
  """Formats a line of `metrics.jsonl`, whose last field is a checksum."""
  line = json.dumps({"step": step, **scalars})
  # Insert the checksum before the brace that ends the line.
  return f'{line[:-1]}, "crc32": {zlib.crc32(line.encode())}}}\n'


def read_metrics(folder: Path) -> tuple[list[dict[str, Any]], list[int]]:
  """Reads the records of `metrics.jsonl`, and finds its damaged lines.

  Returns:
    The records without their checksums, or [] if there is no file. And the
    numbers of the damaged lines, counted from 1: lines that are no record or
    have a wrong checksum. A last line without a line break is ignored, because
    its process was killed while it wrote the line.

  Raises:
    UserError: if the file cannot be read.
  """
  path = folder / "metrics.jsonl"
  try:
    content = path.read_bytes() if path.exists() else b""
  except OSError as error:
    raise UserError(
      f"{path} cannot be read ({error.strerror}): remove it or fix its "
      "permissions."
    ) from None
  # Parse the complete lines: the last part has no line break.
  *lines, _ = content.split(b"\n")
  records = [_parse_metrics(line) for line in lines]
  damaged = [n for n, record in enumerate(records, 1) if record is None]
  return [record for record in records if record is not None], damaged


def _parse_metrics(line: bytes) -> dict[str, Any] | None:
  """Returns the record of a line, or None if the line is damaged."""
  try:
    record = json.loads(line)
  except (ValueError, RecursionError):  # Also for text that is not UTF-8.
    return None
  # A record has a step, and each of its fields is a number or null.
  if not isinstance(record, dict) or not isinstance(record.get("step"), int):
    return None
  if not all(isinstance(v, int | float | None) for v in record.values()):
    return None
  # The checksum covers the other fields of the line.
  expected = record.pop("crc32", None)
  is_right = expected == zlib.crc32(json.dumps(record).encode())
  return record if is_right else None


def read_verified(folder: Path, name: str) -> dict[str, Any]:
  """Returns the content of a JSON file of a run, after checking its digest.

  Raises:
    UserError: if the file cannot be read, or if its digest is missing or wrong.
  """
  content = _read_json(folder, name)
  recorded = content.pop("digest", None)
  if recorded != digest(content):
    state = "does not match its content" if recorded else "is missing"
    raise _not_a_run(folder, name, f"the digest of {name} {state}")
  return content


def _read_json(folder: Path, name: str) -> dict[str, Any]:
  """Returns the content of a JSON file without checking its digest."""
  try:
    content = json.loads((folder / name).read_bytes())
  except (ValueError, OSError, RecursionError) as error:
    problem = f"{name} cannot be read as JSON: {error}"
    raise _not_a_run(folder, name, problem) from None
  if not isinstance(content, dict):
    raise _not_a_run(folder, name, f"{name} holds no JSON object")
  return content


def _check_types(
  folder: Path, name: str, content: Any, fields: Mapping[str, Any]
) -> None:
  """Raises UserError if a field is missing or has another type.

  Args:
    folder: workdir of the run, for the message.
    name: name of the file, for the message.
    content: content of the file.
    fields: type of each field, by its path.
  """
  for field, kind in fields.items():
    # Walk through the sections to the field.
    value = content
    for key in field.split("."):
      value = value.get(key) if isinstance(value, Mapping) else None
    if not isinstance(value, kind):
      problem = "is missing" if value is None else f"is {value!r}"
      raise _not_a_run(folder, name, f"the field {field!r} of {name} {problem}")


def _not_a_run(folder: Path, name: str, problem: str) -> UserError:
  return UserError(
    f"{folder} is not a run of this package, or it is damaged: {problem}. Give "
    "the --workdir of a run that jaxformers trained. If this is one, remove "
    f"{name} and run its training command again, which writes the file again "
    "from the checkpoints."
  )


def check_trained(workdir: Path) -> None:
  """Raises UserError if there is no run in a workdir."""
  if not (workdir / "config.json").exists():
    raise UserError(
      f"There is no run in {workdir}, because it has no config.json: give the "
      "--workdir of a run. If this is one, run its training command again, "
      "which writes the file."
    )
