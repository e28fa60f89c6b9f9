"""Certificates: changes of an input that cannot change its prediction.

A change of the input moves the pooled vector by at most a bound, which is
computed layer by layer from the weights (`InvertibleLayers.bound`). The
difference of two logits then changes by at most this bound times the norm of
the difference of their weight vectors. A prediction with a greater margin
cannot change. This is the radius of Tsuzuku et al. 2018
(https://arxiv.org/abs/1802.04034, proposition 1), adapted to mean pooling when
k of n tokens may be replaced by any token of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
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

BATCH = 50  # Number of examples in a batch.
# Allowances for rounding in float32. ROUNDING is for the logits, relative to
# the largest absolute logit. ENCODER_ROUNDING is for the encoder: the norm of
# an equivalent perturbation of the embedded sequence, relative to the greatest
# norm of the sequence between layers, which biases may make greater.
ROUNDING, ENCODER_ROUNDING = 1e-5, 1e-6


def token_reach(table: np.ndarray) -> np.ndarray:
  """Returns the greatest distance of every token to any token, float64 [v].

  Args:
    table: vectors of the vocabulary, [v, d]. Row 0 is padding and does not
      count as a token.
  """
  table = np.asarray(table, np.float64)
  squares = np.square(table).sum(1)
  reach = np.zeros(len(table))
  # |s - t|^2 = |s|^2 - 2 s . t + |t|^2, in blocks of rows to save memory.
  for start in range(0, len(table), 1_024):
    rows = slice(start, start + 1_024)
    products = table[rows] @ table[1:].T
    reach[rows] = (squares[rows, None] - 2 * products + squares[None, 1:]).max(
      1
    )
  return np.sqrt(np.maximum(reach, 0))


def replaced(reach: np.ndarray, mask: np.ndarray, k: Any) -> Change:
  """Returns bounds on the change of embedded sequences by k replaced tokens.

  Args:
    reach: greatest distance that each token can be moved, [b, n].
    mask: [b, n], True at tokens.
    k: number of replaced tokens, at the worst positions; a number, or an array
      with one number for each sequence, [b].
  """
  # Keep the k greatest distances of each sequence.
  # Sort the distances of each sequence in descending order.
  far = -np.sort(-np.where(mask, reach, 0), 1)
  far = np.where(np.arange(far.shape[1]) < np.reshape(k, (-1, 1)), far, 0)
  count = np.maximum(mask.sum(1), 1)
  total = far.sum(1)
  norm = np.sqrt(np.square(far).sum(1))
  return Change(norm, total, total / count, far.max(1))


def perturbed(radius: np.ndarray, n: np.ndarray) -> Change:
  """Returns bounds on the change by perturbations of given Frobenius norms.

  Args:
    radius: Frobenius norms, [b].
    n: numbers of tokens, [b].
  """
  return Change.within(radius, n)


def is_certified(
  logits: np.ndarray, labels: np.ndarray, kernel: np.ndarray, moved: np.ndarray
) -> np.ndarray:
  """Returns where the right class certainly keeps the greatest logit, bool [b].

  Args:
    logits: logits of the unchanged inputs, [b, c].
    labels: right classes, [b].
    kernel: kernel of the last linear map, [d, c].
    moved: greatest change of the input of the last linear map, [b].
  """
  logits = np.asarray(logits, np.float64)
  columns = np.asarray(kernel, np.float64).T
  rows = np.arange(len(labels))
  # Compare each margin with its greatest change and the allowance, [b, c].
  margin = logits[rows, labels][:, None] - logits
  apart = np.linalg.norm(columns[labels][:, None] - columns[None], axis=-1)
  room = apart * moved[:, None] + ROUNDING * np.abs(logits).max(1)[:, None]
  is_own = np.arange(logits.shape[1])[None] == labels[:, None]
  return ((margin > room) | is_own).all(1)


class Evaluation:
  """Functions of a classifier's inputs that certificates need.

  Args:
    model, params: classifier of ids [b, n], in float32, and its parameters.
  """

  def __init__(self, model: Model, params: Any) -> None:
    self._model = model
    self._variables = make_variables(model, params)

  def logits(self, ids: np.ndarray) -> np.ndarray:
    """Returns the logits of examples at full precision, [b, c]."""
    with jax.default_matmul_precision("highest"):
      return np.asarray(outputs(self._model, self._variables, ids))

  def mask(self, ids: np.ndarray) -> np.ndarray:
    """Returns the mask of the tokens of the inputs, bool [b, n]."""
    return np.asarray(self._model.mask(jnp.asarray(ids)))

  def sizes(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns norms of sequences: embedded, and the allowance for rounding.

    Both are Frobenius norms, [b]. See `ENCODER_ROUNDING` for the allowance.
    """
    captured = capture(self._model, self._variables, ids)
    mask = np.asarray(captured.mask)[..., None]
    norms = [
      np.linalg.norm(np.where(mask, x, 0).astype(np.float64), axis=(1, 2))
      for x in map(np.asarray, captured.hidden)
    ]
    return norms[0], ENCODER_ROUNDING * np.max(norms, 0)


def certify(
  model: Model,
  params: Any,
  ids: np.ndarray,
  labels: np.ndarray,
  batch_size: int = BATCH,
) -> list[tuple[int | None, float]]:
  """Returns the greatest changes that certainly keep the class of each example.

  Args:
    model, params: classifier of sequences in float32, and its parameters.
    ids: inputs of the model, [b, n].
    labels: right classes, [b].
    batch_size: number of examples in a batch.

  Returns:
    A pair for each example. First, the greatest number of replaced tokens under
    which the label certainly keeps the greatest logit; None if inputs are
    numbers or the embedding has no bound for a replaced token. Second, the
    greatest norm of a perturbation of the embedded sequence under which the
    label keeps the greatest logit, relative to the norm of the sequence.

  Raises:
    UserError: for pairs, images, or layers without a bound for all sequences.
  """
  # Refuse inputs and models without a bound.
  config = model.config
  if config.num_inputs > 1 or config.image:
    raise UserError(
      "Certificates exist for single-sequence inputs only, not for pairs or "
      "images."
    )
  bound = find_bound(model, make_variables(model, params))
  if bound is None:
    raise UserError(
      f"The layers, pool or norm of {config.name!r} have no bound that holds "
      "for all sequences, so there is no certificate: train the model "
      f"{bounded_models()}."
    )
  # Prepare everything that does not depend on the examples.
  evaluation = Evaluation(model, params)
  kernel = head_kernels(model, params)[-1]
  # Without a bound for single tokens, certify only perturbations.
  reach = None
  if config.vocab_size and has_plain_tokens(config):
    reach = token_reach(np.asarray(token_table(model, params)))
  # Certify batch by batch, and cut off the repeated examples of the last one.
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
  """Returns what `certify` returns, for the examples of one batch.

  Args:
    evaluation: functions of the model.
    bound: bound of the model, from `find_bound`.
    kernel: kernel of the last linear map, [d, c].
    reach: result of `token_reach`; None to certify no replaced tokens.
    ids, labels: examples, [b, n] and [b].
  """
  # Bound the rounding of the encoder as a small perturbation.
  mask = evaluation.mask(ids)
  n = np.maximum(mask.sum(1), 1)
  logits = evaluation.logits(ids)
  sizes, allowance = evaluation.sizes(ids)
  rounding = bound(perturbed(allowance, n), n)

  def holds(change: Change) -> np.ndarray:
    return is_certified(logits, labels, kernel, bound(change, n) + rounding)

  # Search for the greatest number of replaced tokens.
  zeros = np.zeros(len(ids))
  counts: list[int | None] = [None] * len(ids)
  if reach is not None:
    far = reach[ids]
    counts = _bisect(
      lambda k: holds(replaced(far, mask, k)), zeros, mask.sum(1) + 1.0, 1.0
    ).tolist()
  # Search for the greatest perturbation, up to the norm of the sequence.
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
  """Returns the greatest values for which a condition holds, by bisection.

  The result is `low` where the condition holds for no tested value.

  Args:
    holds: monotone condition, from values [b] to booleans [b].
    low: values for which the condition holds if it holds for any, [b].
    high: upper limits of the values, excluded, [b].
    width: width of the interval at which the search ends; 1 for integers.
  """
  while (high - low > width).any():
    middle = (low + high) / 2
    middle = np.floor(middle) if width == 1 else middle
    is_held = holds(middle)
    low = np.where(is_held, middle, low)
    high = np.where(is_held, high, middle)
  return low
