"""Short texts: the sizes and the training of TransJect's table 1."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from jaxformers.config import base, parse_arg
from jaxformers.foundations.registry import choose
from jaxformers.recipes import shared
from jaxformers.recipes.pretraining import pretraining


def make_config(
  arg: str | None,
  name: str,
  *,
  num_train: Mapping[str, int],
  tiny: Mapping[str, Any],
) -> ConfigDict:
  """Returns the config of a short text task.

  The arguments of the config are model, size, protocol, objective and seed.

  Args:
    arg: argument of the config file, as text.
    name: name of the task.
    num_train: number of training examples, by protocol.
    tiny: fields at size=tiny, as keywords of `tiny_fields`.

  Raises:
    UserError: for an unknown argument, size or protocol.
  """
  # Read the arguments.
  args = parse_arg(
    arg,
    model="transject",
    size="paper",
    protocol="jaxformers",
    objective="",
    seed=0,
  )
  is_tiny = shared.is_tiny(args.size)
  protocol = choose("protocol", args.protocol, num_train)
  config = base(
    seed=args.seed,
    task={
      "name": name,
      "protocol": protocol,
      "archive": "",
      "vocabulary": "",  # A vocab.txt like BERT's; "" trains a vocabulary.
      "vocab_size": 30_522,  # Size of the vocabulary that is trained.
      "max_len": 512,
      "special_tokens": False,
    },
    **model_fields(args.model, tiny=is_tiny),
    eval_batch_size=100,
    # Most texts are much shorter than max_len: pad to one of four lengths.
    buckets=4,
    select="loss" if protocol == "paper" else "accuracy",
    **schedule(num_train[protocol]),
  )
  # Adjust the config to the protocol and to the size.
  if protocol == "paper":
    shared.use_papers_options(config)
  if is_tiny:  # Minutes on two cores, without early stopping.
    fields = shared.tiny_fields(args.model, learning_rate=3e-3, **tiny)
    config.update(fields, patience=0)
  return pretraining(config, args)


def model_fields(name: str, *, tiny: bool) -> dict[str, Any]:
  """Returns a model at the sizes of TransJect's short-text table.

  The sizes are L = 6 and d = 512 with mean pooling. TransJect has E = 4
  experts; all other models have 8 heads and a feed-forward of 2048 (the
  Transformer has 18.9 M parameters without its embedding).

  Args:
    name: name of the model.
    tiny: True for L = 2, d = 64 and two experts or heads, with dropout of the
      embedding.

  Returns:
    The fields `model` and `reference` for `base`.
  """
  # Fields of all models, then the fields in which TransJect differs.
  common = {
    "d_model": 64 if tiny else 512,
    "num_layers": 2 if tiny else 6,
    "positions": "sinusoid",
    "dropout_rate": 0.2 if tiny else 0.1,
    "pool": "mean",
    "pool_norm": "",
    "head_dim": 0,
    **shared.COMMON,
  }
  transject = shared.transject(
    common,
    2 if tiny else 4,
    dropout_rate=0.2 if tiny else 0.0,
    orthogonal_map="cayley",
  )
  # All other models have the heads and the feed-forward of a Transformer.
  make_transformer = functools.partial(
    shared.transformer,
    shared=common,
    num_heads=2 if tiny else 8,
    mlp_dim=128 if tiny else 2_048,
  )
  return shared.with_reference(name, make_transformer, transject)


def schedule(examples: int, batch_size: int = 32) -> dict[str, Any]:
  """Returns TransJect's training on short text: 30 epochs, patience of 4.

  Adam with learning rate 5e-4, beta (0.9, 0.98) and eps 1e-9. Every epoch ends
  with an evaluation.

  Args:
    examples: number of training examples.
    batch_size: examples per step; 32 in the paper.

  Returns:
    Fields for `base`.
  """
  # Steps of an epoch, rounded up.
  epoch = -(-examples // batch_size)
  return {
    "optimizer": dict(shared.VASWANI_ADAM),
    "schedule": {"name": "constant", "learning_rate": 5e-4, "warmup_steps": 0},
    "batch_size": batch_size,
    "total_steps": 30 * epoch,
    "log_steps": 100,
    "eval_steps": epoch,
    "checkpoint_steps": epoch,
    "patience": 4,
  }


def bert_base(name: str) -> dict[str, Any]:
  """Returns the section `model` of BERT-base, without pool and head.

  BERT-base has 12 layers that are normalised after each block (Devlin et al.
  2019, section 3, and the defaults of their code). Differs from it: dropout is
  also between the two maps of the feed-forward.

  Args:
    name: name of the model.
  """
  return {
    "name": name,
    "d_model": 768,
    "num_layers": 12,
    "positions": "learned",
    "dropout_rate": 0.1,
    "dtype": "float32",
    "memory": "stored",
    "embedding": {"norm_epsilon": 1e-12},
    "mixer": {},
    "mixer_defaults": {"num_heads": 12, "dropout_rate": 0.1, "init_std": 0.02},
    "block": {
      "mlp_dim": 3_072,
      "dropout_rate": 0.1,
      "norm_first": False,
      "norm_epsilon": 1e-12,
      "init_std": 0.02,
    },
  }
