"""Recipes agree with the registry of models."""

import jax
import pytest

from jaxformers import config as c
from jaxformers import models
from jaxformers.recipes import shared


def test_tiny_rate_depends_on_the_kind_of_model():
  assert shared.tiny_rate("random_transject", 5e-3) == 5e-3
  assert shared.tiny_rate("transformer", 5e-3) == 1e-3
  assert shared.tiny_rate("s5", 5e-3) == 4e-3


def test_tiny_fields_override_the_schedule():
  fields = shared.tiny_fields(
    "transject", learning_rate=5e-3, total_steps=50, eval_steps=7
  )
  assert fields["eval_steps"] == 7
  assert fields["schedule"]["warmup_steps"] == 5
  with pytest.raises(ValueError, match="size.*'huge'.*paper, tiny"):
    shared.is_tiny("huge")


@pytest.mark.parametrize("path", ["short/imdb", "lra/listops"])
def test_paper_protocol_makes_all_matrices_orthogonal(path):
  """With as many parameters as queries, keys and values alone have."""
  sizes = {"vocab_size": 300, "max_len": 64, "num_classes": 2}
  counts = set()
  for protocol in ("paper", "jaxformers"):
    spec = f"configs/{path}.py:model=transformer_orthogonal,protocol={protocol}"
    model = c.plain(c.load(spec))["model"] | {"num_layers": 1}
    shapes = models.shapes(models.build(**model, **sizes))
    counts.add(sum(leaf.size for leaf in jax.tree.leaves(shapes)))
    paths = jax.tree_util.tree_leaves_with_path(shapes["encoder"]["layer_0"])
    free = [path for path, leaf in paths if "kernel" in str(path)]
    assert bool(free) == (protocol != "paper")
  assert len(counts) == 1
