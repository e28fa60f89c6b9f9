"""Sizes and training of LinOSS on the data sets of its paper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxformers.foundations.registry import choose

SIZES = ("tiny", "published")


class Published(NamedTuple):
  """Sizes and training of one data set; see the fields of a config."""

  learning_rate: float
  num_layers: int
  d_model: int
  state_size: int
  include_time: bool
  scheme: str = "implicit"
  batch_size: int = 32


# Source: Rusch and Rus 2025, https://arxiv.org/abs/2410.03943, as in the files
# `experiment_configs` of the authors' code.
PUBLISHED: Mapping[str, Published] = {
  "EigenWorms": Published(1e-3, 2, 128, 64, True, batch_size=4),
  "EthanolConcentration": Published(1e-5, 4, 16, 16, False),
  "Heartbeat": Published(1e-3, 6, 16, 16, True),
  "MotorImagery": Published(1e-5, 2, 128, 16, False),
  "SelfRegulationSCP1": Published(1e-4, 6, 128, 256, True),
  "SelfRegulationSCP2": Published(1e-5, 6, 64, 256, True, "imex"),
}
MODELS = ("linoss",)


def set_size(config: Any, size: str) -> None:
  """Changes a config of a data set to the sizes that are published for it.

  Args:
    config: config at size "tiny".
    size: "tiny", which changes nothing, or "published".

  Raises:
    UserError: for another size, and for a model or a data set without published
      sizes.
  """
  if choose("size of uea", size, SIZES) == "tiny":
    return
  choose("model with size=published", config.model.name, MODELS)
  problem = config.task.problem
  sizes = PUBLISHED[choose("problem with size=published", problem, PUBLISHED)]
  config.model.update(
    num_layers=sizes.num_layers, d_model=sizes.d_model, head_dim=0
  )
  config.model.mixer.update(
    state_size=sizes.state_size,
    scheme=sizes.scheme,
    dropout_rate=0.05,
    causal=True,
  )
  config.task.include_time = sizes.include_time
  config.model.block.update(norm_type="batch", dropout_rate=0.05)
  config.update(
    batch_size=sizes.batch_size,
    total_steps=100_000,
    eval_steps=1_000,
    optimizer={"name": "adam", "b2": 0.999, "eps": 1e-8},
    schedule={
      "name": "constant",
      "learning_rate": sizes.learning_rate,
      "warmup_steps": 0,
    },
  )
