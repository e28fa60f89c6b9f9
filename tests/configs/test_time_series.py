"""The config of time series and its published sizes."""

import numpy as np
import pytest

from jaxformers import config as c


def load(**arguments):
  text = ",".join(f"{k}={v}" for k, v in arguments.items())
  return c.load(f"series/uea:{text}")


# The authors' files: rate, layers, d, states, batch, scheme, time.
FILES = """
EigenWorms 0.001 2 128 64 4 implicit True
EthanolConcentration 0.00001 4 16 16 32 implicit False
Heartbeat 0.001 6 16 16 32 implicit True
MotorImagery 0.00001 2 128 16 32 implicit False
SelfRegulationSCP1 0.0001 6 128 256 32 implicit True
SelfRegulationSCP2 0.00001 6 64 256 32 imex True
"""


@pytest.mark.parametrize("line", FILES.strip().splitlines())
def test_published_sizes_are_those_of_the_authors_files(line):
  problem, *values = line.split()
  config = load(problem=problem, size="published", protocol="linoss", seed=3)
  assert values == [
    np.format_float_positional(config.schedule.learning_rate),
    *map(str, (config.model.num_layers, config.model.d_model)),
    *map(str, (config.model.mixer.state_size, config.batch_size)),
    config.model.mixer.scheme,
    str(config.task.include_time),
  ]
  assert config.schedule.warmup_steps == 0
  assert config.model.block.norm_type == "batch"
  assert config.model.mixer.causal and not config.model.head_dim
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
