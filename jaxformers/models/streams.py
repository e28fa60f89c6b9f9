"""Streams: causal models that read sequences as their tokens come."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformers.foundations.errors import UserError
from jaxformers.models.decode import is_bounded
from jaxformers.models.model import Model
from jaxformers.models.step_sizes import check as check_steps

LONGEST = 1_024  # Tokens of the longest part that is read in one call.


class Stream:
  """Reads b sequences token by token or in parts of any lengths.

  `TrainedModel.stream` returns it. The results equal those for whole sequences.
  The state of a recurrence does not grow with the number of tokens. Parts are
  read in pieces whose lengths are powers of two, so that few programs are
  compiled for a number of sequences.

  Attributes:
    state: state of the model after the tokens so far; None before the first.
    num_tokens: number of tokens that each sequence has so far, with padding.

  Example:
    >>> import jaxformers as jf
    >>> import numpy as np
    >>> stream = jf.load("zoo:language-allpass").stream()
    >>> stream.feed(np.array([[5, 7, 3]])).shape[:2], stream.num_tokens
    ((1, 3), 3)
  """

  def __init__(
    self,
    model: Model,
    variables: Any,
    prepare: Callable[[np.ndarray], np.ndarray] = np.asarray,
  ) -> None:
    """Begins to read.

    Args:
      model: causal model whose mixer has a cache.
      variables: collections of the model; see `make_variables`.
      prepare: function that normalises the inputs of each call.

    Raises:
      UserError: if the model is not causal.
    """
    model.check_causal()
    self._model, self._variables = model, variables
    self._prepare = prepare
    self.state: Any = None
    self.num_tokens = 0

  def feed(self, inputs: Any, *, step_sizes: Any = None) -> np.ndarray:
    """Reads the next tokens of each sequence.

    Args:
      inputs: ids, int [b, n], 0 at padding; or numbers, float [b, n]; or steps
        of time series, float [b, n, channels]. The
        number of sequences b must be the same in all calls.
      step_sizes: step sizes of the tokens, float [b, n]; None for 1. See
        `Model.apply`.

    Returns:
      The outputs of the model at these tokens, float32 [b, n, c]; or, for a
      classifier, the logits after all tokens so far, float32 [b, c].

    Raises:
      UserError: for inputs of another shape, for more tokens than the model can
        read, and for a model without states or step sizes; see `Model.apply`.
    """
    x = np.asarray(inputs)
    self._check(x)
    steps = None
    if step_sizes is not None:
      mask = self._model.is_token(jnp.asarray(x))
      steps = np.asarray(check_steps(step_sizes, x.shape[:2], mask))
    dtype = np.float32 if self._model.config.real else np.int32
    x = self._prepare(x).astype(dtype)
    outputs = []
    start = 0
    while start < x.shape[1]:
      # Read as many tokens as the greatest power of two that is left.
      length = min(1 << (x.shape[1] - start).bit_length() - 1, LONGEST)
      part = slice(start, start + length)
      y, self.state = _read(
        self._model,
        self._variables,
        self.state,
        x[:, part],
        None if steps is None else steps[:, part],
      )
      outputs.append(np.asarray(y))
      start += length
    self.num_tokens += x.shape[1]
    if self._model.is_pooled:
      return outputs[-1]
    return np.concatenate(outputs, 1)

  def reset(self) -> None:
    """Forgets all tokens: the next ones begin new sequences."""
    self.state, self.num_tokens = None, 0

  def _check(self, x: np.ndarray) -> None:
    """Raises UserError for inputs that cannot be read next."""
    kinds = "iuf" if self._model.config.real else "iu"
    channels = self._model.config.channels
    is_shaped = x.ndim == 2 + bool(channels) and x.shape[2:] in (
      (),
      (channels,),
    )
    if not is_shaped or not x.size or x.dtype.kind not in kinds:
      axes = f"[b, n, {channels}]" if channels else "[b, n]"
      raise UserError(
        f"Inputs of the shape {x.shape} and the type {x.dtype}: give "
        f"{'numbers' if self._model.config.real else 'integer ids'} {axes}, "
        "with at least one token for each of b sequences."
      )
    before = jax.tree.leaves(self.state)
    if before and len(x) != len(before[0]):
      raise UserError(
        f"{len(x)} sequences after {len(before[0])}: give the next tokens of "
        "each sequence, or begin again by reset()."
      )
    total, most = self.num_tokens + x.shape[1], self._model.config.max_len
    if total > most and is_bounded(self._model):
      raise UserError(
        f"{total} tokens are more than max_len={most}: this model counts "
        "positions or stores keys. Choose a recurrence with "
        "model.positions=none, or train with a greater max_len."
      )


@functools.partial(jax.jit, static_argnums=0)
def _read(
  model: Model, variables: Any, state: Any, inputs: jax.Array, steps: Any
) -> tuple[jax.Array, Any]:
  """Returns the outputs at the next tokens, and the next state."""
  result: tuple[jax.Array, Any] = model.apply(
    variables,
    inputs,
    train=False,
    initial_state=state,
    return_state=True,
    step_sizes=steps,
  )
  return result
