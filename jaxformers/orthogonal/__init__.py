"""Orthogonal matrices from unconstrained arrays, and back.

`maps` holds the maps, pure functions on [..., d, d]; `tree` applies one of them
to all parameters of a model; `convert` inverts the maps.
"""

from jaxformers.orthogonal.convert import parameters
from jaxformers.orthogonal.maps import (
  MAPS,
  cayley,
  expm,
  householder,
  initializer,
  matrix,
  orthogonality_defect,
  skew,
)
from jaxformers.orthogonal.tree import (
  is_orthogonal,
  is_parameter,
  is_skew,
  parameter_name,
  rotations,
)

__all__ = [
  "MAPS",
  "cayley",
  "expm",
  "householder",
  "initializer",
  "is_orthogonal",
  "is_parameter",
  "is_skew",
  "matrix",
  "orthogonality_defect",
  "parameter_name",
  "parameters",
  "rotations",
  "skew",
]
