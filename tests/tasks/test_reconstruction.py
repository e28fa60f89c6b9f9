"""Splits whose targets are their own inputs."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformers import tasks
from jaxformers.data.engine.packed import pack
from jaxformers.tasks.reconstruction import MaskedTokens, reconstruct
from jaxformers.tasks.task import Task

RNG = np.random.default_rng(0)
ROWS = [RNG.integers(0, 8, n).astype(np.uint8) for n in (5, 30, 12, 1, 0, 7)]


def text(num_inputs=1, **fields):
  """A task of three or six short texts."""
  labels = np.arange(len(ROWS) // num_inputs) % 2
  split = dataclasses.replace(
    pack(ROWS, np.zeros(len(ROWS))), shift=1, num_inputs=num_inputs
  )
  split = dataclasses.replace(split, labels=labels, keys=labels)
  return Task(
    **{
      "name": "text",
      "protocol": "p",
      "splits": dict.fromkeys(("train", "validation", "test"), split),
      "num_classes": 2,
      "trivial": {},
      "info": {},
      "vocabulary": tuple("_abcdefgh"),
      "max_len": 32,
      "num_inputs": num_inputs,
      **fields,
    }
  )


def pixels():
  split = pack([np.arange(16, dtype=np.uint8) * 16] * 4, np.zeros(4))
  split = dataclasses.replace(split, scale=(122.6, 61.0))
  splits = dict.fromkeys(("train", "validation", "test"), split)
  return text(splits=splits, vocabulary=(), max_len=16)


def batch(task, key=None, indices=range(6), max_len=32):
  return task.splits["train"].batch(np.array(indices), max_len, key)


@given(rate=st.floats(0.01, 0.99), seed=st.integers(0, 9))
def test_reconstruct_targets_are_the_masked_tokens(rate, seed):
  task = reconstruct(text(), "masked", rate)
  got = batch(task, (seed, 3, 0))
  inputs, targets, weights = (got[k] for k in ("inputs", "targets", "weights"))
  assert task.vocabulary[-1] == "<mask>"
  np.testing.assert_array_equal(targets, batch(text())["inputs"])
  is_masked = inputs == task.vocab_size - 1
  np.testing.assert_array_equal(is_masked, weights == 1)
  np.testing.assert_array_equal(inputs[~is_masked], targets[~is_masked])
  assert (targets[is_masked] > 0).all()  # No padding is masked.
  assert (inputs.dtype, weights.dtype) == (np.int32, np.float32)


def test_reconstruction_draws_a_new_mask_of_its_share_each_step():
  long = pack([np.ones(1_000, np.uint8)] * 8, np.zeros(8), shift=1)
  split = MaskedTokens(long, 0.3, 9)
  one, two = (split.batch(np.arange(8), 1_000, (0, k, 0)) for k in (0, 1))
  for part in (one, two):
    share = part["weights"].mean(1)
    np.testing.assert_allclose(share, 0.3, atol=5 * (0.21 / 1_000) ** 0.5)
  assert (one["weights"] != two["weights"]).any(1).all()
  again = split.batch(np.arange(8), 1_000, (0, 0, 0))
  np.testing.assert_array_equal(one["inputs"], again["inputs"])


def test_masks_depend_on_neither_processes_nor_the_padded_length():
  long = pack([np.ones(30, np.uint8)] * 4, np.zeros(4), shift=1)
  split = MaskedTokens(long, 0.3, 9)
  whole = split.batch(np.arange(4), 30, (0, 1, 8))["inputs"]
  second = split.batch(np.arange(2, 4), 40, (0, 1, 10))["inputs"]
  np.testing.assert_array_equal(whole[2:], second[:, :30])


def test_reconstruct_evaluation_masks_do_not_depend_on_the_batch():
  task = reconstruct(text(), "masked", 0.5)
  alone = batch(task, indices=[2], max_len=12)
  among = batch(task, indices=[0, 2, 5], max_len=32)
  for name, array in alone.items():
    np.testing.assert_array_equal(array[0], among[name][1][:12])
  # The first examples are not masked alike.
  weights = batch(task, indices=[0, 1, 2])["weights"][:, :5]
  assert len({tuple(row) for row in weights.tolist()}) > 1


def test_reconstruct_causal_targets_are_the_next_tokens():
  task = reconstruct(text(), "causal")
  got = batch(task)
  inputs = batch(text())["inputs"]
  np.testing.assert_array_equal(got["inputs"], inputs)
  np.testing.assert_array_equal(got["targets"][:, :-1], inputs[:, 1:])
  lengths = (inputs > 0).sum(1)
  np.testing.assert_array_equal(
    got["weights"].sum(1), np.maximum(lengths - 1, 0)
  )
  assert (got["targets"][got["weights"] > 0] > 0).all()
  assert task.vocabulary == text().vocabulary
  assert task.objective == "next_tokens"


def test_reconstruct_uses_the_mask_of_the_vocabulary():
  words = ("_", "[MASK]", *"bcdefgh")
  task = reconstruct(text(vocabulary=words), "masked", 0.5)
  assert task.vocabulary == words
  got = batch(task)
  assert (got["inputs"][got["weights"] > 0] == 1).all()


def test_reconstruct_treats_pairs_as_separate_sequences():
  pairs = text(num_inputs=2)
  assert len(pairs.splits["train"]) == 3
  task = reconstruct(pairs, "masked", 0.5)
  assert (task.num_inputs, len(task.splits["train"])) == (1, 6)
  np.testing.assert_array_equal(batch(task)["targets"], batch(text())["inputs"])


def test_reconstruct_never_masks_special_tokens():
  task = text()
  split = dataclasses.replace(task.splits["train"], start=7, end=8)
  task = dataclasses.replace(task, splits={"train": split})
  got = batch(reconstruct(task, "masked", 0.99))
  is_mark = np.isin(got["targets"], (7, 8))
  assert is_mark.any()
  assert got["weights"][is_mark].max() == 0


def test_reconstruct_masks_pixels_as_nan():
  task = reconstruct(pixels(), "masked", 0.5)
  got = batch(task, indices=range(4), max_len=16)
  np.testing.assert_array_equal(np.isnan(got["inputs"]), got["weights"] == 1)
  want = (np.arange(16) * 16 - 122.6) / 61
  np.testing.assert_allclose(got["targets"][0], want, rtol=1e-6)
  assert (task.objective, task.num_classes) == ("masked_values", 0)
  classes = reconstruct(pixels(), "masked", 0.5, "classes")
  got = batch(classes, indices=range(4), max_len=16)
  np.testing.assert_array_equal(got["targets"][0], np.arange(16) * 16)
  assert np.isnan(got["inputs"]).any()
  assert (classes.objective, classes.num_classes) == ("masked_tokens", 256)
  following = batch(reconstruct(pixels(), "causal"), indices=[0], max_len=16)
  np.testing.assert_allclose(following["targets"][0, :-1], want[1:], rtol=1e-6)
  assert following["weights"].sum() == 15


def test_reconstruct_masks_numbers_that_are_given_in_python():
  x = np.random.default_rng(0).normal(size=(20, 6)).astype(np.float32)
  task = tasks.from_arrays((x, np.arange(20) % 3))
  got = batch(reconstruct(task, "masked", 0.5), indices=range(4), max_len=6)
  np.testing.assert_array_equal(np.isnan(got["inputs"]), got["weights"] == 1)
  with pytest.raises(ValueError, match="targets='classes' is for pixels"):
    reconstruct(task, "masked", 0.5, "classes")


def test_reconstruct_baselines_are_unigram_and_median():
  task = reconstruct(text(), "causal")
  (name, score), *_ = task.baselines().items()
  assert name == "unigram"
  got = batch(task)
  targets = got["targets"][got["weights"] > 0]
  shares = (np.bincount(targets, minlength=9) + 1) / (len(targets) + 9)
  assert score == pytest.approx(np.exp(-np.log(shares[targets]).mean()))
  values = reconstruct(pixels(), "causal").baselines()
  want = (np.arange(1, 16) * 16 - 122.6) / 61
  assert values == {
    "median": pytest.approx(np.abs(want - np.median(want)).mean(), rel=1e-5)
  }


def test_reconstruct_select_and_description():
  task = reconstruct(text(), "masked", 0.5)
  split = task.splits["train"]
  part = split.select(np.array([1, 2]))
  assert len(part) == 2
  assert part.lengths().tolist() == [30, 12]
  assert split.digest() == text().splits["train"].digest()
  before, after = text().description(), task.description()
  assert after["protocol"] == "p, masked 0.5"
  assert after["mask_rate"] == 0.5
  assert before["vocabulary_sha256"] != after["vocabulary_sha256"]


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"objective": "mask"}, "objective.*config.task.*'mask'.*masked"),
    ({"mask_rate": 0.5}, "config.task.mask_rate.*config.task.objective"),
    (
      {"objective": "masked", "targets": "classes"},
      "targets='classes'.*listops",
    ),
    ({"objective": "masked", "mask_rate": 1.5}, "mask_rate=1.5"),
    (
      {"objective": "causal", "mask_rate": 0.5},
      "mask_rate=0.5.*objective='causal'",
    ),
  ],
)
def test_reconstruct_refuses_wrong_options(options, message, data_dir):
  sizes = {"num_train": 8, "num_validation": 2, "num_test": 2}
  sizes |= {"min_length": 5, "max_length": 20, "data_dir": str(data_dir)}
  with pytest.raises(ValueError, match=message):
    tasks.get("listops", **sizes, **options)


def test_reconstruct_refuses_tasks_without_classes():
  for fields in ({"image": (8, 8, 3)}, {"objective": "language_model"}):
    with pytest.raises(ValueError, match="config.task.objective='masked'"):
      reconstruct(text(**fields), "masked")
