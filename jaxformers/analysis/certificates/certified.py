"""Certified accuracy of a classifier, and its accuracy under attack.

Two kinds of change are considered: replacing k tokens, and perturbing the
embedded sequence. The certified accuracy is the share of test examples that are
classified correctly under every such change (`models.certificates`). The
attacked accuracy is the share that survives a search for such changes; it is an
upper bound on the accuracy under the worst change. Jia et al. 2019
(https://arxiv.org/abs/1909.00986) certify a different change: substitutions
from lists of similar words, at any number of places.
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
from jaxformers.foundations import ranges
from jaxformers.foundations.errors import UserError
from jaxformers.foundations.ranges import Count, PositiveCount
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
from jaxformers.models.capture import mask_of_states
from jaxformers.models.certificates import (
  BATCH,
  Evaluation,
  is_certified,
  perturbed,
  replaced,
  token_reach,
)
from jaxformers.models.variables import make_variables

CANDIDATES = 8  # Replacements that each step of the search evaluates.


def margins(logits: jax.Array, labels: jax.Array) -> jax.Array:
  """Returns the logit of the label minus the largest other logit, [b]."""
  of_class = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
  classes = jnp.arange(logits.shape[1])[None]
  others = jnp.where(classes == labels[:, None], -jnp.inf, logits)
  return of_class - others.max(1)


@functools.partial(jax.jit, static_argnums=0)
def _margins(
  model: Model, variables: Any, ids: jax.Array, labels: jax.Array
) -> jax.Array:
  """Returns the margins of examples, [b]; compiled once for a model."""
  with jax.default_matmul_precision("highest"):  # As `Evaluation.logits`.
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
  """Returns the margins [b], and their gradients [b, n, d].

  Args:
    model, variables: model and its collections.
    ids, labels: examples, [b, n] and [b].
    change: perturbation that is added to the embedded tokens, [b, n, d]. The
      gradients are taken with respect to it.
  """

  def total(change: jax.Array) -> tuple[jax.Array, jax.Array]:
    moved = {"perturbations": {"encoder": {"embedded": change}}}
    logits: Any = model.apply({**variables, **moved}, ids, train=False)
    values = margins(logits, labels)
    return values.sum(), values

  with jax.default_matmul_precision("highest"):
    grads, values = jax.grad(total, has_aux=True)(change)
  return values, grads


@jax.jit
def _best_tokens(
  table: jax.Array, slopes: jax.Array, ids: jax.Array, free: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the positions and tokens of the best replacements, [b, m] each.

  The best replacements lower the margin most, to first order.

  Args:
    table: vectors of the vocabulary, [v, c].
    slopes: gradients of the margins by the embedded tokens, [b, n, d].
    ids: examples, [b, n].
    free: [b, n], True at tokens that may be replaced.
  """

  def of_sample(args: Any) -> tuple[jax.Array, jax.Array]:
    slope, row, is_free = args
    # Margin of every token at every position, to first order, [n, v].
    scores = slope[:, : table.shape[1]] @ table.T
    # Exclude id 0, the padding.
    scores = scores.at[:, 0].set(jnp.inf)
    # Choose the best token of each position, and then the best positions.
    best = scores.argmin(1)
    before = jnp.take_along_axis(scores, row[:, None], 1)[:, 0]
    gain = jnp.where(is_free, before - scores.min(1), -jnp.inf)
    _, places = jax.lax.top_k(gain, min(CANDIDATES, len(row)))
    return places, best[places]

  return jax.lax.map(of_sample, (slopes, ids, free))


class Attack(Evaluation):
  """Search for changes of examples that make a classifier wrong.

  Args:
    model, params: classifier of ids, [b, n], in float32, and its parameters.
  """

  def __init__(self, model: Model, params: Any) -> None:
    super().__init__(model, params)
    self._table = token_table(model, params)

  def _margins(self, ids: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Returns the margins of examples, [b]."""
    return np.asarray(_margins(self._model, self._variables, ids, labels))

  def replace(
    self, ids: np.ndarray, labels: np.ndarray, counts: list[int]
  ) -> dict[int, np.ndarray]:
    """Returns which examples stay correct after k replacements, bool [b].

    A greedy search replaces one token after the other. Each step evaluates the
    `CANDIDATES` replacements that lower the margin most to first order, and
    keeps the best one.

    Args:
      ids: examples, [b, n], 0 at padding.
      labels: classes, [b].
      counts: numbers k of replaced tokens, increasing.

    Returns:
      One array for each k.
    """
    # Slopes are for tokens that a causal model has moved to the front.
    ids = np.array(self._model.close_holes(jnp.asarray(ids))[0])
    labels = np.asarray(labels)
    # Only tokens are replaced, and each position once.
    free = ids > 0
    blank = jnp.zeros((*ids.shape, self._model.config.d_model))
    right = self._margins(ids, labels) > 0
    results, rows = {}, np.arange(len(ids))
    for step in range(max(counts) + 1):
      if step in counts:
        results[step] = right.copy()
      if step == max(counts):
        break
      # Choose candidates by the gradient of the margin.
      _, slopes = _slopes(self._model, self._variables, ids, labels, blank)
      steepest = _best_tokens(self._table, slopes, ids, free)
      places, tokens = map(np.asarray, steepest)
      # Evaluate the margin of each candidate.
      trials = []
      for place, token in zip(places.T, tokens.T, strict=True):
        # Positions that are not free keep their ids.
        trial = ids.copy()
        trial[rows, place] = np.where(
          free[rows, place], token, ids[rows, place]
        )
        trials.append((self._margins(trial, labels), place, trial))
      # Keep the replacement with the lowest margin in each example.
      best = np.argmin([values for values, _, _ in trials], 0)
      ids = np.stack([trial for _, _, trial in trials])[best, rows]
      chosen = np.stack([place for _, place, _ in trials])[best, rows]
      free[rows, chosen] = False
      # An example that was wrong at an earlier step counts as wrong.
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
    """Returns which examples stay correct under perturbations, bool [b].

    Projected gradient descent on the margin searches for the perturbation.

    Args:
      ids, labels: examples and classes, as for `replace`.
      radius: largest Frobenius norm of the perturbation, [b].
      steps: number of steps, each a quarter of the radius long.
    """
    # Start from no perturbation; padding is never perturbed.
    limit = jnp.asarray(radius, jnp.float32)[:, None, None]
    mask = mask_of_states(self._model, ids)[..., None]
    n = mask.shape[1]
    change = jnp.zeros((len(ids), n, self._model.config.d_model))
    right = np.ones(len(ids), bool)
    for _ in range(steps + 1):
      values, slopes = _slopes(
        self._model, self._variables, ids, labels, change
      )
      right &= np.asarray(values) > 0
      # Step down the margin, and project back onto the ball of the radius.
      change = change - limit / 4 * _unit(jnp.where(mask, slopes, 0))
      size = jnp.sqrt(jnp.square(change).sum((1, 2), keepdims=True))
      change = change * jnp.minimum(1, limit / (size + 1e-30))
    return right


def _unit(x: jax.Array) -> jax.Array:
  """Returns x [b, n, d] scaled to Frobenius norm 1, sample by sample."""
  size = jnp.sqrt(jnp.square(x).sum((1, 2), keepdims=True))
  return x / (size + 1e-30)


Key = tuple[str, float]  # ("tokens", number) or ("radius", share of the norm).
Batch = Mapping[str, np.ndarray]  # `inputs` and `targets`.


def certified_accuracy(
  model: Model,
  params: Any,
  batches: list[Batch],
  counts: list[int],
  radii: list[float],
) -> dict[Key, float]:
  """Returns the certified accuracy for every change.

  Args:
    model, params: classifier of sequences in float32, and its parameters.
    batches: batches of examples.
    counts: numbers of replaced tokens.
    radii: norms of perturbations, as shares of the embedded sequence's norm.

  Returns:
    Share of examples whose correct prediction no change can alter, by change;
    {} if the layers or the pooling have no bound for all sequences.
  """
  bound = find_bound(model, make_variables(model, params))
  if bound is None:
    return {}
  # Compute the values that do not depend on the examples.
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
    # Bound each change of the embedded sequences.
    changes: dict[Key, Change] = {
      ("tokens", k): replaced(reach[ids], mask, k) for k in counts
    }
    sizes, allowance = attack.sizes(ids)
    changes |= {("radius", r): perturbed(r * sizes, n) for r in radii}
    # Treat rounding in the encoder as a perturbation of its input.
    rounding = bound(perturbed(allowance, n), n)
    logits = attack.logits(ids)
    # Certify the examples whose margin exceeds the bound.
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
  """Returns the share of examples that stay correct under attack, by change.

  Args:
    model, params, batches, counts, radii: as for `certified_accuracy`.
    steps: number of steps of the search for a perturbation.
  """
  attack = Attack(model, params)
  survived: dict[Key, list[np.ndarray]] = {}
  for batch in tqdm(batches, "attacks", disable=None):
    ids, labels = batch["inputs"], batch["targets"]
    # Replace tokens.
    if counts:
      for k, right in attack.replace(ids, labels, counts).items():
        survived.setdefault(("tokens", k), []).append(right)
    # Perturb the embedded sequences.
    sizes, _ = attack.sizes(ids)
    for r in radii:
      right = attack.perturb(ids, labels, r * sizes, steps=steps)
      survived.setdefault(("radius", r), []).append(right)
  return _shares(survived)


def _shares(survived: dict[Key, list[np.ndarray]]) -> dict[Key, float]:
  """Returns the share of True over all batches, for every change."""
  return {k: float(np.concatenate(x).mean()) for k, x in survived.items()}


def make_batches(split: Any, places: np.ndarray, max_len: int) -> list[Batch]:
  """Returns batches of examples, each of sequences of about the same length.

  Args:
    split: split of a task.
    places: indices of the examples in the split.
    max_len: length to which sequences are cut.
  """
  lengths = np.minimum(split.lengths()[places], max_len)
  # Pad to powers of two, because every length compiles a program.
  padded = np.minimum(
    1 << np.ceil(np.log2(np.maximum(lengths, 1))).astype(int), max_len
  )
  # Group the examples by padded length, and cut the groups into batches.
  batches = []
  for length in np.unique(padded):
    chosen = places[padded == length]
    for start in range(0, len(chosen), BATCH):
      rows = chosen[start : start + BATCH]
      batches.append(split.batch(rows, int(length)))
  return batches


def figure(content: dict[str, Any]) -> Figure:
  """Returns the figure of both accuracies, over k and over the radius.

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
    "Accuracy under changes of the input",
    "{examples:,} {split} examples certified, {attacked:,} attacked; step "
    "{step} of {workdir}.".format(**content),
  )
  return plots.curves(texts, rows, "strength of the change", panels)


def measure_certified(
  run: TrainedModel,
  *,
  counts: list[int],
  radii: list[float],
  samples: PositiveCount,
  examples: Count,
  steps: Count,
  seed: Count,
  split: str = "test",
) -> dict[str, Any]:
  """Returns the certified and the attacked accuracies of a run, for JSON.

  Args:
    run: trained classifier of single sequences.
    counts: numbers of replaced tokens; ignored if the inputs are numbers.
    radii: norms of perturbations, as shares of the embedded sequence's norm.
    samples: number of examples to attack.
    examples: number of examples to certify; 0 for all.
    steps: number of steps of the search for a perturbation.
    seed: seed of the choice of examples.
    split: name of the task's split.

  Raises:
    UserError: for pairs, images, language models and segmenters; for numbers
      out of range; and for texts of which tokens are deleted at random.
  """
  numbers = {"samples": samples, "examples": examples, "steps": steps}
  numbers["seed"] = seed
  _check_numbers(numbers, counts, radii)
  _require_sequences(run)
  model = in_float32(run.model)
  source = _choose_texts(run, split)
  counts = sorted(counts) if model.config.vocab_size else []
  # Draw the examples to attack and to certify.
  order = np.random.default_rng(seed).permutation(len(source))
  attacked = np.sort(order[: min(samples, len(source))])
  certified = np.sort(order[: examples or len(source)])
  sure_batches, left_batches = (
    make_batches(source, chosen, run.task.max_len)
    for chosen in (certified, attacked)
  )
  # Certify and attack.
  weights = (model, run.params)
  sure = certified_accuracy(*weights, sure_batches, counts, radii)
  left = attacked_accuracy(*weights, left_batches, counts, radii, steps=steps)
  # Collect the accuracies with the facts about the measurement.
  content: dict[str, Any] = {
    "workdir": str(run.folder),
    "step": run.step,
    "examples": len(certified),
    "attacked": len(attacked),
    "seed": seed,
    "split": split,
  }
  # Add a row for every number of tokens, and for every radius.
  for kind, strengths in (("tokens", counts), ("radius", radii)):
    content[kind] = [
      _row(sure.get((kind, each)), left[kind, each], each) for each in strengths
    ]
  return content


def _check_numbers(
  numbers: Mapping[str, int], counts: list[int], radii: list[float]
) -> None:
  """Raises UserError for a number of `measure_certified` out of range."""
  ranges.check(measure_certified, numbers)
  if min([*counts, *radii], default=0) < 0:
    raise UserError(f"tokens={counts}, radii={radii}: give numbers from 0 on.")


def _choose_texts(run: TrainedModel, split: str) -> Any:
  """Returns a split of the task of a run.

  Raises:
    UserError: for an unknown split, or one of randomly deleted tokens.
  """
  source = run.task.splits[choose("split", split, run.task.splits)]
  if rate := source.reading().get("deletion"):
    raise UserError(
      f"config.task.deletion={rate:g}: the split has one random "
      "deletion of each text, whose certificate says nothing of the text. "
      "Give --edits=1,2,4 for a vote over deletions."
    )
  return source


def _row(
  certified: float | None, attacked: float, strength: float
) -> dict[str, float | None]:
  """Returns the accuracies under changes of one strength, for JSON."""
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
      "Certified accuracy needs a classifier of single sequences, but the task "
      f"{run.task.name} has another objective, pairs or images. Give the run "
      "of a classifier of sequences."
    )
  if not has_plain_tokens(config):
    raise UserError(f"{NOT_PLAIN[0].upper()}{NOT_PLAIN[1:]}.")


def lines(content: dict[str, Any]) -> list[str]:
  """Returns the result of `measure_certified` as lines of text."""
  # A row for each change; "-" stands for no certificate.
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
