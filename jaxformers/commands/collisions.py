r"""Measures how injective causal models are: distances of last states.

jaxformers collisions runs/language runs/other --out collisions

For each run the command prints the nearest pair of the states of last tokens of
different prompts, by layer; the nearest pair of all continuations of the
nearest prompts by one token, and of the continuations of one prompt; and how
near sequences come that differ by one repeated token (representational
collapse). Models with a certificate also have a distance that the states of two
continuations of a prompt cannot be below. --out draws the distances by layer,
with the certified one, and the collapse.
Sources: see `analysis.tokens.collisions`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxformers.analysis.plotting import plots
from jaxformers.analysis.plotting.figures import Figure, Row, Texts
from jaxformers.analysis.tokens import collisions
from jaxformers.commands import states
from jaxformers.foundations import cli, requirements
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.tables import markdown_table
from jaxformers.inference import TrainedModel
from jaxformers.models import sipit
from jaxformers.models.decode import is_bounded

NUM_EXTENDED = 10  # Prompts that are continued by every token.


@cli.command(
  cli.WORKDIRS,
  *states.STATE,
  cli.option("samples", 500, "number of prompts"),
  cli.option("length", 20, "largest number of tokens of a prompt"),
  cli.option("longest", 4_096, "largest number of repeated tokens"),
  states.SPLIT,
  cli.JSON,
  cli.option("out", "", "write the figures OUT and OUT_collapse"),
)
def main(
  workdirs: Sequence[Path],
  samples: int,
  length: int,
  longest: int,
  split: str,
  as_json: bool,
  out: str,
  **state: Any,
) -> None:
  """Prints distances for each run, and draws them if --out is set."""
  if out:
    requirements.require("plots", f"--out={out}")
  # Load all runs before the first one is measured.
  drawn = {}
  for workdir in workdirs:
    run = states.load(workdir, **state)
    label = states.label(workdir, state)
    drawn[label] = (run, run.sample(samples, length, split))
  content = {
    label: _measure(run, ids, longest) for label, (run, ids) in drawn.items()
  }
  cli.show(content, _lines(content), as_json)
  if out:
    for figure in _figures(Path(out).name, content):
      figure.write(Path(out).parent)


def _figures(name: str, content: Mapping[str, Any]) -> Iterator[Figure]:
  """Yields the figures of the distances by layer, and of the collapse."""
  rows: list[Row] = []
  for label, measured in content.items():
    curves = {
      "prompts": measured["least"],
      "continuations": measured["continued"],
      "continuations of one prompt": measured["siblings"],
      "continuations of one prompt, certified": measured["certified"],
    }
    rows += [
      (f"{label}: {kind}", 0, "distance", layer, value)
      for kind, values in curves.items()
      for layer, value in enumerate(values or ())
    ]
  texts = Texts(
    name,
    "Least distances of the states of last tokens",
    "Nearest pair of all prompts; of all continuations of the nearest prompts "
    "by one token; and of the continuations of one of these prompts, with the "
    "distance that they cannot be below. A distance of 0, a collision, is "
    "below the axis.",
  )
  panels = {"distance": "least distance"}
  yield plots.curves(texts, rows, "layer (0: embedding)", panels, log="y")
  rows = [
    (f"{label}, {dtype}", 0, "distance", n, value)
    for label, measured in content.items()
    for dtype, values in measured["collapse"].items()
    for n, value in zip(measured["lengths"], values, strict=True)
  ]
  texts = Texts(
    f"{name}_collapse",
    "Distance of sequences that differ by one repeated token",
    "Relative distance of the last states of (a, ..., a, b) with n and n + 1 "
    "times a, in the last layer. A distance of 0, a collision, is below the "
    "axis.",
  )
  panels = {"distance": "relative distance"}
  yield plots.curves(texts, rows, "n", panels, log="xy")


def _measure(
  run: TrainedModel, ids: np.ndarray, longest: int
) -> dict[str, Any]:
  """Returns all distances of a run.

  Args:
    run: trained model.
    ids: prompts, int32 [b, n].
    longest: largest number of repeated tokens.

  Raises:
    UserError: for a model that is not causal or reads numbers, and for fewer
      than two different prompts.
  """
  model, params = run.model, run.params
  sipit.check_model(model)
  # Move tokens to the front, and leave room for one more.
  ids = np.asarray(model.close_holes(jnp.asarray(ids))[0])
  if is_bounded(model):
    ids = ids[:, : model.config.max_len - 1]
  # Leave out copies, and keep the order of the draw.
  _, first = np.unique(ids, axis=0, return_index=True)
  ids = ids[np.sort(first)]
  counts = np.bincount(ids[ids > 0])
  if len(ids) < 2 or (counts > 0).sum() < 2:
    raise UserError(
      "The prompts are equal, or have one token only: give more --samples."
    )
  hidden = collisions.last_states(model, params, ids)
  threshold = collisions.COLLISION
  layers = [sipit.nearest(x, NUM_EXTENDED, threshold) for x in hidden]
  # Continue the prompts of the nearest pairs of the last layer.
  chosen = [*dict.fromkeys(layers[-1].pairs.ravel().tolist())][:NUM_EXTENDED]
  continued, siblings = [], []
  for layer in range(len(hidden)):
    states = collisions.continuations(model, params, ids[chosen], layer)
    flat = states.reshape(-1, states.shape[-1])
    continued.append(float(sipit.nearest(flat, 1).distances[0]))
    nearest = [sipit.nearest(each, 1).distances[0] for each in states]
    siblings.append(float(min(nearest)))
  lengths = collisions.collapse_lengths(model, longest)
  a, b = counts.argsort()[-2:][::-1].tolist()
  radii = sipit.noise_radii(model, params)
  return {
    "prompts": len(ids),
    "least": [float(pairs.distances[0]) for pairs in layers],
    "typical": [float(np.median(_distances(x))) for x in hidden],
    "collisions": [pairs.num_below for pairs in layers],
    "extended": len(chosen),
    "continuations": len(flat),
    "continued": continued,
    "siblings": siblings,
    # Only models with a bound in every layer have a certificate.
    "certified": [2 * r for r in radii] if len(radii) == len(hidden) else None,
    "tokens": [a, b],
    "lengths": lengths,
    "collapse": collisions.collapse(model, params, (a, b), lengths),
  }


def _distances(x: np.ndarray) -> np.ndarray:
  """Returns distances of prompts that were drawn one after the other."""
  return np.linalg.norm(x[1:] - x[:-1], axis=1)


def _lines(content: Mapping[str, Any]) -> Iterator[str]:
  """Yields the lines of the report."""
  for label, measured in content.items():
    yield (
      f"{label}: {measured['prompts']:,} prompts, "
      f"{measured['continuations']:,} continuations of the nearest "
      f"{measured['extended']}"
    )
    columns = (
      *("layer", "least", "collisions", "typical"),
      *("least continued", "of one prompt"),
    )
    table = [
      (
        str(layer),
        f"{measured['least'][layer]:.3g}",
        f"{measured['collisions'][layer]:,}",
        *(f"{measured[key][layer]:.3g}" for key in ("typical", "continued")),
        f"{measured['siblings'][layer]:.3g}",
      )
      for layer in range(len(measured["least"]))
    ]
    yield from markdown_table(columns, table).splitlines()
    if measured["certified"] is not None:
      yield (
        "Certified least distance of two continuations of a prompt in the last "
        f"layer: {measured['certified'][-1]:.3g}."
      )
    for dtype, values in measured["collapse"].items():
      shown = ", ".join(
        f"{n:,}: {value:.2g}"
        for n, value in zip(measured["lengths"], values, strict=True)
      )
      yield f"Collapse in {dtype}, relative distance by n: {shown}."
    yield ""


if __name__ == "__main__":
  main()
