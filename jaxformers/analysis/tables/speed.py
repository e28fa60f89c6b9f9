"""TransJect's table 3: number of parameters, and inference speed by length."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxformers import models
from jaxformers.foundations.tables import markdown_table
from jaxformers.models.variables import make_variables

# Sizes of the table: L = 6, d = 512, and the vocabulary that follows from the
# authors' numbers of parameters.
SIZES: dict[str, Any] = {
  "num_layers": 6,
  "d_model": 512,
  "vocab_size": 185,
  "num_classes": 2,
}
LENGTHS = (1_024, 2_048, 3_072, 4_096)


def _transformer(mlp_dim: int) -> dict[str, Any]:
  """Returns the config of a Transformer of the table."""
  return {
    "name": "transformer",
    "positions": "sinusoid",
    "mixer": {"num_heads": 8},
    "block": {"mlp_dim": mlp_dim},
  }


def _transject(num_experts: int) -> dict[str, Any]:
  """Returns the config of a TransJect of the table."""
  return {
    "name": "transject",
    "positions": "sinusoid",
    "mixer": {"num_experts": num_experts},
  }


ENCODERS: dict[str, dict[str, Any]] = {
  "Transformer": _transformer(2_048),
  "Transformer, d_ff = 512": _transformer(512),
  "TransJect, E = 1": _transject(1),
  "TransJect, E = 8": _transject(8),
}
# The paper's millions of parameters (ten times the numbers of its code), and
# the paper's speed-up over the Transformer at each length.
PRINTED = dict(zip(ENCODERS, (190.1, 95.6, 66.2, 286.8), strict=True))
SPEED_UPS = {
  "Transformer, d_ff = 512": (1.0, 1.0, 1.1, 1.4),
  "TransJect, E = 1": (5.0, 9.6, 12.8, 26.3),
}


def build_encoder(title: str, length: int) -> models.Model:
  """Returns a model of the table, with a classifier of two classes."""
  return models.build(**ENCODERS[title], **SIZES, max_len=length)


def count_parameters() -> dict[str, int]:
  """Returns the number of parameters of each model without its classifier."""
  head = SIZES["num_classes"] * (SIZES["d_model"] + 1)
  return {
    title: models.size(build_encoder(title, 4_096)) - head for title in ENCODERS
  }


def measure_seconds(
  lengths: Sequence[int] = LENGTHS, rounds: int = 5, batch_size: int = 1
) -> dict[int, dict[str, float]]:
  """Returns the median seconds of an inference call, by length and encoder.

  The encoders take turns in every round. The times exclude compilation and the
  computation of orthogonal matrices.

  Args:
    lengths: numbers of tokens.
    rounds: number of timed rounds.
    batch_size: number of examples of a call.
  """
  timed = ("Transformer", *SPEED_UPS)
  medians = {}
  for length in lengths:
    # Compile all encoders for this length.
    ids = jnp.ones((batch_size, length), jnp.int32)
    calls = {title: _compile(title, ids) for title in timed}
    # Time one call of each encoder in every round.
    seconds: dict[str, list[float]] = {title: [] for title in timed}
    for _ in range(rounds):
      for title, call in calls.items():
        began = time.perf_counter()
        jax.block_until_ready(call())
        seconds[title].append(time.perf_counter() - began)
    medians[length] = {k: statistics.median(v) for k, v in seconds.items()}
  return medians


def _compile(title: str, ids: jax.Array) -> Any:
  """Returns a compiled inference call of an encoder, which has run once."""
  model = build_encoder(title, ids.shape[1])
  init = jax.jit(functools.partial(model.init, train=False))
  params = init(jax.random.key(0), ids[:1, :2])["params"]
  # Compute the orthogonal matrices before the timed calls.
  variables = jax.jit(functools.partial(make_variables, model))(params)
  run = jax.jit(functools.partial(model.apply, train=False))
  jax.block_until_ready(run(variables, ids))
  return functools.partial(run, variables, ids)


def counts_table() -> str:
  """Returns the Markdown table of parameters: the paper's numbers and ours."""
  lines = [
    [title, f"{PRINTED[title]}", f"{count / 1e6:.2f}"]
    for title, count in count_parameters().items()
  ]
  header = ("model", "M parameters, paper", "ours")
  return markdown_table(header, lines, right=(1, 2))


def text(medians: dict[int, dict[str, float]]) -> str:
  """Returns both parts of the table in Markdown, with the paper's numbers.

  Args:
    medians: result of `measure_seconds`.
  """
  parts = [counts_table()]
  # Add the paper's and our speed-ups over the Transformer.
  header = ("speed-up over Transformer", *(f"n = {n:,}" for n in medians))
  lines = []
  for title, printed in SPEED_UPS.items():
    ours = [f"{s['Transformer'] / s[title]:.1f}" for s in medians.values()]
    theirs = dict(zip(LENGTHS, map(str, printed), strict=True))
    lines.append([f"{title}, paper", *(theirs.get(n, "") for n in medians)])
    lines.append([f"{title}, ours", *ours])
  parts.append(markdown_table(header, lines))
  note = (
    "The paper's counts are ten times the counts of its code. Its Transformer "
    "keeps an n x n array for every head; ours does not."
  )
  return "\n\n".join([*parts, note])
