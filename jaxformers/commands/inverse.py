r"""Recovers the tokens from the output of a layer.

jaxformers inverse runs/listops

runs injective layers backwards. A layer of TransJect is injective if the
weights of its gate and Sigma are given (theorem 2 of the paper;
docs/theory.md). The forward pass returns both as side information, which has
num_layers * num_experts + d numbers per sample.

jaxformers inverse runs/language --layer 1 --noise 0.01

finds the tokens of a causal model one after the other, by the state of layer 1
with added noise: see `models.sipit`. Causal models without injective layers are
always inverted in this way. --states takes the states of other sequences from a
file, and prints the tokens.
"""

from __future__ import annotations

import time
from typing import Any
from zipfile import BadZipFile

import jax.numpy as jnp
import numpy as np

from jaxformers.commands import states
from jaxformers.foundations import cli, paths
from jaxformers.foundations.errors import UserError
from jaxformers.inference import TrainedModel
from jaxformers.models import in_float32, inverse, sipit
from jaxformers.models.blocks.invertible import layers_of


@cli.command(
  cli.WORKDIR,
  *states.STATE,
  states.SPLIT,
  cli.option("samples", 32, "number of samples"),
  cli.option("length", 512, "largest number of tokens per sample"),
  cli.option("layer", -1, "number of the layer, from 0; -1 for the last one"),
  cli.option("noise", 0.0, "Euclidean norm of the noise of each state"),
  cli.option("policy", "all", "candidates of a token, all or gradient"),
  cli.argument(
    "--states",
    dest="file",
    default="",
    metavar="FILE",
    help="states [b, n, d] of other sequences, as np.save writes them, or "
    "states and mask [b, n] by np.savez",
  ),
)
def main(
  workdir: str,
  split: str,
  samples: int,
  length: int,
  layer: int,
  noise: float,
  policy: str,
  file: str,
  **state: Any,
) -> None:
  """Prints the share of tokens that are recovered from a layer."""
  run = states.load(workdir, **state)
  place = None if layer == -1 else layer
  is_whole = place is None and not noise and policy == "all"
  if file:
    _print_tokens(run, file, place, noise, policy)
    return
  if not is_whole or layers_of(run.model.stacks()["encoder"]) is None:
    drawn = run.sample(samples, length, split)
    print(states.describe(state), _search(run, drawn, place, noise, policy))
    return
  model = in_float32(run.model)
  ids, *_ = model.close_holes(jnp.asarray(run.sample(samples, length, split)))
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


def _search(
  run: TrainedModel,
  ids: np.ndarray,
  layer: int | None,
  noise: float,
  policy: str,
) -> str:
  """Returns a report of the tokens that are found one after the other.

  Args:
    run: trained model.
    ids: samples, int32 [b, n].
    layer: number of the layer; None for the last one.
    noise: Euclidean norm of the noise that is added to each state.
    policy: argument of `sipit.recover`.
  """
  model, params = run.model, run.params
  ids, mask, hidden = sipit.find_states(model, params, ids, layer)
  began = time.perf_counter()
  tokens = sipit.recover(
    model,
    params,
    _noisy(hidden, noise),
    layer=layer,
    mask=mask,
    policy=policy,
    progress=True,
  )
  seconds = (time.perf_counter() - began) / len(ids)
  right = (tokens.ids == ids)[mask].mean()
  radius = sipit.noise_radius(model, params, layer)
  certified = "no noise radius is known"
  if radius is not None:
    certified = f"certified up to noise of {radius:.2g}"
  name = "the last layer" if layer is None else f"layer {layer}"
  return (
    f"{mask.sum()} tokens of {len(ids)} sequences, one after the other from "
    f"{name} with noise of {noise:g}: {right:.4%} recovered; least margin "
    f"{tokens.margins[mask].min():.3g}, greatest distance "
    f"{tokens.distances[mask].max():.2g}, {seconds:.2g} s a sequence with the "
    f"compilation; {certified}."
  )


def _noisy(states: np.ndarray, noise: float) -> np.ndarray:
  """Returns states [b, n, d] with noise of a Euclidean norm in each."""
  if not noise:
    return states
  drawn = np.random.default_rng(0).normal(size=states.shape)
  return states + drawn * noise / np.linalg.norm(drawn, axis=-1, keepdims=True)


def _print_tokens(
  run: TrainedModel, file: str, layer: int | None, noise: float, policy: str
) -> None:
  """Prints the tokens of the states in a file, a sequence a line.

  Raises:
    UserError: for a file that has no states.
  """
  try:
    content = np.load(paths.expand(file), allow_pickle=False)
    is_archive = not isinstance(content, np.ndarray)
    array = content["states"] if is_archive else content
    if array.ndim != 3:
      raise ValueError(f"an array of {array.ndim} axes")
    mask = content["mask"] if is_archive and "mask" in content else None
  except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
    raise UserError(
      f"{file} has no states ({error}): give states [b, n, d] that np.save has "
      "written, or np.savez(FILE, states=..., mask=...)."
    ) from None
  tokens = sipit.recover(
    run.model,
    run.params,
    _noisy(array, noise),
    layer=layer,
    mask=mask,
    policy=policy,
    progress=True,
  )
  for ids, margins in zip(tokens.ids, tokens.margins, strict=True):
    print(f"margin {np.nanmin(margins):.3g}: {run.inputs.decode(ids)}")


if __name__ == "__main__":
  main()
