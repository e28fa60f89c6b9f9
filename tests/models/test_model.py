"""What classifiers, language models and segmenters share."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import models
from jaxformers.foundations.errors import UserError
from jaxformers.models import Classifier, ModelConfig
from jaxformers.models.config import HEADS
from jaxformers.models.model import CLASSES, bind_encoder_block
from jaxformers.models.streams import Stream
from jaxformers.models.variables import make_variables
from tests import initial
from tests.marks import slow_except
from tests.models.mixers.oracle import small_sizes
from tests.models.test_cache import start
from tests.models.test_reconstruction import SMALL, names

SIZES = dict(vocab_size=20, max_len=8, num_classes=3, d_model=8, num_layers=2)
IMAGE = {"image": (8, 8, 3), "patch_size": 4, "vocab_size": 0, "max_len": 0}


@pytest.mark.parametrize("objective", ["classification", "language_model"])
def test_model_mask_is_true_at_tokens(objective):
  model = models.build("transformer", **SIZES, objective=objective)
  ids = jnp.array([[3, 4, 0], [1, 0, 0]])
  np.testing.assert_array_equal(model.mask(ids), ids > 0)


def test_model_mask_of_pairs_and_class_token():
  pairs = jnp.array([[[3, 0], [4, 5]]])
  model = models.build(
    "transformer", **SIZES, num_inputs=2, interaction="concat", pool="cls"
  )
  want = [[True, True, False], [True, True, True]]
  np.testing.assert_array_equal(model.mask(pairs), want)
  assert model.example(4).shape == (1, 2, 4)


@pytest.mark.parametrize("objective", ["classification", "language_model"])
@pytest.mark.parametrize(
  "name",
  slow_except(
    ("transformer",), sorted(models.MODELS), ("mega", "s5", "transformer")
  ),
)
def test_every_model_refuses_a_sequence_of_no_tokens(name, objective):
  is_causal = objective == "language_model"
  if is_causal and name not in names("next"):
    return
  sizes = SIZES | ({"num_classes": 0} if is_causal else {})
  model = models.build(
    name, **sizes, objective=objective, mixer=SMALL.get(name, {})
  )
  with pytest.raises(UserError, match=r"\(2, 0\).*tokens"):
    model.init(jax.random.key(0), jnp.zeros((2, 0), jnp.int32), train=False)


def test_model_stacks_are_keyed_by_their_parameters():
  image = {"image": (8, 8, 3), "patch_size": 4, "vocab_size": 0, "max_len": 0}
  options = SIZES | image
  model = models.build("transformer", **options, objective="segmentation")
  params = models.shapes(model)
  assert {*model.stacks()} == {"encoder", "decoder"} == {*params}


def test_bind_encoder_block_passes_options_to_mixer_and_block():
  config = ModelConfig(
    "transformer",
    **SIZES,
    mixer={"num_heads": 4},
    block={"mlp_dim": 24},
    dtype="bfloat16",
  )
  block = bind_encoder_block(config)(parent=None)
  assert (block.mlp_dim, block.num_layers) == (24, 2)
  assert block.dtype == block.mixer(parent=None).dtype == "bfloat16"
  assert block.mixer(parent=None).num_heads == 4


def test_check_traces_the_longest_input():
  config = ModelConfig("linformer", **SIZES, mixer={"rank": 9})
  with pytest.raises(ValueError, match=r"rank=9.*max_len=8"):
    Classifier(config).check()
  with pytest.raises(ValueError, match="rank=9"):
    models.build("linformer", **SIZES, mixer={"rank": 9})


def test_check_counts_the_class_token():
  config = ModelConfig("linformer", **SIZES, mixer={"rank": 9}, pool="cls")
  Classifier(config).check()


@pytest.mark.parametrize("objective", sorted(CLASSES))
def test_build_gives_the_class_of_the_objective(objective):
  image = IMAGE if objective == "segmentation" else {}
  model = models.build("transformer", **SIZES | image, objective=objective)
  assert type(model) is CLASSES[objective]
  assert model.objective == objective
  assert models.size(model) > 0


@pytest.mark.parametrize("objective", sorted(HEADS))
def test_build_lists_choices_for_an_unknown_head_option(objective):
  image = IMAGE if objective == "segmentation" else {}
  option = min(HEADS[objective].__annotations__)
  with pytest.raises(ValueError, match=f"'width'.*{option}"):
    models.build(
      "transformer", **SIZES | image, objective=objective, head={"width": 1}
    )


def test_build_lists_choices_for_an_unknown_option():
  with pytest.raises(ValueError, match=r"'num_layer'.*num_layers"):
    models.build("transformer", **SIZES, num_layer=3)


@pytest.mark.parametrize(
  "name", slow_except(["transformer"], ["transformer", "transject", "lru"])
)
@pytest.mark.slow
def test_encoder_works_inside_another_module(name):
  """It is made inside of a call or before, with the output of a classifier."""
  sizes = {key: SIZES[key] for key in SIZES if key != "num_classes"}

  class Tagger(nn.Module):
    inside: bool
    encoder: nn.Module | None = None

    @nn.compact
    def __call__(self, ids, *, train):
      encoder = self.encoder
      if self.inside:
        encoder = models.encoder(name, **sizes)
      return nn.Dense(5)(encoder(ids, train=train))

  ids = jnp.array([[3, 4, 0], [1, 0, 0]])
  for module in (Tagger(True), Tagger(False, models.encoder(name, **sizes))):
    init = functools.partial(module.init_with_output, train=False)
    y, _ = jax.eval_shape(init, jax.random.key(0), ids)
    assert y.shape == (2, 3, 5)
  params = initial.params(module, ids)["encoder"]
  encode = functools.partial(models.encoder(name, **sizes).apply, train=False)
  x = jax.jit(encode)({"params": params}, ids)
  assert x.shape == (2, 3, 8)
  classifier = models.build(name, **SIZES)
  head = initial.params(classifier, ids)["head"]
  see = functools.partial(
    classifier.apply,
    train=False,
    capture_intermediates=lambda module, _: module.name == "encoder",
  )
  _, seen = jax.jit(see)({"params": params | {"head": head}}, ids)
  (expected,) = seen["intermediates"]["encoder"]["__call__"]
  np.testing.assert_allclose(x, expected, atol=1e-6)


@pytest.mark.slow
def test_encoder_accepts_numbers_images_and_a_class_token():
  x = jnp.ones((2, 6))
  model = models.encoder(
    "lru", vocab_size=0, max_len=6, d_model=8, num_layers=1
  )
  y, _ = model.init_with_output(jax.random.key(0), x, train=False)
  assert y.shape == (2, 6, 8)
  sizes = {"d_model": 8, "num_layers": 1}
  model = models.encoder("transformer", **IMAGE, **sizes, pool="cls")
  y, _ = model.init_with_output(
    jax.random.key(0), jnp.ones((2, 8, 8, 3)), train=False
  )
  assert y.shape == (2, 5, 8)


SERIES = ("transformer", "lru", "linoss", "transject", "isometric", "linformer")


def time_series(name, **fields):
  """A model of steps with three channels, and its parameters."""
  fields = {"num_classes": 2, "pool": "mean"} | fields
  model = models.build(
    name,
    vocab_size=0,
    channels=3,
    max_len=9,
    d_model=8,
    num_layers=1,
    mixer=small_sizes(models.MODELS[name].mixer) | fields.pop("mixer", {}),
    **fields,
  )
  return model, start(model)


def steps(n, count=2):
  return np.random.default_rng(n).normal(size=(count, n, 3)).astype(np.float32)


@pytest.mark.parametrize("name", slow_except(("lru",), SERIES))
def test_models_of_time_series_ignore_padding(name):
  model, params = time_series(name)
  apply = jax.jit(functools.partial(model.apply, train=False))
  x = steps(6)
  want = apply({"params": params}, x)
  padded = np.pad(x, ((0, 0), (0, 3), (0, 0)), constant_values=np.nan)
  got = apply({"params": params}, padded)
  np.testing.assert_allclose(got, want, atol=2e-5)
  # A missing number is 0, and not padding.
  hole, zero = x.copy(), x.copy()
  hole[:, 2, 1], zero[:, 2, 1] = np.nan, 0
  got, same = (apply({"params": params}, each) for each in (hole, zero))
  np.testing.assert_allclose(got, same, atol=2e-6)
  assert np.abs(got - want).max() > 1e-5


@pytest.mark.parametrize("name", slow_except(("transformer",), SERIES[:3]))
def test_time_series_are_packed_and_streamed(name):
  model, params = time_series(
    name,
    objective="token_classification",
    mixer={"causal": True},
    positions="none",
  )
  apply = jax.jit(
    functools.partial(model.apply, train=False), static_argnames="sizes"
  )
  x, y = steps(4), steps(5)
  want = [apply({"params": params}, each) for each in (x, y)]
  got = apply(
    {"params": params},
    np.concatenate([x, y], 1),
    segments=np.repeat([[1] * 4 + [2] * 5], 2, 0),
    sizes=(2, 5),
  )
  np.testing.assert_allclose(got, np.concatenate(want, 1), atol=2e-5)
  stream = Stream(model, make_variables(model, params))
  parts = [stream.feed(y[:, part]) for part in (slice(0, 2), slice(2, 5))]
  np.testing.assert_allclose(np.concatenate(parts, 1), want[1], atol=2e-5)
  with pytest.raises(ValueError, match=r"\(2, 4\).*numbers \[b, n, 3\]"):
    stream.feed(y[:, :4, 0])


@pytest.mark.parametrize(
  ("fields", "text"),
  [
    ({"vocab_size": 5}, "channels=3 is for time series"),
    ({"num_inputs": 2, "interaction": "nli"}, "channels=3 is for time series"),
    ({"objective": "next_values"}, "predicts numbers of one channel"),
    ({"objective": "masked_values"}, "predicts numbers of one channel"),
  ],
)
def test_channels_that_do_not_suit_are_refused(fields, text):
  sizes = {"vocab_size": 0, "max_len": 9, "num_classes": 2, "num_inputs": 1}
  with pytest.raises(ValueError, match=text):
    models.build("lru", channels=3, d_model=8, num_layers=1, **sizes | fields)


@pytest.mark.parametrize("name", slow_except((), ("transject", "s4d", "lru")))
def test_packed_time_series_have_their_own_classes(name):
  model, params = time_series(name)
  apply = jax.jit(
    functools.partial(model.apply, train=False), static_argnames="sizes"
  )
  x, y = steps(4, 1), steps(5, 1)
  want = [apply({"params": params}, each) for each in (x, y)]
  got = apply(
    {"params": params},
    np.concatenate([x, y], 1),
    segments=np.array([[1] * 4 + [2] * 5]),
    sizes=(2, 5),
  )
  np.testing.assert_allclose(got[0], np.concatenate(want), atol=2e-5)


@pytest.mark.parametrize("name", slow_except(("lru",), ("lru", "transformer")))
def test_causal_models_close_holes_of_time_series(name):
  model, params = time_series(
    name, objective="token_classification", causal=True, positions="sinusoid"
  )
  apply = jax.jit(functools.partial(model.apply, train=False))
  x = steps(5)
  want = apply({"params": params}, x)
  holes = np.insert(x, 2, np.nan, axis=1)
  got = apply({"params": params}, holes)
  np.testing.assert_allclose(np.delete(got, 2, 1), want, atol=2e-5)
