"""What mixers with matrix states share: directions and caches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers.models.cache import CACHE
from jaxformers.models.mixer import MIXERS
from jaxformers.models.mixers.matrix_state import MatrixState
from tests.marks import slow_except
from tests.models.mixers import sequential
from tests.models.mixers.oracle import small_sizes

NAMES = sorted(
  name
  for name, mixer in MIXERS.items()
  if isinstance(mixer, type) and issubclass(mixer, MatrixState)
)


@pytest.mark.parametrize("name", slow_except(["delta"], NAMES))
def test_parts_with_a_cache_equal_the_whole(name):
  """The cache has the tokens of the short convolution, too."""
  mixer = MIXERS[name](causal=True, **small_sizes(name))
  params = sequential.start(name, small_sizes(name), 0.3)
  x, mask = sequential.inputs(12)

  @jax.jit
  def apply(cache, x, mask):
    variables = {"params": params, **cache}
    options = {"mask": mask, "carry": None, "train": False}
    (y, _), cache = mixer.apply(variables, x, mutable=[CACHE], **options)
    return y, cache

  with jax.enable_x64(True):
    whole, _ = apply({}, x, mask)
    parts, cache = [], {}
    for first, end in ((0, 1), (1, 5), (5, 12)):
      y, cache = apply(cache, x[:, first:end], mask[:, first:end])
      parts.append(y)
  found = np.concatenate(parts, 1)
  np.testing.assert_allclose(found[mask], np.asarray(whole)[mask], atol=1e-5)


def test_a_mixer_of_both_directions_has_no_cache():
  mixer = MIXERS["gla"](num_heads=2)
  x, mask = jnp.ones((1, 3, 8)), jnp.ones((1, 3), bool)
  variables = {"params": sequential.init(mixer, 8)}
  options = {"mask": mask, "carry": None, "train": False}
  with pytest.raises(ValueError, match=r"causal=True"):
    mixer.apply(variables, x, mutable=[CACHE], **options)
