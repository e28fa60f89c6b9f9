"""What a model is applied to."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformers import models
from jaxformers.models.variables import make_variables, semi_orthogonal
from tests import draws, initial

IDS = draws.integers(0, (2, 6), 1, 30)


@pytest.mark.parametrize("name", ["transformer", "random_transject"])
@pytest.mark.slow
def test_make_variables_gives_the_outputs_of_the_parameters(name):
  model = models.build(
    name, vocab_size=30, max_len=6, num_classes=2, d_model=8, num_layers=2
  )
  params = initial.params(model, IDS)
  variables = make_variables(model, params)
  assert variables["params"] is params
  chex.assert_trees_all_close(
    model.apply(variables, IDS, train=False),
    model.apply({"params": params}, IDS, train=False),
    atol=1e-5,
  )
  assert jnp.isfinite(model.apply(variables, IDS, train=False)).all()


@pytest.mark.slow
def test_make_variables_makes_every_transformer_matrix_orthogonal():
  d, mlp_dim = 8, 24
  model = models.build(
    "transformer_orthogonal",
    vocab_size=30,
    max_len=6,
    num_classes=2,
    d_model=d,
    num_layers=2,
    mixer={"orthogonal_output": True},
    block={"orthogonal": True, "mlp_dim": mlp_dim},
  )
  params = initial.params(model, IDS)
  variables = make_variables(model, params)
  # No matrix of a layer is free.
  for name, layer in params["encoder"].items():
    if not name.startswith("layer_"):
      continue
    leaves = jax.tree_util.tree_leaves_with_path(layer)
    paths = [jax.tree_util.keystr(path) for path, _ in leaves]
    assert sum("_skew" in path for path in paths) == 6
    free = {
      path for path in paths if "_skew" not in path and "_bias" not in path
    }
    assert all("norm" in path for path in free)
  # The rows of W1 and the columns of W2 are orthonormal.
  shapes = {"up": (d, mlp_dim), "down": (mlp_dim, d)}
  layer = {
    name: tree["encoder"]["layer_0"] for name, tree in variables.items() if tree
  }
  for name, shape in shapes.items():
    w = Owner(name, shape).apply(
      {"params": {f"{name}_skew": layer["params"][f"{name}_skew"]}}
    )
    product = w @ w.T if name == "up" else w.T @ w
    chex.assert_trees_all_close(product, jnp.eye(d), atol=1e-5)
  chex.assert_trees_all_close(
    model.apply(variables, IDS, train=False),
    model.apply({"params": params}, IDS, train=False),
    atol=1e-5,
  )


class Owner(nn.Module):
  """A module with one matrix."""

  name_: str
  shape: tuple[int, int]

  @nn.compact
  def __call__(self):
    return semi_orthogonal(self, self.name_, self.shape, "cayley")


@pytest.mark.parametrize(
  "shape", [(5, 7), (7, 5), (6, 6), (4, 8), (8, 4), (1, 3), (6, 4)]
)
def test_rectangular_matrices_have_orthonormal_rows_or_columns(shape):
  owner = Owner("kernel", shape)
  params = owner.init(jax.random.key(0))["params"]
  params = jax.tree.map(lambda a: a + draws.normal(0, a.shape), params)
  q = np.asarray(owner.apply({"params": params}), np.float64)
  assert q.shape == shape
  gram = q @ q.T if shape[0] < shape[1] else q.T @ q
  np.testing.assert_allclose(gram, np.eye(min(shape)), atol=2e-6)


@pytest.mark.slow
def test_orthogonal_kernels_refuse_a_deviation():
  model = models.build(
    "transformer",
    vocab_size=30,
    max_len=6,
    num_classes=2,
    d_model=8,
    num_layers=1,
    block={"orthogonal": True, "mlp_dim": 16, "init_std": 0.02},
  )
  with pytest.raises(ValueError, match="init_std=0.02.*orthogonal=True"):
    initial.params(model, IDS)
