"""Sizes and training of recurrent mixers on Long Range Arena."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import choose
from jaxformers.recipes import matched, shared
from jaxformers.recipes.traits import find_traits

WIDTH = 64  # Channels, where the size of a config does not say otherwise.
# Examples of the training split, for lengths that papers give in epochs.
NUM_TRAIN = {
  "listops": 96_000,
  "text": 25_000,
  "retrieval": 147_086,
  "image": 45_000,
  "pathfinder": 160_000,
  "pathx": 160_000,
}


class Published(NamedTuple):
  """Sizes and training of a model on a task, in the model's own paper.

  Attributes:
    d_model: width.
    num_layers: layers.
    dropout_rate: dropout inside and after the mixer.
    mixer, block: options of both.
    batch_size: examples of a step.
    total_steps, warmup_steps: length of the run and of the linear warm-up.
    learning_rate: peak.
    weight_decay: decay, times the learning rate.
    groups: `config.optimizer.groups`.
    schedule: name of the schedule.
    adam: options of Adam that differ from those of most papers.
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


# Groups of S5's `opt_config`, given the ratio of both learning rates: which
# factor B has, and whether weight decay shrinks it.
S5_GROUPS = {
  "standard": (True, False),
  "BandCdecay": (True, True),
  "BfastandCdecay": (False, True),
  "noBCdecay": (True, False),
}


def s5_groups(
  name: str, ratio: float, *, share_step: bool = False
) -> dict[str, dict[str, Any]]:
  """Returns the groups of an `opt_config` of S5's code.

  Source: `create_train_state` of lindermanlab/S5, commit 3c18fdb. A shared step
  has the global rate and decays there, and here.

  Args:
    name: in `S5_GROUPS`.
    ratio: global learning rate over that of the state-space parameters.
    share_step: True for one step of all states.

  Raises:
    UserError: for an unknown name.
  """
  is_slow, decays = S5_GROUPS[choose("opt_config", name, S5_GROUPS)]
  slow = 1 / ratio
  groups: dict[str, dict[str, Any]] = {
    "eigenvalues": {"factor": slow},
    "input": {"factor": slow if is_slow else 1.0, "decay": decays},
    "step": {"factor": slow},
  }
  if share_step:
    groups["step"] = {"factor": 1.0, "decay": True}
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
  """A line of S5's `bin/run_experiments/run_lra_*.sh`, commit 3c18fdb.

  Args:
    task: name of the task.
    sizes: width, states, blocks and epochs.
    rates: dropout, weight decay, learning rate of state-space parameters, and
      the ratio of the global rate to it.
    groups: name of the `opt_config`.
    num_layers, batch_size, warmup_epochs: other sizes.
    **mixer: options of the mixer.
  """
  d_model, states, blocks, epochs = sizes
  dropout_rate, weight_decay, rate, ratio = rates
  epoch = NUM_TRAIN[task] // batch_size
  share = bool(mixer.get("share_step"))
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
  """A file of S4's `configs/experiment/lra`, commit e757cef.

  A and B have the rate 1e-3 and no decay. So has the step, and C the rate,
  where the file gives one rate for all (64 states); else the step has the rate
  of the rest.
  """
  slow = {"factor": 1e-3 / rate, "decay": False}
  groups: dict[str, dict[str, Any]] = {
    "eigenvalues": slow,
    "input": slow,
    "step": {"factor": 1.0, "decay": False},
  }
  if states == 64:
    groups |= {"step": slow, "output": {"factor": 1e-3 / rate}}
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
  """A row of table 9 of Orvieto et al. 2023.

  The paper chose the rate from a grid, and names it for Image alone, 4e-3; the
  others have 1e-3, the default of minimal-LRU. Its Image is in colour, the one
  of Long Range Arena is grey.
  """
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
  """A row of table 8 of Ma et al. 2023; its values have 2 d channels."""
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


_PIXELS: dict[str, Any] = {
  "norm_type": "batch",
  "norm_first": True,
  "dropout_rate": 0.0,
  "weights": "laplace",
}
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

PUBLISHED: Mapping[str, Mapping[str, Published]] = {
  "s5": _S5,
  "s4d": _S4D,
  "lru": _LRU,
  "mega": _MEGA,
}

# Options of a mixer at size=tiny.
TINY: Mapping[str, Mapping[str, Any]] = {
  "lru": {"state_size": 32},
  "mega": {"attention_chunk": 128},
}
# Eigenvalues of the LRU at size=tiny, found on validation splits: near 1 they
# count the brackets of ListOps, and fast ones find the words of a text.
TINY_RINGS: Mapping[str, Mapping[str, float]] = {
  "listops": {"r_min": 0.9, "r_max": 0.999, "max_phase": math.pi / 10},
  "text": {"r_min": 0.5, "r_max": 0.95},
}


def model_fields(
  name: str, size: str, task: str, width: int, common: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the fields of a recurrent model, positions and sizes among them.

  At "paper" it has the sizes of Skyformer's comparison, as all baselines: two
  layers, d = 64, 64 states. At "matched" it is as wide as the Transformer's
  parameters allow, see `matched_width`; at "tiny" it trains in minutes; at
  "published" it has the sizes of its own paper, BatchNorm among them.

  Args:
    name: name of a model with a recurrence.
    size: "paper", "matched", "tiny" or "published".
    task: name of the config's task.
    width: channels of a token, at all sizes but "published".
    common: fields that all models have, such as pool and head.

  Raises:
    UserError: for size "published" of a model without such sizes.
  """
  if size == "published":
    known = PUBLISHED[choose("model with size=published", name, PUBLISHED)]
    sizes = known[task]
    return _fields(
      name,
      common,
      sizes.d_model,
      sizes.num_layers,
      sizes.dropout_rate,
      sizes.mixer,
      sizes.block,
    )
  if size != "tiny":
    return _fields(name, common, width, 2, 0.1, {}, {})
  ring = TINY_RINGS.get(task, {}) if name == "lru" else {}
  mixer = {**TINY.get(name, {}), **ring}
  return _fields(name, common, width, 2, 0.0, mixer, {})


def matched_width(
  name: str,
  common: Mapping[str, Any],
  reference: Mapping[str, Any],
  inputs: matched.Inputs | None,
) -> int:
  """Returns the width with at most the Transformer's parameters.

  Args:
    name: name of a model with a recurrence.
    common: fields that all models have, such as pool and head. The widths were
      chosen with the class token of protocol=lra, which recurrences leave out.
    reference: fields of the Transformer.
    inputs: sizes of the task.

  Raises:
    UserError: without sizes of the task, and for a model that does not tell its
      number of parameters.
  """
  if inputs is None:
    raise UserError("size=matched needs the sizes of the task: give inputs=.")
  count_layers = find_traits(name).count_layers
  if count_layers is None:
    raise UserError(
      f"size=matched needs the number of parameters of {name!r}: give "
      "Variant(count_layers=...) where it is registered, or choose size=paper."
    )

  def count(width: int) -> int:
    layers = count_layers(width, inputs.max_len, common["num_layers"])
    return layers + matched.count_outside(common, inputs, width)

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
