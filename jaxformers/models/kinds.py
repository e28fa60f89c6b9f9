"""Kinds of parameters, which optimisers may train apart.

A mixer declares the kinds of its parameters by a class attribute `kinds`, a
mapping from names of parameters to kinds; others have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax

EIGENVALUES = "eigenvalues"  # What a recurrence multiplies its state by.
STEP = "step"  # Step sizes of a discretisation.
INPUT = "input"  # From input to state, B.
OUTPUT = "output"  # From state to output, C.

KINDS = (EIGENVALUES, STEP, INPUT, OUTPUT)
# Kinds that weight decay leaves alone unless a config says otherwise: decay
# would move them to a value that is no smaller model.
UNDECAYED = (EIGENVALUES, STEP)


def find_kinds(stacks: Mapping[str, nn.Module], params: Any) -> Any:
  """Returns a tree with the kind of every parameter, "" for none.

  Args:
    stacks: an unbound block of each stack of layers, by its parameters.
    params: a tree of parameters, or a tree of their structure.
  """
  declared = {}
  for stack, block in stacks.items():
    make = getattr(block, "mixer", None)
    mixer = make(parent=None) if make is not None else None
    declared[stack] = getattr(mixer, "kinds", {})

  def kind(path: Any, _: Any) -> str:
    names = [str(getattr(key, "key", key)) for key in path]
    if len(names) < 2 or "mixer" not in names[1:]:
      return ""
    return declared.get(names[0], {}).get(names[-1], "")

  return jax.tree_util.tree_map_with_path(kind, params)
