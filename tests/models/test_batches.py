"""Inputs of any number in batches of one size."""

import numpy as np
import pytest

from jaxformers.models import batches


def test_in_batches_repeats_the_last_input_to_fill_the_last_batch():
  x = np.arange(5)
  got = [batch.tolist() for batch in batches.in_batches(x, 2)]
  assert got == [[0, 1], [2, 3], [4, 4]]
  assert not [*batches.in_batches(x[:0], 2)]


@pytest.mark.slow
def test_apply_in_batches_returns_an_output_for_each_input():
  shapes = []

  def double(x):
    shapes.append(x.shape)
    return 2 * x

  x = np.arange(10).reshape(5, 2)
  np.testing.assert_array_equal(batches.apply_in_batches(double, x, 3), 2 * x)
  assert shapes == [(3, 2)] * 2
