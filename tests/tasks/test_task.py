import dataclasses
import json

import numpy as np
import pytest

from jaxformers import tasks
from jaxformers.data.engine.packed import pack
from jaxformers.tasks import task as t


def example(rows, labels, test_rows, test_labels, **fields):
  def split(rows, labels):
    return pack([np.array(row, np.uint8) for row in rows], np.array(labels))

  test = split(test_rows, test_labels)
  return t.Task(
    name="toy",
    protocol="own",
    splits={"train": split(rows, labels), "validation": test, "test": test},
    selection="validation",
    vocabulary=("<pad>", *"abcd"),
    max_len=4,
    num_classes=2,
    trivial=fields,
    info={},
  )


def test_get_refuses_unknown_tasks_and_options():
  with pytest.raises(ValueError, match="task.*'listop'.*'listops'"):
    tasks.get("listop")
  with pytest.raises(ValueError, match="task.*'text'.*'length'.*max_len"):
    tasks.get("text", length=3)


def test_description_changes_with_every_relevant_field():
  toy = example([[1, 2]], [0], [[1]], [0])
  description = toy.description()
  assert description == json.loads(json.dumps(description))
  for change in (
    {"protocol": "other"},
    {"vocabulary": ("<pad>", *"abdc")},
    {"max_len": 5},
    {"padded_len": 5},
    {"selection": "test"},
    {
      "splits": {
        **toy.splits,
        "train": toy.splits["train"],
        "test": pack([], []),
      }
    },
  ):
    assert dataclasses.replace(toy, **change).description() != description, (
      change
    )


def test_description_changes_with_every_token():
  rows = [[1 + k % 4, 1 + k % 3] for k in range(1_000)]
  description = example(rows, [0] * 1_000, [[1]], [0]).description()
  assert example(rows, [0] * 1_000, [[1]], [0]).description() == description
  rows[500][1] += 1
  other = example(rows, [0] * 1_000, [[1]], [0]).description()
  assert {key for key in description if description[key] != other[key]} == {
    "data"
  }
  assert description["data"]["test"] == other["data"]["test"]


def test_encode_refuses_tasks_without_text():
  toy = example([[1]], [0], [[1]], [0])
  with pytest.raises(ValueError, match="toy.*not text"):
    toy.encode("a movie")
