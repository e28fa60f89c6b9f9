"""Muon for the matrices of this package, also on the orthogonal group.

Muon replaces the momentum of a matrix by the nearest orthogonal matrix, its
sign, by a few Newton-Schulz iterations. This is steepest descent for a step of
a given spectral norm. Plain optax takes matrices with two axes only. Here a
matrix is every kernel of a layer: kernels of heads have three axes, and are
orthogonalised as the matrices that they stand for, all heads together.
Embeddings, heads of models, convolutions, and all arrays that are no kernels
are left to Adam, with Nesterov's momentum as in optax.

Sources: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; Liu et
al. 2025, https://arxiv.org/abs/2502.16982, section 2.2, for the scale.

On the orthogonal group of matrices Q, with the gradient G, let K be the skew
part of Q.T G. Among all Q A with a skew A of spectral norm at most 1, the
product with G is greatest for the sign of K, which is skew. The lower triangle
of K is the gradient of the coordinates of `riemannian`, and of the maps
`cayley` and `expm` at the identity, up to a factor; coordinates of other maps
are treated in the same way. A step of the size r turns all invariant planes by
the same angle, 2 arctan(r / 2) with the Cayley map.

Source: Su 2025, "Steepest descent on manifolds: Muon and orthogonality", for
square matrices.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from jaxformers import orthogonal

# Kernels of layers, of the encoder and of the decoder of a Segmenter.
KERNEL = re.compile(r".*/layer_\d+/(.*/)?kernel")


def axes(path: Any, leaf: Any) -> MuonDimensionNumbers | None:
  """Returns the input and output axes of a matrix; None for other parameters.

  Args:
    path: path of a parameter, of `jax.tree_util`.
    leaf: the parameter.
  """
  if orthogonal.is_parameter(path):
    return MuonDimensionNumbers(-2, -1)
  split = split_axes(path, leaf)
  if split is None:
    return None
  places = tuple(range(leaf.ndim))
  return MuonDimensionNumbers(places[:split], places[split:])


def split_axes(path: Any, leaf: Any) -> int | None:
  """Returns the number of input axes of a kernel; None for other parameters.

  Args:
    path: path of a parameter, of `jax.tree_util`.
    leaf: the parameter.
  """
  name = jax.tree_util.keystr(path, simple=True, separator="/")
  if not KERNEL.fullmatch(name) or leaf.ndim not in (2, 3):
    return None
  # Heads are outputs, [d, h, e], or inputs of the last map, [h, e, d].
  return 2 if leaf.ndim == 3 and name.endswith("out/kernel") else 1


def scale_by_muon(
  *,
  beta: float,
  consistent_rms: float,
  adam_factor: float,
  adam_b1: float,
  adam_b2: float,
) -> optax.GradientTransformation:
  """Returns Muon without the learning rate, and Adam for other parameters.

  Args:
    beta: decay of Muon's momentum.
    consistent_rms: root mean square of the entries of a step of a matrix
      [m, n] is about this; 0 for the factor sqrt(max(1, n / m)).
    adam_factor: learning rate of Adam, in units of Muon's.
    adam_b1, adam_b2: decays of Adam's moments.
  """
  # The factor -1 of gradient descent comes later, with the learning rate.
  inner = optax.contrib.muon(
    -1.0,
    beta=beta,
    consistent_rms=consistent_rms or None,
    adam_learning_rate=-adam_factor,
    adam_b1=adam_b1,
    adam_b2=adam_b2,
    muon_weight_dimension_numbers=lambda tree: jax.tree_util.tree_map_with_path(
      axes, tree
    ),
  )

  def update(updates: Any, state: Any, params: Any = None) -> Any:
    updates = _map_rotations(orthogonal.skew, updates)
    updates, state = inner.update(updates, state, params)
    return _map_rotations(lambda s: jnp.tril(s, -1), updates), state

  return optax.GradientTransformation(inner.init, update)


def _map_rotations(function: Callable[..., Any], tree: Any) -> Any:
  """Applies a function to the coordinates of rotations only."""
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: (
      function(leaf) if orthogonal.is_parameter(path) else leaf
    ),
    tree,
  )
