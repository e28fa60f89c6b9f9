"""Maps from unconstrained arrays to orthogonal matrices, and their inverses.

`maps` holds the maps, for one array or for all parameters of a model. `convert`
holds the inverses.
"""

from jaxformers.orthogonal.convert import parameters
from jaxformers.orthogonal.maps import (
  MAPS,
  cayley,
  expm,
  householder,
  initializer,
  is_orthogonal,
  is_parameter,
  is_skew,
  matrix,
  orthogonality_defect,
  parameter_name,
  rotations,
  skew,
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
