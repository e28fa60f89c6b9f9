"""What a model is applied to: parameters, and all that is made of them once."""

from __future__ import annotations

from typing import Any

from jaxformers import orthogonal
from jaxformers.models.mixers.transject import FOLDED, fold


def make_variables(model: Any, params: Any) -> dict[str, Any]:
  """Returns the Linen collections that `model.apply` takes.

  Args:
    model: from `models.build`.
    params: its parameters.

  Returns:
    `params`; `rotations`, the orthogonal matrices that a map makes of them; and
    what Random-TransJect has `folded`.
  """
  rotations = orthogonal.rotations(params, model.orthogonal_map)
  folded = fold(params, rotations, model.orthogonal_map)
  return {"params": params, "rotations": rotations, FOLDED: folded}
