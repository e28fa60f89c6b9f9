"""Certified and measured factors by which an encoder changes distances.

The certified bounds (docs/theory.md) are evaluated on the trained weights. The
measured activation factors follow equation 9 of TransJect.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxformers.analysis.certificates import attention
from jaxformers.analysis.certificates.ascent import adversarial
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.tables import markdown_table
from jaxformers.models import Model, in_float32
from jaxformers.models.blocks.fixed_point import LENGTHS
from jaxformers.models.blocks.invertible import Interval, layers_of
from jaxformers.models.capture import capture, mask_of_states
from jaxformers.models.inverse import layers_in_float32
from jaxformers.models.variables import make_variables, of_stack

KINDS = ("tokens", "sequences", "farthest")


def guaranteed(
  model: Model, params: Any, shared: Any, norms: Any
) -> list[dict[str, Any]]:
  """Returns the certificate of every layer, from the actual weights.

  Args:
    model, params: model and parameters from `models.build`, with injective
      layers.
    shared: values computed from data that all layers use. For TransJect they
      are Sigma, [b, d] or [1, d].
    norms: largest Frobenius norm of a sample's tokens before each layer, [l].

  Returns:
    `InvertibleLayers.certificate` of each layer.
  """
  layers = layers_in_float32(model)
  variables = make_variables(model, params)
  weights = layers.weights(of_stack(variables, "encoder"))
  return [
    layers.certificate(layer_weights, shared, float(norm))
    for layer_weights, norm in zip(weights, norms, strict=True)
  ]


def product(intervals: list[Interval]) -> Interval:
  """Returns the product of the intervals of all layers."""
  low, high = map(math.prod, zip(*intervals, strict=True))
  return low, high


def pairs(mask: np.ndarray, count: int, seed: int) -> np.ndarray:
  """Returns random pairs of distinct positions, int32 [b, count, 2].

  The two positions of a pair belong to one sample. Their token ids may
  coincide.

  Args:
    mask: [b, n], True at tokens. A sample with fewer than two tokens gives the
      pair (0, 0).
    count: number of pairs per sample, drawn with repetition.
    seed: seed of the generator.
  """
  rng = np.random.default_rng(seed)
  drawn = np.zeros((len(mask), count, 2), np.int32)
  for b, row in enumerate(mask):
    # Draw only among the positions of tokens.
    (places,) = np.nonzero(row)
    if len(places) > 1:
      # Add an offset of at least 1, which gives a distinct position.
      first = rng.integers(len(places), size=count)
      other = (first + rng.integers(1, len(places), size=count)) % len(places)
      drawn[b] = np.stack([places[first], places[other]], 1)
  return drawn


def distances(hidden: tuple[jax.Array, ...], places: jax.Array) -> jax.Array:
  """Returns the distances |x_i^l - x_j^l| of token pairs, [l + 1, b, count].

  Args:
    hidden: `hidden` of a `capture.Capture`.
    places: result of `pairs`.
  """

  first, second = places[..., 0, None], places[..., 1, None]
  differences = [
    jnp.take_along_axis(x, first, 1) - jnp.take_along_axis(x, second, 1)
    for x in hidden
  ]
  return jnp.linalg.norm(jnp.stack(differences), axis=-1)


def activation_factors(distances: np.ndarray) -> np.ndarray:
  """Returns |x_i^l - x_j^l| / |x_i^0 - x_j^0|, float64 [l + 1, b, count].

  The factor of a pair is NaN if its embedded tokens are equal.

  Source: TransJect, equation 9, before its two means.

  Args:
    distances: result of the function `distances`.
  """
  lengths = np.asarray(distances, np.float64)
  # Mark pairs of equal embeddings by NaN, so that callers leave them out.
  return lengths / np.where(lengths[0] > 0, lengths[0], np.nan)


def dot_factors(hidden: tuple[jax.Array, ...], places: jax.Array) -> jax.Array:
  """Returns (x_i^l . x_j^l) / (x_i^0 . x_j^0) of pairs, [l + 1, b, count].

  This is the activation factor of the dot product. The factor of a pair is NaN
  if its embedded tokens are equal (as for distances) or orthogonal.

  Source: TransJect, section 6. The paper gives no formula; this one is equation
  9 with dot products instead of distances.

  Args:
    hidden: `hidden` of a `capture.Capture`.
    places: result of `pairs`.
  """
  first, second = places[..., 0, None], places[..., 1, None]
  products: list[jax.Array] = []
  differ: jax.Array | None = None
  for x in hidden:
    # Both tokens of each pair, [b, count, d].
    x, y = (jnp.take_along_axis(x, k, 1) for k in (first, second))
    differ = (x != y).any(-1) if differ is None else differ
    products.append(jnp.einsum("bkd,bkd->bk", x, y, precision="highest"))
  assert differ is not None  # `hidden` holds at least the embedding.
  start = jnp.where(differ & (products[0] != 0), products[0], jnp.nan)
  return jnp.stack(products) / start


def measure_factors(
  model: Model,
  params: Any,
  batches: list[np.ndarray],
  *,
  count: int = 1_000,
  seed: int = 0,
) -> dict[str, Any]:
  """Measures activation factors over data, batch by batch.

  No hidden state is kept. Batches without a pair of different embeddings are
  skipped.

  Args:
    model, params: model and parameters from `models.build`, in evaluation.
    batches: batches of ids, as the model takes them.
    count: number of pairs of tokens per sample.
    seed: seed of the pairs.

  Returns:
    `factors`: mean, smallest and largest factor over all pairs of different
    embeddings, for the embedding and every layer. `norms`: largest Frobenius
    norm of a sample, for the embedding and every layer. `pairs`: number of
    pairs. `shared`: values that injective layers share, concatenated over
    batches; None for other layers.

  Raises:
    UserError: if no sample has two tokens of different embeddings.
  """
  variables = make_variables(model, params)
  all_factors, all_norms, all_shared = [], [], []
  for k, ids in enumerate(tqdm(batches, "activation factors", disable=None)):
    mask = mask_of_states(model, ids)
    places = jnp.asarray(pairs(mask, count, seed + k))
    # Measure distances [l + 1, b, count] and norms [l + 1] on the device.
    apart, norms, shared = jax.device_get(
      _observe(model, variables, ids, places)
    )
    # Leave out pairs of equal embeddings.
    factors = activation_factors(apart).reshape(len(apart), -1)
    factors = factors[:, np.isfinite(factors[0])]
    if factors.size:
      all_factors.append(factors)
      all_norms.append(norms)
      all_shared.append(shared)
  if not all_factors:
    raise UserError(
      "The samples have no two different tokens: give longer ones, or more."
    )
  # Summarise over all pairs of all batches, [l + 1, pairs].
  joined = np.concatenate(all_factors, 1)
  return {
    "factors": [
      {"mean": float(f.mean()), "min": float(f.min()), "max": float(f.max())}
      for f in joined
    ],
    "norms": np.max(all_norms, 0).tolist(),
    "pairs": joined.shape[1],
    "shared": jax.tree.map(lambda *x: np.concatenate(x), *all_shared),
  }


@functools.partial(jax.jit, static_argnums=0)
def _observe(
  model: Model, variables: Any, ids: jax.Array, places: jax.Array
) -> tuple[jax.Array, jax.Array, Any]:
  """Returns distances of pairs, largest norms, and values the layers share.

  The norms are maxima over samples, at the embedding and after each layer.
  Shared values are None unless the layers are injective. The function is
  compiled once for a model.
  """
  captured = capture(model, variables, ids)
  hidden, mask = captured.hidden, captured.mask
  # Frobenius norms of whole samples without padding, [l + 1, b].
  tokens = jnp.where(mask[..., None], jnp.stack(hidden), 0)
  norms = jnp.sqrt(jnp.square(tokens).sum((2, 3)))
  shared = None
  layers = layers_of(model.stacks()["encoder"])
  if layers is not None:
    encoder = of_stack(variables, "encoder")
    shared = layers.shared(encoder, hidden[0], mask).value
  return distances(hidden, places), norms.max(1), shared


def measure_encoder(
  model: Model,
  params: Any,
  ids: np.ndarray,
  *,
  batch_size: int = 8,
  steps: int = 200,
  seed: int = 0,
) -> dict[str, Any]:
  """Returns the certificate, the measured and the searched factors, for JSON.

  The model is evaluated in float32 (see `models.in_float32`), because bfloat16
  rounds tokens too coarsely.

  Args:
    model, params: model and parameters from `models.build`.
    ids: samples, as the model takes them. The searches start from the first
      `batch_size` samples.
    batch_size: number of samples of a batch.
    steps: number of Adam steps of each search.
    seed: seed of pairs and directions.

  Returns:
    `guaranteed`: certificates of the `layers`, of `all` layers together (None
    if a layer has none), and what the certificate `says`; without one, the
    result of `attention.certify` as `attention`. `measured`: result of
    `measure_factors`. `adversarial`: result of `ascent.adversarial`.
  """
  batches = np.split(ids, range(batch_size, len(ids), batch_size))
  model = in_float32(model)
  measured = measure_factors(model, params, batches, seed=seed)
  shared = measured.pop("shared")
  # Certify each layer, if the layers are injective.
  rows, total = [], None
  if layers_of(model.stacks()["encoder"]) is not None:
    # Drop the last norm, of the encoder's output, which enters no layer.
    rows = guaranteed(model, params, shared, measured["norms"][:-1])
  # Certify the encoder only if every layer has a certificate.
  if rows and all(rows):
    total = {
      kind: product([row[kind] for row in rows])
      for kind in KINDS
      if all(kind in row for row in rows)
    }
  # Search in all distances for which there is a bound.
  kinds = tuple(k for k in KINDS if k != "farthest" or k in (total or {}))
  ball = None
  guarantee: dict[str, Any] = {"layers": rows, "all": total}
  first = jnp.asarray(batches[0])
  if total is None:
    n = model.mask(first).shape[-1]
    certificate = attention.certify(model, params, n)
    if not certificate["missing"]:
      captured = capture(model, make_variables(model, params), first)
      certificate["near"] = attention.near(model, params, captured)
      kinds, ball = KINDS, certificate["ball"]
    guarantee["attention"] = certificate
    sentences = _explain_attention(certificate, n)
  else:
    sentences = _explain(model, total)
  guarantee["says"] = sentences
  # Search for pairs whose factors come near the bounds.
  extremes = adversarial(
    model, params, first, kinds=kinds, ball=ball, steps=steps, seed=seed
  )
  return {
    "guaranteed": guarantee,
    "measured": measured,
    "adversarial": extremes,
  }


def _explain_attention(certificate: dict[str, Any], n: int) -> list[str]:
  """Returns sentences that explain the result of `attention.certify`."""
  if certificate["missing"]:
    return [
      f"This encoder has no certificate ({certificate['missing']}): all "
      "numbers are measured."
    ]
  tokens, frobenius = (certificate["log10"][kind] for kind in attention.KINDS)
  sentences = [
    "Two sequences: the greatest distance of two tokens grows by a factor of "
    f"at most 10^{_rounded_up(tokens)}, for any number of tokens; the "
    f"Frobenius norm by at most 10^{_rounded_up(frobenius)}, for {n} tokens. "
    "No lower bound is known."
  ]
  if certificate["ball"] is not None:
    sentences.append(
      "It holds while embedded tokens have norms of at most "
      f"{certificate['ball']:.4g}, as all tokens of the vocabulary have."
    )
  if certificate["norm"] > 10:
    sentences.append(
      "The bound is vacuous: one normalisation of tokens can multiply a "
      f"small distance by up to {certificate['norm']:.0f}."
    )
  return [*sentences, _attention_table(certificate, n)]


def _attention_table(certificate: dict[str, Any], n: int) -> str:
  """Returns the constants of the attention of every layer as text."""
  titles = ["layer", "norm of tokens", "greatest distance", f"Frobenius ({n})"]
  titles += ["near the examples", "sink", "feed-forward", "norm"]
  rows = [
    (
      str(i + 1),
      *(
        f"{number:.4g}"
        for number in (
          row["radius"],
          row["attention_tokens"],
          row["attention_frobenius"],
          near["frobenius"],
          near["sink"],
          row["mlp"],
          row["norm"],
        )
      ),
    )
    for i, (row, near) in enumerate(
      zip(certificate["layers"], certificate["near"], strict=True)
    )
  ]
  table = markdown_table(titles, rows, right=range(len(titles)))
  return f"Constants of attention and of the other parts:\n{table}"


def _rounded_up(number: float) -> float:
  """Returns the next number with one decimal."""
  return math.ceil(10 * number) / 10


def _explain(model: Model, total: dict[str, Interval]) -> list[str]:
  """Returns sentences that explain the certificate `total` of the encoder."""
  layers = layers_in_float32(model)
  # Endings of the sentence about a lower bound of 0.
  apart = ", so nothing keeps two of them apart; the upper bound is"
  vacuous = {
    "tokens": "; distances grow by at most",
    "sequences": apart,
    "farthest": apart,
  }
  sentences = []
  nouns = {"tokens": "Two tokens of one sample", "sequences": layers.scope()}
  if "farthest" in total:
    scope = layers.scope()[0].lower() + layers.scope()[1:]
    nouns["farthest"] = f"Greatest distance of two tokens of {scope}"
    del nouns["sequences"]
  for kind, noun in nouns.items():
    if kind not in total:
      sentences.append(f"{noun}: nothing is guaranteed, for tokens meet.")
      continue
    low, high = total[kind]
    change = f"distances change by a factor of {low:.4g} to {high:.4g}."
    if not low > 0:
      change = f"the lower bound is vacuous (0){vacuous[kind]} {high:.4g}."
    sentences.append(f"{noun}: {change}")
  is_bounded = any(total[kind][0] > 0 for kind in LENGTHS if kind in total)
  return sentences + layers.remarks(bounded=is_bounded)


def factor_table(content: dict[str, Any]) -> str:
  """Returns the result of `measure_encoder` as text, one line per layer."""

  def span(low: float, high: float) -> str:
    return f"[{low:.4g}, {high:.4g}]"

  def line(label: str, intervals: Any) -> str:
    by_kind = intervals or {}
    spans = [span(*by_kind[k]) if k in by_kind else "-" for k in kinds]
    return "  ".join([f"{label:>5}", *(f"{span:18}" for span in spans)])

  # Write a line for each layer.
  guarantee, measured = content["guaranteed"], content["measured"]
  # Show the greatest distance of two tokens only where it was searched.
  kinds = [kind for kind in KINDS if kind in content["adversarial"]]
  titles = [f"{title:18}" for title in ("guaranteed, tokens", *kinds[1:])]
  lines = ["  ".join(["layer", *titles, "activation factor"])]
  # Skip the embedding, whose factor is 1.
  for i, factor in enumerate(measured["factors"][1:]):
    label = line(str(i + 1), (guarantee["layers"] or {i: None})[i])
    extremes = span(factor["min"], factor["max"])
    lines.append(f"{label}  {factor['mean']:.4f} {extremes}")
  # End with the guaranteed and the searched factors of the whole encoder.
  lines += [
    line("all", guarantee["all"]),
    f"{line('found', content['adversarial'])}  (by gradient ascent)",
    f"Activation factors: {measured['pairs']} pairs of tokens.",
    *guarantee["says"],
  ]
  return "\n".join(lines)
