r"""Runs injective layers backwards, from the last output to the tokens.

jaxformers inverse runs/listops

A layer of TransJect is injective if the weights of its gate and Sigma are given
(theorem 2 of the paper; docs/theory.md). The forward pass returns both as side
information, which has num_layers * num_experts + d numbers per sample.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxformers.commands import states
from jaxformers.foundations import cli
from jaxformers.models import in_float32, inverse


@cli.command(
  cli.WORKDIR,
  *states.STATE,
  states.SPLIT,
  cli.option("samples", 32, "number of samples"),
  cli.option("length", 512, "largest number of tokens per sample"),
)
def main(
  workdir: str, split: str, samples: int, length: int, **state: Any
) -> None:
  """Prints the share of tokens that are recovered from the last layer."""
  run = states.load(workdir, **state)
  ids = jnp.asarray(run.sample(samples, length, split))
  model = in_float32(run.model)
  # Recover the tokens from only the last layer and the side information.
  hidden, side = inverse.forward(model, run.params, ids)
  x = inverse.inverse(model, run.params, hidden[-1], side)
  recovered, positions = inverse.tokens(model, run.params, x)
  mask = np.asarray(model.mask(ids))[:, model.config.cls :]
  expected = np.asarray(ids)
  if model.config.channels:
    expected = np.nan_to_num(expected)
  else:
    expected = expected.reshape(mask.shape)
  # Compare ids and positions at the tokens, without padding.
  right = np.isclose(recovered, expected, atol=1e-4)[mask].mean()
  shares = f"{right:.4%} of the tokens"
  if positions is not None:
    placed = (positions == np.arange(mask.shape[1]))[mask].mean()
    shares += f" and {placed:.4%} of their positions"
  # Largest error of the recovered embedding.
  off = inverse.largest_at_tokens(x - hidden[0], side.mask)
  label = states.describe(state)
  print(
    f"{f'{label}: ' if label else ''}"
    f"{mask.sum()} tokens of {len(expected)} sequences, through "
    f"{len(hidden) - 1} layers and back: {shares} recovered; largest error of "
    f"the embedding {off:.2g}."
  )


if __name__ == "__main__":
  main()
