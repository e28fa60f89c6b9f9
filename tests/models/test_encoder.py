"""The one encoder: images and sequences, embedded and carried through."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import models
from jaxformers.models import mixers
from jaxformers.models.mixer import MIXERS
from tests import draws, initial
from tests.marks import slow_except

assert mixers
IMAGES = draws.normal(0, (2, 8, 8, 3))


def deit(name="transformer", size=(192, 3), image=(224, 224, 3), **options):
  d_model, num_heads = size
  own = {"num_heads": num_heads, "init_std": 0.02}
  return models.build(
    name,
    vocab_size=0,
    max_len=0,
    num_classes=1_000,
    image=image,
    patch_size=16,
    d_model=d_model,
    num_layers=12,
    positions="learned",
    pool="cls",
    mixer=own | options.pop("mixer", {}),
    block={"mlp_dim": 4 * d_model, "norm_epsilon": 1e-6},
    **options,
  )


@pytest.mark.parametrize(
  ("size", "count"),
  [((192, 3), 5_717_416), ((384, 6), 22_050_664), ((768, 12), 86_567_656)],
)
@pytest.mark.slow
def test_deits_have_the_published_parameters(size, count):
  """Touvron et al. 2021, table 1: 5.7, 22 and 86 million."""
  assert models.size(deit(size=size)) == count
  assert models.size(deit("neutreno", size=size)) == count


def test_deit_variants_have_their_extra_parameters():
  full = models.size(deit())
  one = 192 * 192 + 192  # A projection to queries.
  assert models.size(deit("symmetric_transformer")) == full - 12 * one
  scaled = models.size(deit(mixer={"feat_scale": True}))
  assert scaled == full + 12 * 2 * 192
  learned = models.size(deit("neutreno", mixer={"learn_fidelity": True}))
  assert learned == full + 11


def small(name, **options):
  return models.build(
    name,
    vocab_size=0,
    max_len=0,
    num_classes=4,
    image=(8, 8, 3),
    patch_size=4,
    d_model=8,
    positions="learned",
    **({"pool": "cls", "num_layers": 1} | options),
  )


FEW = {"rank": 2, "num_landmarks": 2, "num_buckets": 2}


@pytest.mark.parametrize(
  "name",
  slow_except(("isometric", "s5", "transformer"), sorted(models.MODELS)),
)
@pytest.mark.slow
def test_encoder_of_every_model_reads_images(name):
  known = getattr(MIXERS.data.get(models.MODELS[name].mixer), "options", ())
  # A causal mixer reads nothing after a token in front.
  pool = {"pool": "mean"} if name in ("mamba", "rglru") else {}
  model = small(name, mixer={k: FEW[k] for k in FEW if k in known}, **pool)
  logits = jax.eval_shape(
    lambda: model.init_with_output(jax.random.key(1), IMAGES, train=False)[0]
  )
  assert logits.shape == (2, 4)


def test_encoder_reads_an_image_as_patches():
  model = small("transformer")
  params = initial.params(model, IMAGES, seed=1)
  apply = jax.jit(functools.partial(model.apply, train=False))
  logits = apply({"params": params}, IMAGES)
  one = apply({"params": params}, IMAGES[1:])
  np.testing.assert_allclose(one[0], logits[1], atol=1e-5)
  # Without positions the patches of an image may change places.
  places = params["encoder"]["embedding"]["positions"]
  assert places.shape == (5, 8)
  params["encoder"]["embedding"]["positions"] = 0 * places
  turned = jnp.concatenate([IMAGES[:, 4:], IMAGES[:, :4]], 1)
  got, want = (apply({"params": params}, x) for x in (turned, IMAGES))
  np.testing.assert_allclose(got, want, atol=1e-5)


def test_drop_path_spares_samples_whole_and_keeps_the_mean():
  model = small("transformer", block={"drop_path_rate": 0.5}, num_layers=2)
  images = jnp.broadcast_to(IMAGES[:1], (2_000, 8, 8, 3))
  params = initial.params(model, IMAGES, seed=1)
  logits = jax.jit(
    lambda images, key: model.apply(
      {"params": params}, images, train=True, rngs={"dropout": key}
    )
  )(images, jax.random.key(3))
  found = np.unique(np.round(np.asarray(logits), 4), axis=0)
  # The first layer drops nothing; of the last either branch, both or none.
  assert len(found) == 4


@pytest.mark.slow
def test_drop_path_rate_out_of_range_is_refused():
  with pytest.raises(ValueError, match="drop_path_rate=1.0"):
    models.shapes(small("transformer", block={"drop_path_rate": 1.0}))
