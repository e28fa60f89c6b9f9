"""What a model takes over from another, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import models
from jaxformers.foundations.errors import UserError
from jaxformers.models import transplant as module
from jaxformers.models.embedding import patches
from jaxformers.models.transplant import transplant
from tests import initial

pytestmark = pytest.mark.slow

SIZES = {"vocab_size": 9, "max_len": 6, "d_model": 8, "num_layers": 1}
IDS = jnp.array([[1, 2, 3, 4, 5, 6], [3, 2, 1, 0, 0, 0]])
LETTERS = tuple("_abcdefgh")
# Grid of the test below, interpolated to 2 x 2 and 5 x 5 points.
PYTORCH = tuple(
  map(
    np.array,
    [
      [
        [0.900771975517273, 2.710632085800171],
        [4.365722179412842, 4.8679351806640625],
      ],
      [
        [
          -0.24191999435424805,
          -0.28918299078941345,
          0.328000009059906,
          2.906464099884033,
          4.8785929679870605,
        ],
        [
          0.22246499359607697,
          2.1108338832855225,
          4.076000213623047,
          2.7428479194641113,
          1.2351690530776978,
        ],
        [
          1.4240000247955322,
          4.97599983215332,
          8.0,
          2.9239981174468994,
          -1.8639999628067017,
        ],
        [
          3.8394570350646973,
          4.6854071617126465,
          5.443999767303467,
          4.381712913513184,
          3.3528339862823486,
        ],
        [
          5.553729057312012,
          3.836160898208618,
          2.52000093460083,
          5.532482147216797,
          8.271809577941895,
        ],
      ],
    ],
  )
)


def built(name="transformer", seed=0, **options):
  """A model and its parameters at the start."""
  options = SIZES | {"num_classes": 3} | options
  model = models.build(name, **options)
  x = model.example()
  return model, initial.params(model, x, seed=seed)


def begun(source, start, **options):
  """The parameters of a model that begins with those of another."""
  vocabularies = {"vocabulary": LETTERS, "source_vocabulary": LETTERS}
  return transplant(start, source, **{**vocabularies, **options})


@pytest.mark.slow
def test_transplant_to_the_same_task_gives_the_same_logits():
  model, source = built()
  _, start = built(seed=1)
  got = begun(source, start, same_task=True)
  want = model.apply({"params": source}, IDS, train=False)
  logits = model.apply({"params": got.params}, IDS, train=False)
  np.testing.assert_array_equal(logits, want)
  assert not got.new
  assert not got.resized


def test_transplant_to_another_task_has_a_new_head():
  (_, source), (_, start) = built(), built(seed=1)
  got = begun(source, start)
  assert got.new == ("head/logits/bias", "head/logits/kernel")
  np.testing.assert_array_equal(
    got.params["head"]["logits"]["kernel"], start["head"]["logits"]["kernel"]
  )
  assert jax.tree.all(
    jax.tree.map(np.array_equal, got.params["encoder"], source["encoder"])
  )
  # The same task, but more classes: all of the head is new.
  _, more = built(seed=1, num_classes=5)
  assert begun(source, more, same_task=True).new == got.new


def test_transplant_of_a_language_model_into_a_classifier():
  _, source = built(objective="language_model", num_classes=0)
  _, start = built(seed=1)
  got = begun(source, start)
  assert got.new == ("head/logits/bias", "head/logits/kernel")
  assert got.unused
  assert not any(path.startswith("encoder/") for path in got.unused)


def test_transplant_of_softmax_into_neutreno():
  _, source = built(num_layers=2)
  held = {"num_layers": 2, "mixer": {"learn_fidelity": True}}
  _, start = built("neutreno", 1, **held)
  got = begun(source, start, same_task=True)
  assert got.new == ("encoder/layer_1/mixer/fidelity",)
  # And what is learned is not thrown away on the way back.
  with pytest.raises(ValueError, match="layer_1/mixer/fidelity"):
    begun(start, source)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"d_model": 16}, "layer_0/mixer/out/kernel"),
    ({"num_layers": 2}, "(?s)16 tensors.*layer_1"),
    ({"block": {"mlp_dim": 4}}, "down/kernel"),
    ({"positions": "learned"}, "embedding/positions"),
  ],
)
def test_transplant_refuses_another_architecture_by_its_arrays(
  options, message
):
  (_, source), (_, start) = built(), built(**options)
  with pytest.raises(ValueError, match=message):
    begun(source, start, name="runs/x")


def test_transplant_resizes_the_vocabulary():
  (_, source), (_, start) = built(vocab_size=10), built(seed=1)
  longer = (*LETTERS, "<mask>")
  got = begun(source, start, source_vocabulary=longer)
  (table, theirs, ours) = (
    np.asarray(p["encoder"]["embedding"]["tokens"]["embedding"])
    for p in (got.params, source, start)
  )
  np.testing.assert_array_equal(table, theirs[:9])
  assert got.resized == ("encoder/embedding/tokens/embedding",)
  back = begun(start, source, vocabulary=longer)
  table = back.params["encoder"]["embedding"]["tokens"]["embedding"]
  np.testing.assert_array_equal(table, np.concatenate([ours, theirs[9:]]))


def test_transplant_refuses_another_vocabulary_of_the_same_size():
  (_, source), (_, start) = built(), built(seed=1)
  with pytest.raises(ValueError, match="id 2.*'B'.*'b'"):
    begun(source, start, source_vocabulary=tuple("_aBcdefgh"))


@pytest.mark.parametrize("length", [4, 6, 11])
def test_transplant_interpolates_sequence_positions(length):
  (_, source), (_, start) = (
    built(positions="learned", seed=seed, max_len=n)
    for seed, n in enumerate((6, length))
  )
  got = begun(source, start)
  table = np.asarray(got.params["encoder"]["embedding"]["positions"])
  theirs = np.asarray(source["encoder"]["embedding"]["positions"])
  if length <= 6:
    np.testing.assert_array_equal(table, theirs[:length])
  else:  # Each is between two of them.
    assert table.shape == (length, 8)
    assert (table <= theirs.max(0) + 1e-6).all()
    np.testing.assert_allclose(table[0], theirs[0], rtol=1e-6)


def test_transplant_keeps_the_position_of_the_class_token():
  (_, source), (_, start) = (
    built(positions="learned", pool="cls", seed=seed, max_len=n)
    for seed, n in enumerate((6, 12))
  )
  got = begun(source, start).params["encoder"]["embedding"]["positions"]
  theirs = np.asarray(source["encoder"]["embedding"]["positions"])
  assert got.shape == (13, 8)
  np.testing.assert_array_equal(got[0], theirs[0])
  np.testing.assert_allclose(got[1], theirs[1], rtol=1e-6)


def test_transplant_refuses_adaptive_tables_of_another_vocabulary():
  options = {"objective": "language_model", "num_classes": 0}
  options["embedding"] = {"cutoffs": (3, 6)}
  (_, source), (_, start) = (built(seed=s, **options) for s in (0, 1))
  with pytest.raises(ValueError, match="id 0.*'h'.*'_'"):
    begun(source, start, source_vocabulary=LETTERS[::-1])


def test_transplant_refuses_another_width():
  (_, source), (_, start) = built(), built(d_model=16)
  with pytest.raises(ValueError, match="(?s)tokens/embedding"):
    begun(source, start)


def test_resize_positions_interpolates_a_grid_and_refuses_others():
  table = np.random.default_rng(0).normal(size=(17, 3)).astype(np.float32)
  assert module.resize_positions(table, 17) is table
  wide = module.resize_positions(table, 65)
  np.testing.assert_array_equal(wide[0], table[0])
  grid, old = wide[1:].reshape(8, 8, 3), table[1:].reshape(4, 4, 3)
  np.testing.assert_allclose(grid.mean((0, 1)), old.mean((0, 1)), atol=0.1)
  # Without a class token there is none to keep.
  np.testing.assert_allclose(
    module.resize_positions(table[1:], 64), wide[1:], atol=1e-6
  )
  flat = np.concatenate([table[:1], np.full((16, 3), 2.0, np.float32)])
  np.testing.assert_allclose(
    module.resize_positions(flat, 37)[1:], 2, atol=1e-5
  )
  for count in (18, 16):
    with pytest.raises(ValueError, match=f"17 positions.*{count}"):
      module.resize_positions(table, count)


def test_resize_positions_is_the_bicubic_interpolation_of_deit():
  """Numbers of PyTorch's interpolate(mode="bicubic", align_corners=False)."""
  grid = np.array([[0, 1, 4], [2, 8, -1], [5, 3, 7]], np.float32)
  for want in PYTORCH:
    count = len(want)
    got = module.resize_positions(grid.reshape(9, 1), count**2)
    np.testing.assert_allclose(got.reshape(count, count), want, atol=1e-5)
  # Two tokens in front: 27 positions are not those of a square and one.
  table = np.concatenate([np.full((2, 1), 9, np.float32), grid.reshape(9, 1)])
  got = module.resize_positions(table, 6, 2)
  np.testing.assert_allclose(
    got.ravel(), [9, 9, *PYTORCH[0].ravel()], atol=1e-5
  )


def test_resize_patches_embeds_enlarged_images_alike():
  """Of an image that is enlarged as the filters are, to rounding."""
  rng = np.random.default_rng(0)
  kernel = rng.normal(size=(4 * 4 * 3, 5)).astype(np.float32)
  larger = module.resize_patches(kernel, 8 * 8 * 3, 3)
  image = rng.normal(size=(1, 4, 4, 3)).astype(np.float32)
  enlarged = jax.image.resize(image, (1, 8, 8, 3), "linear")
  np.testing.assert_allclose(
    patches(enlarged, 8) @ larger, patches(image, 4) @ kernel, atol=1e-4
  )
  assert module.resize_patches(kernel, 7, 3) is None


@pytest.mark.slow
@pytest.mark.long
def test_transplant_of_a_classifier_into_a_segmenter_of_larger_images():
  image = {"vocab_size": 0, "pool": "cls", "positions": "learned"}
  _, source = built(image=(8, 8, 3), patch_size=4, **image)
  model, start = built(
    image=(16, 16, 3), patch_size=8, objective="segmentation", **image
  )
  got = transplant(start, source, image=(16, 16, 3))
  assert got.resized == ("encoder/embedding/patches/kernel",)
  assert {path.split("/")[0] for path in got.new} == {"decoder"}
  out = model.apply({"params": got.params}, model.example(), train=False)
  assert np.isfinite(out).all()


@pytest.mark.parametrize(
  ("theirs", "ours"),
  [
    ((8, 32, 3), (16, 16, 3)),
    ((8, 32, 3), (24, 24, 3)),
    ((8, 8, 3), (4, 16, 3)),
  ],
)
def test_positions_of_images_that_are_not_square_stay_on_their_grid(
  theirs, ours
):
  options = {"vocab_size": 0, "max_len": 0, "patch_size": 4, "pool": "cls"}
  options["positions"] = "learned"
  _, source = built(image=theirs, **options)
  _, start = built(image=ours, **options)
  with pytest.raises(UserError, match="images of .* square images only"):
    transplant(start, source, image=ours, source_image=theirs)
  same = transplant(source, source, image=theirs, source_image=theirs)
  assert not same.resized
