"""Distances of last states: nearest pairs, continuations and collapse."""

import numpy as np
import pytest

from jaxformers.analysis.tokens import collisions
from jaxformers.foundations.errors import UserError
from jaxformers.models import sipit
from tests.models.test_cache import start
from tests.models.test_model import SIZES
from tests.models.test_sipit import V, build, prompts, rotary, states


def test_last_states_are_those_of_the_last_tokens():
  model, params = build("lru")
  ids = prompts()
  ids[1, 4:] = 0
  found = collisions.last_states(model, params, ids)
  for row, last in enumerate((6, 3, 6)):
    for layer in (0, 2):
      want = states(model, params, ids, layer)[row, last]
      np.testing.assert_allclose(found[layer, row], want, atol=1e-6)


@pytest.mark.parametrize("name", ["transformer", "allpass"])
def test_continuations_equal_the_whole(name):
  model, params = build(name)
  ids = prompts(2, 4)
  for layer in range(3):
    found = collisions.continuations(model, params, ids, layer)
    assert found.shape == (2, V - 1, 16)
    for token in (1, 9, V - 1):
      whole = np.concatenate([ids, [[token]] * 2], 1)
      want = states(model, params, whole, layer)[:, -1]
      np.testing.assert_allclose(found[:, token - 1], want, atol=5e-6)
  if name == "transformer":
    with pytest.raises(UserError, match="12 tokens.*max_len=12"):
      collisions.continuations(model, params, prompts(2, 12), 1)
  radius = sipit.noise_radius(model, params)
  assert (radius is None) == (name == "transformer")
  if radius:
    # The certified distance of two continuations of a prompt.
    for each in found:
      assert sipit.nearest(each, 1).distances[0] >= 2 * radius > 1e-4


def test_collapse_is_the_distance_of_repeated_tokens():
  model, params = build("transformer", positions="sinusoid")
  curves = collisions.collapse(model, params, (3, 5), [1, 4])
  ids = np.array([[3, 3, 3, 3, 5, 0], [3, 3, 3, 3, 3, 5]])
  hidden = states(model, params, ids, 2)
  x, y = hidden[0, 4], hidden[1, 5]
  want = np.linalg.norm(x - y) / np.linalg.norm(x)
  np.testing.assert_allclose(curves["float32"][1], want, rtol=1e-4)
  np.testing.assert_allclose(curves["bfloat16"][1], want, rtol=0.3)
  # A constant sequence does not tell its length to rotary positions.
  alone = collisions.collapse(*rotary(), (3, 3), [2, 6])
  assert max(alone["float32"]) < 1e-6
  assert collisions.collapse_lengths(model, 100) == [1, 2, 4, 8]


def test_models_that_read_later_tokens_are_refused():
  from jaxformers import models

  model = models.build("transformer", **SIZES)
  with pytest.raises(UserError, match="reads later tokens"):
    collisions.last_states(model, start(model), prompts())
