"""Windows of a stream of tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformers.data.engine import packed
from jaxformers.data.engine.loader import Loader
from jaxformers.data.engine.segments import Segments, stream


@given(st.integers(2, 60), st.integers(1, 20), st.integers(0, 9), st.data())
def test_segments_batch_of_some_windows_is_evenly_spaced(
  total, length, most, data
):
  stride = data.draw(st.integers(1, length))
  tokens = np.arange(1, total + 1)
  windows = Segments(tokens, length, stride)
  few = Segments(tokens, length, stride, most=most)
  assert len(few) == min(most or len(windows), len(windows))
  batch = few.batch(np.arange(len(few)))
  firsts = batch["inputs"][:, 0] - 1
  if len(few) > 1:
    gaps = np.diff(firsts) // stride
    assert gaps.max() - gaps.min() <= 1
    assert 0 <= len(windows) - 1 - firsts[-1] // stride <= gaps.max()
  all_of_them = windows.batch(firsts // stride)
  for name, values in all_of_them.items():
    np.testing.assert_array_equal(batch[name], values)
  seen = batch["targets"][batch["weights"] > 0]
  np.testing.assert_array_equal(tokens[few.predicted()], seen)


@given(st.integers(2, 60), st.integers(1, 20), st.data())
def test_segments_predict_every_token_but_the_first_once(total, length, data):
  stride = data.draw(st.integers(1, length))
  tokens = np.arange(1, total + 1, dtype=np.uint16)
  split = Segments(tokens, length, stride)
  batch = split.batch(np.arange(len(split)))
  seen = batch["targets"][batch["weights"] > 0]
  np.testing.assert_array_equal(np.sort(seen), tokens[1:])
  np.testing.assert_array_equal(tokens[split.predicted()], tokens[1:])
  real = batch["weights"] > 0
  np.testing.assert_array_equal(
    batch["targets"][real], batch["inputs"][real] + 1
  )
  # All but those of the first window see at least length - stride before them.
  later = np.argwhere(real)
  assert all(at >= length - stride for k, at in later if k)
  # What stands before a predicted token is there, and nothing is padding.
  for k, at in later:
    np.testing.assert_array_equal(np.diff(batch["inputs"][k, : at + 1]), 1)


def test_segments_with_stride_1_weigh_one_token_each():
  split = Segments(np.arange(10), 4, 1, shift=1)
  assert len(split) == 6
  batch = split.batch(np.array([0, 2, 5]))
  assert batch["inputs"].tolist() == [[1, 2, 3, 4], [3, 4, 5, 6], [6, 7, 8, 9]]
  assert batch["targets"][:, -1].tolist() == [5, 7, 10]
  assert batch["weights"].sum(1).tolist() == [4, 1, 1]
  cut = split.batch(np.array([0, 2, 5]), 2)
  assert {name: x.tolist() for name, x in cut.items()} == {
    name: x[:, :2].tolist() for name, x in batch.items()
  }
  assert batch["inputs"].dtype == np.int32


def test_loader_of_segments_gives_padding_weight_zero():
  split = Segments(np.arange(1, 12), 4, 4)
  assert len(split) == 3
  batches = list(Loader(split, (4,)).all(2))
  weights = np.stack([b["weights"] for b in batches])
  assert weights.shape == (2, 2, 4)
  assert weights.sum() == 10
  assert weights[1, 1].sum() == 0
  batch = Loader(split, (4,)).batch(np.array([2, 0]), (0, 0))
  assert batch["weights"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
  assert batch["inputs"][0].tolist() == [9, 10, 0, 0]


def test_stream_joins_texts_end_to_end():
  texts = packed.pack([np.array([1, 2]), np.array([3]), np.array([4])], [0] * 3)
  assert stream(texts) is texts.tokens
  assert stream(texts.select(np.array([2, 0]))).tolist() == [4, 1, 2]


def test_segments_digest_depends_on_tokens_and_stride():
  forwards, other = (
    Segments(np.arange(9), 3, 3),
    Segments(np.arange(9)[::-1], 3, 3),
  )
  assert forwards.digest() != other.digest()
  assert forwards.digest() == Segments(np.arange(9), 3, 1).digest()
  assert forwards.reading() == {"first_id": 0, "length": 3}
  # Of millions of tokens every one counts.
  tokens = np.zeros(3 << 20, np.uint8)
  long = Segments(tokens, 3, 3).digest()
  tokens[1_000_001] = 1
  assert Segments(tokens, 3, 3).digest() != long


@pytest.mark.parametrize("stride", [0, 5])
def test_segments_refuse_a_stride_that_leaves_tokens_out(stride):
  with pytest.raises(ValueError, match=f"stride={stride} .*4"):
    Segments(np.arange(9), 4, stride)
  with pytest.raises(ValueError, match="most=-1"):
    Segments(np.arange(9), 4, 4, most=-1)
  with pytest.raises(ValueError, match="1 token.*predict"):
    Segments(np.arange(1), 4, 4)
