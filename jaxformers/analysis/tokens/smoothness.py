r"""Measures how alike tokens become: over-smoothing, and its functional.

python -m jaxformers smoothness runs/transformer runs/neutreno \
    --out smoothness
python -m jaxformers smoothness runs/transformer --untrained --split train
python -m jaxformers smoothness runs/transformer --model neutreno \
    --options mixer.fidelity=0.6

The functions are pure; the command draws them for trained models. It keeps the
means over layers in the run's `scores.json`, for `python -m jaxformers
published`.
Source: Nguyen et al. 2023 (NeuTRENO), https://arxiv.org/abs/2312.00751; numbers
of equations are the paper's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformers import cli, requirements, trained
from jaxformers.analysis.plotting import figures, plots
from jaxformers.analysis.plotting.figures import Row, Texts
from jaxformers.analysis.tokens import capture as captures
from jaxformers.analysis.tokens.capture import Capture
from jaxformers.errors import UserError
from jaxformers.models import Model
from jaxformers.models.mixers.scores import weigh
from jaxformers.models.variables import make_variables

_HIGHEST = jax.lax.Precision.HIGHEST
_einsum = functools.partial(jnp.einsum, precision=_HIGHEST)
_matmul = functools.partial(jnp.matmul, precision=_HIGHEST)


def cosine_similarity(x: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns the mean cosine of pairs of different tokens of a sample, [b].

  (|sum_i u_i|^2 - n) / (n (n - 1)) with u_i the tokens at length one, in
  O(n d) instead of O(n^2 d). NaN for fewer than two tokens. A token of zeros
  has cosine 0 with all.

  Source: appendix E.3.

  Args:
    x: [b, n, d].
    mask: [b, n], True at tokens.
  """
  # Scale tokens to length one; padding and zeros stay zero.
  length = jnp.linalg.norm(x, axis=-1, keepdims=True)
  unit = jnp.where(mask[..., None], x / _divisor(length), 0)
  count = mask.sum(1).astype(x.dtype)
  pairs = count * (count - 1)
  # Take each token's cosine with itself from the sum over all pairs.
  squares = jnp.square(unit).sum((1, 2))
  total = jnp.square(unit.sum(1)).sum(-1) - squares
  return jnp.where(pairs > 0, total / _divisor(pairs), jnp.nan)


def _divisor(x: jax.Array) -> jax.Array:
  """Returns x where it is positive, and 1 elsewhere."""
  return jnp.where(x > 0, x, 1)


def attention_weights(
  q: jax.Array,
  k: jax.Array,
  mask: jax.Array,
  causal: bool = False,
  diagonal: bool = True,
) -> jax.Array:
  """Returns softmax(q k.T / sqrt(e)) over the tokens, [..., n, n].

  A row that sees no token is zero.

  Source: equation 2.

  Args:
    q, k: queries and keys, [..., n, e].
    mask: [..., n], True at tokens; it has one axis less than q.
    causal: True if no token sees a later one.
    diagonal: False if no token sees itself.
  """
  scores = _scores(q, k)
  seen = _seen(mask, causal, diagonal)
  return jnp.where(seen, weigh(scores, seen), 0)


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
  """Returns q k.T / sqrt(e) of q and k [..., n, e] -> [..., n, n]."""
  return _einsum("...ne,...me->...nm", q, k) / q.shape[-1] ** 0.5


def _seen(mask: jax.Array, causal: bool, diagonal: bool = True) -> jax.Array:
  """Returns which keys a query sees; mask [..., n] -> [..., n or 1, n]."""
  n = mask.shape[-1]
  seen = mask[..., None, :]
  if causal:
    seen = seen & jnp.tri(n, dtype=bool)
  return seen if diagonal else seen & ~jnp.eye(n, dtype=bool)


def _off_diagonal(weights: jax.Array) -> jax.Array:
  """Returns weights [..., n, n] with zeros on the diagonal.

  A term v_i - v_i is zero whatever its weight. Where a token mostly attends to
  itself, that weight is all that float32 keeps of a sum over the row.
  """
  return weights * (1 - jnp.eye(weights.shape[-1], dtype=weights.dtype))


def _centre(v: jax.Array, weights: jax.Array) -> jax.Array:
  """Returns v [..., n, e] less its mean by the weights of a graph.

  Differences stay as they are. Where tokens are nearly alike, float32 keeps
  them only without what all tokens share.
  """
  # Weigh tokens by how much the graph uses them.
  share = jnp.abs(weights).sum(-1) + jnp.abs(weights).sum(-2)
  share = share / _divisor(share.sum(-1, keepdims=True))
  mean = _einsum("...n,...ne->...e", share, v)
  return v - mean[..., None, :]


def functional(v: jax.Array, weights: jax.Array) -> jax.Array:
  """Returns J = 1/2 sum_ij w_ij |v_i - v_j|^2, the roughness of v, [...].

  Source: equation 6, its integral as a sum. The paper leaves the normalisation
  open: weights = exp(k_i . k_j / sqrt e) / n^2 is dominated by the keys' norms
  (see `log_functional_kernel`), so that layers compare by row-stochastic
  weights over n.

  Args:
    v: values of the tokens, [..., n, e].
    weights: weights w of the graph, [..., n, n], not negative.
  """
  weights = _off_diagonal(weights)
  v = _centre(v, weights)
  # |v_i - v_j|^2 = |v_i|^2 + |v_j|^2 - 2 v_i . v_j, without [n, n, e].
  square = jnp.square(v).sum(-1)
  cross = _einsum("...nm,...ne,...me->...", weights, v, v)
  rows, columns = weights.sum(-1), weights.sum(-2)
  return ((rows + columns) * square).sum(-1) / 2 - cross


def log_functional_kernel(
  v: jax.Array, k: jax.Array, mask: jax.Array, causal: bool = False
) -> jax.Array:
  """Returns log J under the weights exp(k_i . k_j / sqrt e) / n^2, [...].

  The weights themselves overflow float32 from |k|^2 = 88 sqrt e on, so the
  greatest is taken out before they are made. -inf for fewer than two tokens.

  Source: equations 6 and 11; n is the number of tokens of the sample.

  Args:
    v, k: values and keys, [..., n, e].
    mask: [..., n], True at tokens.
    causal: True if no token sees a later one.
  """
  seen = _seen(mask, causal, diagonal=False) & mask[..., None]
  # Divide all weights by the greatest, and add its logarithm at the end.
  scores = jnp.where(seen, _scores(k, k), -jnp.inf)
  top = scores.max((-1, -2))
  top = jnp.where(jnp.isfinite(top), top, 0)
  rough = functional(v, jnp.exp(scores - top[..., None, None]))
  count = jnp.maximum(mask.sum(-1), 1).astype(v.dtype)
  return top + jnp.log(jnp.maximum(rough, 0)) - 2 * jnp.log(count)


def gradient(v: jax.Array, weights: jax.Array) -> jax.Array:
  """Returns the gradient of `functional` by v, [..., n, e].

  sum_j (v_i - v_j) (w_ij + w_ji).

  Source: equation 8.
  """
  return _slope(v, weights + weights.mT)


def _slope(v: jax.Array, weights: jax.Array) -> jax.Array:
  """Returns sum_j w_ij (v_i - v_j) of v [..., n, e] -> [..., n, e]."""
  weights = _off_diagonal(weights)
  v = _centre(v, weights)
  total = _einsum("...nm,...me->...ne", weights, v)
  return weights.sum(-1)[..., None] * v - total


def step(
  u: jax.Array,
  weights: jax.Array,
  fidelity: jax.Array | float = 0.0,
  first: jax.Array | None = None,
) -> jax.Array:
  """Takes one Euler step of the gradient flow, with a step size for each token.

  A u + lambda (f - u) with A the rows of w + w.T at sum one: attention, and
  with lambda NeuTRENO's.

  Source: equations 10, 12 and 22.

  Args:
    u: tokens, [..., n, e].
    weights: weights k of equation 6, [..., n, n], not negative.
    fidelity: weight lambda of the fidelity term.
    first: values f of the first layer, [..., n, e]; needed with a fidelity.
  """
  # Make the weights symmetric, and then each row's sum one.
  both = weights + weights.mT
  both = both / both.sum(-1, keepdims=True)
  after = _einsum("...nm,...me->...ne", both, u)
  return after if first is None else after + fidelity * (first - u)


def flow(
  u: jax.Array,
  weights: jax.Array,
  time: jax.Array | float,
  fidelity: jax.Array | float = 0.0,
  first: jax.Array | None = None,
) -> jax.Array:
  """Returns the gradient flow at a time, in closed form, [..., n, e].

  du/dt = -grad E(u), with grad E of `gradient` and lambda (u - f). The flow
  goes to the mean of all tokens, which it reaches where `weights` joins all of
  them; with a fidelity it goes to the minimum of E. E never rises along it. The
  eigenvectors of the Laplacian do the integration, exact but for rounding.

  Source: equations 9 and 21.

  Args:
    u: tokens at time 0, [..., n, e].
    weights: weights k of equation 6, [..., n, n], not negative.
    time: time of the flow, not negative; a scalar or [...].
    fidelity: weight lambda of the fidelity term.
    first: values f of the first layer, [..., n, e]; needed with a fidelity.

  Raises:
    UserError: for a fidelity without `first`.
  """
  has_no_fidelity = isinstance(fidelity, (int, float)) and not fidelity
  if first is None and not has_no_fidelity:
    raise UserError(f"fidelity={fidelity} pulls towards `first`: give `first`.")
  # Decompose the graph's Laplacian.
  both = weights + weights.mT
  eye = jnp.eye(both.shape[-1], dtype=both.dtype)
  rates, basis = jnp.linalg.eigh(both.sum(-1)[..., None] * eye - both)
  rates = jnp.maximum(rates, 0) + fidelity
  # Each coordinate decays at its rate from its start to its end.
  decay = jnp.exp(-rates * jnp.asarray(time)[..., None])[..., None]
  into = basis.mT
  end = jnp.zeros_like(u)
  if first is not None:
    share = jnp.where(rates > 0, fidelity / _divisor(rates), 0)
    end = share[..., None] * _matmul(into, first)
  return _matmul(basis, end + decay * (_matmul(into, u) - end))


def gradient_cosine(
  v: jax.Array, a: jax.Array, b: jax.Array, mask: jax.Array
) -> jax.Array:
  """Returns the cosine of v - A v and v - B v, averaged over tokens, [...].

  It says how near asymmetric attention comes to the gradient of J, which
  symmetric attention follows. Only the direction of a slope matters, so each
  row of the weights is first divided by its greatest entry off the diagonal.
  Tokens without a slope, such as the first of a causal sequence, are left out;
  NaN where all are.

  Of symmetric attention, whose queries are its keys, it is 1 by construction;
  the paper prints 0.982 and 0.976 for Sym-DeiT.

  Source: appendix E.1, table 4.

  Args:
    v: values of the tokens, [..., n, e].
    a, b: weights A and B, [..., n, n]; their diagonals play no part.
    mask: [..., n], True at tokens.
  """
  # Slopes of both attentions, at length one.
  directions = []
  for weights in (a, b):
    weights = _off_diagonal(weights)
    greatest = jnp.abs(weights).max(-1, keepdims=True)
    slope = _slope(v, weights / _divisor(greatest))
    norm = jnp.linalg.norm(slope, axis=-1, keepdims=True)
    directions.append(slope / _divisor(norm))
    mask = mask & (norm[..., 0] > 0)
  cosine = (directions[0] * directions[1]).sum(-1)
  return cosine.mean(-1, where=mask)


def head_redundancy(before: jax.Array, after: jax.Array) -> jax.Array:
  """Returns the cosine of two layers' attention, head by head, [...].

  Source: appendix G.2.

  Args:
    before, after: attention matrices, [..., n, n].
  """
  inner = (before * after).sum((-1, -2))
  norms = [jnp.sqrt(jnp.square(w).sum((-1, -2))) for w in (before, after)]
  return inner / (norms[0] * norms[1])


def stationary(scores: jax.Array) -> jax.Array:
  """Returns the stationary distribution of symmetric attention, [..., n].

  pi_j = sum_i exp(s_ij) / sum_il exp(s_il) for symmetric s. A^m v tends to
  sum_j pi_j v_j at every token.

  Source: equations 19 and 20.

  Args:
    scores: scores s, [..., n, n], symmetric; -inf where there is no token.
  """
  # Sums of rows in logarithms, so that nothing overflows.
  log = jax.nn.logsumexp(scores, -1)
  return jax.nn.softmax(log, -1)


def limit(
  weights: jax.Array, fidelity: jax.Array | float, first: jax.Array
) -> jax.Array:
  """Returns the limit of u <- A u + lambda (f - u) with A fixed, [..., n, e].

  lambda ((1 + lambda) I - A)^-1 f, which is constant over tokens only if f is.
  The iteration converges if all eigenvalues mu of A have |mu - lambda| < 1, so
  not for lambda above about 1.

  Source: proposition 1.

  Args:
    weights: attention A, [..., n, n], rows of sum one.
    fidelity: weight lambda of the fidelity term, positive.
    first: values f of the first layer, [..., n, e].
  """
  eye = jnp.eye(weights.shape[-1], dtype=weights.dtype)
  return fidelity * jnp.linalg.solve((1 + fidelity) * eye - weights, first)


CURVES = {
  "similarity": "mean cosine of two tokens",
  "functional": "J of the values, per token",
  "functional_kernel": "log10 of J of the values, exp kernel / n^2",
  "gradient_cosine": "cosine of attention's and J's slope",
  "head_redundancy": "cosine of attention with the layer before",
}
# Quantities that a sample of one token has not.
NEEDS_PAIRS = ("similarity", "gradient_cosine")
# First layer of a curve, where it is not 1.
FIRST_LAYER = {"similarity": 0, "head_redundancy": 2}


def curves(captured: Capture, causal: bool = False) -> dict[str, jax.Array]:
  """Returns every quantity of every layer, averaged over samples and heads.

  Args:
    captured: result of `capture`.
    causal: True if no token sees a later one, in attention and in J.

  Returns:
    `similarity` [l + 1], of the embedding and of every layer's output; and for
    mixers with queries, keys and values, [l] each: `functional`, with weights
    softmax(k k.T / sqrt e) / n, `functional_kernel`, log10 of the mean of J
    with exp(k k.T / sqrt e) / n^2, `gradient_cosine`, of softmax attention with
    queries against that with keys in their place; and `head_redundancy`
    [l - 1] between successive layers. See `CURVES`. A sample of one token has
    neither similarity nor slope, and is left out of these means; they are NaN
    where all samples are.
  """
  similarity = [cosine_similarity(x, captured.mask) for x in captured.hidden]
  result = {"similarity": jnp.stack([jnp.nanmean(s) for s in similarity])}
  # All other quantities need keys and values in every layer; layers that are a
  # loop, and those without heads, have none.
  has_keys = [{"key", "value"} <= {*heads} for heads in captured.heads]
  if not has_keys or not all(has_keys):
    return result
  mask = captured.mask[:, None]
  quantities, weights = zip(
    *(_of_heads(heads, mask, causal) for heads in captured.heads), strict=True
  )
  result |= jax.tree.map(lambda *values: jnp.stack(values), *quantities)
  redundancy = [head_redundancy(a, b).mean() for a, b in pairwise(weights)]
  # A single layer has none before it.
  if redundancy:
    result["head_redundancy"] = jnp.stack(redundancy)
  return result


def _of_heads(
  heads: Mapping[str, jax.Array], mask: jax.Array, causal: bool
) -> tuple[dict[str, jax.Array], jax.Array]:
  """Returns the quantities of a layer's heads, and its attention weights.

  Args:
    heads: `key`, `value` and perhaps `query`, [b, h, n, e].
    mask: [b, 1, n], True at tokens.
    causal: True if no token sees a later one.
  """
  # Where queries are not projected apart they are the keys.
  heads = {"query": heads["key"], **heads}
  q, k, v = (heads[name].astype(jnp.float32) for name in captures.HEADS)
  tokens = jnp.broadcast_to(mask, v.shape[:-1])
  pairs = _seen(mask, causal) & mask[..., None]
  count = jnp.maximum(mask.sum(-1), 1).astype(jnp.float32)
  # J with row-stochastic weights, and with the exp kernel.
  symmetric = jnp.where(pairs, attention_weights(k, k, mask, causal), 0)
  rough = functional(v, symmetric / count[..., None, None])
  logs = log_functional_kernel(v, k, tokens, causal)
  log_mean = jax.nn.logsumexp(logs) - math.log(logs.size)
  # Slopes of attention with queries, and with keys in their place.
  slope, slope_of_keys = (
    attention_weights(x, k, mask, causal, False) for x in (q, k)
  )
  cosine = gradient_cosine(v, slope, slope_of_keys, tokens)
  quantities = {
    "functional": rough.mean(),
    "functional_kernel": log_mean / math.log(10),
    "gradient_cosine": jnp.nanmean(cosine),
  }
  weights = jnp.where(pairs, attention_weights(q, k, mask, causal), 0)
  return quantities, weights


def maps(captured: Capture, causal: bool = False) -> dict[int, np.ndarray]:
  """Returns softmax(q k.T / sqrt e) of the first sample, for every head.

  These are the weights of softmax attention; of another mixer, those that it
  would have.

  Args:
    captured: result of `capture`.
    causal: True if no token sees a later one.

  Returns:
    Matrices [h, n, n] by the number of the layer, from 1, of the layers that
    have keys. Without queries of their own, keys are the queries.
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
  """Returns `curves` averaged over samples, measured a batch at a time.

  Args:
    model, params: model and parameters from `models.build`, in evaluation.
    ids: samples, as the model takes them.
    batch_size: samples at a time; the last batch may be smaller.
  """
  variables = make_variables(model, params)
  # Values of each batch, with the number of its samples that have them.
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
    # Average J, not its logarithm; the greatest is taken out first.
    top = values.max(0)
    top = np.where(np.isfinite(top), top, 0)
    with np.errstate(divide="ignore"):
      return top + np.log10((shares * 10 ** (values - top)).sum(0))
  return (shares * values).sum(0)


@functools.partial(jax.jit, static_argnums=0)
def _batch_curves(
  model: Model, variables: Any, ids: jax.Array
) -> dict[str, jax.Array]:
  """Returns the curves of a batch; compiled once for a model."""
  causal = model.config.is_causal
  return curves(captures.capture(model, variables, ids), causal)


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


# Explains the panels of `figure`, in the words of `CURVES`.
EXPLANATION = (
  "J = 1/2 sum_ij w_ij |v_i - v_j|^2 measures how much the values v of a layer "
  "differ between tokens (NeuTRENO, equation 6); it is 0 where all are equal. "
  "Its weights w are softmax(k k.T / sqrt e) / n, or with the exp kernel "
  "exp(k k.T / sqrt e) / n^2. A slope is the direction in which attention, or "
  "a step down J, moves the values. All but the cosine of two tokens need "
  "queries, keys and values (docs/mixers.md)."
)


def figure(
  curve_rows: list[Row], data: str, name: str = "smoothness"
) -> figures.Figure:
  """Returns a figure of every quantity over layers, with bands over seeds.

  Args:
    curve_rows: results of `rows` for several runs and seeds.
    data: sentence on samples and seeds, which begins the caption.
    name: name of the figure's files.
  """
  caption = f"{data}; bands are one deviation over seeds. {EXPLANATION}"
  texts = Texts(name, "How alike tokens become", caption)
  return plots.curves(texts, curve_rows, "layer (0: embedding)", CURVES)


def text(curve_rows: list[Row]) -> str:
  """Returns a table for every run: a column per layer, a line per quantity.

  Lines are means over seeds, with the sample deviations below if there are
  several. A layer without the quantity has "-".
  """
  lines = []
  for run, rows_of_run in figures.grouped(curve_rows).items():
    layers = sorted({row[3] for row in rows_of_run})
    # Fill the table with text.
    table = [["layer (0: embedding)", *map(str, layers)]]
    by_name = figures.grouped(rows_of_run, 2)
    for name in filter(by_name.get, CURVES):
      places, *spreads = figures.averaged(by_name[name], 3, 4)
      means, bars = (dict(zip(places, x, strict=True)) for x in spreads)
      table.append([CURVES[name], *(_cell(means, k, 4) for k in layers)])
      if not all(map(math.isnan, bars.values())):
        table.append(["  +-", *(_cell(bars, k, 2) for k in layers)])
    # Pad the columns to one width.
    first = max(len(title) for title, *_ in table)
    width = max(len(cell) for _, *cells in table for cell in cells)
    lines += ["", run]
    for title, *cells in table:
      padded = "".join(f"  {cell:>{width}}" for cell in cells)
      lines.append(f"  {title:<{first}}{padded}")
  return "\n".join(lines)


def _cell(values: Mapping[int, float], layer: int, digits: int) -> str:
  value = values.get(layer, math.nan)
  return "-" if math.isnan(value) else f"{value:.{digits}g}"


@cli.command(
  cli.WORKDIRS,
  *trained.STATE,
  cli.option("samples", 64, "number of samples"),
  cli.option("length", 512, "largest number of tokens per sample"),
  trained.SPLIT,
  cli.option("out", "", "write OUT.csv, OUT.png and OUT.svg"),
)
def main(
  workdirs: Sequence[Path],
  samples: int,
  length: int,
  split: str,
  out: str,
  **state: Any,
) -> None:
  """Prints a table for each run, and draws the figure if asked.

  A run as it was trained, its untrained start, and its model with other weights
  or of another name stand beside each other.
  """
  if out:
    requirements.require("plots", f"--out={out}")
  states = trained.states(state)
  curve_rows: list[Row] = []
  seeds, sizes, lengths = set(), set(), set()
  for workdir in workdirs:
    # Seeds of one run, in seed_0 and so on, share its line.
    folders = sorted(workdir.glob("seed_*")) or [workdir]
    seeds.add(len(folders))
    for arguments in states:
      label = ", ".join(
        filter(None, [str(workdir), trained.describe(arguments)])
      )
      for seed, folder in enumerate(folders):
        run = trained.load(folder, **arguments)
        ids = run.sample(samples, length, split)
        sizes.add(len(ids))
        lengths.add(captures.num_tokens(run.model, ids))
        measured = measure_curves(run.model, run.params, ids)
        # Table 4 averages the cosines over layers.
        means = {k: float(np.mean(values)) for k, values in measured.items()}
        trained.record(
          run,
          folder,
          arguments,
          "smoothness",
          means,
          len(ids),
          split=split,
          samples=len(ids),
        )
        curve_rows += rows(label, seed, measured)
  # Print the table and the caption, and draw if asked.
  data = figures.describe_data(sizes, lengths, seeds, split)
  picture = figure(curve_rows, data, Path(out or "smoothness").name)
  print(f"{text(curve_rows)}\n\n{picture.caption}")
  if out:
    picture.write(Path(out).parent)
    print(f"\nWritten to {out}.csv, .png and .svg.")


if __name__ == "__main__":
  main()
