"""Generation, against whole sequences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import models
from jaxformers.models import decode
from tests import initial
from tests.marks import long_except
from tests.models.test_cache import N, build, start

PROMPT = np.array([[3, 7, 1, 4], [5, 2, 0, 0]])


@pytest.mark.parametrize("name", ["s5", "transformer"])
@pytest.mark.slow
def test_generate_takes_the_likeliest_tokens_of_whole_sequences(name):
  model = build(name)
  params = start(model)
  found = models.generate(model, params, PROMPT, 5, temperature=0)
  assert found.shape == (2, 5) and found.dtype == jnp.int32
  apply = jax.jit(functools.partial(model.apply, train=False))
  for row, tokens in zip(PROMPT, np.asarray(found), strict=True):
    # log p of every place of the whole text at once: no later token counts.
    text = np.array([*row[row > 0], *tokens])
    padded = np.pad(text, (0, N - len(text)))[None]
    likeliest = np.asarray(apply({"params": params}, padded)[0]).argmax(-1)
    assert (likeliest[len(text) - 6 : len(text) - 1] == tokens).all()


def test_choice_with_tiny_temperature_is_greedy():
  """Log probabilities over 1e-40 are infinite, and NaN for the likeliest."""
  log_p = jnp.log(jnp.array([[0.0, 0.2, 0.5, 0.3], [0.1, 0.1, 0.1, 0.7]]))
  for temperature in (0.0, 1e-300, 1e-40, 1e-21, 1e-19, 1e-3):
    for top_k in (0, 2):
      choice = decode.Choice(jnp.float32(temperature), jnp.int32(top_k))
      drawn = choice.draw(log_p, jax.random.key(0), top_k)
      assert drawn.tolist() == [2, 3], temperature


@pytest.mark.parametrize("name", ["mega", "s5", "transformer"])
@pytest.mark.slow
def test_generate_skips_padding_of_a_prompt(name):
  model = build(name)
  prompts = np.array([[5, 2, 7, 0, 0], [0, 0, 5, 2, 7], [5, 0, 2, 0, 7]])
  found = models.generate(model, start(model), prompts, 5, temperature=0)
  alone = models.generate(
    model, start(model), prompts[:1, :3], 5, temperature=0
  )
  np.testing.assert_array_equal(found, np.tile(alone, (3, 1)))


@pytest.mark.slow
@pytest.mark.long
def test_generate_draws_follow_the_probabilities():
  model = build("lru")
  params = start(model)
  prompt = np.tile(PROMPT[:1], (4_000, 1))
  log_p = model.apply({"params": params}, PROMPT[:1], train=False)[0, -1]
  for options, wanted in (
    ({}, jax.nn.softmax(log_p)),
    ({"temperature": 0.5}, jax.nn.softmax(2 * log_p)),
  ):
    drawn = models.generate(
      model, params, prompt, 1, key=jax.random.key(0), **options
    )
    share = np.bincount(np.asarray(drawn).ravel(), minlength=11) / 4_000
    np.testing.assert_allclose(share, wanted, atol=4 * 0.5 / np.sqrt(4_000))
  drawn = models.generate(
    model, params, prompt, 1, key=jax.random.key(0), top_k=2
  )
  assert {*np.asarray(drawn).ravel()} == {*np.asarray(log_p).argsort()[-2:]}


def test_generate_of_a_recurrence_exceeds_the_training_length():
  model = build("lru", positions="none")
  found = models.generate(model, start(model), PROMPT, N + 9, temperature=0)
  assert found.shape == (2, N + 9) and (found > 0).all()


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"steps": N}, "4 tokens.*13 steps.*max_len=13"),
    ({"steps": 0}, "steps=0"),
    ({"key": None}, "temperature.*key=jax.random.key"),
    ({"top_k": 11}, "top_k=11.*0 to 10"),
    ({"top_k": 1.5}, "top_k=1.5"),
    ({"steps": 2.5}, "steps=2.5"),
    ({"temperature": float("nan")}, "temperature=nan.*finite"),
    ({"temperature": float("inf")}, "temperature=inf"),
    ({"temperature": "0"}, "temperature=0"),
    ({"prompt": [[1], [0]]}, r"prompt.*\(2, 1\)"),
    ({"prompt": [[1, 11]]}, "prompt.*1 to 11.*0 to 10"),
    ({"prompt": [1, 2]}, r"prompt.*\(2,\)"),
  ],
)
def test_generate_refuses_wrong_arguments(change, message):
  model = build("transformer")
  options = {"prompt": PROMPT, "steps": 2, "key": jax.random.key(0)} | change
  with pytest.raises(ValueError, match=message):
    models.generate(model, {}, options.pop("prompt"), **options)


@pytest.mark.parametrize("name", long_except(["s4d"], ["s4d", "allpass"]))
@pytest.mark.slow
def test_generate_without_positions_exceeds_max_len(name):
  sizes = dict(vocab_size=9, max_len=5, num_classes=0, d_model=8, num_layers=1)
  model = models.build(
    name, objective="language_model", positions="none", **sizes
  )
  params = initial.params(model, jnp.asarray(PROMPT))
  ids = models.generate(model, params, PROMPT, 8, temperature=0)
  assert ids.shape[1] >= 8


def test_generate_of_a_certified_mixer_stops_at_max_len():
  sizes = dict(vocab_size=9, max_len=5, num_classes=0, d_model=8, num_layers=1)
  model = models.build(
    "certified_s4d", objective="language_model", positions="none", **sizes
  )
  with pytest.raises(ValueError, match="8 steps.*max_len=5"):
    models.generate(model, {}, PROMPT, 8, temperature=0)


@pytest.mark.slow
def test_generate_refuses_a_classifier():
  sizes = dict(vocab_size=9, max_len=8, num_classes=2, d_model=8)
  model = models.build("s5", num_layers=1, **sizes)
  with pytest.raises(ValueError, match="classification.*language_model"):
    models.generate(model, {}, PROMPT, 2, temperature=0)
