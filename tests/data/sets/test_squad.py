import json
import random
import re
import string

import pytest

from jaxformers.data.sets import squad
from tests.data.archives import squad as files
from tests.data.archives import write_folder, write_tar

SOURCE = squad.source(8, 4)


def test_squad_reads_questions_from_a_folder_and_a_tar(tmp_path):
  content = files({"train": 2, "dev": 1})
  folder = write_folder(tmp_path / "squad", content)
  splits = SOURCE.read(folder)
  assert {name: len(rows) for name, rows in splits.items()} == {
    "train": 8,
    "test": 4,
  }
  key, example = splits["test"][1]
  assert key == 1
  assert example["question"] == b"Where is Bob?"
  context = example["context"].decode()
  (start, city), (_, longer) = json.loads(example["answers"])
  assert context[start : start + len(city)] == city == "Oslo"
  assert longer == "in Oslo"
  tar = write_tar(tmp_path / "squad.tar.gz", content)
  assert SOURCE.read(tar) == splits


def test_squad_refuses_other_counts_and_formats(tmp_path):
  folder = write_folder(tmp_path / "few", files({"train": 1, "dev": 1}))
  with pytest.raises(ValueError, match="4 examples.*'train'.*8"):
    SOURCE.read(folder)
  for content in (b'{"data": [{}]}', b"[]", b'{"data"', b'{"data": 3}'):
    bad = files({"train": 2, "dev": 1}) | {"dev-v1.1.json": content}
    folder = write_folder(tmp_path / "bad", bad)
    with pytest.raises(ValueError, match=r"dev-v1\.1\.json.*SQuAD"):
      SOURCE.read(folder)
  # Questions of version 2 may have no answer.
  content = files({"train": 2, "dev": 1})
  data = json.loads(content["dev-v1.1.json"])
  data["data"][0]["paragraphs"][0]["qas"][0]["answers"] = []
  content["dev-v1.1.json"] = json.dumps(data).encode()
  folder = write_folder(tmp_path / "v2", content)
  with pytest.raises(ValueError, match="'dev-0-Ada'.*answer"):
    SOURCE.read(folder)


def official(predictions, answers):
  """evaluate-v1.1.py, from its description: a list of words, then counts."""

  def words(text):
    text = "".join(c for c in text.lower() if c not in set(string.punctuation))
    text = re.sub(r"\b(a|an|the)\b", " ", text)
    return text.split()

  def f1(a, b):
    a, b, same = words(a), words(b), 0
    left = list(b)
    for word in a:
      if word in left:
        left.remove(word)
        same += 1
    if same == 0:
      return 0
    return 2 * same / (len(a) + len(b))

  total_f1 = total_exact = 0
  for prediction, known in zip(predictions, answers, strict=True):
    total_f1 += max(f1(prediction, answer) for answer in known)
    total_exact += any(words(prediction) == words(answer) for answer in known)
  count = len(predictions)
  return {"f1": total_f1 / count, "exact_match": total_exact / count}


def test_squad_evaluate_matches_the_official_script():
  random.seed(0)
  parts = ["The", "a", "an", "cat", "cat,", "Cat's", "\u00e9t\u00e9", "theme"]
  parts += ["--", "", "1,000", "dog.", "\u2019s", "A-b"]

  def text():
    return " ".join(random.choices(parts, k=random.randint(0, 5)))

  predictions = [text() for _ in range(300)]
  answers = [[text() for _ in range(random.randint(1, 4))] for _ in range(300)]
  scores = squad.evaluate(predictions, answers)
  assert scores == pytest.approx(official(predictions, answers))
  assert 0.02 < scores["exact_match"] < scores["f1"] < 0.9


@pytest.mark.parametrize(
  ("predicted", "answer", "f1", "exact"),
  [
    ("The cat.", "cat", 1, 1),
    ("a theme", "theme", 1, 1),
    ("the big cat", "cat cat", 0.5, 0),
    ("", "cat", 0, 0),
    ("the", "a", 0, 1),  # Both are empty: equal, without a common word.
  ],
)
def test_squad_f1_and_exact_match_by_hand(predicted, answer, f1, exact):
  assert squad.f1_score(predicted, answer) == pytest.approx(f1)
  assert squad.exact_match(predicted, answer) == exact


def test_squad_evaluate_refuses_no_questions():
  with pytest.raises(ValueError, match="questions to score"):
    squad.evaluate([], [])
