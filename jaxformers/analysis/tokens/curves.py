"""Measures of over-smoothing, layer by layer, with their table and figure."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.analysis.plotting import figures, plots
from jaxformers.analysis.plotting.figures import Row, Texts
from jaxformers.analysis.tokens.smoothness import (
  attention_weights,
  cosine_similarity,
  functional,
  gradient_cosine,
  head_redundancy,
  log_functional_kernel,
  massive,
  of_weights,
  ranks,
  residual,
  seen_keys,
)
from jaxformers.models import Model
from jaxformers.models import capture as captures
from jaxformers.models.capture import Capture
from jaxformers.models.variables import make_variables
from jaxformers.orthogonal.products import dot

CURVES = {
  "similarity": "mean cosine of two tokens",
  "functional": "J of the values, per token",
  "functional_kernel": "log10 of J of the values, exp kernel / n^2",
  "gradient_cosine": "cosine of attention's and J's slope",
  "head_redundancy": "cosine of attention with the layer before",
  "residual": "share of the tokens besides their mean",
  "stable_rank": "stable rank of the tokens, centred",
  "effective_rank": "effective rank of the tokens, centred",
  "massive": "greatest over median entry of the tokens",
  "first": "weight of the first token",
  "missing": "1 minus the sum of a row of weights",
  "column": "greatest sum of a column of weights",
  "entropy": "entropy of a row of weights, nats",
  "second": "second / first singular value of weights",
  "streams_second": "second singular value of the mixing so far",
  "streams_last": "smallest singular value of the mixing so far",
  "streams_gain": "greatest sum of a row or column of the mixing so far",
}
# Quantities that are undefined for a sample of one token.
NEEDS_PAIRS = ("similarity", "gradient_cosine")
# First layer of a curve, if not 1. Layer 0 is the embedding.
HIDDEN = ("similarity", "residual", "stable_rank", "effective_rank", "massive")
FIRST_LAYER = {**dict.fromkeys(HIDDEN, 0), "head_redundancy": 2}


def curves(captured: Capture, causal: bool = False) -> dict[str, jax.Array]:
  """Returns the curves of all quantities, averaged over samples and heads.

  Args:
    captured: result of `capture`.
    causal: True if no token sees a later token, in attention and in J.

  Returns:
    `similarity`, `residual`, `stable_rank`, `effective_rank` and `massive`
    [l + 1], of the embedding and of every layer's output (see `smoothness`).
    For models with streams, `streams_second`, `streams_last` and
    `streams_gain` [l]: singular values, and the greatest sum of a row or a
    column of absolute values, of the product of all mixing matrices so far. If
    `captured` has weights, the measures of `smoothness.of_weights` [l]. For
    mixers with queries, keys and values also
    `functional` [l], mean of J with the weights softmax(k k.T / sqrt e) / n;
    `functional_kernel` [l], log10 of the mean of J with exp(k k.T / sqrt e) /
    n^2;
    `gradient_cosine` [l], cosine of the slopes of softmax attention with
    queries and of softmax attention with keys as queries;
    `head_redundancy` [l - 1], cosine of the attention of successive layers.
    Samples of one token have neither similarity nor slope and are left out of
    these two means, which are NaN if every sample has one token.
  """
  layers = [_of_tokens(x, captured.mask) for x in captured.hidden]
  layers_of_streams = _of_streams(captured.mixing, captured.mask)
  weighed = [heads["weights"] for heads in captured.heads if "weights" in heads]
  of_layers = [
    of_weights(
      w.astype(jnp.promote_types(w.dtype, jnp.float32)),
      jnp.broadcast_to(captured.mask[:, None], w.shape[:-1]),
    )
    for w in weighed
  ]
  result = {
    name: jnp.stack([jnp.nanmean(values[name]) for values in group])
    for group in (layers, of_layers, layers_of_streams)
    for name in (group[0] if group else ())
  }
  # The other quantities need keys and values in every layer. Looped layers and
  # layers without heads have none.
  has_keys = [{"key", "value"} <= {*heads} for heads in captured.heads]
  if not has_keys or not all(has_keys):
    return result
  mask = captured.mask[:, None]
  quantities, weights = zip(
    *(_of_heads(heads, mask, causal) for heads in captured.heads), strict=True
  )
  result |= jax.tree.map(lambda *values: jnp.stack(values), *quantities)
  redundancy = [head_redundancy(a, b).mean() for a, b in pairwise(weights)]
  # Redundancy needs at least two layers.
  if redundancy:
    result["head_redundancy"] = jnp.stack(redundancy)
  return result


def _of_tokens(x: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
  """Returns the quantities of hidden states [b, n, d], [b] each."""
  x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  stable, effective = ranks(x, mask)
  values = (cosine_similarity(x, mask), residual(x, mask), stable, effective)
  return dict(zip(HIDDEN, (*values, massive(x, mask)), strict=True))


def _of_streams(
  mixing: Sequence[jax.Array], mask: jax.Array
) -> list[dict[str, jax.Array]]:
  """Returns the quantities of streams in every layer, [b, n] each.

  Args:
    mixing: matrices [b or 1, n or 1, s, s] of two branches for each layer.
    mask: [b, n], True at tokens; padding has NaN.
  """
  result: list[dict[str, jax.Array]] = []
  product: Any = None
  for number, matrix in enumerate(mixing):
    product = matrix if product is None else dot(matrix, product)
    if number % 2:
      s = jnp.linalg.svd(product, compute_uv=False)
      sums = [jnp.abs(product).sum(axis).max(-1) for axis in (-1, -2)]
      gain = jnp.maximum(*sums)
      values = (s[..., 1], s[..., -1], gain)
      names = ("streams_second", "streams_last", "streams_gain")
      of_tokens = (jnp.where(mask, value, jnp.nan) for value in values)
      result.append(dict(zip(names, of_tokens, strict=True)))
  return result


def _of_heads(
  heads: Mapping[str, jax.Array], mask: jax.Array, causal: bool
) -> tuple[dict[str, jax.Array], jax.Array]:
  """Returns the quantities of a layer's heads, and its attention weights.

  Args:
    heads: `key`, `value` and optionally `query`, [b, h, n, e].
    mask: [b, 1, n], True at tokens.
    causal: True if no token sees a later token.
  """
  # A mixer without separate queries uses the keys as queries.
  heads = {"query": heads["key"], **heads}
  q, k, v = (heads[name].astype(jnp.float32) for name in captures.HEADS)
  tokens = jnp.broadcast_to(mask, v.shape[:-1])
  pairs = seen_keys(mask, causal) & mask[..., None]
  count = jnp.maximum(mask.sum(-1), 1).astype(jnp.float32)
  # Compute J with row-stochastic weights, and with the exp kernel.
  symmetric = jnp.where(pairs, attention_weights(k, k, mask, causal), 0)
  rough = functional(v, symmetric / count[..., None, None])
  logs = log_functional_kernel(v, k, tokens, causal)
  log_mean = jax.nn.logsumexp(logs) - math.log(logs.size)
  # Compare the slopes of attention with queries and with keys as queries.
  slope, slope_of_keys = (
    attention_weights(x, k, mask, causal, False) for x in (q, k)
  )
  cosine = gradient_cosine(v, slope, slope_of_keys, tokens)
  # Average over samples and heads.
  quantities = {
    "functional": rough.mean(),
    "functional_kernel": log_mean / math.log(10),
    "gradient_cosine": jnp.nanmean(cosine),
  }
  weights = jnp.where(pairs, attention_weights(q, k, mask, causal), 0)
  return quantities, weights


def maps(captured: Capture, causal: bool = False) -> dict[int, np.ndarray]:
  """Returns softmax(q k.T / sqrt e) of the first sample, for every head.

  For softmax attention these are the attention weights. For other mixers these
  are the weights that softmax attention would have.

  Args:
    captured: result of `capture`.
    causal: True if no token sees a later token.

  Returns:
    Matrices [h, n, n] for every layer with keys, by the number of the layer
    from 1. A mixer without separate queries uses the keys as queries.
  """
  matrices = {}
  for layer, heads in enumerate(captured.heads, 1):
    if "key" in heads:
      q, k = (heads.get(name, heads["key"])[:1] for name in captures.HEADS[:2])
      q, k = q.astype(jnp.float32), k.astype(jnp.float32)
      weights = attention_weights(q, k, captured.mask[:1, None], causal)
      matrices[layer] = np.asarray(weights[0])
  return matrices


def measure_curves(
  model: Model, params: Any, ids: np.ndarray, batch_size: int = 8
) -> dict[str, list[float]]:
  """Returns `curves` averaged over samples, measured batch by batch.

  Args:
    model, params: model and parameters from `models.build`, in evaluation.
    ids: samples, as the model takes them.
    batch_size: number of samples of a batch; the last batch may be smaller.
  """
  variables = make_variables(model, params)
  # Collect the values of each batch, with the number of samples behind them.
  measured: dict[str, list[tuple[np.ndarray, int]]] = {}
  for batch in captures.batches(ids, batch_size, "smoothness"):
    num_pairs = int((np.asarray(model.mask(batch)).sum(1) > 1).sum())
    values_by_name = jax.device_get(_batch_curves(model, variables, batch))
    for name, values in values_by_name.items():
      count = num_pairs if name in NEEDS_PAIRS else len(batch)
      if count:
        value = np.asarray(values, float)
        measured.setdefault(name, []).append((value, count))
  return {
    name: _average(name, *map(np.array, zip(*pairs, strict=True))).tolist()
    for name, pairs in measured.items()
  }


def _average(name: str, values: np.ndarray, counts: np.ndarray) -> np.ndarray:
  """Returns the mean over batches of values [batches, l] -> [l]."""
  shares = counts[:, None] / counts.sum()
  if name == "functional_kernel":
    # Average J, not its logarithm. Dividing by the maximum avoids overflow.
    top = values.max(0)
    top = np.where(np.isfinite(top), top, 0)
    with np.errstate(divide="ignore"):
      return top + np.log10((shares * 10 ** (values - top)).sum(0))
  return (shares * values).sum(0)


@functools.partial(jax.jit, static_argnums=0)
def _batch_curves(
  model: Model, variables: Any, ids: jax.Array
) -> dict[str, jax.Array]:
  """Returns the curves of a batch. The function is compiled once per model."""
  causal = model.config.is_causal
  captured = captures.capture(model, variables, ids, weights=True)
  return curves(captured, causal)


def rows(label: str, seed: int, measured: dict[str, list[float]]) -> list[Row]:
  """Returns the curves of a run as rows of `plots.curves`.

  Args:
    label: label of the run.
    seed: seed of the run.
    measured: result of `measure_curves`.

  Returns:
    (label, seed, quantity, layer, value); layer 0 is the embedding.
  """
  return [
    (label, seed, name, FIRST_LAYER.get(name, 1) + k, value)
    for name, values in measured.items()
    for k, value in enumerate(values)
  ]


# Explanation of the panels of `figure`, with the names of `CURVES`.
EXPLANATION = (
  "J = 1/2 sum_ij w_ij |v_i - v_j|^2 measures how much the values v of a layer "
  "differ between tokens (NeuTRENO, equation 6); it is 0 where all are equal. "
  "Its weights w are softmax(k k.T / sqrt e) / n, or with the exp kernel "
  "exp(k k.T / sqrt e) / n^2. A slope is the direction in which attention, or "
  "a step down J, moves the values. These quantities and the cosine with the "
  "layer before need queries, keys and values (docs/mixers.md). Weights are "
  "the factors of the values of other tokens in the outputs of the heads."
)


def figure(
  curve_rows: list[Row], data: str, name: str = "smoothness"
) -> figures.Figure:
  """Returns the figure of all quantities over layers, with bands over seeds.

  Args:
    curve_rows: results of `rows` for several runs and seeds.
    data: sentence on samples and seeds, with which the caption begins.
    name: name of the figure's files.
  """
  caption = f"{data}; bands are one deviation over seeds. {EXPLANATION}"
  texts = Texts(name, "How alike tokens become", caption)
  return plots.curves(texts, curve_rows, "layer (0: embedding)", CURVES)


def text(curve_rows: list[Row], names: Mapping[str, str] = CURVES) -> str:
  """Returns a table for every run, a column per layer, a line per quantity.

  The numbers are means over seeds. With several seeds, a second line has the
  sample deviations. "-" stands for a quantity that a layer does not have.

  Args:
    curve_rows: results of `rows`.
    names: titles of the quantities.
  """
  lines = []
  for run, rows_of_run in figures.grouped(curve_rows).items():
    layers = sorted({row[3] for row in rows_of_run})
    # Write the titles and a line for every quantity.
    title = "layer (0: embedding)" if 0 in layers else "layer"
    table = [[title, *map(str, layers)]]
    by_name = figures.grouped(rows_of_run, 2)
    for name in filter(by_name.get, names):
      places, *spreads = figures.averaged(by_name[name], 3, 4)
      means, bars = (dict(zip(places, x, strict=True)) for x in spreads)
      table.append([names[name], *(_cell(means, k, 4) for k in layers)])
      if not all(map(math.isnan, bars.values())):
        table.append(["  +-", *(_cell(bars, k, 2) for k in layers)])
    # Pad all columns of numbers to the same width.
    first = max(len(title) for title, *_ in table)
    width = max(len(cell) for _, *cells in table for cell in cells)
    lines += ["", run]
    for title, *cells in table:
      padded = "".join(f"  {cell:>{width}}" for cell in cells)
      lines.append(f"  {title:<{first}}{padded}")
  return "\n".join(lines)


def _cell(values: Mapping[int, float], layer: int, digits: int) -> str:
  """Returns the value of a layer as text, or "-" without a value."""
  value = values.get(layer, math.nan)
  return "-" if math.isnan(value) else f"{value:.{digits}g}"
