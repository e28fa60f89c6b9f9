r"""How far a trained encoder moves tokens apart: what is certain, what is seen.

python -m jaxformers lipschitz runs/listops

For TransJect the certificate is a theorem evaluated on the weights at hand: an
interval for |f(x) - f(y)| / |x - y| of any two tokens of one sample, and of any
two sequences where there is one (docs/theory.md). For every encoder the
measured part stands beside it: activation factors over data (TransJect,
equation 9) and the extremes that gradient ascent finds.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxformers import cli, trained
from jaxformers.analysis.certificates.ascent import adversarial
from jaxformers.analysis.certificates.inverse import layers_in_float32
from jaxformers.analysis.tokens.capture import capture
from jaxformers.errors import UserError
from jaxformers.models import Classifier, in_float32
from jaxformers.models.blocks.invertible import Interval, layers_of
from jaxformers.models.variables import make_variables, of_stack

KINDS = ("tokens", "sequences")


def guaranteed(
  model: Classifier, params: Any, shared: Any, norms: Any
) -> list[dict[str, Any]]:
  """Returns the certificate of every layer, from its actual weights.

  Args:
    model, params: from `models.build`, with injective layers.
    shared: what the layers shared on data; for TransJect Sigma, [b, d] or
      [1, d].
    norms: [l], the greatest Frobenius norm of a sample's tokens before each
      layer.

  Returns:
    For each layer what `InvertibleLayers.certificate` says, with the intervals
    `tokens` and `sequences`.
  """
  layers = layers_in_float32(model)
  variables = make_variables(model, params)
  weights = layers.weights(of_stack(variables, "encoder"))
  return [
    layers.certificate(layer_weights, shared, float(norm))
    for layer_weights, norm in zip(weights, norms, strict=True)
  ]


def product(intervals: list[Interval]) -> Interval:
  """Of all layers: the product of the lowest and of the greatest factors."""
  lows, highs = zip(*intervals, strict=True)
  return math.prod(lows), math.prod(highs)


def pairs(mask: np.ndarray, count: int, seed: int) -> np.ndarray:
  """Pairs of different tokens of each sample -> int32 [b, count, 2].

  Args:
    mask: [b, n], True at tokens; a sample with fewer than two gives [0, 0].
    count: of pairs a sample, drawn with repetition.
    seed: of the generator.
  """
  rng = np.random.default_rng(seed)
  drawn = np.zeros((len(mask), count, 2), np.int32)
  for b, row in enumerate(mask):
    (places,) = np.nonzero(row)
    if len(places) > 1:
      first = rng.integers(len(places), size=count)
      other = (first + rng.integers(1, len(places), size=count)) % len(places)
      drawn[b] = np.stack([places[first], places[other]], 1)
  return drawn


def distances(hidden: tuple[jax.Array, ...], chosen: jax.Array) -> jax.Array:
  """|x_i^l - x_j^l| of chosen pairs -> [l + 1, b, count].

  Args:
    hidden: of `capture.Capture`.
    chosen: from `pairs`.
  """

  def of(x: jax.Array) -> jax.Array:
    one, other = (
      jnp.take_along_axis(x, chosen[..., k, None], 1) for k in (0, 1)
    )
    return jnp.linalg.norm(one - other, axis=-1)

  return jnp.stack([of(x) for x in hidden])


def activation_factors(distances: np.ndarray) -> np.ndarray:
  """|x_i^l - x_j^l| / |x_i^0 - x_j^0| -> float64 [l + 1, b, count].

  Source: TransJect, equation 9, before its two means. NaN where the embedded
  tokens are equal.

  Args:
    distances: from the function of that name.
  """
  found = np.asarray(distances, np.float64)
  return found / np.where(found[0] > 0, found[0], np.nan)


def measure_factors(
  model: Classifier,
  params: Any,
  batches: list[np.ndarray],
  *,
  count: int = 1_000,
  seed: int = 0,
) -> dict[str, Any]:
  """Activation factors over data, batch by batch.

  Args:
    model, params: any of `models.build`, in evaluation.
    batches: ids, as the model takes them; nothing of a batch is kept.
    count: of pairs of tokens a sample.
    seed: of the pairs.

  Returns:
    `factors`, for the embedding and every layer the mean, least and greatest
    over all pairs of different embeddings; `norms`, the greatest Frobenius norm
    of a sample's tokens there; `pairs`, their number; and `shared`, what
    injective layers shared, batches one after the other; None for others.
  """
  own = make_variables(model, params)
  encoder = of_stack(own, "encoder")
  layers = layers_of(model.stacks()["encoder"])

  @jax.jit
  def of(ids: jax.Array, chosen: jax.Array) -> Any:
    found = capture(model, own, ids)
    tokens = [jnp.where(found.mask[..., None], x, 0) for x in found.hidden]
    norms = jnp.stack([jnp.sqrt(jnp.square(x).sum((1, 2))) for x in tokens])
    shared = None
    if layers is not None:
      shared = layers.shared(encoder, found.hidden[0], found.mask).value
    return distances(found.hidden, chosen), norms.max(1), shared

  total = low = high = norms = 0.0
  number, batches_shared = 0, []
  for k, ids in enumerate(tqdm(batches, "activation factors", disable=None)):
    mask = np.asarray(model.mask(jnp.asarray(ids)))
    apart, largest, shared = jax.device_get(
      of(ids, jnp.asarray(pairs(mask, count, seed + k)))
    )
    factors = activation_factors(apart).reshape(len(apart), -1)
    factors = factors[:, np.isfinite(factors[0])]
    if not factors.size:
      continue
    total = total + factors.sum(1)
    low = np.minimum(low, factors.min(1)) if number else factors.min(1)
    high = np.maximum(high, factors.max(1)) if number else factors.max(1)
    norms = np.maximum(norms, largest)
    number += factors.shape[1]
    batches_shared.append(shared)
  if not number:
    raise UserError(
      "The samples have no two different tokens: give longer ones, or more."
    )
  return {
    "factors": [
      {"mean": float(m / number), "min": float(a), "max": float(b)}
      for m, a, b in zip(total, low, high, strict=True)
    ],
    "norms": [float(norm) for norm in norms],
    "pairs": number,
    "shared": jax.tree.map(
      lambda *leaves: np.concatenate(leaves), *batches_shared
    ),
  }


def report(
  model: Classifier,
  params: Any,
  ids: np.ndarray,
  *,
  batch_size: int = 8,
  steps: int = 200,
  seed: int = 0,
) -> dict[str, Any]:
  """The certificate, where there is one, and what was measured; plain JSON.

  Args:
    model, params: any of `models.build`; looked at in float32 (see
      `models.in_float32`), for rounding is no Lipschitz function.
    ids: samples, as the model takes them; the ascents start from the first
      `batch_size`.
    batch_size: samples at a time.
    steps: of every ascent.
    seed: of pairs and directions.
  """
  batches = [ids[k : k + batch_size] for k in range(0, len(ids), batch_size)]
  model = in_float32(model)
  seen = measure_factors(model, params, batches, seed=seed)
  shared = seen.pop("shared")
  rows: list[dict[str, Any]] = []
  total = None
  if layers_of(model.stacks()["encoder"]) is not None:
    rows = guaranteed(model, params, shared, seen["norms"][:-1])
  if rows and all(rows):
    total = {kind: product([row[kind] for row in rows]) for kind in KINDS}
  extremes = adversarial(
    model, params, jnp.asarray(batches[0]), steps=steps, seed=seed
  )
  return {
    "guaranteed": {"layers": rows, "all": total, "says": _says(model, total)},
    "measured": seen,
    "adversarial": extremes,
  }


def _says(model: Classifier, total: dict[str, Interval] | None) -> list[str]:
  """What the certificate means, in sentences."""
  if total is None:
    return ["This encoder has no certificate: what follows is measured."]
  layers = layers_in_float32(model)
  low, high = total["tokens"]
  says = [
    f"Two tokens of one sample: distances change by {low:.4g} to {high:.4g}."
    if low > 0
    else f"Two tokens of one sample: the lower bound is vacuous (0); distances "
    f"grow by at most {high:.4g}."
  ]
  scope = layers.scope()
  low, high = total["sequences"]
  if low > 0:
    says.append(f"{scope}: distances change by {low:.4g} to {high:.4g}.")
  else:
    says.append(
      f"{scope}: the lower bound is vacuous (0), so nothing keeps two of them "
      f"apart; the upper bound is {high:.4g}."
    )
  return says + layers.remarks(bounded=low > 0)


def table(found: dict[str, Any]) -> str:
  """A report as text, a line for each layer."""

  def span(low: float, high: float) -> str:
    return f"[{low:.4g}, {high:.4g}]"

  lines = ["layer  guaranteed, tokens  sequences           activation factor"]
  rows = found["guaranteed"]["layers"]
  factors = found["measured"]["factors"][1:]
  for i, factor in enumerate(factors):
    own = [span(*rows[i][kind]) if rows else "-" for kind in KINDS]
    lines.append(
      f"{i + 1:5}  {own[0]:18}  {own[1]:18}  {factor['mean']:.4f} "
      f"{span(factor['min'], factor['max'])}"
    )
  total = found["guaranteed"]["all"]
  own = [span(*total[kind]) if total else "-" for kind in KINDS]
  lines.append(f"  all  {own[0]:18}  {own[1]:18}")
  own = [span(*found["adversarial"][kind]) for kind in KINDS]
  lines.append(f"found  {own[0]:18}  {own[1]:18}  (by gradient ascent)")
  return "\n".join(
    lines
    + [f"Activation factors: {found['measured']['pairs']} pairs of tokens."]
    + found["guaranteed"]["says"]
  )


@cli.command(
  cli.WORKDIR,
  cli.argument("--samples", default=32, help="number of test samples"),
  cli.argument("--length", default=128, help="most tokens of a sample"),
  cli.argument("--steps", default=200, help="steps of each ascent"),
  cli.argument("--seed", default=0, help="seed of all that is drawn"),
)
def main(
  workdir: str, samples: int, length: int, steps: int, seed: int
) -> None:
  """Prints the table of a run and writes `lipschitz.json` into its workdir."""
  run = trained.load(workdir)
  ids = run.sample(samples, length, seed=seed)
  content = {
    "step": run.step,
    **{"workdir": workdir, "samples": samples, "length": length},
    **{"steps": steps, "seed": seed},
    **report(run.model, run.params, ids, steps=steps, seed=seed),
  }
  path = Path(workdir) / "lipschitz.json"
  path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
  print(f"{run.config['model']['name']} at step {run.step} on {run.task.name}")
  print(table(content))
  print(f"Written to {path}.")


if __name__ == "__main__":
  main()
