"""Long Range Arena: TransJect's sizes, and the training of Skyformer's code."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from jaxformers.config import base, parse_arg
from jaxformers.recipes import shared
from jaxformers.registry import choose

SIZES = ("paper", "matched", "tiny")
# How each protocol pools tokens, unless the task says otherwise: "jaxformers"
# pools as TransJect's paper does, and the others as their code bases do.
POOLS = {
  "jaxformers": "max",
  "lra": "cls",
  "skyformer": "padded_mean",
  "s4": "mean",
}


def parse_arguments(arg: str | None) -> ConfigDict:
  """Returns model, size, protocol and seed; `tiny` is True at size=tiny.

  Raises:
    UserError: for an unknown argument, or another size than `SIZES`.
  """
  args = parse_arg(
    arg, model="transject", size="paper", protocol="jaxformers", seed=0
  )
  args.tiny = shared.is_tiny(args.size, SIZES)
  return args


def make_config(
  args: ConfigDict,
  *,
  task: Mapping[str, Any],
  matched_widths: Mapping[str, int],
  learning_rate: float,
  warmup_steps: int,
  tiny: Mapping[str, Any],
  pools: Mapping[str, str] = POOLS,
  heads: Mapping[str, Mapping[str, Any]] | None = None,
  **fields: Any,
) -> ConfigDict:
  """Returns the config of a task of Long Range Arena.

  Args:
    args: result of `parse_arguments`.
    task: fields of the task; the protocol is added.
    matched_widths: width of TransJect at size=matched, by protocol.
    learning_rate: peak learning rate at size=paper.
    warmup_steps: steps until the peak at size=paper.
    tiny: fields at size=tiny, as keywords of `tiny_fields`.
    pools: pooling by protocol.
    heads: further fields of the head, by protocol.
    **fields: other fields of the run, for `base`.

  Raises:
    UserError: for an unknown protocol.
  """
  protocol = choose("protocol", args.protocol, pools)
  head = heads[protocol] if heads else {}
  config = base(
    seed=args.seed,
    task={"name": task["name"], "protocol": protocol, **task},
    **model_fields(
      args.model,
      pools=pools,
      protocol=protocol,
      size=args.size,
      matched=matched_widths,
      **head,
    ),
    **fields,
    **skyformer_schedule(learning_rate, warmup_steps),
  )
  # Replace Skyformer's schedule by that of size=tiny.
  if args.tiny:
    config.update(shared.tiny_fields(args.model, **tiny))
  return config


def model_fields(
  name: str,
  *,
  pools: Mapping[str, str],
  protocol: str,
  size: str,
  matched: Mapping[str, int],
  **head: Any,
) -> dict[str, Any]:
  """Returns a model at the sizes of TransJect's LRA table, and its reference.

  TransJect has L = 2, E = 4, d = 512. All others have the sizes of Skyformer's
  comparison, from which the paper takes their numbers: also two layers, but
  d = 64, two heads, 128 hidden units and mean pooling, a fifteenth of the
  parameters. Results are compared with the parameters of the Transformer.

  Args:
    name: name of the model.
    pools: pooling by protocol; under "jaxformers" it is TransJect's on the
      task, and models in the Transformer's form pool the mean.
    protocol: key of `pools`.
    size: "paper"; "matched", TransJect with at most the Transformer's
      parameters; or "tiny", TransJect with d = 32 and E = 2. Other models have
      one size.
    matched: width of TransJect at size "matched", by protocol.
    **head: further fields of the head, for both.

  Returns:
    The fields `model` and `reference` for `base`.
  """
  tiny = shared.is_tiny(size, SIZES)
  pool = pools[choose("protocol", protocol, pools)]
  # S4 has no hidden layer between the pooled tokens and the logits.
  head = {"head_dim": 0 if protocol == "s4" else 128} | head
  # TransJect and the others differ in width, positions, dropout and pooling.
  common = {"num_layers": 2, **shared.COMMON, **head}
  widths = {"paper": 512, "matched": matched[protocol], "tiny": 32}
  transject = shared.transject(
    common,
    2 if tiny else 4,
    d_model=widths[size],
    positions="sinusoid",
    dropout_rate=0.0,
    pool=pool,
    orthogonal_map="cayley",
  )
  # These are the sizes of Skyformer's comparison.
  others = {
    **common,
    "d_model": 64,
    "positions": "learned",
    "dropout_rate": 0.1,
    "pool": "mean" if protocol == "jaxformers" else pool,
  }
  make_transformer = functools.partial(
    shared.transformer, shared=others, num_heads=2, mlp_dim=128
  )
  return shared.with_reference(name, make_transformer, transject)


def skyformer_schedule(
  learning_rate: float, warmup_steps: int
) -> dict[str, Any]:
  """Returns the training of Skyformer's code, as TransJect's LRA runs have it.

  Adam under PyTorch's OneCycleLR, whose default also cycles the first beta;
  gradients clipped entry by entry at 1; 50,000 steps. Differs from it: float32
  throughout, where they have half precision on linear layers.

  Returns:
    Fields for `base`.
  """
  return {
    "optimizer": {
      "name": "adam",
      "b2": 0.999,
      "eps": 1e-6,
      "clip_value": 1.0,
      "weight_decay": 0.0,
      "cycle_momentum": True,
    },
    "schedule": {
      "name": "onecycle",
      "learning_rate": learning_rate,
      "warmup_steps": warmup_steps,
    },
    "total_steps": 50_000,
    "log_steps": 100,
    "eval_steps": 500,
    "checkpoint_steps": 500,
  }
