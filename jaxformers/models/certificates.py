"""Certificates: changes of an input that cannot change its prediction.

A change moves the pooled vector by at most a bound that goes through the layers
with the weights of the model (`InvertibleLayers.bound`), and the difference of
two logits by the norm of the difference of their weights times that. A
prediction whose margin is greater cannot change. As the radius of Tsuzuku et
al. 2018 (https://arxiv.org/abs/1802.04034), proposition 1, but for the mean
over tokens, of which k of n change by any token of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxformers.foundations.errors import UserError
from jaxformers.models.batches import in_batches
from jaxformers.models.blocks.invertible import Change
from jaxformers.models.bounds import (
  LogitBound,
  find_bound,
  has_plain_tokens,
  head_kernels,
  token_table,
)
from jaxformers.models.capture import capture
from jaxformers.models.model import Model
from jaxformers.models.variables import make_variables, outputs
from jaxformers.models.variants import bounded_models

BATCH = 50  # Examples at a time.
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


class Evaluation:
  """A classifier of sequences as functions of its inputs.

  Args:
    model, params: classifier of ids, [b, n], in float32, and its parameters.
  """

  def __init__(self, model: Model, params: Any) -> None:
    self._model = model
    self._variables = make_variables(model, params)

  def logits(self, ids: np.ndarray) -> np.ndarray:
    """Returns the logits of examples, [b, c]."""
    return np.asarray(outputs(self._model, self._variables, ids))

  def mask(self, ids: np.ndarray) -> np.ndarray:
    """Returns where there are tokens, bool [b, n]."""
    return np.asarray(self._model.mask(jnp.asarray(ids)))

  def sizes(self, ids: np.ndarray) -> np.ndarray:
    """Returns the Frobenius norms of the embedded sequences, [b]."""
    mask = self.mask(ids)
    embedded = capture(self._model, self._variables, ids).hidden[0]
    x = np.where(mask[..., None], np.asarray(embedded), 0)
    return np.sqrt(np.square(x.astype(np.float64)).sum((1, 2)))


def certify(
  model: Model,
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
  evaluation = Evaluation(model, params)
  kernel = head_kernels(model, params)[-1]
  reach = None
  if config.vocab_size and has_plain_tokens(config):
    reach = token_reach(np.asarray(token_table(model, params)))
  certificates = []
  pairs = (in_batches(x, batch_size) for x in (ids, labels))
  for examples in zip(*pairs, strict=True):
    certificates += _certify_batch(evaluation, bound, kernel, reach, *examples)
  return certificates[: len(ids)]


def _certify_batch(
  evaluation: Evaluation,
  bound: LogitBound,
  kernel: np.ndarray,
  reach: np.ndarray | None,
  ids: np.ndarray,
  labels: np.ndarray,
) -> list[tuple[int | None, float]]:
  """Returns `certify` of the examples of a batch.

  Args:
    evaluation: the model as functions of ids.
    bound: bound of the model, from `find_bound`.
    kernel: kernel of the last linear map, [d, c].
    reach: result of `token_reach`; None where tokens are not replaced.
    ids, labels: examples, [b, n] and [b].
  """
  mask = evaluation.mask(ids)
  n = np.maximum(mask.sum(1), 1)
  sizes, logits = evaluation.sizes(ids), evaluation.logits(ids)
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
