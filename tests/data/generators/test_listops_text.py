import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformers.data.generators import listops
from jaxformers.data.generators import listops_text as text
from tests.data.generators.test_listops import recursive_tree


@pytest.mark.parametrize(
  ("expression", "value"),
  [
    ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9),
    ("[SM 9 8 7 ]", 4),
    ("[MED 1 4 ]", 2),
    ("[MED 7 1 9 ]", 7),
    ("[MIN [SM 5 5 ] 3 ]", 0),
  ],
)
def test_evaluate_values_by_hand(expression, value):
  assert text.evaluate(expression.split()) == value


@given(seed=st.integers(0, 10_000))
def test_binarised_encodes_back_to_the_same_ids(seed):
  settings = listops.Settings(max_depth=4, max_args=4)
  rng = random.Random(seed)
  tokens = [rng.choice(listops.OPERATORS)]
  for _ in range(3):
    tokens += recursive_tree(rng, settings, 2)
  ids = text.encode(" ".join([*tokens, "]"]))
  written = text.binarised(ids)
  assert written.count("(") == written.count(")") == len(ids) - 1
  np.testing.assert_array_equal(text.encode(written), ids)


def test_binarised_matches_the_example_of_lra():
  ids = text.encode("[MAX 2 3 ]")
  assert text.binarised(ids) == "( ( ( [MAX 2 ) 3 ) ] )"


def test_write_tsv_begins_with_the_header_of_lra(tmp_path):
  kw = dict(
    num_train=20, num_validation=5, num_test=5, min_length=5, max_length=60
  )
  splits = listops.generate(listops.Settings(**kw))
  text.write_tsv(splits, tmp_path)
  header, first, *_ = (tmp_path / "basic_val.tsv").read_text().splitlines()
  assert header == "Source\tTarget"
  ids, label = text.parse(first)
  np.testing.assert_array_equal(ids, splits["validation"][0])
  assert label == splits["validation"].labels[0]
  # Files that are there are kept.
  for name in ("basic_train.tsv", "basic_test.tsv"):
    (tmp_path / name).unlink()
  with pytest.raises(ValueError, match="basic_val.tsv exists already"):
    text.write_tsv(splits, tmp_path)
  assert [path.name for path in tmp_path.iterdir()] == ["basic_val.tsv"]


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ("( [MAX 2 ) ] )", r"tab.*MAX 2 \) \] \)"),
    ("( [MAX 2 ) ] )\t12", "digit.*12"),
    ("\t5", r"expression.*\\t5"),
    ("] ] 3\t3", "[Bb]racket.*operation"),
    ("[MAX 2\t2", "one expression.*brackets"),
    ("[MAX 2 3 ]\t2", r"value 3\b.*\b2\b"),
    ("( [AVG 2 ) ] )\t2", r"'\[AVG'.*ListOps"),
  ],
)
def test_parse_refuses_a_wrong_line(line, message):
  with pytest.raises(ValueError, match=message):
    text.parse(line)
