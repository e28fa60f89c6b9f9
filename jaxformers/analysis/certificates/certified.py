r"""Scores a classifier under every change of its inputs of a size.

python -m jaxformers certified runs/imdb

For k replaced tokens, and for perturbations of the embedded sequence: certified
accuracy, the share of test examples that are classified right and stay so
whatever the change is; and attacked accuracy, what is left after a search for
such changes, which is an upper bound. The first needs layers with a bound for
all sequences, such as those of `isometric`; every encoder has the second.

The certificate: a change moves the pooled vector by at most a bound that goes
through the layers with the weights at hand (`InvertibleLayers.bound`), and the
difference of two logits by the norm of the difference of their weights times
that. A prediction whose margin is greater cannot change. As the radius of
Tsuzuku et al. 2018 (https://arxiv.org/abs/1802.04034), proposition 1, but for
the mean over tokens, of which k of n change by any token of the vocabulary.
Jia et al. 2019 (https://arxiv.org/abs/1909.00986) certify substitutions from
lists of similar words, at any number of places.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxformers import cli, requirements, trained
from jaxformers.analysis.plotting import plots
from jaxformers.analysis.plotting.figures import Figure, Texts
from jaxformers.analysis.tokens.capture import capture
from jaxformers.errors import UserError
from jaxformers.models import Classifier, in_float32
from jaxformers.models.blocks.invertible import Change
from jaxformers.models.bounds import (
  NOT_PLAIN,
  LogitBound,
  find_bound,
  has_plain_tokens,
  head_kernels,
  token_table,
)
from jaxformers.models.variables import make_variables, outputs
from jaxformers.models.variants import bounded_models
from jaxformers.registry import choose
from jaxformers.tables import markdown_table

BATCH = 50  # Examples at a time.
CANDIDATES = 8  # Replacements that a step of the search tries out.
# Room for rounding in float32: of logits, relative to the greatest, and of the
# encoder, as a perturbation of the embedded sequence, relative to its norm.
ROUNDING, ENCODER_ROUNDING = 1e-5, 1e-6


def token_reach(table: np.ndarray) -> np.ndarray:
  """Returns the greatest distance of every token to another, float64 [v].

  Args:
    table: vectors of the vocabulary, [v, d]; 0 is padding, which is no token.
  """
  table = np.asarray(table, np.float64)
  squares = np.square(table).sum(1)
  reach = np.zeros(len(table))
  for start in range(0, len(table), 1_024):
    rows = slice(start, start + 1_024)
    products = table[rows] @ table[1:].T
    reach[rows] = (squares[rows, None] - 2 * products + squares[None, 1:]).max(
      1
    )
  return np.sqrt(np.maximum(reach, 0))


def replaced(reach: np.ndarray, mask: np.ndarray, k: Any) -> Change:
  """Returns how far k replaced tokens move the embedded sequences.

  Args:
    reach: distance that each token can be moved, [b, n].
    mask: [b, n], True at tokens.
    k: number of replaced tokens, at the worst places; or one for each
      sequence, [b].
  """
  far = -np.sort(-np.where(mask, reach, 0), 1)
  far = np.where(np.arange(far.shape[1]) < np.reshape(k, (-1, 1)), far, 0)
  count = np.maximum(mask.sum(1), 1)
  total = far.sum(1)
  return Change(np.sqrt(np.square(far).sum(1)), total, total / count)


def perturbed(radius: np.ndarray, n: np.ndarray) -> Change:
  """Returns the change by any perturbation of a Frobenius norm, [b]."""
  return Change(radius, np.sqrt(n) * radius, radius / np.sqrt(n))


def is_certified(
  logits: np.ndarray, labels: np.ndarray, kernel: np.ndarray, moved: np.ndarray
) -> np.ndarray:
  """Returns where the right class stays the greatest logit, bool [b].

  Args:
    logits: [b, c].
    labels: [b].
    kernel: kernel of the last linear map, [d, c].
    moved: greatest change of its input, [b].
  """
  logits = np.asarray(logits, np.float64)
  columns = np.asarray(kernel, np.float64).T
  rows = np.arange(len(labels))
  margin = logits[rows, labels][:, None] - logits
  apart = np.linalg.norm(columns[labels][:, None] - columns[None], axis=-1)
  room = apart * moved[:, None] + ROUNDING * np.abs(logits).max(1)[:, None]
  is_own = np.arange(logits.shape[1])[None] == labels[:, None]
  return ((margin > room) | is_own).all(1)


def margins(logits: jax.Array, labels: jax.Array) -> jax.Array:
  """Returns the logit of the label less the greatest other one, [b]."""
  of_class = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
  classes = jnp.arange(logits.shape[1])[None]
  others = jnp.where(classes == labels[:, None], -jnp.inf, logits)
  return of_class - others.max(1)


@functools.partial(jax.jit, static_argnums=0)
def _margins(
  model: Classifier, variables: Any, ids: jax.Array, labels: jax.Array
) -> jax.Array:
  return margins(model.apply(variables, ids, train=False), labels)


@functools.partial(jax.jit, static_argnums=0)
def _slopes(
  model: Classifier,
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
    logits = model.apply({**variables, **moved}, ids, train=False)
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


class Attack:
  """Searches for changes of examples that make a model wrong.

  Args:
    model, params: classifier of ids, [b, n], in float32, and its parameters.
  """

  def __init__(self, model: Classifier, params: Any) -> None:
    self._model = model
    self._variables = make_variables(model, params)
    self._table = token_table(model, params)

  def logits(self, ids: np.ndarray) -> np.ndarray:
    """Returns the logits of examples, [b, c]."""
    return np.asarray(outputs(self._model, self._variables, ids))

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

  def mask(self, ids: np.ndarray) -> np.ndarray:
    """Returns where there are tokens, bool [b, n]."""
    return np.asarray(self._model.mask(jnp.asarray(ids)))

  def sizes(self, ids: np.ndarray) -> np.ndarray:
    """Returns the Frobenius norms of the embedded sequences, [b]."""
    mask = self.mask(ids)
    embedded = capture(self._model, self._variables, ids).hidden[0]
    x = np.where(mask[..., None], np.asarray(embedded), 0)
    return np.sqrt(np.square(x.astype(np.float64)).sum((1, 2)))


def _unit(x: jax.Array) -> jax.Array:
  size = jnp.sqrt(jnp.square(x).sum((1, 2), keepdims=True))
  return x / (size + 1e-30)


Key = tuple[str, float]  # "tokens" and their number, or "radius" and its share.
Batch = Mapping[str, np.ndarray]  # `inputs` and `targets`.


def certified_accuracy(
  model: Classifier,
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


def certify(
  model: Classifier,
  params: Any,
  ids: np.ndarray,
  labels: np.ndarray,
  batch_size: int = BATCH,
) -> list[tuple[int | None, float]]:
  """Returns the greatest changes that cannot change the class of examples.

  Args:
    model, params: classifier of sequences in float32, and its parameters.
    ids: inputs of the model, [b, n].
    labels: classes, [b].
    batch_size: examples at a time.

  Returns:
    For each example the greatest number of replaced tokens under which the
    label certainly stays the greatest logit, None where inputs are numbers; and
    the greatest norm of a perturbation, as a share of the embedded sequence's
    norm.

  Raises:
    UserError: for pairs, images, or layers without a bound for all sequences.
  """
  config = model.config
  if config.num_inputs > 1 or config.image:
    raise UserError(
      "Certificates are of single sequences, not of these inputs."
    )
  bound = find_bound(model, make_variables(model, params))
  if bound is None:
    raise UserError(
      f"The layers, pool or norm of {config.name!r} have no bound for all "
      "sequences, and so there is no certificate: train the model "
      f"{bounded_models()}."
    )
  # Make once what does not depend on the examples.
  attack = Attack(model, params)
  kernel = head_kernels(model, params)[-1]
  reach = None
  if config.vocab_size and has_plain_tokens(config):
    reach = token_reach(np.asarray(token_table(model, params)))
  certificates = []
  pairs = (trained.in_batches(x, batch_size) for x in (ids, labels))
  for examples in zip(*pairs, strict=True):
    certificates += _certify_batch(attack, bound, kernel, reach, *examples)
  return certificates[: len(ids)]


def _certify_batch(
  attack: Attack,
  bound: LogitBound,
  kernel: np.ndarray,
  reach: np.ndarray | None,
  ids: np.ndarray,
  labels: np.ndarray,
) -> list[tuple[int | None, float]]:
  """Returns `certify` of the examples of a batch.

  Args:
    attack: the model as functions of ids.
    bound: bound of the model, from `find_bound`.
    kernel: kernel of the last linear map, [d, c].
    reach: result of `token_reach`; None where tokens are not replaced.
    ids, labels: examples, [b, n] and [b].
  """
  mask = attack.mask(ids)
  n = np.maximum(mask.sum(1), 1)
  sizes, logits = attack.sizes(ids), attack.logits(ids)
  rounding = bound(perturbed(ENCODER_ROUNDING * sizes, n), n)

  def holds(change: Change) -> np.ndarray:
    return is_certified(logits, labels, kernel, bound(change, n) + rounding)

  zeros = np.zeros(len(ids))
  counts: list[int | None] = [None] * len(ids)
  if reach is not None:
    far = reach[ids]
    counts = _bisect(
      lambda k: holds(replaced(far, mask, k)), zeros, mask.sum(1) + 1.0, 1.0
    ).tolist()
  # Beyond the norm of the sequence itself nothing is searched for.
  radii = _bisect(
    lambda share: holds(perturbed(share * sizes, n)), zeros, zeros + 1, 1e-6
  )
  numbers = [None if k is None else int(k) for k in counts]
  return list(zip(numbers, radii.tolist(), strict=True))


def _bisect(
  holds: Callable[[np.ndarray], np.ndarray],
  low: np.ndarray,
  high: np.ndarray,
  width: float,
) -> np.ndarray:
  """Returns the greatest values that hold, to a width; 0 where none does.

  Args:
    holds: monotone condition, from values [b] to booleans [b].
    low: values that hold if any does, [b].
    high: values that do not hold, [b].
    width: width of the interval that is left; 1 for integers.
  """
  while (high - low > width).any():
    middle = (low + high) / 2
    middle = np.floor(middle) if width == 1 else middle
    is_held = holds(middle)
    low = np.where(is_held, middle, low)
    high = np.where(is_held, high, middle)
  return low


def attacked_accuracy(
  model: Classifier,
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
    content: result of `report`.
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


def report(
  run: trained.Trained,
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
  config = run.model.config
  is_sequence = config.num_inputs == 1 and not config.image
  if config.objective != "classification" or not is_sequence:
    raise UserError(
      "Certified accuracy is of classifiers of one sequence, and "
      f"{run.task.name} has another objective, pairs or images."
    )
  if not has_plain_tokens(config):
    raise UserError(f"{NOT_PLAIN[0].upper()}{NOT_PLAIN[1:]}.")
  model = in_float32(run.model)
  source = run.task.splits[choose("split", split, run.task.splits)]
  counts = sorted(counts) if config.vocab_size else []
  order = np.random.default_rng(seed).permutation(len(source))
  attacked = np.sort(order[: min(samples, len(source))])
  certified = np.sort(order[: examples or len(source)])
  options = (counts, radii)
  max_len = run.task.max_len
  sure = certified_accuracy(
    model, run.params, make_batches(source, certified, max_len), *options
  )
  left = attacked_accuracy(
    model,
    run.params,
    make_batches(source, attacked, max_len),
    *options,
    steps=steps,
  )
  content: dict[str, Any] = {
    "workdir": str(run.workdir),
    "step": run.step,
    "examples": len(certified),
    "attacked": len(attacked),
    "seed": seed,
    "split": split,
  }
  for kind, strengths in (("tokens", counts), ("radius", radii)):
    content[kind] = [
      {
        "strength": strength,
        "certified": sure.get((kind, strength)),
        "attacked": left[kind, strength],
      }
      for strength in strengths
    ]
  return content


def lines(content: dict[str, Any]) -> list[str]:
  """Returns the result of `report` as lines of text."""
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


@cli.command(
  cli.WORKDIR,
  *trained.STATE,
  trained.SPLIT,
  cli.option("tokens", "0,1,2,4,8", "numbers of replaced tokens"),
  cli.option("radii", "0.001,0.01,0.1", "norms of perturbations, as shares"),
  cli.option("samples", 200, "number of test examples to attack"),
  cli.option("examples", 0, "number to certify (default: all)"),
  cli.option("steps", 20, "steps of gradient ascent"),
  cli.option("seed", 0, "seed of the choice of examples"),
)
def main(workdir: str, tokens: str, radii: str, **options: Any) -> None:
  """Prints the table of a run; writes `certified.json` and pictures into it.

  Tables of other states are printed, and not written.
  """
  state = trained.take_state(options)
  if not trained.describe(state):
    requirements.require("plots", f"The picture in {workdir}")
  run = trained.load(workdir, **state)
  content = report(
    run,
    counts=cli.numbers("tokens", tokens),
    radii=cli.numbers("radii", radii, float),
    **options,
  )
  print(f"{run.config.model.name} at step {run.step} on {run.task.name}")
  print("\n".join(lines(content)))
  if label := trained.describe(state):
    print(f"Not written to {workdir}: {label}.")
    return
  path = Path(workdir) / "certified.json"
  path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
  figure(content).write(Path(workdir))
  print(f"Written to {path}, with pictures beside it.")


if __name__ == "__main__":
  main()
