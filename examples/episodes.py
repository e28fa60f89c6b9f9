"""Trains an agent's memory on endless streams of episodes, with resets.

python -m examples.episodes

An episode has 8 to 24 tokens. In two of three episodes one token is a cue of
four kinds; the other tokens are noise. At every token the model says which cue
it has seen in this episode, if any. Nothing in the tokens shows where an
episode ends: only the resets do, as the end of an episode in reinforcement
learning. A model that is not told cannot forget the cue of the episode before.

The streams are read 32 tokens at a time. The state of one window is the first
state of the next one, and gradients end at its edge (truncated back-propagation
through time).
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
import optax

from jaxformers import models

CUES, NOISE = 4, 6  # Kinds of tokens; id 0 is padding.
WINDOW, STREAMS = 32, 32
SHORTEST, LONGEST = 8, 24  # Tokens of an episode.


def episodes(seed: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
  """Yields tokens, resets and labels of the next window, int [STREAMS, WINDOW].

  Resets are 1 at the first token of an episode. Labels are 0 without a cue, or
  the number of the cue, from 1.
  """
  rng = np.random.default_rng(seed)
  left = np.zeros(STREAMS, int)  # Tokens until the end of the episode.
  cue_at, cue = np.zeros(STREAMS, int), np.zeros(STREAMS, int)
  seen = np.zeros(STREAMS, int)
  while True:
    shape = (WINDOW, STREAMS)
    tokens, resets, labels = (np.zeros(shape, int) for _ in range(3))
    for t in range(WINDOW):
      # Begin the next episode, with a cue at one of its tokens or at none.
      ends = left == 0
      length = rng.integers(SHORTEST, LONGEST + 1, STREAMS)
      left = np.where(ends, length, left)
      place = (rng.random(STREAMS) * length).astype(int)
      has_cue = rng.random(STREAMS) < 2 / 3
      cue_at = np.where(ends, np.where(has_cue, place, -1), cue_at)
      cue = np.where(ends, rng.integers(1, CUES + 1, STREAMS), cue)
      # Show the cue or noise.
      shows = cue_at == 0
      seen = np.where(ends, 0, seen)
      seen = np.where(shows, cue, seen)
      noise = rng.integers(CUES + 1, CUES + NOISE + 1, STREAMS)
      tokens[t], resets[t] = np.where(shows, cue, noise), ends
      labels[t] = seen
      left, cue_at = left - 1, cue_at - 1
    yield tokens.T, resets.T, labels.T


def train(
  *, uses_resets: bool, name: str = "lru", steps: int = 300, seed: int = 0
) -> float:
  """Returns the share of right labels in the last tenth of a training.

  Args:
    uses_resets: False to hide the ends of episodes from the model.
    name: name of a recurrence with resets.
    steps: number of windows.
    seed: seed of the parameters and of the streams.
  """
  model = models.build(
    name,
    objective="token_classification",
    causal=True,
    positions="none",
    vocab_size=CUES + NOISE + 1,
    max_len=WINDOW,
    num_classes=CUES + 1,
    d_model=32,
    num_layers=2,
  )
  params = model.init(jax.random.key(seed), model.example(), train=False)[
    "params"
  ]
  tx = optax.adam(3e-3)

  @jax.jit
  def step(params, opt_state, state, tokens, numbers, labels):
    def loss(params):
      logits, after = model.apply(
        {"params": params},
        tokens,
        train=True,
        initial_state=state,
        return_state=True,
        segments=numbers,
      )
      each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
      return each.mean(), (after, (logits.argmax(-1) == labels).mean())

    grads, (state, right) = jax.grad(loss, has_aux=True)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, state, right

  opt_state, state, shares = tx.init(params), None, []
  for _, (tokens, resets, labels) in zip(
    range(steps), episodes(seed), strict=False
  ):
    # Example 1 of a window continues from the state; a reset begins the next.
    numbers = 1 + np.cumsum(resets * uses_resets, 1)
    params, opt_state, state, right = step(
      params, opt_state, state, tokens, numbers, labels
    )
    shares.append(float(right))
  return float(np.mean(shares[-max(steps // 10, 1) :]))


if __name__ == "__main__":
  for uses_resets in (False, True):
    share = train(uses_resets=uses_resets)
    print(f"{'with' if uses_resets else 'without'} resets: {share:.1%} right")
