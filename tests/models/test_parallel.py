"""What models know of a mesh."""

import jax
import numpy as np
from jax.sharding import Mesh

from jaxformers.models.parallel import MODEL, experts_are_spread


def test_experts_are_spread_where_the_mesh_says_so():
  devices = np.array(jax.devices())
  assert not experts_are_spread()
  for shape, want in (((2, 2), True), ((4, 1), False)):
    mesh = Mesh(devices.reshape(shape), ("data", MODEL))

    def seen(x, mesh=mesh):
      with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return x, experts_are_spread()

    assert jax.eval_shape(lambda x: seen(x)[0], 1.0).shape == ()
    assert jax.jit(seen)(1.0)[1] == want
