"""Certified accuracy of a classifier, and its accuracy under a search.

For k replaced tokens, and for perturbations of the embedded sequence: the share
of test examples that are classified right and stay so for every such change
(`models.certificates`), and what is left after a search for such changes, which
is an upper bound. Jia et al. 2019 (https://arxiv.org/abs/1909.00986) certify
substitutions from lists of similar words, at any number of places.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxformers.analysis.plotting import plots
from jaxformers.analysis.plotting.figures import Figure, Texts
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import choose
from jaxformers.foundations.tables import markdown_table
from jaxformers.inference import TrainedModel
from jaxformers.models import Model, in_float32
from jaxformers.models.blocks.invertible import Change
from jaxformers.models.bounds import (
  NOT_PLAIN,
  find_bound,
  has_plain_tokens,
  head_kernels,
  token_table,
)
from jaxformers.models.certificates import (
  BATCH,
  ENCODER_ROUNDING,
  Evaluation,
  is_certified,
  perturbed,
  replaced,
  token_reach,
)
from jaxformers.models.variables import make_variables

CANDIDATES = 8  # Replacements that a step of the search tries out.


def margins(logits: jax.Array, labels: jax.Array) -> jax.Array:
  """Returns the logit of the label less the greatest other one, [b]."""
  of_class = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
  classes = jnp.arange(logits.shape[1])[None]
  others = jnp.where(classes == labels[:, None], -jnp.inf, logits)
  return of_class - others.max(1)


@functools.partial(jax.jit, static_argnums=0)
def _margins(
  model: Model, variables: Any, ids: jax.Array, labels: jax.Array
) -> jax.Array:
  logits: Any = model.apply(variables, ids, train=False)
  return margins(logits, labels)


@functools.partial(jax.jit, static_argnums=0)
def _slopes(
  model: Model,
  variables: Any,
  ids: jax.Array,
  labels: jax.Array,
  change: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Returns the margins [b], and their gradient by the embedded tokens.

  Args:
    model, variables: model and its collections.
    ids, labels: examples, [b, n] and [b].
    change: what is added to the embedded tokens, [b, n, d].
  """

  def total(change: jax.Array) -> tuple[jax.Array, jax.Array]:
    moved = {"perturbations": {"encoder": {"embedded": change}}}
    logits: Any = model.apply({**variables, **moved}, ids, train=False)
    values = margins(logits, labels)
    return values.sum(), values

  grads, values = jax.grad(total, has_aux=True)(change)
  return values, grads


@jax.jit
def _best_tokens(
  table: jax.Array, slopes: jax.Array, ids: jax.Array, free: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns places and tokens of the steepest replacements, [b, m] each."""

  def of_sample(args: Any) -> tuple[jax.Array, jax.Array]:
    slope, row, is_free = args
    # What a token in a place changes, to first order; 0 is no token.
    scores = slope[:, : table.shape[1]] @ table.T
    scores = scores.at[:, 0].set(jnp.inf)
    best = scores.argmin(1)
    before = jnp.take_along_axis(scores, row[:, None], 1)[:, 0]
    gain = jnp.where(is_free, before - scores.min(1), -jnp.inf)
    _, places = jax.lax.top_k(gain, min(CANDIDATES, len(row)))
    return places, best[places]

  return jax.lax.map(of_sample, (slopes, ids, free))


class Attack(Evaluation):
  """Searches for changes of examples that make a model wrong.

  Args:
    model, params: classifier of ids, [b, n], in float32, and its parameters.
  """

  def __init__(self, model: Model, params: Any) -> None:
    super().__init__(model, params)
    self._table = token_table(model, params)

  def _margins(self, ids: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return np.asarray(_margins(self._model, self._variables, ids, labels))

  def replace(
    self, ids: np.ndarray, labels: np.ndarray, counts: list[int]
  ) -> dict[int, np.ndarray]:
    """Returns where examples stay right after k replacements, bool [b] each.

    One token after the other: the `CANDIDATES` that lower the margin most to
    first order are tried out, and the best is kept.

    Args:
      ids: [b, n], 0 at padding.
      labels: [b].
      counts: numbers k, increasing.
    """
    ids, labels = np.array(ids), np.asarray(labels)
    free = ids > 0
    blank = jnp.zeros((*ids.shape, self._model.config.d_model))
    right = self._margins(ids, labels) > 0
    results, rows = {}, np.arange(len(ids))
    for step in range(max(counts) + 1):
      if step in counts:
        results[step] = right.copy()
      if step == max(counts):
        break
      _, slopes = _slopes(self._model, self._variables, ids, labels, blank)
      found = _best_tokens(self._table, slopes, ids, free)
      places, tokens = map(np.asarray, found)
      trials = []
      for place, token in zip(places.T, tokens.T, strict=True):
        trial = ids.copy()
        trial[rows, place] = np.where(
          free[rows, place], token, ids[rows, place]
        )
        trials.append((self._margins(trial, labels), place, trial))
      best = np.argmin([values for values, _, _ in trials], 0)
      ids = np.stack([trial for _, _, trial in trials])[best, rows]
      chosen = np.stack([place for _, place, _ in trials])[best, rows]
      free[rows, chosen] = False
      right &= self._margins(ids, labels) > 0
    return results

  def perturb(
    self,
    ids: np.ndarray,
    labels: np.ndarray,
    radius: np.ndarray,
    *,
    steps: int,
  ) -> np.ndarray:
    """Returns where examples stay right under gradient ascent, bool [b].

    Args:
      ids, labels: as for `replace`.
      radius: greatest Frobenius norm of the perturbation, [b].
      steps: number of steps, each a quarter of the radius.
    """
    limit = jnp.asarray(radius, jnp.float32)[:, None, None]
    mask = jnp.asarray(self._model.mask(jnp.asarray(ids)))[..., None]
    n = mask.shape[1]
    change = jnp.zeros((len(ids), n, self._model.config.d_model))
    right = np.ones(len(ids), bool)
    for _ in range(steps + 1):
      values, slopes = _slopes(
        self._model, self._variables, ids, labels, change
      )
      right &= np.asarray(values) > 0
      change = change - limit / 4 * _unit(jnp.where(mask, slopes, 0))
      size = jnp.sqrt(jnp.square(change).sum((1, 2), keepdims=True))
      change = change * jnp.minimum(1, limit / (size + 1e-30))
    return right


def _unit(x: jax.Array) -> jax.Array:
  size = jnp.sqrt(jnp.square(x).sum((1, 2), keepdims=True))
  return x / (size + 1e-30)


Key = tuple[str, float]  # "tokens" and their number, or "radius" and its share.
Batch = Mapping[str, np.ndarray]  # `inputs` and `targets`.


def certified_accuracy(
  model: Model,
  params: Any,
  batches: list[Batch],
  counts: list[int],
  radii: list[float],
) -> dict[Key, float]:
  """Returns the share of examples that no change makes wrong.

  {} where layers or pool have no bound for all sequences.

  Args:
    model, params: classifier of sequences in float32, and its parameters.
    batches: examples.
    counts: numbers of replaced tokens.
    radii: norms of perturbations, as shares of the embedded sequence's norm.
  """
  bound = find_bound(model, make_variables(model, params))
  if bound is None:
    return {}
  attack = Attack(model, params)
  reach = np.zeros(0)
  if counts:
    reach = token_reach(np.asarray(token_table(model, params)))
  kernel = head_kernels(model, params)[-1]
  held: dict[Key, list[np.ndarray]] = {}
  for batch in tqdm(batches, "certificates", disable=None):
    ids, labels = batch["inputs"], batch["targets"]
    mask = attack.mask(ids)
    n = np.maximum(mask.sum(1), 1)
    changes: dict[Key, Change] = {
      ("tokens", k): replaced(reach[ids], mask, k) for k in counts
    }
    sizes = attack.sizes(ids)
    changes |= {("radius", r): perturbed(r * sizes, n) for r in radii}
    rounding = bound(perturbed(ENCODER_ROUNDING * sizes, n), n)
    logits = attack.logits(ids)
    for key, change in changes.items():
      moved = bound(change, n) + rounding
      sure = is_certified(logits, labels, kernel, moved)
      held.setdefault(key, []).append(sure)
  return _shares(held)


def attacked_accuracy(
  model: Model,
  params: Any,
  batches: list[Batch],
  counts: list[int],
  radii: list[float],
  *,
  steps: int,
) -> dict[Key, float]:
  """Returns the share of examples that stay right under a search for changes.

  Args:
    model, params, batches, counts, radii: as for `certified_accuracy`.
    steps: steps of gradient ascent.
  """
  attack = Attack(model, params)
  survived: dict[Key, list[np.ndarray]] = {}
  for batch in tqdm(batches, "attacks", disable=None):
    ids, labels = batch["inputs"], batch["targets"]
    if counts:
      for k, right in attack.replace(ids, labels, counts).items():
        survived.setdefault(("tokens", k), []).append(right)
    sizes = attack.sizes(ids)
    for r in radii:
      right = attack.perturb(ids, labels, r * sizes, steps=steps)
      survived.setdefault(("radius", r), []).append(right)
  return _shares(survived)


def _shares(survived: dict[Key, list[np.ndarray]]) -> dict[Key, float]:
  return {k: float(np.concatenate(x).mean()) for k, x in survived.items()}


def make_batches(split: Any, places: np.ndarray, max_len: int) -> list[Batch]:
  """Returns examples of a split, each beside others of about its length.

  Args:
    split: split of a task.
    places: numbers of the examples.
    max_len: length that sequences are cut to.
  """
  lengths = np.minimum(split.lengths()[places], max_len)
  # A program is compiled for each length: powers of two are few.
  padded = np.minimum(
    1 << np.ceil(np.log2(np.maximum(lengths, 1))).astype(int), max_len
  )
  batches = []
  for length in np.unique(padded):
    chosen = places[padded == length]
    for start in range(0, len(chosen), BATCH):
      rows = chosen[start : start + BATCH]
      batches.append(split.batch(rows, int(length)))
  return batches


def figure(content: dict[str, Any]) -> Figure:
  """Returns both accuracies over k and over the radius.

  Args:
    content: result of `measure_certified`.
  """
  panels = {
    "tokens": "accuracy, tokens replaced",
    "radius": "accuracy, share of the norm",
  }
  rows = [
    (title, 0, kind, row["strength"], row[title])
    for kind in panels
    for row in content[kind]
    for title in ("certified", "attacked")
    if row[title] is not None
  ]
  texts = Texts(
    "certified",
    "Accuracy that changes of the input leave",
    f"{content['examples']:,} test examples certified, {content['attacked']:,} "
    "attacked; step {step} of {workdir}.".format(**content),
  )
  return plots.curves(texts, rows, "strength of the change", panels)


def measure_certified(
  run: TrainedModel,
  *,
  counts: list[int],
  radii: list[float],
  samples: int,
  examples: int,
  steps: int,
  seed: int,
  split: str = "test",
) -> dict[str, Any]:
  """Returns certified and attacked accuracies of a run, for JSON.

  Args:
    run: a trained classifier of single sequences.
    counts: numbers of replaced tokens; ignored where inputs are numbers.
    radii: norms of perturbations, as shares of the embedded sequence's norm.
    samples: number of test examples that are attacked.
    examples: number of test examples that are certified; 0 for all.
    steps: steps of gradient ascent.
    seed: seed of the choice of examples.
    split: split of the task.

  Raises:
    UserError: for pairs, images, language models and segmenters.
  """
  _require_sequences(run)
  model = in_float32(run.model)
  source = run.task.splits[choose("split", split, run.task.splits)]
  counts = sorted(counts) if model.config.vocab_size else []
  order = np.random.default_rng(seed).permutation(len(source))
  attacked = np.sort(order[: min(samples, len(source))])
  certified = np.sort(order[: examples or len(source)])
  sure_batches, left_batches = (
    make_batches(source, chosen, run.task.max_len)
    for chosen in (certified, attacked)
  )
  weights = (model, run.params)
  sure = certified_accuracy(*weights, sure_batches, counts, radii)
  left = attacked_accuracy(*weights, left_batches, counts, radii, steps=steps)
  content: dict[str, Any] = {
    "workdir": str(run.folder),
    "step": run.step,
    "examples": len(certified),
    "attacked": len(attacked),
    "seed": seed,
    "split": split,
  }
  for kind, strengths in (("tokens", counts), ("radius", radii)):
    content[kind] = [
      _row(sure.get((kind, each)), left[kind, each], each) for each in strengths
    ]
  return content


def _row(
  certified: float | None, attacked: float, strength: float
) -> dict[str, float | None]:
  """Returns the accuracies under changes of a strength, for JSON."""
  return {
    "strength": strength,
    "certified": certified,
    "attacked": attacked,
  }


def _require_sequences(run: TrainedModel) -> None:
  """Raises UserError for a model that does not classify single sequences."""
  config = run.model.config
  is_sequence = config.num_inputs == 1 and not config.image
  if config.objective != "classification" or not is_sequence:
    raise UserError(
      "Certified accuracy is of classifiers of one sequence, and "
      f"{run.task.name} has another objective, pairs or images."
    )
  if not has_plain_tokens(config):
    raise UserError(f"{NOT_PLAIN[0].upper()}{NOT_PLAIN[1:]}.")


def lines(content: dict[str, Any]) -> list[str]:
  """Returns the result of `measure_certified` as lines of text."""
  rows = [
    (
      f"{row['strength']} token{'s' * (row['strength'] != 1)}"
      if kind == "tokens"
      else f"{row['strength']:g} of the norm",
      "-" if row["certified"] is None else f"{row['certified']:.2%}",
      f"{row['attacked']:.2%}",
    )
    for kind in ("tokens", "radius")
    for row in content[kind]
  ]
  titles = (
    "change of",
    f"certified ({content['examples']:,})",
    f"attacked ({content['attacked']:,})",
  )
  text = [markdown_table(titles, rows, right=(1, 2))]
  if all(row[1] == "-" for row in rows):
    text.append(
      "These layers have no bound for all sequences, so nothing is certified."
    )
  return text
