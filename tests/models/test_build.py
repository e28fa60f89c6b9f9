"""Models by name: what does not depend on their layers."""

import pytest

from jaxformers import models
from jaxformers.models.build import CLASSES
from jaxformers.models.config import HEAD_OPTIONS

SIZES = dict(vocab_size=20, max_len=8, num_classes=3, d_model=8, num_layers=1)
IMAGE = {"image": (8, 8, 3), "patch_size": 4, "vocab_size": 0, "max_len": 0}


@pytest.mark.parametrize("objective", sorted(CLASSES))
def test_an_objective_has_a_class(objective):
  image = IMAGE if objective == "segmentation" else {}
  model = models.build("transformer", **SIZES | image, objective=objective)
  assert type(model) is CLASSES[objective]
  assert model.objective == objective
  assert models.size(model) > 0


@pytest.mark.parametrize("objective", sorted(HEAD_OPTIONS))
def test_an_unknown_option_of_a_head_lists_the_choices(objective):
  image = IMAGE if objective == "segmentation" else {}
  with pytest.raises(ValueError, match=r"'width'.*dropout_rate"):
    models.build(
      "transformer", **SIZES | image, objective=objective, head={"width": 1}
    )


def test_an_unknown_option_lists_the_choices():
  with pytest.raises(ValueError, match=r"'num_layer'.*num_layers"):
    models.build("transformer", **SIZES, num_layer=3)
