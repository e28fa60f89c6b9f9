"""Files of a run's workdir: written with a digest, and checked when read.

Other programs write files of these names too: a folder of Hugging Face has a
`config.json`. A file may also be damaged: a digit of `results.json` that has
changed would be quoted as a result.
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
# Fields that every file of this package has, with their types; a dot leads into
# a section.
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
# Fields of a record of scores.json.
SCORE_FIELDS = ("command", "how", "step", "examples", "scores")


def digest(content: Any) -> str:
  """Returns the BLAKE2b digest of a JSON content, 16 hexadecimal digits."""
  text = json.dumps(content, sort_keys=True)
  return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def with_digest(content: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a content as JSON reads it back, with its digest."""
  # The digest is of what JSON reads back: tuples become lists.
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
  """Writes `vocabulary.json`: what every id stands for, and how to read inputs.

  With it a trained model reads texts and arrays without its data set; see
  `tasks.inputs.from_record`. For word pieces it also writes `tokenizer.json`,
  which Hugging Face's `tokenizers` reads.

  Args:
    folder: workdir of the run, or any other.
    task: a `tasks.Task`.
  """
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
  """Writes `vocabulary.json` and, unless it is "", `tokenizer.json`."""
  if tokenizer_json:
    tokenizer = json.loads(tokenizer_json)
    durable.write_json(folder / TOKENIZER, tokenizer)
    content = {**content, "tokenizer_digest": digest(tokenizer)}
  write(folder, "vocabulary.json", content)


def has_tokenizer(vocabulary: Mapping[str, Any]) -> bool:
  """Returns True if a `vocabulary.json` has a `tokenizer.json` next to it."""
  return "tokenizer_digest" in vocabulary


def read_tokenizer(folder: Path, vocabulary: Mapping[str, Any]) -> Any:
  """Returns the content of `tokenizer.json`, which has its digest elsewhere.

  Args:
    folder: workdir of the run, or an exported model.
    vocabulary: content of its `vocabulary.json`, which has the digest.

  Raises:
    UserError: as `read_config`.
  """
  content = _read_json(folder, TOKENIZER)
  if vocabulary.get("tokenizer_digest") != digest(content):
    problem = f"the digest of {TOKENIZER} is not that in vocabulary.json"
    raise _not_a_run(folder, TOKENIZER, problem)
  return content


def read_config(folder: Path) -> dict[str, Any]:
  """Returns the content of a run's `config.json`.

  Raises:
    UserError: for a file that is damaged, or that this package did not write;
      it names the file, what is wrong with it, and what to do.
  """
  config = read_verified(folder, "config.json")
  check_config(folder, "config.json", config)
  return config


def read_results(folder: Path) -> dict[str, Any]:
  """Returns the content of a run's `results.json`.

  Raises:
    UserError: as `read_config`.
  """
  results = read_verified(folder, "results.json")
  _check_types(folder, "results.json", results, RESULTS_FIELDS)
  kinds = {results["metric"]: (int, float)}
  _check_types(folder, "results.json", results, kinds)
  return results


def read_all_scores(folder: Path) -> dict[str, Any]:
  """Returns the results of a run, with `scores` that commands have written.

  Raises:
    UserError: as `read_config`, also for a damaged `scores.json`.
  """
  results = read_results(folder)
  scores = read_scores(folder)
  return results | ({"scores": scores} if scores else {})


def read_scores(folder: Path) -> list[dict[str, Any]]:
  """Returns the records of a run's `scores.json`; [] if there is no file.

  See `add_score`.

  Raises:
    UserError: for a file that is damaged, or that this package did not write.
  """
  if not (folder / "scores.json").exists():
    return []
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
      "remove it, and run the commands again whose scores it held "
      "(segmentation, perplexity, smoothness or robustness)."
    )
  return scores


def add_score(folder: Path, record: Mapping[str, Any]) -> None:
  """Adds a record to a run's `scores.json`, or replaces one made alike.

  Args:
    folder: workdir of the run.
    record: `command` that computed it, `how` it was made, `step` of the
      checkpoint, number of `examples`, and `scores` by name.

  Raises:
    UserError: as `read_scores`.
  """
  key = [record[name] for name in ("command", "how")]
  kept = [
    other
    for other in read_scores(folder)
    if [other["command"], other["how"]] != key
  ]
  write(folder, "scores.json", {"scores": [*kept, record]})


def check_config(folder: Path, name: str, config: Any) -> None:
  """Raises UserError if a config was not written by this package.

  Args:
    folder: workdir of the run.
    name: file that the config was read from.
    config: its content.
  """
  _check_types(folder, name, config, CONFIG_FIELDS)


def metrics_line(step: int, scalars: Mapping[str, float]) -> str:
  """Returns a line of `metrics.jsonl`; its last field is a checksum."""
  line = json.dumps({"step": step, **scalars})
  # Insert the checksum before the brace that ends the line.
  return f'{line[:-1]}, "crc32": {zlib.crc32(line.encode())}}}\n'


def read_metrics(folder: Path) -> tuple[list[dict[str, Any]], list[int]]:
  """Returns the records of `metrics.jsonl`, and which lines are damaged.

  Returns:
    The records without their checksums, none if there is no file; and the
    numbers, from 1, of lines that are not a record or not as written. A last
    line without its end counts as neither: its process was killed.

  Raises:
    UserError: for a file that cannot be read at all.
  """
  path = folder / "metrics.jsonl"
  try:
    content = path.read_bytes() if path.exists() else b""
  except OSError as error:
    raise UserError(
      f"{path} cannot be read ({error.strerror}): remove it or mend its "
      "permissions."
    ) from None
  *lines, _ = content.split(b"\n")  # What follows the last end is cut off.
  records = [_parse_metrics(line) for line in lines]
  damaged = [n for n, record in enumerate(records, 1) if record is None]
  return [record for record in records if record is not None], damaged


def _parse_metrics(line: bytes) -> dict[str, Any] | None:
  """Returns the record of a line, or None if the line is damaged."""
  try:
    record = json.loads(line)
  except (ValueError, RecursionError):  # Also for text that is not UTF-8.
    return None
  # A record has a step, and every field of it is a number or null.
  if not isinstance(record, dict) or not isinstance(record.get("step"), int):
    return None
  if not all(isinstance(v, int | float | None) for v in record.values()):
    return None
  # The checksum is of the line without it.
  expected = record.pop("crc32", None)
  is_right = expected == zlib.crc32(json.dumps(record).encode())
  return record if is_right else None


def read_verified(folder: Path, name: str) -> dict[str, Any]:
  """Returns the content of a JSON file of a run, whose digest must be right.

  Raises:
    UserError: as `read_config`.
  """
  content = _read_json(folder, name)
  found = content.pop("digest", None)
  if found != digest(content):
    state = "is not that of its content" if found else "is missing"
    raise _not_a_run(folder, name, f"the digest of {name} {state}")
  return content


def _read_json(folder: Path, name: str) -> dict[str, Any]:
  """Returns the content of a JSON file, whatever its digest is."""
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
  """Raises UserError for a field that is missing or of another type."""
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
    f"{name} and run its training command again: the file is written anew from "
    "the checkpoints."
  )


def check_trained(workdir: Path) -> None:
  """Raises UserError if there is no run in a workdir."""
  if not (workdir / "config.json").exists():
    raise UserError(
      f"There is no run in {workdir}, for it has no config.json: give the "
      "--workdir of a run. If this is one, its training command writes the "
      "file anew."
    )
