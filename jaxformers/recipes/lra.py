"""Long Range Arena: the sizes and training of TransJect, Skyformer and LRA."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from jaxformers.config import base, parse_arg
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import choose
from jaxformers.recipes import pretraining, recurrences, shared
from jaxformers.recipes.matched import Inputs
from jaxformers.recipes.traits import find_traits

SIZES = ("paper", "matched", "tiny", "laptop", "published")
# Pooling of each protocol, unless the task sets another: "jaxformers" pools as
# TransJect's paper does, and the others as their code bases do. "paper" pools
# as Skyformer does, except for TransJect, which keeps its own pooling.
POOLS = {
  "jaxformers": "max",
  "lra": "cls",
  "skyformer": "padded_mean",
  "s4": "mean",
  "paper": "padded_mean",
}


class Shape(NamedTuple):
  """Sizes of an encoder in LRA's configs.

  Attributes:
    d_model: width of the embedding.
    num_heads: number of attention heads in a layer.
    num_layers: number of layers.
    qkv_dim: number of channels of all heads together.
    mlp_dim: number of hidden units in the feed-forward and in the head.
    dropout_rate: dropout of the embedding and of the branches.
    pool: pooling of the tokens; "" for the pooling of the task.
  """

  d_model: int
  num_heads: int
  num_layers: int
  qkv_dim: int
  mlp_dim: int
  dropout_rate: float = 0.1
  pool: str = ""


class Original(NamedTuple):
  """Sizes and training of a task in LRA's own code.

  Source: lra_benchmarks/*/configs of google-research/long-range-arena, commit
  cd31e5c.

  Attributes:
    shapes: shapes by model; the Transformer's shape holds for all models that
      are not listed.
    fields: fields of the run, for `base`.
    attention_dropout: dropout of attention weights.
    positions: kind of positions.
    block_size: number of tokens in a block of local, sparse and Sinkhorn
      attention.
  """

  shapes: Mapping[str, Shape]
  fields: Mapping[str, Any]
  attention_dropout: float = 0.1
  positions: str = "sinusoid"
  block_size: int = 50


# Options of LRA's mixers that differ from our defaults.
LRA_MIXERS: Mapping[str, Mapping[str, Any]] = {
  "sparse": {"num_summary": 10},
  "longformer": {"window": 512, "num_global": 0},
  "linformer": {"rank": 16, "share_key_value": True},
  "reformer": {"chunk_size": 10, "num_buckets": 10, "num_hashes": 1},
  "synthesizer": {"kind": "random+dot"},
}


def parse_arguments(arg: str | None) -> ConfigDict:
  """Parses the arguments model, size, protocol, objective and seed.

  The result also has `is_small`, which is True at size=tiny and size=laptop.

  Raises:
    UserError: for an unknown argument, or for a size that is not in `SIZES`.
  """
  args = parse_arg(
    arg,
    model="transject",
    size="paper",
    protocol="jaxformers",
    objective="",
    seed=0,
  )
  args.is_small = choose("size", args.size, SIZES) in shared.SMALL_SIZES
  return args


def make_config(
  args: ConfigDict,
  *,
  task: Mapping[str, Any],
  length: int,
  matched_widths: Mapping[str, int],
  inputs: Mapping[str, Inputs],
  original: Original,
  learning_rate: float,
  warmup_steps: int,
  tiny: Mapping[str, Any],
  laptop: Mapping[str, Any] | None = None,
  eval_examples: int = 0,
  pools: Mapping[str, str] = POOLS,
  heads: Mapping[str, Mapping[str, Any]] | None = None,
  **fields: Any,
) -> ConfigDict:
  """Returns the config of a task of Long Range Arena.

  Args:
    args: result of `parse_arguments`.
    task: fields of the task, without the protocol.
    length: number of tokens in an example of Skyformer's code, a power of two.
    matched_widths: width of TransJect at size=matched, by protocol.
    inputs: sizes of the task, by protocol; "jaxformers" holds for the protocols
      that are not listed. The widths of recurrences at size=matched follow
      from them.
    original: sizes and training under protocol=lra.
    learning_rate: peak learning rate at size=paper.
    warmup_steps: number of steps up to the peak at size=paper.
    tiny: fields at size=tiny, as keywords of `tiny_fields`.
    laptop: fields that replace fields of `tiny` at size=laptop, at most two
      hours of a core; None if the task has no such size.
    eval_examples: number of examples that choose the checkpoint in Skyformer's
      code, if it does not score all; for "skyformer" and "paper".
    pools: pooling, by protocol; "jaxformers" has TransJect's own pooling.
    heads: further fields of the head, by protocol.
    **fields: other fields of the run, for `base`.

  Raises:
    UserError: for an unknown protocol, or for size=laptop if the task has no
      such size.
  """
  if args.size == "laptop":
    if laptop is None:
      raise UserError(
        f"size=laptop: {task['name']} has no such size; lra/listops, lra/text, "
        "lra/retrieval, lra/image and lra/pathfinder have. Choose size=tiny."
      )
    tiny = {**tiny, **laptop}
  # Find the sizes and the training of the protocol.
  protocol = choose("protocol", args.protocol, pools)
  is_original = protocol == "lra" and not args.is_small
  head = heads[protocol] if heads else {}
  training = skyformer_schedule(learning_rate, warmup_steps) | fields
  config = base(
    seed=args.seed,
    task={"name": task["name"], "protocol": protocol, **task},
    **model_fields(
      args.model,
      pools=pools,
      protocol=protocol,
      size=args.size,
      matched=matched_widths,
      inputs=inputs.get(protocol, inputs["jaxformers"]),
      length=length,
      original=original if is_original else None,
      task=task["name"],
      **head,
    ),
    **training | (dict(original.fields) if is_original else {}),
  )
  # Replace the training by a published one, and adjust the protocol.
  if args.size == "published":
    config.update(published_training(args.model, task["name"]))
  if protocol == "paper":
    shared.use_papers_options(config)
  if protocol in ("skyformer", "paper"):
    config.eval_examples = eval_examples
  # Replace the schedule by the one of size=tiny.
  if args.is_small:
    config.update(shared.tiny_fields(args.model, **tiny))
  return config


def published_training(name: str, task: str) -> dict[str, Any]:
  """Returns the training of a model's own paper, as fields for `base`."""
  if name == "transformer":
    return pretraining.published_training(task)
  return recurrences.published_training(name, task)


def model_fields(
  name: str,
  *,
  pools: Mapping[str, str],
  protocol: str,
  size: str,
  matched: Mapping[str, int],
  inputs: Inputs | None = None,
  length: int = 0,
  original: Original | None = None,
  task: str = "",
  **head: Any,
) -> dict[str, Any]:
  """Returns a model at the sizes of TransJect's LRA table, and its reference.

  TransJect has L = 2, E = 4 and d = 512. All other models have the sizes of
  Skyformer's comparison, from which the paper takes their scores: two layers as
  well, but d = 64, two heads, 128 hidden units and mean pooling, a fifteenth of
  the parameters. Under "lra" they have the sizes of LRA. The reference is the
  Transformer, whose number of parameters is compared with the model's.

  Args:
    name: name of the model.
    pools: pooling, by protocol. TransJect uses the pooling of "jaxformers" also
      under "paper". Models in the form of a Transformer use the mean under
      "jaxformers".
    protocol: key of `pools`.
    size: "paper"; "matched" for TransJect and recurrences with at most the
      Transformer's parameters; "tiny" or "laptop" for TransJect with d = 32 and
      E = 2, and small recurrences; or for recurrences and the Transformer
      "published", see `recurrences` and `pretraining`. Other models have only
      one size.
    matched: width of TransJect at size "matched", by protocol.
    inputs: sizes of the task, for recurrences at size "matched".
    length: number of tokens in an example of Skyformer's code, a power of two;
      0 for mixers with their own defaults.
    original: sizes of LRA; None for Skyformer's sizes.
    task: name of the task, for recurrences.
    **head: further fields of the head, for the model and its reference.

  Returns:
    The fields `model` and `reference` for `base`.
  """
  tiny = size in shared.SMALL_SIZES
  # Check the size, and find the pooling.
  if size == "published":
    _check_published(name)
  pool = pools[choose("protocol", protocol, pools)]
  # S4 has no hidden layer between pooled tokens and logits.
  width = 0 if protocol == "s4" else 128
  head = {"pool_norm": "", "head_dim": width} | head
  # TransJect differs from the others in width, positions, dropout and pooling.
  common = {"num_layers": 2, **shared.COMMON, **head}
  widths = {"matched": matched[protocol], "tiny": 32, "laptop": 32}
  transject = shared.transject(
    common,
    2 if tiny else 4,
    d_model=widths.get(size, 512),
    positions="sinusoid",
    dropout_rate=0.0,
    pool=pools["jaxformers"] if protocol == "paper" else pool,
    orthogonal_map="cayley",
  )

  def make_transformer(name: str) -> dict[str, Any]:
    traits = find_traits(name)
    # Layers with bounds have the sizes of `shared.certified`.
    if traits.is_bounded:
      return shared.certified(name, common | {"pool": transject["pool"]})
    is_mean = protocol == "jaxformers"
    # Recurrences have the width of the size.
    if traits.recurrence:
      width = recurrences.WIDTH
      if size == "matched":
        reference = make_transformer("transformer")
        sizes = common | {"pool": pool}
        width = recurrences.matched_width(name, sizes, reference, inputs)
      # A class token at the front of a causal mixer would see no other token.
      is_mean = is_mean or pool == "cls"
      fields = common | {"pool": "mean" if is_mean else pool}
      return recurrences.model_fields(name, size, task, width, fields)
    # All other models have the sizes of LRA or of Skyformer.
    if original is not None:
      return original_fields(name, original, pool, head)
    mean_or_pool = "mean" if is_mean else pool
    return skyformer_fields(name, common, mean_or_pool, length)

  fields = shared.with_reference(name, make_transformer, transject)
  if size == "published" and name == "transformer":
    fields["model"] = pretraining.published_model(task, common)
  return fields


def _check_published(name: str) -> None:
  """Raises UserError for a model without published sizes for these tasks."""
  published = (*recurrences.PUBLISHED, "transformer")
  if name not in published:
    raise UserError(
      f"size=published is for {', '.join(published)}, not for {name}: "
      "choose size=paper."
    )


def skyformer_fields(
  name: str, common: Mapping[str, Any], pool: str, length: int
) -> dict[str, Any]:
  """Returns an encoder at the sizes of Skyformer's comparison.

  Args:
    name: name of the model.
    common: fields that all models have.
    pool: pooling of the tokens.
    length: number of tokens in a padded example, a power of two; 0 for mixers
      with their own defaults.
  """
  sizes = {"d_model": 64, "positions": "learned", "dropout_rate": 0.1}
  fields = {**common, **sizes, "pool": pool}
  model = shared.transformer(name, fields, num_heads=2, mlp_dim=128)
  if length:
    model["mixer"] = skyformer_options(name, length)
  return model


def skyformer_options(name: str, length: int) -> dict[str, Any]:
  """Returns the options of a mixer that follow from the length.

  In Skyformer's code, Informer has u = f ceil(ln n) queries and sampled keys,
  with f = ceil(128 / ln n), and Reformer has two buckets for each of its chunks
  of 64 tokens.

  Args:
    name: name of the model.
    length: number of tokens in a padded example, a power of two.
  """
  if name == "informer":
    factor = math.ceil(128 / math.log(length))
    count = factor * math.ceil(math.log(length))
    return {"num_queries": count, "num_samples": count}
  if name == "reformer":
    return {"num_buckets": 2 * length // 64}
  return {}


def original_fields(
  name: str, original: Original, pool: str, head: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns an encoder at the sizes of LRA's own configs.

  Differs from LRA: the best checkpoint on the validation split is scored, while
  LRA scores the last one.

  Args:
    name: name of the model.
    original: sizes of the task.
    pool: pooling of the task.
    head: fields of the head that the task sets.
  """
  # Take the shape of the model, or the Transformer's.
  shape = original.shapes.get(name, original.shapes["transformer"])
  sizes = {
    "num_layers": shape.num_layers,
    **shared.COMMON,
    "d_model": shape.d_model,
    "positions": original.positions,
    "dropout_rate": shape.dropout_rate,
    "pool": shape.pool or pool,
    "embedding": {"init_std": 1.0},
    "head_dim": shape.mlp_dim,
    **head,
  }
  model = shared.transformer(name, sizes, shape.num_heads, shape.mlp_dim)
  # Orthogonal matrices are square: the heads of this baseline keep all
  # channels.
  channels = (
    shape.d_model if name == "transformer_orthogonal" else shape.qkv_dim
  )
  model["mixer_defaults"] |= {
    "head_size": channels // shape.num_heads,
    "use_bias": False,
    "dropout_rate": original.attention_dropout,
  }
  model["block"]["dropout_rate"] = shape.dropout_rate
  # Set the options of the mixer.
  mixer = dict(LRA_MIXERS.get(name, {}))
  if name in ("local", "sinkhorn", "sparse"):
    mixer["block_size"] = original.block_size
  model["mixer"] = mixer
  return model


def original_schedule(
  name: str,
  learning_rate: float,
  warmup_steps: int,
  total_steps: int,
  *,
  weight_decay: float = 0.0,
  clip_norm: float = 0.0,
  **fields: Any,
) -> dict[str, Any]:
  """Returns the training of LRA's own code: Adam with decoupled decay.

  Differs from it: kernels and embeddings decay, and LRA's biases and scales of
  norms do, too. See `optim.cosine` for the schedule of images.

  Args:
    name: name of the schedule: "rsqrt" for texts, "cosine" for images.
    learning_rate: `base_learning_rate` of LRA's config.
    warmup_steps: number of steps of the linear warm-up.
    total_steps: number of steps of the run.
    weight_decay: weight decay, which is multiplied by the learning rate.
    clip_norm: greatest norm of the gradient; 0 for no clipping.
    **fields: `batch_size` and other fields.

  Returns:
    Fields for `base`.
  """
  if warmup_steps > total_steps:
    # The run ends during its warm-up: keep the learning rates of these steps.
    learning_rate *= total_steps / warmup_steps / warmup_steps**0.5
    name, warmup_steps = "constant", total_steps
  adam = {**shared.VASWANI_ADAM, "weight_decay": weight_decay}
  return {
    "optimizer": adam | {"clip_norm": clip_norm},
    "schedule": {
      "name": name,
      "learning_rate": learning_rate,
      "warmup_steps": warmup_steps,
    },
    "total_steps": total_steps,
    "log_steps": 100,
    "eval_steps": 500,
    "checkpoint_steps": 500,
    **fields,
  }


def skyformer_schedule(
  learning_rate: float, warmup_steps: int
) -> dict[str, Any]:
  """Returns the training of Skyformer's code, which TransJect's LRA runs use.

  Adam under PyTorch's OneCycleLR, which also cycles the first beta by default;
  gradients clipped entry by entry at 1; 50,000 steps. Differs from that code:
  float32 throughout, where Skyformer has half precision in linear layers.

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
