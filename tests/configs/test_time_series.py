"""The config of time series and its published sizes."""

import pytest

from jaxformers import config as c
from jaxformers.recipes import time_series


def load(**arguments):
  text = ",".join(f"{k}={v}" for k, v in arguments.items())
  return c.load(f"series/uea:{text}")


@pytest.mark.parametrize("problem", sorted(time_series.PUBLISHED))
def test_published_sizes_are_those_of_the_paper(problem):
  config = load(problem=problem, size="published", protocol="linoss", seed=3)
  sizes = time_series.PUBLISHED[problem]
  assert config.model.num_layers == sizes.num_layers
  assert config.model.d_model == sizes.d_model
  assert config.model.mixer.state_size == sizes.state_size
  assert config.model.block.norm_type == "batch"
  assert config.model.mixer.causal and not config.model.head_dim
  assert config.schedule.learning_rate == sizes.learning_rate
  # The seed of the run draws the splits of this protocol.
  assert (config.seed, config.task.seed) == (3, 3)
  assert load(seed=3).task.seed == 0


@pytest.mark.parametrize(
  ("arguments", "text"),
  [
    ({"size": "small"}, "'small'.*published, tiny"),
    ({"size": "published"}, "'BasicMotions'.*EigenWorms"),
    ({"size": "published", "model": "s5"}, "'s5'.*linoss"),
  ],
)
def test_sizes_that_are_not_published_are_refused(arguments, text):
  with pytest.raises(ValueError, match=text):
    load(**arguments)
