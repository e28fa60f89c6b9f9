"""Kinds of parameters, as mixers declare them."""

import jax
import pytest

from jaxformers import models
from jaxformers.models.blocks.contract import BLOCKS
from jaxformers.models.kinds import KINDS
from jaxformers.models.mixer import MIXERS
from tests.marks import slow_except

SIZES = dict(vocab_size=9, max_len=300, num_classes=2, d_model=8, num_layers=2)


@pytest.mark.parametrize(
  "name",
  slow_except(("isometric", "s5", "transject"), sorted(models.MODELS)),
)
@pytest.mark.slow
def test_declared_kinds_name_parameters_of_every_model(name):
  model = models.build(name, **SIZES)
  shapes = models.shapes(model)
  kinds = jax.tree_util.tree_leaves_with_path(model.kinds(shapes))
  assert len(kinds) == len(jax.tree.leaves(shapes))
  variant = models.MODELS[name]
  owner = MIXERS[variant.mixer] if variant.mixer else BLOCKS[variant.block]
  declared = getattr(owner, "kinds", {})
  assert {*declared.values()} <= {*KINDS}
  found = {(path[-1].key, kind) for path, kind in kinds if kind}
  # S5 has C, or C1 and C2; S4D has B for one start.
  assert found <= {*declared.items()}
  # DeltaNet has no decay.
  if variant.fixed.get("forget") is not False:
    assert {kind for _, kind in found} == {*declared.values()}
  for path, kind in kinds:
    is_inside = "mixer" in [key.key for key in path]
    assert not kind or is_inside or not variant.mixer
