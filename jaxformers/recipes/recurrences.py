"""Sizes and training of recurrent mixers on Long Range Arena."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import choose
from jaxformers.recipes import matched, shared
from jaxformers.recipes.traits import find_traits

# Number of channels, if the size of a config does not set another.
WIDTH = 64
# Number of training examples, for papers that give the length in epochs.
NUM_TRAIN = {
  "listops": 96_000,
  "text": 25_000,
  "retrieval": 147_086,
  "image": 45_000,
  "pathfinder": 160_000,
  "pathx": 160_000,
}


class Published(NamedTuple):
  """Sizes and training of a model on a task, from the model's own paper.

  Attributes:
    d_model: width d.
    num_layers: number of layers.
    dropout_rate: dropout inside and after the mixer.
    mixer, block: options of the mixer and of the block.
    batch_size: number of examples in a step.
    total_steps, warmup_steps: number of steps of the run, and of its linear
      warm-up.
    learning_rate: peak learning rate.
    weight_decay: weight decay, which is multiplied by the learning rate.
    groups: value of `config.optimizer.groups`.
    schedule: name of the schedule.
    adam: options of Adam that differ from most papers.
  """

  d_model: int
  num_layers: int
  dropout_rate: float
  mixer: Mapping[str, Any]
  block: Mapping[str, Any]
  batch_size: int
  total_steps: int
  warmup_steps: int
  learning_rate: float
  weight_decay: float
  groups: Mapping[str, Mapping[str, Any]]
  schedule: str = "cosine"
  adam: Mapping[str, Any] = {}


# Groups of S5's `opt_config`: True if B has the lower learning rate of the
# state-space parameters, and True if weight decay shrinks B.
S5_GROUPS = {
  "standard": (True, False),
  "BandCdecay": (True, True),
  "BfastandCdecay": (False, True),
  "noBCdecay": (True, False),
}


def s5_groups(
  name: str, ratio: float, *, share_step: bool = False
) -> dict[str, dict[str, Any]]:
  """Returns the parameter groups of an `opt_config` of S5's code.

  A shared step has the global learning rate and decays, as in that code.

  Source: `create_train_state` of lindermanlab/S5, commit 3c18fdb.

  Args:
    name: name in `S5_GROUPS`.
    ratio: global learning rate over the one of the state-space parameters.
    share_step: True if all states share one step.

  Raises:
    UserError: for an unknown name.
  """
  # State-space parameters have the global learning rate divided by `ratio`.
  is_slow, decays = S5_GROUPS[choose("opt_config", name, S5_GROUPS)]
  slow = 1 / ratio
  groups: dict[str, dict[str, Any]] = {
    "eigenvalues": {"factor": slow},
    "input": {"factor": slow if is_slow else 1.0, "decay": decays},
    "step": {"factor": slow},
  }
  # A shared step is trained like all other parameters.
  if share_step:
    groups["step"] = {"factor": 1.0, "decay": True}
  # This option slows C down as well.
  if name == "noBCdecay":
    groups["output"] = {"factor": slow, "decay": False}
  return groups


def _s5(
  task: str,
  sizes: tuple[int, int, int, int],
  rates: tuple[float, float, float, float],
  groups: str,
  *,
  num_layers: int = 6,
  batch_size: int = 50,
  warmup_epochs: int = 1,
  **mixer: Any,
) -> Published:
  """Returns a line of S5's `bin/run_experiments/run_lra_*.sh`, commit 3c18fdb.

  Args:
    task: name of the task.
    sizes: width, number of states, number of blocks and number of epochs.
    rates: dropout, weight decay, learning rate of the state-space parameters,
      and the global learning rate over that one.
    groups: name of the `opt_config`.
    num_layers, batch_size, warmup_epochs: other sizes.
    **mixer: options of the mixer.
  """
  # Convert epochs to steps.
  d_model, states, blocks, epochs = sizes
  dropout_rate, weight_decay, rate, ratio = rates
  epoch = NUM_TRAIN[task] // batch_size
  share = bool(mixer.get("share_step"))
  # The global learning rate is the rate of the state-space parameters times
  # the ratio.
  return Published(
    d_model,
    num_layers,
    dropout_rate,
    {"state_size": states, "blocks": blocks, **mixer},
    {"norm_type": "batch"},
    batch_size,
    epochs * epoch,
    warmup_epochs * epoch,
    rate * ratio,
    weight_decay,
    s5_groups(groups, ratio, share_step=share),
  )


# S5 on every task.
_S5 = {
  "listops": _s5(
    "listops",
    (128, 16, 8, 40),
    (0.0, 0.04, 1e-3, 3),
    "BfastandCdecay",
    num_layers=8,
    glu="half2",
  ),
  "text": _s5(
    "text",
    (256, 192, 12, 35),
    (0.1, 0.07, 1e-3, 4),
    "standard",
    warmup_epochs=0,
    share_step=True,
    glu="half2",
  ),
  "retrieval": _s5(
    "retrieval",
    (128, 256, 16, 20),
    (0.0, 0.05, 1e-3, 2),
    "standard",
    batch_size=32,
    share_step=True,
    c_init="rows",
  ),
  "image": _s5(
    "image",
    (512, 384, 3, 250),
    (0.1, 0.07, 1e-3, 4.5),
    "BfastandCdecay",
    clip_eigenvalues=True,
  ),
  "pathfinder": _s5(
    "pathfinder",
    (192, 256, 8, 200),
    (0.05, 0.03, 9e-4, 5),
    "standard",
    batch_size=64,
    c_init="rows",
  ),
  "pathx": _s5(
    "pathx",
    (128, 256, 16, 75),
    (0.0, 0.06, 6e-4, 3),
    "BandCdecay",
    batch_size=32,
    c_init="complex",
    step_min=1e-4,
  ),
}


def _s4d(
  d_model: int,
  states: int,
  batch_size: int,
  rate: float,
  steps: int,
  *,
  dropout_rate: float = 0.0,
  norm_first: bool = True,
  num_ssm: int = 1,
  **mixer: Any,
) -> Published:
  """Returns a file of S4's `configs/experiment/lra`, commit e757cef.

  A and B have the learning rate 1e-3 and no weight decay. In files with one
  learning rate for all of them (64 states), the step has both as well, and C
  has the learning rate. In the other files the step has the rate of all other
  parameters.
  """
  # Give A, B and the step their learning rates, and C where the file does.
  slow = {"factor": 1e-3 / rate, "decay": False}
  groups: dict[str, dict[str, Any]] = {
    "eigenvalues": slow,
    "input": slow,
    "step": {"factor": 1.0, "decay": False},
  }
  if states == 64:
    groups |= {"step": slow, "output": {"factor": 1e-3 / rate}}
  # The warm-up takes a tenth of the steps, and weight decay is 0.05.
  return Published(
    d_model,
    6,
    dropout_rate,
    {"state_size": states, "num_ssm": num_ssm, **mixer},
    {"norm_type": "batch", "norm_first": norm_first, "final_norm": norm_first},
    batch_size,
    steps,
    steps // 10,
    rate,
    0.05,
    groups,
  )


# S4D on every task.
_S4D = {
  "listops": _s4d(256, 4, 32, 0.01, 120_000, norm_first=False),
  "text": _s4d(256, 4, 16, 0.01, 50_000),
  "retrieval": _s4d(256, 4, 64, 0.01, 50_000),
  "image": _s4d(512, 64, 50, 0.01, 180_000, dropout_rate=0.1, norm_first=False),
  "pathfinder": _s4d(256, 64, 64, 0.004, 500_000, num_ssm=0),
  "pathx": _s4d(256, 64, 16, 0.001, 500_000, num_ssm=0, step_min=1e-4),
}


def _lru(
  d_model: int,
  states: int,
  steps: int,
  batch_size: int,
  factor: float,
  dropout_rate: float,
  ring: tuple[float, float],
  *,
  rate: float = 1e-3,
  causal: bool = True,
  **mixer: Any,
) -> Published:
  """Returns a row of table 9 of Orvieto et al. 2023.

  The paper chose the learning rate from a grid and states it only for Image,
  4e-3. The other tasks have 1e-3, the default of minimal-LRU. The paper's Image
  is in colour, and the one of Long Range Arena is grey.
  """
  # The eigenvalues and B are trained slower by `factor`, without decay.
  slow = {"factor": factor, "decay": False}
  return Published(
    d_model,
    6,
    dropout_rate,
    {
      "state_size": states,
      "r_min": ring[0],
      "r_max": ring[1],
      "causal": causal,
      **mixer,
    },
    {"norm_type": "batch"},
    batch_size,
    steps,
    steps // 10,
    rate,
    0.05,
    {"eigenvalues": slow, "input": slow},
  )


# The LRU on every task.
_LRU = {
  "listops": _lru(128, 256, 80_000, 32, 0.5, 0.0, (0.0, 0.99)),
  "text": _lru(256, 192, 50_000, 32, 0.1, 0.1, (0.5, 0.9)),
  "retrieval": _lru(128, 256, 100_000, 64, 0.5, 0.1, (0.5, 0.9)),
  "image": _lru(512, 384, 180_000, 50, 0.25, 0.1, (0.9, 0.999), rate=4e-3),
  "pathfinder": _lru(
    192, 256, 500_000, 64, 0.25, 0.0, (0.9, 0.999), causal=False
  ),
  "pathx": _lru(
    128,
    256,
    250_000,
    32,
    0.25,
    0.0,
    (0.999, 0.9999),
    causal=False,
    max_phase=math.pi / 10,
    glu="half1",
  ),
}


def _mega(
  num_layers: int,
  d_model: int,
  query_dim: int,
  batch_size: int,
  rate: float,
  weight_decay: float,
  steps: int,
  warmup_steps: int,
  *,
  norm_type: str = "layer",
  norm_first: bool = False,
  dropout_rate: float = 0.1,
  **mixer: Any,
) -> Published:
  """Returns a row of table 8 of Ma et al. 2023; values have 2 d channels."""
  return Published(
    d_model,
    num_layers,
    dropout_rate,
    {"query_dim": query_dim, **mixer},
    {"mlp_dim": 2 * d_model, "norm_type": norm_type, "norm_first": norm_first},
    batch_size,
    steps,
    warmup_steps,
    rate,
    weight_decay,
    {},
    "linear",
    {"b2": 0.98, "clip_norm": 1.0},
  )


# Options of Mega on all tasks of pixels.
_PIXELS: dict[str, Any] = {
  "norm_type": "batch",
  "norm_first": True,
  "dropout_rate": 0.0,
  "weights": "laplace",
}
# Mega on every task.
_MEGA = {
  "listops": _mega(6, 80, 64, 64, 1e-3, 0.01, 90_000, 3_000),
  "text": _mega(4, 128, 64, 50, 4e-3, 0.01, 25_000, 10_000, norm_type="scale"),
  "retrieval": _mega(
    6, 128, 64, 64, 3e-3, 0.04, 91_960, 10_000, norm_type="scale"
  ),
  "image": _mega(
    8, 160, 96, 50, 0.01, 0.02, 180_000, 9_000, truncation=1_024, **_PIXELS
  ),
  "pathfinder": _mega(
    6, 128, 64, 128, 0.01, 0.01, 250_000, 50_000, truncation=1_024, **_PIXELS
  ),
  "pathx": _mega(
    4, 64, 32, 128, 0.01, 0.01, 125_000, 25_000, truncation=4_096, **_PIXELS
  ),
}

# Published sizes, by model and task.
PUBLISHED: Mapping[str, Mapping[str, Published]] = {
  "s5": _S5,
  "s4d": _S4D,
  "lru": _LRU,
  "mega": _MEGA,
}

# Options of a mixer at size=tiny and size=laptop.
TINY: Mapping[str, Mapping[str, Any]] = {
  "lru": {"state_size": 32},
  "linoss": {"state_size": 32},
  "damped_linoss": {"state_size": 32},
  "mega": {"attention_chunk": 128},
}
# Eigenvalues of the LRU at these sizes, chosen on validation splits: near 1
# they count the brackets of ListOps, and fast ones find words of a text.
TINY_RINGS: Mapping[str, Mapping[str, float]] = {
  "listops": {"r_min": 0.9, "r_max": 0.999, "max_phase": math.pi / 10},
  "text": {"r_min": 0.5, "r_max": 0.95},
  "retrieval": {"r_min": 0.3, "r_max": 0.9},
}


class Small(NamedTuple):
  """Sizes for two cores: width, number of layers, dropout."""

  d_model: int = WIDTH
  num_layers: int = 2
  dropout_rate: float = 0.0


# Sizes at size=laptop that differ from size=tiny, by task.
LAPTOP: Mapping[str, Small] = {
  "text": Small(d_model=128, dropout_rate=0.15),
  "image": Small(num_layers=4),
  "pathfinder": Small(num_layers=3),
  "retrieval": Small(num_layers=1, d_model=128, dropout_rate=0.2),
}


def model_fields(
  name: str, size: str, task: str, width: int, common: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the fields of a recurrent model, including positions and sizes.

  At "paper" the model has the sizes of Skyformer's comparison, as all baselines
  have: two layers, d = 64 and 64 states. At "matched" it is as wide as the
  Transformer's parameters allow, see `matched_width`. At "tiny" it trains in
  minutes, and at "laptop" in an hour, see `LAPTOP`. At "published" it has the
  sizes of the model's paper, with BatchNorm.

  Args:
    name: name of a model with a recurrence.
    size: "paper", "matched", "tiny", "laptop" or "published".
    task: name of the config's task.
    width: number of channels of a token at "paper" and "matched".
    common: fields that all models have, such as pool and head.

  Raises:
    UserError: if size is "published" and the model has no published sizes.
  """
  # Take the sizes of the model's own paper.
  if size == "published":
    published = PUBLISHED[choose("model with size=published", name, PUBLISHED)]
    width, num_layers, dropout_rate, mixer, block, *_ = published[task]
    return _fields(name, common, width, num_layers, dropout_rate, mixer, block)
  # Take the baseline's sizes, or small ones that learn in few steps.
  if size not in shared.SMALL_SIZES:
    return _fields(name, common, width, 2, 0.1, {}, {})
  small = LAPTOP.get(task, Small()) if size == "laptop" else Small()
  ring = TINY_RINGS.get(task, {}) if name == "lru" else {}
  options = {**TINY.get(name, {}), **ring}
  return _fields(name, common, *small, mixer=options, block={})


def matched_width(
  name: str,
  common: Mapping[str, Any],
  reference: Mapping[str, Any],
  inputs: matched.Inputs | None,
) -> int:
  """Returns the greatest width with at most the Transformer's parameters.

  Args:
    name: name of a model with a recurrence.
    common: fields that all models have, such as pool and head. The width was
      chosen with the class token of protocol=lra, which recurrences do not use.
    reference: fields of the Transformer.
    inputs: sizes of the task.

  Raises:
    UserError: if the sizes of the task are missing, or if the registration of
      the model does not count its parameters.
  """
  # Check that the parameters can be counted.
  if inputs is None:
    raise UserError("size=matched needs the sizes of the task: give inputs=.")
  count_layers = find_traits(name).count_layers
  if count_layers is None:
    raise UserError(
      f"size=matched needs the number of parameters of {name!r}: give "
      "Variant(count_layers=...) where it is registered, or choose size=paper."
    )

  # Count the layers, and everything outside of them.
  def count(width: int) -> int:
    layers = count_layers(width, inputs.max_len, common["num_layers"])
    return layers + matched.count_outside(common, inputs, width)

  # Compare with the Transformer.
  limit = matched.count_transformer(reference, inputs)
  return matched.find_width(count, limit)


def _fields(
  name: str,
  common: Mapping[str, Any],
  width: int,
  num_layers: int,
  dropout_rate: float,
  mixer: Mapping[str, Any],
  block: Mapping[str, Any],
) -> dict[str, Any]:
  # Set only the options that the mixer and the block have.
  traits = find_traits(name)
  inside = {"dropout_rate": dropout_rate} if traits.has_mixer_dropout else {}
  if "mlp_dim" in traits.block_options:
    block = {"mlp_dim": 2 * width, **block}
  return {
    **common,
    "name": name,
    "d_model": width,
    "num_layers": num_layers,
    "positions": "none",
    "dropout_rate": 0.0,
    "embedding": {"init_std": 1.0},
    "mixer": {**inside, **mixer},
    "block": {"dropout_rate": dropout_rate, **block},
  }


def published_training(name: str, task: str) -> dict[str, Any]:
  """Returns the training of a model's own paper, as fields for `base`.

  Differs from the papers' code: the best checkpoint on the validation split is
  scored; parameters with one axis (D, biases, norms) do not decay; the cosine
  ends at 0 (S5: 1e-6, the LRU: 1e-7); BatchNorm keeps 0.95 of its averages at
  every step (S5 on both Pathfinders: 0.9); and the warm-up of Mega on Path-X is
  linear, not quadratic.
  """
  # Set Adam, with its groups of parameters.
  sizes = PUBLISHED[name][task]
  optimizer = {
    **shared.VASWANI_ADAM,
    "b2": 0.999,
    "eps": 1e-8,
    "clip_norm": 0.0,
    "weight_decay": sizes.weight_decay,
    **sizes.adam,
    "groups": {kind: dict(group) for kind, group in sizes.groups.items()},
  }
  # Evaluate forty times during the run.
  return {
    "optimizer": optimizer,
    "schedule": {
      "name": sizes.schedule,
      "learning_rate": sizes.learning_rate,
      "warmup_steps": sizes.warmup_steps,
    },
    "batch_size": sizes.batch_size,
    "total_steps": sizes.total_steps,
    "log_steps": 100,
    "eval_steps": max(sizes.total_steps // 40, 1),
    "checkpoint_steps": 1_000,
  }
