"""Inversion of causal models: from the states of any layer to the tokens.

In a causal model the state of a token depends on the token and on earlier ones.
Given the states of all tokens, each token is found by trying every token of the
vocabulary after the tokens that are already found, and by taking the one whose
state is nearest. All candidates continue from one cache, so that a candidate
costs one step.

Source: SipIt of Nikolaou et al. 2025, https://arxiv.org/abs/2510.15511,
algorithm 1. Differs from it: candidates share the cache of the prefix, and the
nearest candidate is taken, not the first one within a distance.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from jaxformers.foundations.errors import UserError
from jaxformers.foundations.registry import check_keywords, choose
from jaxformers.models.batches import in_batches
from jaxformers.models.blocks.fixed_point import LENGTHS
from jaxformers.models.blocks.invertible import layers_of
from jaxformers.models.bounds import token_table
from jaxformers.models.cache import CACHE, FIXED
from jaxformers.models.capture import capture
from jaxformers.models.config import ModelConfig
from jaxformers.models.decode import is_bounded
from jaxformers.models.mixer import names_with_step
from jaxformers.models.model import EncoderModel, Model, in_float32
from jaxformers.models.variables import make_variables, of_stack

POLICIES = ("all", "gradient")
MAX_BYTES = 1 << 26  # Bytes of the caches of the candidates of a chunk.
MAX_ENTRIES = 1 << 24  # Distances of a block of pairs.
GRADIENT_STEPS = 60
GRADIENT_RATE = 0.1  # Relative to the deviation of the embedded candidates.


class Recovered(NamedTuple):
  """Tokens that were recovered from states.

  Attributes:
    ids: the nearest candidates, int32 [b, n]; 0 where the mask is False.
    distances: Euclidean distances of their states from the given ones, float32
      [b, n].
    margins: distance of the second nearest candidate over the distance of the
      nearest one, at least 1, float32 [b, n]; NaN where the mask is False. 1 is
      a collision: two candidates have the same state.
  """

  ids: np.ndarray
  distances: np.ndarray
  margins: np.ndarray


class States(NamedTuple):
  """States of a layer for the tokens of prompts; see `find_states`.

  Attributes:
    ids: tokens, moved to the front of each row, int32 [b, n].
    mask: bool [b, n], True at tokens.
    states: output of the layer, float32 [b, n, d].
  """

  ids: np.ndarray
  mask: np.ndarray
  states: np.ndarray


def find_states(
  model: Model,
  params: Any,
  ids: np.ndarray,
  layer: int | None = None,
  batch_size: int = 32,
) -> States:
  """Returns the states of a layer from which `recover` finds the tokens.

  Computes in float32.

  Args:
    model, params, layer: arguments of `recover`.
    ids: prompts, int32 [b, n], 0 at padding.
    batch_size: number of prompts that are read together.

  Raises:
    UserError: for a model or a layer that `recover` refuses, and for a
      classifier's prompt with padding before a token.
  """
  check_model(model)
  check_layer(model, layer)
  model = in_float32(model)
  variables = make_variables(model, params)
  parts = []
  for batch in in_batches(ids, min(batch_size, len(ids))):
    hidden = capture(model, variables, jnp.asarray(batch)).hidden
    parts.append(np.asarray(hidden[-1 if layer is None else layer]))
  # Models of next tokens move tokens to the front, before padding.
  moved = np.asarray(model.close_holes(jnp.asarray(ids))[0])
  if ((moved[:, :-1] == 0) & (moved[:, 1:] > 0)).any():
    raise UserError(
      "A prompt has padding (id 0) before a token: give its tokens first."
    )
  return States(moved, moved > 0, np.concatenate(parts)[: len(ids)])


@check_keywords
def recover(
  model: Model,
  params: Any,
  states: Any,
  *,
  layer: int | None = None,
  mask: Any = None,
  policy: str = "all",
  num_candidates: int = 64,
  batch_size: int = 32,
  progress: bool = False,
) -> Recovered:
  """Returns the tokens whose states of a layer are nearest to given ones.

  Computes in float32. The tokens of a prompt are found one after the other, so
  that a wrong token may spoil the next ones.

  Args:
    model: causal model of ids, whose mixer has a cache.
    params: parameters of the model.
    states: output of a layer for the tokens of b prompts, float [b, n, d], such
      as `capture` returns it: before a final norm of the encoder.
    layer: number of the layer, from 1, or 0 for the embedded tokens; None for
      the last layer.
    mask: bool [b, n], True at tokens, which come first in each row; None for
      all True.
    policy: candidates of a token. "all": the vocabulary without padding.
      "gradient": the `num_candidates` tokens that are nearest to the input of
      the first layer which Adam finds for the state; it may miss the token.
    num_candidates: number of candidates of "gradient".
    batch_size: number of prompts that are searched together.
    progress: True to show a progress bar on stderr.

  Raises:
    UserError: for a model that reads later tokens or has no cache, for states
      of another shape or that are not finite, for more tokens than the model
      reads, and for an unknown layer or policy.
  """
  states, mask = _check(model, states, mask, layer, policy)
  if num_candidates < 1:
    raise UserError(f"num_candidates={num_candidates}: give at least 1.")
  config, params = _shortened(in_float32(model).config, params, states.shape[1])
  model = EncoderModel(config)
  layer = model.config.num_layers if layer is None else layer
  variables = make_variables(model, params)
  size = model.config.vocab_size
  count = size - 1 if policy == "all" else min(num_candidates, size - 1)
  if policy == "gradient":
    # Bound the embeddings of all candidates, [vocab_size, b, d].
    largest = 4 * MAX_BYTES // (4 * size * model.config.d_model)
    batch_size = max(min(batch_size, largest), 1)
  batch_size = min(batch_size, len(states))
  search = (layer, policy, count)
  parts = []
  starts = range(0, len(states), batch_size)
  for start in tqdm(starts, "inverting", disable=None if progress else True):
    # Fill the last batch with its last prompt, so that one program is compiled.
    rows = np.minimum(np.arange(start, start + batch_size), len(states) - 1)
    parts.append(_recover(model, search, variables, states[rows], mask[rows]))
  ids, distances, margins = (
    np.concatenate([np.asarray(x) for x in arrays])[: len(states)]
    for arrays in zip(*parts, strict=True)
  )
  if not np.isfinite(distances[mask]).all():
    raise UserError(
      "The states are too far from the states of all tokens: give "
      "states of this model."
    )
  return Recovered(ids, distances, np.where(mask, margins, np.nan))


def _shortened(
  config: ModelConfig, params: Any, n: int
) -> tuple[ModelConfig, Any]:
  """Returns a config and parameters for n tokens with smaller caches.

  Attention stores max_len keys and values; softmax attention does not depend on
  max_len otherwise, except for a table of positions. Other models stay as they
  are.
  """
  is_free = config.positions in ("none", "sinusoid", "learned")
  if config.variant.mixer != "softmax" or not is_free or n >= config.max_len:
    return config, params
  if config.positions == "learned":
    encoder = dict(params["encoder"])
    table = encoder["embedding"]["positions"][:n]
    encoder["embedding"] = {**encoder["embedding"], "positions": table}
    params = {**params, "encoder": encoder}
  return dataclasses.replace(config, max_len=n), params


class Nearest(NamedTuple):
  """Nearest pairs of vectors.

  Attributes:
    distances: Euclidean distances, ascending, float64 [k].
    pairs: numbers of the two vectors of each pair, int64 [k, 2].
    num_below: number of all pairs whose distance is below a threshold.
  """

  distances: np.ndarray
  pairs: np.ndarray
  num_below: int


def nearest(x: np.ndarray, count: int, threshold: float = 0.0) -> Nearest:
  """Returns the `count` nearest pairs of different rows of x [b, d]."""
  x = np.asarray(x, np.float64)
  # What all rows share would only cost digits.
  is_finite = np.isfinite(x).all(1)
  x = x - x[is_finite].mean(0)
  squares = np.square(x).sum(1)
  greatest = squares[is_finite].max()
  kept, pairs, num_below = np.zeros(0), np.zeros((0, 2), np.int64), 0
  size = max(MAX_ENTRIES // len(x), 1)
  for start in range(0, len(x), size):
    rows, columns = x[start : start + size], x[start:]
    # |a - b|^2 = |a|^2 - 2 a . b + |b|^2 chooses the pairs of a block.
    square = squares[start : start + size, None] + squares[None, start:]
    square -= 2 * rows @ columns.T
    is_pair = np.arange(len(rows))[:, None] < np.arange(len(columns))[None]
    square[~is_pair] = np.inf
    # The sum cancels: keep a margin, and compute the differences themselves.
    near = square < threshold**2 + 1e-9 * (greatest + 1)
    first, second = np.nonzero(near)
    exact = np.linalg.norm(rows[first] - columns[second], axis=1)
    num_below += int((exact < threshold).sum())
    # All pairs that may be among the nearest ones, up to rounding.
    last = min(count, square.size) - 1
    most = np.partition(square.ravel(), last)[last] + 1e-12 * greatest
    first, second = np.nonzero(np.isfinite(square) & (square <= most))
    exact = np.linalg.norm(rows[first] - columns[second], axis=1)
    kept = np.concatenate([kept, exact])
    pairs = np.concatenate([pairs, start + np.stack([first, second], 1)])
    order = np.argsort(kept, kind="stable")[:count]
    kept, pairs = kept[order], pairs[order]
  return Nearest(kept, pairs, num_below)


def noise_radius(
  model: Model, params: Any, layer: int | None = None
) -> float | None:
  """Returns a noise of states up to which `recover` finds every token.

  Args:
    model: causal model.
    params: parameters of the model.
    layer: number of the layer, from 0; None for the last one.

  Returns:
    A Euclidean norm, see `noise_radii`; None if none is known for the layer.

  Raises:
    UserError: for an unknown layer.
  """
  check_layer(model, layer)
  layer = model.config.num_layers if layer is None else layer
  radii = noise_radii(model, params)
  return radii[layer] if layer < len(radii) else None


def noise_radii(model: Model, params: Any) -> list[float]:
  """Returns a noise of the states of each layer that changes no token.

  Let c be the least factor by which the layers change a distance of two
  sequences, and m the least distance of two embedded tokens. Two candidates
  after equal tokens differ only in the last state, because the model is
  causal, so that their states are at least c m apart. If the noise of each
  state is below c m / 2, the right candidate is the nearest. The bound is for
  exact arithmetic; see docs/theory.md, section 14.

  Args:
    model: causal model.
    params: parameters of the model.

  Returns:
    c m / 2, a Euclidean norm, for layers 0, 1, ..., as far as c is known; empty
    if the layers have no such factors, or if tokens are not rows of one table.
  """
  layers = layers_of(model.stacks()["encoder"])
  table = token_table(model, params)
  has_norm = model.config.embedding.get("norm_epsilon")
  if layers is None or not model.config.is_causal or table is None or has_norm:
    return []
  if len(table) < 3:
    return []
  variables = make_variables(model, params)
  # Row 0 is padding.
  radii = [float(nearest(np.asarray(table)[1:], 1).distances[0]) / 2]
  for weights in layers.weights(of_stack(variables, "encoder")):
    try:
      bounds = layers.certificate(weights, None, 0.0)
    except UserError:
      break
    # Only one token differs, so that every distance of sequences is the same.
    kind = next((kind for kind in LENGTHS if kind in bounds), None)
    if kind is None:
      break
    radii.append(bounds[kind][0] * radii[-1])
  return radii


def check_layer(model: Model, layer: int | None) -> None:
  """Raises UserError for a layer that the model does not have."""
  count = model.config.num_layers
  is_number = isinstance(layer, numbers.Integral) and layer is not True
  if layer is not None and not (is_number and 0 <= layer <= count):
    raise UserError(f"layer={layer}: choose one of 0 to {count}.")


def check_model(model: Model) -> None:
  """Raises UserError for a model that is not inverted token by token."""
  config = model.config
  if not config.is_causal:
    raise UserError(
      f"The model {config.name!r} reads later tokens, so that its states are "
      "not inverted token by token: choose a causal model, such as a language "
      "model. Injective layers have their own inverse, which needs the inputs, "
      "the last layer and no choice of candidates."
    )
  is_read = config.vocab_size and config.num_inputs == 1
  if config.variant.mixer not in names_with_step() or not is_read:
    raise UserError(
      f"The model {config.name!r} is not inverted token by token: its mixer "
      "has no cache, or it does not read single sequences of ids. Mixers with "
      f"a cache are {', '.join(names_with_step())}."
    )
  model.check_causal()


def _check(
  model: Model, states: Any, mask: Any, layer: int | None, policy: str
) -> tuple[np.ndarray, np.ndarray]:
  """Returns states and mask as arrays; raises the errors of `recover`."""
  config = model.config
  choose("policy", policy, POLICIES)
  check_model(model)
  check_layer(model, layer)
  states = np.asarray(states)
  if states.dtype.kind not in "iuf" and states.dtype != jnp.bfloat16:
    raise UserError(
      f"states of the type {states.dtype}: give one array of real numbers, "
      "such as float32."
    )
  states = states.astype(np.float32)
  mask = np.ones(states.shape[:2]) if mask is None else np.asarray(mask)
  mask = mask.astype(bool)
  is_shaped = states.ndim == 3 and states.shape[2] == config.d_model
  if not is_shaped or not states.size or mask.shape != states.shape[:2]:
    raise UserError(
      f"states {list(states.shape)} with a mask {list(mask.shape)}: give the "
      f"outputs of a layer, [b, n, {config.d_model}], and a mask [b, n]."
    )
  if (mask[:, 1:] & ~mask[:, :-1]).any():
    raise UserError(
      "The mask is False before a token: give the tokens of each row first."
    )
  if not np.isfinite(states[mask]).all():
    raise UserError("states have numbers that are not finite: correct them.")
  if is_bounded(model) and states.shape[1] > config.max_len:
    raise UserError(
      f"States of {states.shape[1]} tokens, but the model reads at most "
      f"max_len={config.max_len}: cut them."
    )
  return states, mask


def read_token(
  model: EncoderModel, variables: Any, cache: Any, ids: jax.Array, **more: Any
) -> tuple[tuple[jax.Array, ...], Any]:
  """Returns the states of one more token in all layers, and the next cache.

  Args:
    model, variables: encoder.
    cache: collections of the cache after the tokens so far.
    ids: next token of each prompt, int32 [b].
    **more: further collections.

  Returns:
    The embedded token and the output of every layer, [b, d] each.
  """
  with jax.default_matmul_precision("highest"):
    _, changed = model.apply(
      {**variables, **cache, **more},
      ids[:, None],
      train=False,
      mutable=[CACHE, FIXED, "intermediates"],
    )
  changed = dict(changed)
  hidden = changed.pop("intermediates")["encoder"]["hidden"]
  return tuple(x[:, 0].astype(jnp.float32) for x in hidden), changed


def start_cache(model: EncoderModel, variables: Any, count: int) -> Any:
  """Returns the empty cache of `count` prompts: padding does not change it."""
  return read_token(model, variables, {}, jnp.zeros(count, jnp.int32))[1]


def _chunk(model: EncoderModel, variables: Any, b: int, count: int) -> int:
  """Returns the number of candidates whose caches fit `MAX_BYTES`."""
  start = functools.partial(start_cache, model, count=b)
  cache = jax.eval_shape(start, variables)[CACHE]
  size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
  return max(min(MAX_BYTES // max(size, 1), count), 1)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _recover(
  model: EncoderModel,
  search: tuple[int, str, int],
  variables: Any,
  states: jax.Array,
  mask: jax.Array,
) -> Recovered:
  """Returns the recovered tokens of a batch of prompts.

  Args:
    model, variables: encoder.
    search: layer, policy, and number of candidates.
    states: states of the layer, [b, n, d].
    mask: True at tokens, [b, n].
  """
  layer, policy, count = search
  b = len(states)
  width = _chunk(model, variables, b, count)
  every = jnp.arange(1, model.config.vocab_size, dtype=jnp.int32)

  def embed(cache: Any, ids: jax.Array) -> jax.Array:
    """Returns the embedding of each candidate [k] in each prompt, [k, b, d]."""
    return jax.vmap(
      lambda v: read_token(model, variables, cache, jnp.full(b, v))[0][0]
    )(ids)

  def candidates(cache: Any, target: jax.Array) -> jax.Array:
    """Returns the candidates of the next token of each prompt, [count, b]."""
    if policy == "all":
      return jnp.broadcast_to(every[:, None], (count, b))
    embedded = embed(cache, every)
    inputs = _descend(model, layer, variables, cache, embedded, target)
    distance = jnp.linalg.norm(embedded - inputs[None], axis=-1)
    return every[jax.lax.top_k(-distance.T, count)[1]].T

  def position(cache: Any, token: Any) -> tuple[Any, Any]:
    target, is_token = token
    ids = candidates(cache, target)
    # Fill the last chunk with padding, which is never chosen.
    ids = jnp.pad(ids, ((0, -count % width), (0, 0))).reshape(-1, width, b)

    def chunk(best: Any, ids: jax.Array) -> tuple[Any, None]:
      hidden = jax.vmap(
        lambda row: read_token(model, variables, cache, row)[0][layer]
      )(ids)
      distance = jnp.linalg.norm(hidden - target[None], axis=-1)
      distance = jnp.where(ids > 0, distance, jnp.inf)
      # Keep the two nearest candidates so far, [2, b].
      distances, kept = (
        jnp.concatenate(pair)
        for pair in zip(best, (distance, ids), strict=True)
      )
      order = jnp.argsort(distances, axis=0, stable=True)[:2]
      return tuple(
        jnp.take_along_axis(x, order, 0) for x in (distances, kept)
      ), None

    empty = (jnp.full((2, b), jnp.inf), jnp.zeros((2, b), jnp.int32))
    (distances, kept), _ = jax.lax.scan(chunk, empty, ids)
    chosen = jnp.where(is_token, kept[0], 0)
    _, cache = read_token(model, variables, cache, chosen)
    least, second = distances
    margin = jnp.where(second > least, second / least, 1.0)
    return cache, (chosen, least, margin)

  cache = start_cache(model, variables, b)
  tokens = (jnp.moveaxis(states, 1, 0), mask.T)
  _, outputs = jax.lax.scan(position, cache, tokens)
  return Recovered(*(x.T for x in outputs))


def _descend(
  model: EncoderModel,
  layer: int,
  variables: Any,
  cache: Any,
  embedded: jax.Array,
  target: jax.Array,
) -> jax.Array:
  """Returns inputs of the first layer whose states come near a target, [b, d].

  Adam starts from the mean of the embedded candidates.

  Args:
    model, layer, variables, cache: see `_recover` and `read_token`.
    embedded: embedding of all candidates in each prompt, [k, b, d].
    target: states of the layer, [b, d].
  """
  b = len(target)
  ids = jnp.ones(b, jnp.int32)
  scale = embedded.std()

  def loss(x: jax.Array) -> jax.Array:
    change = {"encoder": {"embedded": (x - embedded[0])[:, None]}}
    hidden, _ = read_token(model, variables, cache, ids, perturbations=change)
    return jnp.linalg.norm(hidden[layer] - target, axis=-1).sum()

  optimizer = optax.adam(GRADIENT_RATE * scale)
  x = embedded.mean(0)

  def step(carry: Any, _: None) -> tuple[Any, None]:
    x, state = carry
    updates, state = optimizer.update(jax.grad(loss)(x), state)
    return (optax.apply_updates(x, updates), state), None

  (x, _), _ = jax.lax.scan(step, (x, optimizer.init(x)), None, GRADIENT_STEPS)
  return x
